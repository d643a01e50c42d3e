"""DeepGP against SparseGP, its bound in closed form where inner layers are still, and a step."""

from __future__ import annotations

import pytest
import torch
from examples import load
from sparse_cases import fixed, rows

import doxa
from doxa.errors import Unavailable
from doxa.function.deep_gp import directions


def test_one_layer_is_the_sparse_process() -> None:
    """With Gaussian noise one natural step of length 1 on all rows is the closed form."""
    x, y = rows()
    sparse = fixed((x, y), 8)
    deep = fixed((x, y), 8, method=doxa.DeepGP, settings={"layers": 1, "natural": 1.0})
    assert torch.equal(sparse.points, deep.points)
    p, q = sparse.predict(x), deep.predict(x)
    assert torch.allclose(p.mean, q.mean, atol=1e-8)
    assert torch.allclose(p.variance, q.variance, atol=1e-8)
    assert deep.elbo == pytest.approx(sparse.elbo, abs=1e-6)


@pytest.mark.parametrize("layers", [2, 3])
def test_inner_layers_start_at_a_prior_that_costs_nothing(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q(v) = p(v) has no divergence: the bound is that of the sparse process, in the limit of a
    prior without variance."""
    monkeypatch.setattr("doxa.function.deep_gp._FIRST_POWER", 1e-10)
    x, y = rows()
    sparse = fixed((x, y), 30)
    settings = {"layers": layers, "natural": 1.0}
    deep = fixed((x, y), 30, method=doxa.DeepGP, settings=settings, lr=1e-12)
    assert deep.elbo == pytest.approx(sparse.elbo, abs=0.05)
    assert torch.allclose(sparse.predict(x).mean, deep.predict(x).mean, atol=2e-3)


@pytest.mark.slow
def test_few_rows_are_not_learned_by_heart() -> None:
    """y is linear in five columns, with noise of 1: the exact GP is near the truth, and a deep one
    by default as good, with intervals that hold. (Inner layers that start without noise: 0.26
    nats behind, and 74 % of the rows inside 90 %.)"""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(620, 5, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-1.0], [0.5], [0.0], [0.0]]).double()
    y = y + torch.randn(620, 1, generator=g, dtype=torch.float64)
    data = (x[:120], y[:120])
    exact = doxa.fit(None, data, "gp", standardize=True).predict(x[120:])
    deep = doxa.fit(None, data, "deep-gp", standardize=True, steps=400)
    p = deep.predict(x[120:])
    low, high = p.interval(0.9)
    assert float(((y[120:] > low) & (y[120:] < high)).double().mean()) > 0.85
    assert float(p.log_prob(y[120:]).mean()) > float(exact.log_prob(y[120:]).mean()) - 0.1
    assert deep.status == "ok" and deep.diagnostics["held_out"]["rows"] == 20


def test_an_inner_layer_keeps_the_principal_directions() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 500, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1])
    kept = directions(x, 2)[0]
    assert torch.allclose(kept.abs(), torch.tensor([[0, 1], [1, 0], [0, 0]]).double(), atol=0.05)
    wider = directions(x, 5)[0]
    assert torch.equal(x[0] @ wider, torch.nn.functional.pad(x[0], (0, 2)))


def test_rows_are_not_added_to_a_deep_process() -> None:
    x, y = rows(10)
    posterior = doxa.fit(None, (x, y), doxa.DeepGP(inducing=4), steps=2)
    with pytest.raises(Unavailable, match="deep process"):
        posterior.condition(x, y)


@pytest.mark.slow
def test_a_step_has_a_higher_bound_than_the_evidence_of_any_smooth_process() -> None:
    """The exact GP at its best hyper-parameters is what the bound is held against."""
    example = load("deep_gp")
    data = example.step(60)
    deep = example.fit(data, doxa.DeepGP(inducing=15), steps=1000)
    assert deep.elbo > example.fit(data, doxa.GP()).log_evidence
