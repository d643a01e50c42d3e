"""Members are averaged in prediction, and none depends on which others ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.likelihoods import Gaussian

Check = Callable[..., None]


def own(tensors: dict[str, Tensor], k: int, members: int) -> dict[str, Tensor]:
    """Member k's part: tensors lead with the member axis, but for what all members share."""
    shared = lambda name: name.startswith("constant.")  # noqa: E731
    assert all(shared(name) or len(value) == members for name, value in tensors.items())
    return {n: v if shared(n) else v[k : k + 1] for n, v in tensors.items()}


def test_a_member_does_not_depend_on_the_others(trained: Any, assert_close: Check) -> None:
    options = {"dtype": torch.float64, "steps": 30}
    together = trained.fit(members=3, **options)
    assert together.members == 3
    parts = [own(together.tensors(), k, 3) for k in range(3)]
    for k in range(3):
        alone = trained.fit(members=[k], **options)
        assert alone.members == 1
        assert_close(alone.tensors(), parts[k], trained.fast.rounding)
    with pytest.raises(AssertionError):  # members differ, so that the comparison says something
        assert_close(parts[0], parts[1], 1e-3)


@pytest.mark.by_family
def test_the_order_of_members_does_not_matter(trained: Any, assert_close: Check) -> None:
    options = {"dtype": torch.float64, "steps": 10}
    up, down = trained.fit(members=[1, 4], **options), trained.fit(members=[4, 1], **options)
    assert_close(own(up.tensors(), 0, 2), own(down.tensors(), 1, 2), trained.fast.rounding)
    assert_close(own(up.tensors(), 1, 2), own(down.tensors(), 0, 2), trained.fast.rounding)


@pytest.mark.by_family
def test_early_stopping_is_each_members_own(trained: Any, assert_close: Check) -> None:
    """A member that has stopped is not taken up again because others go on. The noise is given:
    what is learned on held-out rows may be the mixture's (`ensemble/map.py`)."""
    high = 30 * trained.cls.default_rate
    options = {"dtype": torch.float64, "validation": 0.3, "patience": 1, "lr": high}
    if trained.task == "regression":
        options["likelihood"] = Gaussian(noise=3.0)
    together = trained.fit(members=3, **options)
    for k in range(3):
        alone = trained.fit(members=[k], **options)
        assert_close(alone.tensors(), own(together.tensors(), k, 3), trained.fast.rounding)


def test_members_are_averaged_in_prediction(case: Any) -> None:
    x, _ = case.data()
    options = {"dtype": torch.float64, "steps": 10}
    together = case.fit(members=2, **options)
    assert together.members == 2
    # 100 in all: 50 of each member's
    draws = together.kind in (
        "gaussian", "implicit", "laplace", "flow", "sparse-process", "deep-process",
        "functional", "implicit-process", "neural-process",
    )  # fmt: skip
    alone = [case.fit(members=[k], **options).predict(x, n=50 if draws else None) for k in range(2)]
    mean = (alone[0].mean + alone[1].mean) / 2
    assert torch.allclose(together.predict(x).mean, mean, rtol=case.fast.rounding)


@pytest.mark.by_family
def test_a_members_functions_do_not_depend_on_the_others(
    regression: Any, assert_close: Check
) -> None:
    """What is drawn at prediction is keyed by the member's id, not by its place."""
    case = regression
    x, _ = case.data()
    options = {"dtype": torch.float64, "steps": 10, "settings": case.fast.many_steps}
    together, alone = case.fit(members=[0, 3], **options), case.fit(members=[3], **options)
    count = min(4, len(alone.predict(x).weights)) if alone.kind == "sample" else 4
    f = together.functions(x, 2 * count, seed=2)
    own, of_other = f[count:], f[:count]
    got = alone.functions(x, count, seed=2)
    assert_close({"f": got}, {"f": own}, case.fast.rounding)
    assert not torch.allclose(got, of_other, rtol=1e-3)


@pytest.mark.parametrize("members", [0, [], [1, 1], -1])
def test_members_must_be_some_and_distinct(case: Any, members: Any) -> None:
    with pytest.raises(MethodError, match="members"):
        case.fit(members=members)
