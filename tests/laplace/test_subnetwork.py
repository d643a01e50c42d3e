"""A full matrix over the weights of largest variance: closed forms on a linear network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import status

SIZES = torch.tensor([0.1, 2.0, 0.3, 1.0, 0.2], dtype=torch.float64)  # of the columns of x


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def rows() -> tuple[Tensor, Tensor]:
    x = normal(40, 5)
    x[:, 2] += 0.8 * x[:, 4]
    x = x * SIZES
    return x, x @ normal(5, 1, seed=1) + 0.3 * normal(40, 1, seed=2)


def at_the_maximum(**settings: Any) -> Any:
    x, y = rows()
    h = x.T @ x / 0.09 + torch.eye(5).double() / 0.49
    net = nn.Linear(5, 1, bias=False).double()
    net.weight.data = torch.linalg.solve(h, x.T @ y / 0.09).T
    model = doxa.Model(net, doxa.Gaussian(noise=0.3), doxa.Normal(0.7))
    method = doxa.Laplace(train=False, **settings)
    return doxa.fit(model, (x, y), method, init="given", members=2, validation=None)


def test_a_linear_network() -> None:
    """The weights of the three smallest columns, whose variance is largest; the inverse of their
    block of H; the evidence of a linear model of these columns, given the other weights."""
    x, y = rows()
    posterior = at_the_maximum(subnetwork=3)
    assert posterior.covariance.index.tolist() == [[0, 2, 4]] * 2
    few = x[:, [0, 2, 4]]
    block = few.T @ few / 0.09 + torch.eye(3).double() / 0.49
    expected = torch.zeros(5, 5).double()
    expected[np.ix_([0, 2, 4], [0, 2, 4])] = torch.linalg.inv(block)
    assert torch.allclose(posterior.covariance.dense(), expected.expand(2, -1, -1), atol=1e-12)
    variance = (few @ torch.linalg.inv(block) * few).sum(1)
    assert torch.allclose(posterior.predict(x).epistemic[:, 0], variance, rtol=1e-9)
    rest = y - x[:, [1, 3]] @ posterior.mean[0, [1, 3], None]
    marginal = 0.09 * torch.eye(40).double() + 0.49 * few @ few.T
    evidence = multivariate_normal(np.zeros(40), marginal.numpy()).logpdf(rest[:, 0].numpy())
    assert posterior.log_evidence == pytest.approx(float(evidence), rel=1e-10)
    drawn = posterior.layout.flatten(posterior.draw(2_000))
    assert torch.equal(drawn[:, [1, 3]], posterior.mean[:1, [1, 3]].expand(2_000, -1))
    error = (2.0 / 2_000) ** 0.5 * 5  # of a variance, relatively; 3 checks, chance 2e-6
    spread = drawn[:, [0, 2, 4]].var(0) / expected.diagonal()[[0, 2, 4]]
    assert ((spread - 1).abs() < error).all()


def test_all_weights_are_the_full_matrix(tmp_path: Path) -> None:
    """With learned noise and a prior scale that is found; more weights than there are is all."""
    x, y = rows()
    options: dict[str, Any] = {"members": 2, "steps": 20, "seed": 0, "validation": None}
    net = doxa.nets.mlp(5, 1, (3,), activation="tanh").double()
    full = doxa.fit(net, (x, y), doxa.Laplace(newton_steps=0), **options)
    ours = doxa.fit(net, (x, y), doxa.Laplace(subnetwork=100), **options)
    assert torch.allclose(ours.covariance.dense(), full.covariance.dense(), rtol=1e-8, atol=1e-12)
    assert ours.log_evidence == pytest.approx(full.log_evidence, rel=1e-10)
    for name in ("prior_scale", "newton_decrement"):
        assert ours.diagnostics[name] == pytest.approx(full.diagnostics[name], rel=1e-8)
    few = doxa.fit(net, (x, y), doxa.Laplace(subnetwork=4), **options)
    few.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x).variance, few.predict(x).variance)
    assert torch.equal(loaded.functions(x, 3), few.functions(x, 3))
    assert (few.predict(x).epistemic < full.predict(x).epistemic).all()


def test_what_it_needs() -> None:
    with pytest.raises(MethodError, match="structure='full'"):
        doxa.Laplace("diagonal", subnetwork=3)
    with pytest.raises(MethodError, match="Gaussian prior"):
        model = doxa.Model(nn.Linear(5, 1).double(), "gaussian", doxa.StudentTPrior())
        doxa.fit(model, rows(), doxa.Laplace(subnetwork=3))


def test_memory_is_that_of_the_diagonal_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are chosen by the diagonal over all 2,000, which takes 8 bytes each, though the
    matrix over the three that are chosen takes 72."""
    net = nn.Linear(2000, 1, bias=False).double()
    data = normal(10, 2000), normal(10, 1, seed=1)
    monkeypatch.setattr(status, "free_memory", lambda device: 8 * 2000)
    with pytest.raises(MemoryBudgetError, match="over 2000 weights"):
        doxa.fit(net, data, doxa.Laplace(subnetwork=3), steps=1, validation=None)
