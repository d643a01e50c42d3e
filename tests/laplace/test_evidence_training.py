"""Noise and prior scales by evidence, during training and for each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Killed, stop_at
from straight import lines
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.laplace import laplace


def trained(method: doxa.Laplace, data: tuple[Tensor, Tensor], outputs: int = 1) -> Any:
    net = nn.Linear(2, outputs).double()
    return doxa.fit(net, data, method, steps=400, lr=0.05, schedule="cosine")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "structure",
    ["full", pytest.param("low-rank", marks=SLOW), pytest.param("functional", marks=SLOW)],
)
def test_training_of_a_linear_network_ends_at_the_type_two_maximum(structure: str) -> None:
    """Nothing is polished: the weights follow prior and noise, and these the weights."""
    x, y = lines()
    exact = doxa.fit(None, (x, y), doxa.BayesianLinear())
    method = doxa.Laplace(structure, tune="evidence", evidence_steps=30, newton_steps=0)
    ours = trained(method, (x, y))
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-8)
    assert ours.diagnostics["prior_scale"][0] == pytest.approx(float(exact.prior_std), rel=1e-5)
    assert float(ours.mean[0, -1].exp()) == pytest.approx(float(exact.noise), rel=1e-5)


def evidence(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, noise: Tensor) -> Tensor:
    """log N(y; 0, w² XXᵀ + b² 11ᵀ + σ² I), summed over outputs."""
    n = len(y)
    cover = weight.exp() ** 2 * x @ x.T + bias.exp() ** 2 * torch.ones(n, n, dtype=x.dtype)
    cover = cover + noise.exp() ** 2 * torch.eye(n, dtype=x.dtype)
    p = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=x.dtype), cover)
    return p.log_prob(y.T).sum()


@pytest.mark.parametrize("structure", [pytest.param("full", marks=SLOW), "low-rank"])
def test_scales_of_weight_and_bias_maximise_the_exact_evidence(structure: str) -> None:
    """Two prior scales and the noise of a linear model: the gradient of its evidence, written as
    that of a Gaussian over y, vanishes there, and its value is the posterior's."""
    x, y = lines(outputs=2)
    method = doxa.Laplace(structure, tune="evidence", tuned_scale="layer", evidence_steps=30)
    ours = trained(method, (x, y), outputs=2)
    found = ours.diagnostics["prior_scale"][0]
    logs = torch.tensor([found["weight"], found["bias"]], dtype=torch.float64).log()
    logs = torch.cat([logs, ours.mean[0, -1:]]).requires_grad_()
    value = evidence(x, y, *logs)
    assert ours.log_evidence == pytest.approx(float(value.detach()), rel=1e-9)
    (slope,) = torch.autograd.grad(value, logs)
    assert float(slope.abs().max()) < 1e-4
    assert found["bias"] > 1.5 * found["weight"]  # they do differ
    wide = {name: prior.std for name, prior in ours.priors[0].items()}
    assert wide == pytest.approx(found)


@pytest.mark.slow
def test_groups_of_outputs_and_of_weights_at_once() -> None:
    """Each output its noise and each tensor its scale, in two forms that hold all of the matrix."""
    x, y = lines(outputs=2)
    likelihood = doxa.Gaussian(per_output=True)
    model = doxa.Model(nn.Linear(2, 2).double(), likelihood)
    fit = lambda method: doxa.fit(model, (x, y), method, steps=300, lr=0.05, schedule="cosine")  # noqa: E731
    asked = {"tune": "evidence", "tuned_scale": "layer", "evidence_steps": 20}
    full, low = (fit(doxa.Laplace(kind, **asked)) for kind in ("full", "low-rank"))
    for name in ("weight", "bias"):
        mine, other = (p.diagnostics["prior_scale"][0][name] for p in (full, low))
        assert mine == pytest.approx(other, rel=1e-4)
    assert low.log_evidence == pytest.approx(full.log_evidence, rel=1e-6)


