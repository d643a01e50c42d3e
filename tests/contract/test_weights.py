"""A row of weight 2 is two rows, and one of weight 0 is none: n is the sum of weights.

Exact where every step sees all rows and its noise does not depend on them: noise is keyed by the
member and the step, so this holds for chains and for variational methods, too. (Rows that are drawn
with replacement are all rows, each once, where a batch holds them all.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.errors import DataError

Check = Callable[..., None]

BY_ROW = {
    "mc-dropout": "has a mask a row, so that other rows are other masks",
    "concrete-dropout": "has a mask a row, so that other rows are other masks",
    "mnf": "has noise a row, so that other rows are other noise",
    "bootstrap": "has a random weight a row",
    "rank1": "deals rows out to its components, with noise of their own",
    "batch-ensemble": "deals rows out to its components",
    "sparse-gp-classification": "has noise a row where a target has several latents",
    "nngp-classification": "is calibrated on rows left out one by one, not with their copies",
    "ntk": "is calibrated on rows left out one by one, not with their copies",
    "deep-gp": "has noise a row, so that other rows are other noise",
}


def comparable(case: Any, data: Any, **options: Any) -> Any:
    """A fit whose every step sees all rows, from the same start, in the units it is given."""
    why = BY_ROW.get(case.name) or BY_ROW.get(str(case))
    if why is not None:
        pytest.skip(why)
    size = len(data[1])
    settings = case.fast.many_steps if case.row.family == "mcmc" else {}
    chosen = {
        "batch_size": size, "steps": 20, "standardize": False, "dtype": torch.float64,
        "init": "given", "members": 2, "settings": settings, "validation": None,
    }  # fmt: skip
    return case.fit(data, **{**chosen, **options})


def scaled(case: Any) -> tuple[Tensor, Tensor]:
    """Targets near 1, since they are not standardised here."""
    x, y = case.data()
    return (x, (y - 5) / 10) if case.regression else (x, y)


def agree(got: Any, want: Any, case: Any, answers: Any, assert_close: Check) -> None:
    x, y = scaled(case)
    relative = max(1e-8, case.fast.rounding)
    assert_close(answers(got.predict(x), y), answers(want.predict(x), y), relative)
    assert got.log_evidence is None, "a weighted likelihood is tempered, and has no evidence"
    assert got.elbo is None, "nor a bound on it"


def test_whole_weights_are_repeated_rows(case: Any, answers: Any, assert_close: Check) -> None:
    x, y = scaled(case)
    weight = torch.arange(len(y)) % 3 + 1
    again = torch.repeat_interleave(torch.arange(len(y)), weight)
    got = comparable(case, (x, y), sample_weight=weight)
    want = comparable(case, (x[again], y[again]))
    agree(got, want, case, answers, assert_close)
    plain = comparable(case, (x, y))
    assert not torch.allclose(plain.predict(x).variance, want.predict(x).variance, rtol=1e-6)


@pytest.mark.by_family
def test_rows_of_weight_zero_are_no_rows(case: Any, answers: Any, assert_close: Check) -> None:
    """However far away they lie."""
    x, y = scaled(case)
    kept = torch.arange(len(y)) % 4 != 1
    far = torch.where(kept[:, None], x, 50.0)
    got = comparable(case, (far, y), sample_weight=kept.double())
    agree(got, comparable(case, (x[kept], y[kept])), case, answers, assert_close)


def test_weights_that_cannot_be_are_refused(case: Any) -> None:
    rows = len(case.data()[1])
    bad = [-torch.ones(rows), torch.full((rows,), torch.nan), torch.zeros(rows), torch.ones(3)]
    for weight in bad:
        with pytest.raises(DataError, match="weight"):
            case.fit(sample_weight=weight)
