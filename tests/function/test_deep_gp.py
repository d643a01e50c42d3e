"""DeepGP against SparseGP, its bound in closed form where inner layers are still, and a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import load
from sparse_cases import fixed, fixed_for, rows
from torch import Tensor

import doxa
from doxa.errors import Unavailable
from doxa.function.deep_gp import directions
from doxa.function.sparse import DRAWS


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


class Begun(doxa.DeepGP):
    """Its inner layers start away from their prior, at N(0.7, 0.5² I) for each value."""

    def init_inner(self, points: Tensor) -> tuple[Any, Tensor]:
        state, points = super().init_inner(points)
        for name in state:
            if name.endswith("mean"):
                state[name] = torch.full_like(state[name], 0.7)
            elif name.endswith("root"):
                state[name] = 0.5 * state[name]
        return state, points


def test_the_bound_pays_for_what_inner_layers_have_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the limit of a prior without variance an inner layer changes no prediction, and what is
    lost to the sparse process is the divergence of its q(v) from N(0, I), by torch's own. Training
    then has nothing to gain but that divergence, and removes most of it."""
    monkeypatch.setattr("doxa.function.deep_gp._FIRST_POWER", 1e-10)
    x, y = rows()
    sparse = fixed((x, y), 8)
    settings = {"layers": 3, "natural": 1.0}
    deep = fixed((x, y), 8, method=Begun, settings=settings, lr=1e-12)
    q, p = torch.distributions.Normal(0.7, 0.5), torch.distributions.Normal(0.0, 1.0)
    lost = 2 * 2 * 8 * float(torch.distributions.kl_divergence(q, p))  # layers, outputs, points
    assert sparse.elbo - deep.elbo == pytest.approx(lost, abs=0.05)
    trained = fixed_for(60, (x, y), 8, method=Begun, settings=settings, lr=0.05)
    assert 0 < sparse.elbo - trained.elbo < 0.3 * lost


def test_natural_steps_follow_the_schedule_of_the_rate() -> None:
    """At fixed hyper-parameters and on all rows Λ_t = (1 − γ_t)Λ_{t−1} + γ_t (I + A), so that what
    is left of I in Λ is Π(1 − γ_t); A from a single step of length 1."""
    x, y = rows()
    options: Any = {"method": doxa.DeepGP, "batch_size": 30}
    whole = fixed((x, y), 8, settings={"layers": 1, "natural": 1.0}, **options)
    shares = [1.0, 0.5, 0.0, 0.2]
    part = fixed_for(
        4, (x, y), 8, settings={"layers": 1, "natural": 0.5},
        schedule=lambda done: shares[round(4 * done)], **options,
    )  # fmt: skip
    eye = torch.eye(8).double()
    precision = lambda found: (found.root @ found.root.mT).inverse()[0, 0]  # noqa: E731
    left = 0.5 * 0.75 * 1.0 * 0.9
    want = eye + (1 - left) * (precision(whole) - eye)
    assert torch.allclose(precision(part), want, rtol=1e-6)


def test_the_moments_are_those_of_whole_functions() -> None:
    """Var f = E Var[f | h] + Var E[f | h] over draws of the inner layers, here of a large variance,
    so that the second is half of it: against 300 functions drawn layer after layer. A ratio of two
    variances, each of at least 100 draws, is known to 16 %."""
    x, y = rows()
    deep = fixed((x, y), 20, method=Begun, settings={"layers": 2, "natural": 1.0}, lr=1e-12)
    hyper = deep.inner["inner.0.hyper"]  # its variance comes first
    deep.inner["inner.0.hyper"] = hyper + torch.eye(hyper.shape[1])[0] * 3.0
    at = x[:5]
    mean, variance = deep.marginals(deep.prepared(at))
    f = deep.functions(at, 300, seed=5)[..., 0]
    assert float((variance.flatten() / f.var(0)).mean()) == pytest.approx(1.0, abs=0.3)
    error = f.std(0) * (1 / 300 + 1 / DRAWS) ** 0.5
    assert ((mean.flatten() - f.mean(0)).abs() < 5 * error).all()


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
    assert deep.status == "ok" and deep.diagnostics["held_out"]["rows"] == 120


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


@pytest.mark.slow
@pytest.mark.parametrize("method", [doxa.DeepGP(inducing=6), doxa.SparseGP(inducing=6)])
def test_a_bound_by_draws_states_its_error(
    method: doxa.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pass draws anew where it has another number of draws: from its average over 2,000
    of them, 24 estimates are away by their own errors. Mean square of 24 standard normals outside
    0.4 and 2.2: one in 2,000."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, generator=g).double()
    if isinstance(method, doxa.DeepGP):
        y, kind = x[:, 0].sin() + 0.3 * torch.randn(40, generator=g).double(), "gaussian"
    else:
        y, kind = (x[:, 0] > 0.3).long() + (x[:, 0] > 1).long(), "categorical"

    def bound(draws: int) -> tuple[float, float]:
        monkeypatch.setattr("doxa.function.variational._REPLICATES", draws)
        fitted = doxa.fit(None, (x, y), method, likelihood=kind, steps=20, validation=None)
        return fitted.elbo, fitted.diagnostics["elbo_error"]

    best, rest = bound(2000)
    away = [(value - best) / error for value, error in map(bound, range(8, 32))]
    assert 0.4 < sum(a * a for a in away) / len(away) < 2.2
    assert rest == pytest.approx(bound(500)[1] / 2, rel=0.2)
