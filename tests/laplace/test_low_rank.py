"""Laplace with curvature of low rank: exact where the rank suffices, and which part it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.laplace.low_rank import leading


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def fit(structure: str, per_output: bool = False, **settings: Any) -> Any:
    x = normal(8, 2)
    y = x @ normal(2, 2, seed=1) + 0.3 * normal(8, 2, seed=2)
    torch.manual_seed(0)
    net = doxa.nets.mlp(2, 2, (6,), activation="tanh").double()  # 32 weights; 16 rows of J
    method = doxa.Laplace(structure, train=False, **settings)
    likelihood = doxa.Gaussian(per_output=per_output)
    options: dict[str, Any] = {"init": "given", "validation": None, "batch_size": 3}
    return doxa.fit(net, (x, y), method, likelihood=likelihood, **options)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("tune", [None, "evidence"])
def test_it_is_the_full_matrix_where_the_rank_suffices(tune: str | None, per_output: bool) -> None:
    """Noise and prior scale by type-II maximum likelihood, evidence, covariance, predictions."""
    full = fit("full", per_output, tune=tune)
    ours = fit("low-rank", per_output, tune=tune, rank=16)
    assert ours.log_evidence == pytest.approx(full.log_evidence, rel=1e-8)
    assert torch.allclose(ours.mean, full.mean, rtol=1e-7)
    assert torch.allclose(ours.covariance.dense(), full.covariance.dense(), rtol=1e-5, atol=1e-9)
    x = normal(5, 2, seed=7)
    assert torch.allclose(ours.predict(x).variance, full.predict(x).variance, rtol=1e-6)


def test_a_smaller_rank_keeps_the_leading_eigenpairs() -> None:
    """Below G everywhere, and with 95 % of what the best matrix of that rank has."""
    rows = normal(60, 30) * torch.linspace(2.0, -2.0, 30).exp().double()
    kept = torch.zeros(10, 30, dtype=torch.float64)
    for piece in rows.split(7):
        kept = leading(torch.cat([kept, piece]), 10)
    best = torch.linalg.eigvalsh(rows.mT @ rows)[-5:].sum()
    ours = leading(kept, 5)
    assert torch.linalg.eigvalsh(rows.mT @ rows - ours.mT @ ours)[0] > -1e-9
    assert 0.95 * best < ours.square().sum() <= best * (1 + 1e-12)
