"""A gradient in pieces is that of the whole batch: rows have the noise that they have in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import MethodError

Check = Callable[..., None]


@pytest.mark.by_family
def test_pieces_of_a_batch_give_the_same_posterior(
    case: Any, answers: Any, assert_close: Check
) -> None:
    data = case.data()
    size = len(data[1])
    if not doxa.get_method(case.name).sums_over_rows:
        with pytest.raises(MethodError, match="not a sum over rows"):
            case.fit(data, microbatch=size // 3 + 1)
        return
    settings = case.fast.many_steps if case.row.family == "mcmc" else {}
    options = {
        "batch_size": size, "steps": 10, "dtype": torch.float64, "members": 2, "settings": settings,
        "validation": None,
    }  # fmt: skip
    whole = case.fit(data, **options)
    pieces = case.fit(data, **options, microbatch=size // 3 + 1)
    x, y = data
    relative = max(1e-7, case.fast.rounding)
    assert_close(answers(pieces.predict(x), y), answers(whole.predict(x), y), relative)