def test_what_is_ascended_is_the_density_under_the_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """log p(θ | τ) of weights N(0, 1/τ), by torch's own density."""
    seen = []
    honest = laplace.Objective.__call__

    def watched(self: Any, run: Any, params: Any, batch: Any, clock: Any) -> Any:
        found = honest(self, run, params, batch, clock)
        seen.append((run, params["theta"].detach(), params["tau"], found[2].value))
        return found

    monkeypatch.setattr(laplace.Objective, "__call__", watched)
    method = doxa.Laplace(tune="evidence", evidence_steps=3, tuned_scale="layer")
    doxa.fit(nn.Linear(2, 1).double(), lines(), method, steps=20, engine="loop:eager")
    run, theta, tau, value = seen[-1]
    weights = theta[0, run.subset_index]
    scales = tau[0].rsqrt()[torch.tensor([0, 0, 1])]  # two of the weight, one of the bias
    assert not torch.allclose(scales, torch.ones(3).double(), rtol=0.05)
    density = lambda s: torch.distributions.Normal(0.0, s).log_prob(weights).sum()  # noqa: E731
    rest = run.prior.log_prob(theta)[0] - density(torch.ones(3).double())
    assert float(value) == pytest.approx(float(density(scales) + rest), rel=1e-12)


def test_a_member_is_as_it_would_be_alone() -> None:
    net, data = doxa.nets.mlp(2, 1, (3,)).double(), lines()
    method = doxa.Laplace("diagonal", tune="evidence", tuned_scale="layer", evidence_steps=3)
    together = doxa.fit(net, data, method, steps=30, members=2)
    alone = doxa.fit(net, data, method, steps=30, members=[1])
    for name, value in alone.diagnostics["prior_scale"][0].items():
        assert together.diagnostics["prior_scale"][1][name] == pytest.approx(value, rel=1e-9)


def test_what_does_not_go_together_is_said() -> None:
    for settings, words in (
        ({"structure": "functional", "tuned_scale": "layer"}, "one scale"),
        ({"evidence_steps": 3, "train": False}, "steps of training"),
        ({"evidence_steps": 3, "subnetwork": 2}, "after training"),
        ({"evidence_steps": 3, "curvature": "hessian"}, "not be positive definite"),
    ):
        with pytest.raises(MethodError, match=words):
            doxa.Laplace(**settings)
    model = doxa.Model(nn.Linear(2, 1).double(), doxa.Gaussian(noise=0.3), doxa.Normal(1.0))
    with pytest.raises(MethodError, match="both are fixed"):
        doxa.fit(model, lines(), doxa.Laplace(evidence_steps=3), steps=5)


def test_training_that_was_killed_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    """Bit for bit, from a checkpoint between two re-estimations; runs of unequal rows."""
    net, data = doxa.nets.mlp(2, 1, (3,)).double(), lines()
    method = doxa.Laplace("kronecker", tune="evidence", tuned_scale="layer", evidence_steps=4)
    runs = doxa.Runs(rows=[torch.arange(30), torch.arange(5, 40)])

    def fit(**options: Any) -> Any:
        return doxa.fit(net, data, method, steps=40, runs=runs, batch_size=8, **options)

    want = fit()
    with pytest.raises(Killed):
        fit(checkpoint=tmp_path, checkpoint_every=0, callbacks=[stop_at(20, Killed)])
    assert_same_all(fit(checkpoint=tmp_path), want)
    assert want[0].diagnostics["prior_scale"] != want[1].diagnostics["prior_scale"]


def assert_same_all(got: Any, want: Any) -> None:
    for one, two in zip(got, want, strict=True):
        assert all(torch.equal(one.tensors()[k], v) for k, v in two.tensors().items())
        assert one.diagnostics["prior_scale"] == two.diagnostics["prior_scale"]
        assert one.history == two.history
