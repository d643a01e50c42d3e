"""A prior that was given is used: under a narrow one every weight of every layer ends smaller."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

import doxa

# Methods in which uncertain weights do not have the prior that is given.
ON_FUNCTIONS = {
    "fbnn": "its prior is one over functions",
    "functional-prior": "it finds the prior of the weights, from one over functions",
    "vip": "the means of its weights are learned without a prior",
}
NARROW, WIDE = 0.05, 10.0
LOOKED_AT = ("0.weight", "0.bias", "2.weight")  # a last bias of one number may change its sign


@cache
def fitted(case: Any, std: float, subset: str = "all") -> Any:
    """Tests share it."""
    return case.fit(prior=doxa.Normal(std), validation=None, subset=subset)


def sizes(posterior: Any) -> dict[str, Tensor]:
    """The root mean square of tensors of weights, over members and kept draws."""
    flat = posterior.samples if posterior.kind == "sample" else posterior.point()
    weights = posterior.layout.unflatten(flat)
    return {name: weights[name].double().square().mean().sqrt() for name in LOOKED_AT}


def test_a_narrow_prior_makes_every_layer_smaller(trained: Any) -> None:
    """From the same start, with the same batches and noise. A prior that is forgotten leaves them
    as large as under a wide one."""
    if trained.name in ON_FUNCTIONS:
        pytest.skip(ON_FUNCTIONS[trained.name])
    narrow, wide = (sizes(fitted(trained, std)) for std in (NARROW, WIDE))
    for name in LOOKED_AT:
        assert float(narrow[name] / wide[name]) < 0.95, name


def test_a_narrow_prior_makes_points_smaller_too(trained: Any) -> None:
    """Weights before the last layer, where that alone is uncertain; their steps are few, and those
    of some samplers short."""
    if trained.name == "functional-prior":
        pytest.skip(ON_FUNCTIONS[trained.name])
    narrow, wide = (sizes(fitted(trained, std, "last_layer")) for std in (NARROW, WIDE))
    own = () if trained.name in ON_FUNCTIONS else ("2.weight",)
    for name in ("0.weight", "0.bias", *own):
        assert float(narrow[name] / wide[name]) < 0.99, name


def test_a_narrow_prior_makes_functions_flat(trained: Any) -> None:
    """What is predicted varies less between rows; the functions of vip are those of its prior."""
    if trained.name in ON_FUNCTIONS and trained.name != "vip":
        pytest.skip(ON_FUNCTIONS[trained.name])
    x, _ = trained.data()

    def spread(std: float) -> float:
        p = fitted(trained, std).predict(x)
        value = p.mean if trained.regression else p.probs
        return float(value.double().std(0).square().mean().sqrt())

    most = 0.95 if trained.name == "vip" else 0.8  # its few steps leave more of the start
    assert spread(NARROW) < most * spread(WIDE)
