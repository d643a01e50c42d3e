"""Laplace: posterior, predictive, evidence, type-II estimates; the anchor is in statistical/."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import curvature, status


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def rows(n: int = 40, outputs: int = 1) -> tuple[Tensor, Tensor]:
    x = normal(n, 2)
    return x, x @ normal(2, outputs, seed=1) + 0.4 + 0.3 * normal(n, outputs, seed=2)


def classes(n: int = 60) -> tuple[Tensor, Tensor]:
    x = normal(n, 2)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def tanh_net(outputs: int = 1) -> nn.Module:
    return doxa.nets.mlp(2, outputs, (6,), activation="tanh").double()


def fit(net: nn.Module, data: Any, method: Any, **options: Any) -> Any:
    options = {"steps": 200, "seed": 0} | options
    return doxa.fit(net, data, method, **options)


def linear(x: Tensor, y: Tensor, **settings: Any) -> Any:
    return doxa.fit(None, (x, y), doxa.BayesianLinear(**settings))


@pytest.mark.slow
def test_learned_noise_is_type_two_maximum_likelihood() -> None:
    """On a linear network, the noise and evidence of exact evidence maximisation."""
    x, y = rows()
    exact = linear(x, y, prior_std=1.0)
    method = doxa.Laplace(newton_steps=60, tune=None)
    ours = fit(nn.Linear(2, 1).double(), (x, y), method)
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-10)
    assert float(ours.mean[0, -1].exp()) == pytest.approx(float(exact.noise), rel=1e-8)
    p, q = ours.predict(x), exact.predict(x)
    assert torch.allclose(p.mean, q.mean, rtol=1e-8)
    assert torch.allclose(p.variance, q.variance, rtol=1e-8)


def test_the_evidence_is_that_of_the_noise_that_was_found() -> None:
    """Targets that are orthogonal to the inputs have their maximum at zero weights, whatever the
    noise is. From a start at noise 1 the level is where log N(y; 0, σ²I + xxᵀ) is largest on a
    grid, and the evidence is that density there."""
    x, y = rows()
    x, _ = torch.linalg.qr(x)
    y = y - x @ (x.T @ y)
    net = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    model = doxa.Model(net, doxa.Gaussian(), doxa.Normal(1.0))
    ours = doxa.fit(model, (x, y), doxa.Laplace(train=False, tune=None), init="given")

    def evidence(noise: float) -> float:
        covariance = noise**2 * torch.eye(len(x)).double() + x @ x.T
        zero = torch.zeros(len(x)).double()
        return float(torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0]))

    found = float(ours.predict(x[:1]).aleatoric.sqrt())
    assert ours.log_evidence == pytest.approx(evidence(found), rel=1e-10)
    grid = torch.linspace(0.5, 2.0, 61).double() * found
    assert evidence(found) >= max(map(evidence, grid.tolist())) - 1e-9
    assert abs(found - 1.0) > 0.1, "nothing moved, so that nothing was tested"


def test_members_in_one_mode_have_its_evidence() -> None:
    """The mean of three evidences, which are the same on a linear network: not their sum."""
    x, y = rows()
    exact = linear(x, y, prior_std=1.0, noise=0.3)
    method, likelihood = doxa.Laplace(newton_steps=3, tune=None), doxa.Gaussian(0.3)
    options = {"members": 3, "steps": 5, "validation": None}
    ours = fit(nn.Linear(2, 1).double(), (x, y), method, likelihood=likelihood, **options)
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-9)


@pytest.mark.slow
def test_each_output_may_have_its_own_noise() -> None:
    x, y = rows(60, outputs=2)
    y[:, 1] += normal(60, seed=5)
    likelihood = doxa.Gaussian(per_output=True)
    exact = doxa.fit(None, (x, y), doxa.BayesianLinear(prior_std=1.0), likelihood=likelihood)
    method = doxa.Laplace(newton_steps=60, tune=None)
    ours = fit(nn.Linear(2, 2).double(), (x, y), method, likelihood=likelihood, validation=None)
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-9)
    assert torch.allclose(ours.mean[0, -2:].exp(), exact.noise[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 0.3])
def test_the_priors_scale_by_evidence(noise: float | None) -> None:
    x, y = rows()
    exact = linear(x, y, noise=noise)
    likelihood = doxa.Gaussian(noise=noise)
    method = doxa.Laplace(newton_steps=100, tune="evidence")
    ours = fit(nn.Linear(2, 1).double(), (x, y), method, likelihood=likelihood)
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-9)
    assert ours.diagnostics["prior_scale"][0] == pytest.approx(float(exact.prior_std), rel=1e-6)


def test_the_last_layer_is_a_linear_model_of_the_features() -> None:
    x, y = rows()
    net = tanh_net()
    exact = doxa.fit(net, (x, y), doxa.BayesianLinear(noise=0.3, prior_std=1.0), init="given")
    model = doxa.Model(net, doxa.Gaussian(noise=0.3), doxa.Normal(1.0), subset="last_layer")
    ours = doxa.fit(model, (x, y), doxa.Laplace(newton_steps=2, train=False), init="given")
    assert ours.covariance.size == 7
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-10)
    assert torch.allclose(ours.predict(x).mean, exact.predict(x).mean, rtol=1e-9)
    assert torch.allclose(ours.predict(x).variance, exact.predict(x).variance, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.3, None], ids=["given", "learned"])
def test_the_evidence_of_a_last_layer_counts_no_other_weight(noise: float | None) -> None:
    """Under a prior that is not Gaussian, too: it is that of the same layer alone, on its features;
    and without learned noise that by quadrature to the O(1/n) of the approximation."""
    x, y = rows(200)
    net = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    h = net[:2](x).detach()
    prior, likelihood = doxa.StudentTPrior(4.0, 0.5), doxa.Gaussian(noise)
    part, alone = (
        doxa.fit(
            doxa.Model(each, likelihood, prior, subset=subset), (inputs, y),
            doxa.Laplace(newton_steps=20, train=False), init="given",
        )
        for each, inputs, subset in ((net, x, "last_layer"), (net[2], h, "all"))
    )  # fmt: skip
    assert part.log_evidence == pytest.approx(alone.log_evidence, rel=1e-10)
    sigma = math.sqrt(float(part.predict(x[:1]).aleatoric))
    w = torch.linspace(-8, 8, 40_001).double()
    log_joint = torch.distributions.Normal(h * w, sigma).log_prob(y).sum(0)
    zero = torch.zeros((), dtype=torch.float64)
    log_joint += torch.distributions.StudentT(zero + 4.0, zero, zero + 0.5).log_prob(w)
    by_quadrature = float(log_joint.logsumexp(0) + (w[1] - w[0]).log())
    assert part.log_evidence == pytest.approx(by_quadrature, abs=0.05)


def test_polishing_finds_a_maximum() -> None:
    """A logistic regression: the gradient of the log joint vanishes."""
    x, y = classes()
    model = doxa.Model(nn.Linear(2, 3).double(), "categorical", doxa.Normal(1.0))
    ours = doxa.fit(
        model,
        (x, y),
        doxa.Laplace(newton_steps=10, mean_correction=False),
        steps=20,
        validation=None,
    )
    flat = ours.mean[0].clone().requires_grad_()
    params = ours.layout.unflatten(flat)
    (grad,) = torch.autograd.grad(ours.network.log_joint(params, x, y), flat)
    assert grad.abs().max() < 1e-8


def test_temperature_scales_the_covariance_and_removes_the_evidence() -> None:
    data = rows()
    net = tanh_net()
    hot, cold = (
        fit(net, data, doxa.Laplace(temperature=t, train=False), init="given") for t in (1.0, 0.25)
    )
    assert torch.allclose(cold.covariance.dense(), 0.25 * hot.covariance.dense())
    assert hot.log_evidence is not None
    assert cold.log_evidence is None


def test_a_grid_of_temperatures_is_separate_fits() -> None:
    runs = doxa.Runs(grid={"temperature": [0.25, 1.0]})
    sweep = fit(tanh_net(), rows(), doxa.Laplace(), runs=runs)
    assert torch.allclose(4 * sweep[0].covariance.dense(), sweep[1].covariance.dense())
    assert sweep[0].log_evidence is None
    assert sweep[1].log_evidence is not None


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_functions_are_the_linearised_network_at_the_drawn_weights(structure: str) -> None:
    x, y = rows()
    posterior = fit(tanh_net(), (x, y), doxa.Laplace(structure), members=3)
    f, n = posterior.functions(x, 8, seed=4), 8
    drawn = posterior.layout.flatten(posterior.draw(n, seed=4))
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    value, j = curvature.Jacobians(
        posterior.network, posterior.mean, posterior.network.subset_names
    )(x)
    index = posterior.layout.index(posterior.network.subset_names)
    away = (drawn - posterior.mean[owner])[:, index]
    expected = value[owner] + torch.einsum("snop,sp->sno", j[owner], away)
    assert torch.allclose(f, expected, rtol=1e-8, atol=1e-10)


def test_the_closed_form_is_the_limit_of_its_draws() -> None:
    """20,000 function draws of two members: mean and variance within 5 standard errors at 10 rows
    (20 checks, chance 1e-5)."""
    x, y = rows()
    posterior = fit(tanh_net(), (x, y), doxa.Laplace(), members=2)
    p = posterior.predict(x[:10])
    f = posterior.functions(x[:10], 20_000)
    error = f.std(0) / math.sqrt(20_000)
    assert ((f.mean(0) - p.mean).abs() < 5 * error).all()
    fourth = ((f - f.mean(0)) ** 4).mean(0)
    spread = ((fourth - f.var(0) ** 2) / 20_000).sqrt()
    assert ((f.var(0) - p.epistemic).abs() < 5 * spread).all()


@pytest.mark.slow
def test_classification_draws_correlated_logits() -> None:
    """p.samples are the functions, whose covariance over classes is J Σ Jᵀ; probabilities are those
    of their average, but for how far log odds of three classes are from a Gaussian."""
    x, y = classes()
    posterior = fit(
        tanh_net(3),
        (x, y),
        doxa.Laplace(mean_correction=False),
        likelihood=doxa.Categorical(temperature=1.0),
    )
    p = posterior.predict(x[:4], n=20_000)
    assert torch.equal(p.samples, posterior.functions(x[:4], 20_000))
    f, j = posterior.jacobians()(x[:4])
    expected = posterior.covariance.outer(j)[0]
    away = p.samples - f
    ours = torch.einsum("sno,snp->nop", away, away) / 20_000
    variance = expected.diagonal(dim1=-2, dim2=-1)
    error = ((variance[..., None] * variance[:, None] + expected.square()) / 20_000).sqrt()
    assert ((ours - expected).abs() < 5 * error).all()
    assert torch.allclose(p.probs, p.samples.softmax(-1).mean(0), rtol=0, atol=2e-3)
    moments = posterior.predict(x[:4], n=20_000, keep="moments")
    assert torch.allclose(moments.probs, p.probs)
    assert torch.allclose(moments.mutual_information, p.mutual_information, atol=1e-9)


def test_sampled_predictions_put_weights_into_the_network() -> None:
    x, y = rows()
    posterior = fit(tanh_net(), (x, y), doxa.Laplace(predictive="sampled"))
    params = posterior.draw(5, seed=2)
    net = posterior.network
    expected = [net.forward({k: v[s] for k, v in params.items()}, x) for s in range(5)]
    assert torch.allclose(posterior.predict(x, 5, seed=2).samples, torch.stack(expected))


@pytest.mark.slow
def test_standardisation_is_counted_in_the_evidence() -> None:
    x, y = rows()
    one, other = (
        fit(
            nn.Linear(2, 1).double(),
            (x, a * y + 5),
            doxa.Laplace(newton_steps=40),
            standardize=True,
        )
        for a in (1.0, 1000.0)
    )
    change = -len(x) * math.log(1000.0)
    assert other.log_evidence - one.log_evidence == pytest.approx(change, rel=1e-8)
    assert torch.allclose(other.predict(x).std, 1000 * one.predict(x).std, rtol=1e-6)


def test_the_pass_does_not_depend_on_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data, net = rows(), tanh_net()
    method = doxa.Laplace(train=False)
    whole = fit(net, data, method, init="given", batch_size=40)
    pieces = fit(net, data, method, init="given", batch_size=7)
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", {"cpu": 1})
    single = fit(net, data, method, init="given", batch_size=40)
    for other in (pieces, single):
        assert other.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)
        assert torch.allclose(other.covariance.dense(), whole.covariance.dense(), rtol=1e-8)


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_runs_of_unequal_length_are_separate_fits(structure: str) -> None:
    x, y = rows()
    splits = [torch.arange(25), torch.arange(10, 40)]
    options: dict[str, Any] = {"init": "given", "standardize": True}
    net, method = tanh_net(), doxa.Laplace(structure, train=False)
    sweep = fit(net, (x, y), method, runs=doxa.Runs(rows=splits), **options)
    for run, split in zip(sweep, splits, strict=True):
        alone = fit(net, (x[split], y[split]), method, **options)
        assert run.log_evidence == pytest.approx(alone.log_evidence, rel=1e-9)
        assert torch.allclose(run.predict(x).std, alone.predict(x).std, rtol=1e-8)


@pytest.mark.slow
def test_evidence_ranks_a_prior_that_fits() -> None:
    """Weights of size one: the evidence prefers Normal(1) to one far too tight or too wide."""
    data = rows()
    scores = [
        fit(nn.Linear(2, 1).double(), data, doxa.Laplace(newton_steps=30), prior=doxa.Normal(std))
        .log_evidence
        for std in (0.01, 1.0, 100.0)
    ]  # fmt: skip
    assert scores[1] == max(scores)


def test_batch_norm_is_frozen_and_said(caplog: pytest.LogCaptureFixture) -> None:
    x, y = rows()
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with caplog.at_level(logging.INFO, "doxa"):
        posterior = fit(net, (x, y), doxa.Laplace(), members=2)
    assert "BatchNorm uses its running statistics" in caplog.text
    one = posterior.predict(x[:1])
    assert torch.allclose(one.mean, posterior.predict(x).mean[:1])


def test_several_heads() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    x, y = rows(60)
    model = doxa.Model(TwoHeads().double(), ("gaussian", "categorical"))
    posterior = doxa.fit(model, (x, (y, classes()[1])), "laplace", steps=100)
    regression, classification = posterior.predict(x[:5], n=50).heads
    assert regression.mean.shape == (5, 1)
    assert classification.probs.shape == (5, 3)


def test_a_trained_network_keeps_its_weights() -> None:
    """Post hoc: what MAP found, with curvature added and the noise re-estimated."""
    x, y = rows()
    net = tanh_net()
    posterior = fit(net, (x, y), doxa.Laplace(train=False), init="given")
    f = net(x).detach()
    assert torch.allclose(posterior.predict(x).mean, f, rtol=1e-12)
    naive = float((y - f).square().mean().sqrt())
    assert float(posterior.mean[0, -1].exp()) > naive  # RSS/(n − γ), not RSS/n


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_saved_and_loaded(tmp_path: Path, structure: str) -> None:
    x, y = rows()
    posterior = fit(tanh_net(), (x, y), doxa.Laplace(structure), members=2, standardize=True)
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert loaded.log_evidence == posterior.log_evidence
    assert torch.equal(loaded.predict(x).variance, posterior.predict(x).variance)
    assert torch.equal(loaded.functions(x, 3), posterior.functions(x, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"structure": "kronecker", "curvature": "hessian"}, "structure='full'"),
        ({"structure": "dense"}, "structure must be one of"),
        ({"predictive": "magic"}, "predictive must be one of"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"structure": "diagonal", "newton_steps": 2}, "structure='full'"),
        ({"tune": "cross-validation"}, "tune must be one of"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        doxa.Laplace(**settings)


def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows()
    with pytest.raises(MethodError, match="Gaussian prior"):
        method = doxa.Laplace(tune="evidence")
        fit(tanh_net(), data, method, prior=doxa.StudentTPrior())
    monkeypatch.setattr(status, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryBudgetError, match="GiB"):
        fit(tanh_net(), data, doxa.Laplace())


def test_a_heavy_tailed_prior_has_evidence_too() -> None:
    """One weight: the evidence of a Student-t prior against quadrature, within the error of the
    approximation (the posterior is nearly Gaussian: 40 rows, noise 0.3)."""
    x = normal(40, 1)
    y = 0.8 * x + 0.3 * normal(40, 1, seed=3)
    prior = doxa.StudentTPrior(df=4.0, scale=1.0)
    model = doxa.Model(nn.Linear(1, 1, bias=False).double(), doxa.Gaussian(noise=0.3), prior)
    ours = doxa.fit(model, (x, y), doxa.Laplace(newton_steps=20), steps=50)
    grid = torch.linspace(0.0, 1.6, 4001).double()
    likelihood = torch.distributions.Normal(grid[:, None] * x[:, 0], 0.3).log_prob(y[:, 0]).sum(1)
    density = likelihood + torch.distributions.StudentT(4.0).log_prob(grid)
    exact = torch.logsumexp(density, 0) + math.log(float(grid[1] - grid[0]))
    assert ours.log_evidence == pytest.approx(float(exact), abs=1e-2)


def test_a_hessian_has_the_statistics_that_training_left() -> None:
    """f is linear in the last layer, so that the Hessian there is the Gauss–Newton matrix, at the
    running statistics of BatchNorm and not at those that the network came with."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    found = [
        fit(net, rows(), doxa.Laplace(structure="full", curvature=kind, newton_steps=0, tune=None),
            subset="last_layer", likelihood=doxa.Gaussian(noise=0.3), validation=None)
        for kind in ("ggn", "hessian")
    ]  # fmt: skip
    assert not torch.allclose(found[0].buffers["1.running_mean"][0], torch.zeros(4).double())
    dense = [posterior.covariance.dense() for posterior in found]
    torch.testing.assert_close(dense[1], dense[0])


def test_memory_that_is_short_names_a_smaller_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "free_memory", lambda device: 100)
    for structure, smaller in (("full", "kronecker"), ("kronecker", "diagonal")):
        with pytest.raises(MemoryBudgetError, match=f"use structure='{smaller}'"):
            fit(tanh_net(), rows(), doxa.Laplace(structure=structure))
