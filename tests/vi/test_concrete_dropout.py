"""Concrete dropout: its objective, its masks, and what it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import doxa
from doxa.errors import MethodError, ModelError
from doxa.vi.concrete_dropout import kept


def curve(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=g, dtype=torch.float64) - 2
    return x, (2 * x).sin() + 0.3 * torch.randn(n, 1, generator=g, dtype=torch.float64)


def test_relaxed_masks_are_masks_in_the_limit_and_unbiased() -> None:
    """E[(1 − z)/(1 − p)] is 1 up to the relaxation; at t = 1e-4 it is a mask, of dropped share p.
    40,000 draws; five standard errors of at most √(p/(1 − p)/n)."""
    u = torch.rand(40_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for p in (0.1, 0.4):
        logit = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64)
        relaxed = kept(u, logit, torch.tensor(1e-4, dtype=torch.float64))
        near = (relaxed < 1e-6) | ((relaxed * (1 - p) - 1).abs() < 1e-6)
        assert near.double().mean() > 0.999
        assert abs(float((relaxed > 0.5).double().mean()) - (1 - p)) < 5 * math.sqrt(p / 4e4)
        assert abs(float(relaxed.mean()) - 1) < 5 * math.sqrt(p / (1 - p) / 4e4)
        hard = kept(u, logit, None)
        assert sorted(hard.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)])
        assert ((relaxed - hard).abs() < 1e-6).double().mean() > 0.999, "the same mask"


def test_the_objective_is_mc_dropouts_at_the_same_p() -> None:
    """log p(θ) and the regulariser together are MC dropout's −KL: −Σ‖M‖²/2s²(1 − p) + Σ Q·H(p)."""
    x, y = curve(20)
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    seen = {}

    class Watched(doxa.ConcreteDropout):
        def finish(self, run, state, kept):  # type: ignore[no-untyped-def]
            theta = state["theta"]
            seen["got"] = self._regulariser(run, theta, state["layers"]) + run.prior.log_prob(theta)
            seen["plain"] = run.prior.log_prob(torch.zeros_like(theta))
            return super().finish(run, state, kept)

    posterior = doxa.fit(
        net.double(), (x, y), Watched(initial_p=0.2), steps=30, prior=doxa.Normal(0.7),
        likelihood=doxa.Gaussian(noise=0.5), members=2, validation=None,
    )  # fmt: skip
    rates = posterior.diagnostics["p"]
    assert list(rates) == ["2.dropout", "4.dropout"] and len(rates["2.dropout"]) == 2
    for m in range(2):
        w = posterior.layout.unflatten(posterior.theta[m])
        want = 0.0
        for layer, units in (("2", 5), ("4", 4)):
            p = rates[f"{layer}.dropout"][m]
            assert p != pytest.approx(0.2, abs=1e-4), "it learned nothing"
            want -= float(w[f"{layer}.weight"].square().sum()) / (2 * 0.49 * (1 - p))
            want += units * (-p * math.log(p) - (1 - p) * math.log(1 - p))
        for name in ("0.weight", "0.bias", "2.bias", "4.bias"):
            want -= float(w[name].square().sum()) / (2 * 0.49)
        assert float((seen["got"] - seen["plain"])[m]) == pytest.approx(want, rel=1e-10)


@pytest.mark.slow
def test_p_falls_as_rows_are_added() -> None:
    """What is left open by the data shrinks with them: in the paper's figure too."""
    found = []
    for n in (20, 2000):
        net = doxa.nets.mlp(1, 1, (40,), activation="relu").double()
        posterior = doxa.fit(
            net, curve(n), doxa.ConcreteDropout(initial_p=0.3), steps=1500, lr=1e-2,
            likelihood=doxa.Gaussian(noise=0.3), validation=None, batch_size=64,
        )  # fmt: skip
        (p,) = posterior.diagnostics["p"].values()
        found.append(p[0])
    assert found[1] < 0.5 * found[0], found


def test_convolutions_mask_channels() -> None:
    x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )
    posterior = doxa.fit(net, (x, (x.mean((1, 2, 3)) > 0).long()), "concrete-dropout", steps=5)
    assert posterior.network.sites["2.dropout.uniform"].shape == (4, 1, 1)
    assert posterior.network.sites["5.dropout.uniform"].shape == (12,)
    assert torch.isfinite(posterior.predict(x).probs).all()


def test_what_it_cannot_use() -> None:
    x, y = curve(10)
    with pytest.raises(ModelError, match="no dropout layer"):
        doxa.fit(nn.Linear(1, 1).double(), (x, y), "concrete-dropout")
    net = doxa.nets.mlp(1, 1, (4,)).double()
    with pytest.raises(MethodError, match="Gaussian priors"):
        doxa.fit(net, (x, y), "concrete-dropout", prior=doxa.LaplacePrior(1.0))
    with pytest.raises(ModelError, match="none can be inserted"):
        doxa.fit(net, (x, y), "concrete-dropout", subset=lambda name: name == "0.weight")
    with pytest.raises(MethodError, match="initial_p"):
        doxa.ConcreteDropout(initial_p=1.0)
