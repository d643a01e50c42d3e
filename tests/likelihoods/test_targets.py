"""What likelihoods accept: targets, settings, names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from doxa.errors import DataError, ModelError, ShapeError, Unavailable
from doxa.likelihoods import (
    Affine,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    likelihood,
)

LOC, SCALE = torch.tensor([3.0, -1.0]), torch.tensor([2.0, 0.5])


def test_targets_are_understood() -> None:
    assert Gaussian().prepare_targets(np.arange(3), (1,)).tolist() == [[0.0], [1.0], [2.0]]
    assert Gaussian().prepare_targets(torch.ones(3).half(), ()).dtype == torch.float32
    assert Gaussian().prepare_targets(np.ones(3), ()).dtype == torch.float64
    assert Categorical().prepare_targets([0, 2, 1], (3,)).dtype == torch.int64
    assert Categorical().prepare_targets(np.array([0.0, 2.0]), (3,)).tolist() == [0, 2]
    assert Categorical(ignore_index=255).prepare_targets([0, 255], (3,)).tolist() == [0, 255]
    assert Bernoulli().prepare_targets([True, False], (1,)).tolist() == [[1.0], [0.0]]
    assert Gaussian().prepare_targets(np.ones((0, 2)), (2,)).shape == (0, 2)


@pytest.mark.parametrize(
    ("lik", "y", "output", "error", "message"),
    [
        (Gaussian(), np.ones(3), (2,), ShapeError, r"\[N, 2\]"),
        (Gaussian(), np.ones((3, 1)), (), ShapeError, r"\[N\]"),
        (Gaussian(), np.ones((3, 2)), (1,), ShapeError, r"\[N, 1\]"),
        (Gaussian(), 1.0, (), ShapeError, "shape"),
        (Gaussian(), [0.0, np.nan], (1,), DataError, "row 1"),
        (Gaussian(), [[0.0, 1.0], [0.0, np.inf]], (2,), DataError, r"row 1, output \[1\]"),
        (Gaussian(), ["a", "b"], (1,), DataError, "numbers"),
        (Gaussian(), torch.ones(2, dtype=torch.complex64), (), DataError, "complex"),
        (Categorical(), [0, 1, 3], (3,), DataError, "row 2"),
        (Categorical(), [0, -1], (3,), DataError, "row 1"),
        (Categorical(), [0.0, 0.5], (3,), DataError, "row 1"),
        (Categorical(), np.eye(3), (3,), ShapeError, r"\[N\]"),
        (Bernoulli(), [0, 1, 2], (), DataError, "row 2"),
        (Poisson(), [1, -2], (), DataError, "row 1"),
        (Poisson(), [1.5], (), DataError, "row 0"),
        (NegativeBinomial(), [1, -2], (), DataError, "row 1"),
        (NegativeBinomial(), [1.5], (), DataError, "row 0"),
        (Categorical(), [0], (1,), ModelError, "Bernoulli"),
        (HeteroscedasticGaussian(), [0.0], (3,), ModelError, "two network outputs"),
        (Categorical(class_weight=[1.0, 2.0]), [0], (3,), ModelError, "2 weights"),
    ],
)
def test_unusable_targets(
    lik: Likelihood, y: Any, output: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lik.prepare_targets(y, output)


def test_settings_are_checked_compared_and_frozen() -> None:
    assert Gaussian(noise=[1, 2]) == Gaussian(noise=np.array([1.0, 2.0]))  # type: ignore[arg-type]
    assert hash(Gaussian(noise=[1, 2])) == hash(Gaussian(noise=(1.0, 2.0)))
    assert Affine(Gaussian(), LOC, SCALE) == Affine(Gaussian(), LOC.clone(), SCALE)
    assert Affine(Gaussian(), LOC, SCALE) != Affine(Gaussian(), LOC + 1, SCALE)
    assert len({Affine(Gaussian(), LOC, SCALE), Affine(Gaussian(), LOC.clone(), SCALE)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gaussian().noise = 1.0  # type: ignore[misc]
    for wrong in (
        lambda: Gaussian(noise=0.0),
        lambda: Gaussian(noise=1.0, per_output=True),
        lambda: Gaussian(noise=[1.0, 2.0]).constants((3,)),
        lambda: StudentT(df=0.5),
        lambda: StudentT(scale=-1.0),
        lambda: Categorical(class_weight=2.0),  # type: ignore[arg-type]
        lambda: NegativeBinomial(concentration=0.0),
        lambda: NegativeBinomial(concentration=[1.0, 2.0]).constants((3,)),
        lambda: Affine(Poisson(), LOC, SCALE),
        lambda: likelihood("gausian"),
        lambda: likelihood(3),  # type: ignore[arg-type]
    ):
        with pytest.raises(ModelError):
            wrong()
    with pytest.raises(Unavailable):
        Bernoulli().cdf(torch.zeros(1), torch.zeros(1), {})
