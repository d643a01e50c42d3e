"""Weights beside functions, energies, divergences: what the diagnostics read from a sampler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import doxa
from doxa.diagnose import doctor
from doxa.errors import ShapeError
from doxa.posterior import SamplePosterior
from doxa.posterior.chains import ebfmi


def autoregressive(phi: float, chains: int, draws: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    noise = torch.randn(chains, draws, generator=g, dtype=torch.float64)
    x = [noise[:, 0] / math.sqrt(1 - phi**2)]
    for t in range(1, draws):
        x.append(phi * x[-1] + noise[:, t])
    return torch.stack(x, 1)


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_ebfmi_of_an_autoregression(phi: float) -> None:
    """E[(E_t − E_{t−1})²] / Var E = 2(1 − φ); 20,000 draws bring it within 5 %."""
    found = ebfmi(autoregressive(phi, 2, 20_000))
    assert found.shape == (2,)
    assert found.tolist() == pytest.approx([2 * (1 - phi)] * 2, rel=0.05)


def test_ebfmi_against_arviz() -> None:
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    energy = autoregressive(0.6, 3, 200)
    theirs = arviz.bfmi(energy.numpy(), chain_axis=0, draw_axis=1)
    assert ebfmi(energy).tolist() == pytest.approx(theirs.tolist(), rel=1e-2)  # n for n − 1


def test_ebfmi_needs_chains() -> None:
    for shape in ((5,), (2, 3), (2, 5, 1)):
        with pytest.raises(ShapeError, match="energies must be"):
            ebfmi(torch.zeros(shape))


@pytest.fixture(scope="module")
def fitted() -> tuple[SamplePosterior, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, generator=g, dtype=torch.float64)
    y = x + 0.3 * torch.randn(30, 1, generator=g, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    method = doxa.HMC(draws=150, burn_in=100, leapfrog=8)
    posterior = doxa.fit(net, (x, y), method, members=2, likelihood=doxa.Gaussian(0.3), seed=1)
    return posterior, (x, y)


def mirrored(posterior: SamplePosterior) -> None:
    """Chain 1 moved to the mirror image of chain 0's mode: w, b, v → −w, −b, −v."""
    samples = posterior.samples
    flip = torch.ones(samples.shape[2], dtype=samples.dtype)
    for name in ("0.weight", "0.bias", "2.weight"):
        flip[posterior.layout.slices[name]] = -1
    sign = samples[:, :, posterior.layout.slices["0.weight"]].sign()  # [2, T, 1]
    wanted = torch.tensor([1.0, -1.0]).double().reshape(2, 1, 1)
    posterior.samples = torch.where(sign == wanted, samples, samples * flip)


@pytest.mark.slow
def test_mirror_images_are_told_from_disagreement(
    fitted: tuple[SamplePosterior, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """The network is the same under w, b, v → −w, −b, −v: functions agree, weights cannot."""
    posterior, data = fitted
    mirrored(posterior)
    found = doctor(posterior, data)
    assert found["weights"].status == "good"
    assert found["weights"].value is not None
    assert found["weights"].value > 1.5
    assert "symmetric modes" in found["weights"].words
    assert "R-hat of the functions" in found["chains"].words


def test_divergences_and_energies_are_read(
    fitted: tuple[SamplePosterior, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    posterior, data = fitted
    kept = dict(posterior.diagnostics)
    assert kept["divergences"] >= 0
    healthy = {"divergences": 0, "divergent_share": 0.0, "ebfmi": [0.9, 1.1], "transitions": 150}
    for changed, verdict in (
        ({}, "good"),
        ({"divergences": 30, "divergent_share": 0.1}, "bad"),
        ({"ebfmi": [0.9, 0.1]}, "warning"),
        ({"ebfmi": [0.9, 0.1], "transitions": 20}, "good"),
        ({"ebfmi": [math.nan, math.nan]}, "good"),
    ):
        posterior.record.diagnostics = kept | healthy | changed
        finding = doctor(posterior, data)["energy"]
        assert finding.status == verdict, changed
    posterior.record.diagnostics = kept


def test_arviz_has_sample_stats(
    fitted: tuple[SamplePosterior, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    pytest.importorskip("arviz_base")
    posterior, _ = fitted
    tree = posterior.to_arviz()
    assert tree["posterior"]["0.weight"].shape == (2, 150, 1, 1)
    stats = tree["sample_stats"]
    assert stats["energy"].shape == (2, 150)
    assert {"lp", "acceptance_rate", "diverging"} <= set(stats.data_vars)
    ours = ebfmi(posterior.record.stats["energy"]).tolist()  # of the draws that were kept
    assert ours == pytest.approx(posterior.diagnostics["ebfmi"], rel=1e-6)


def test_sample_stats_are_saved(
    fitted: tuple[SamplePosterior, tuple[torch.Tensor, torch.Tensor]], tmp_path: object
) -> None:
    posterior, _ = fitted
    posterior.save(f"{tmp_path}/run")
    again = doxa.load(f"{tmp_path}/run", net=posterior.network.net)
    assert torch.equal(again.record.stats["energy"], posterior.record.stats["energy"])
