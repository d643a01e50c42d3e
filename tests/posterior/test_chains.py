"""R-hat and effective sizes, against arviz-stats and against chains whose worth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from doxa.diagnose import ess_bulk, ess_tail, rhat
from doxa.errors import ShapeError
from doxa.posterior.chains import finite, moved


def autoregressive(phi: float, chains: int, draws: int, seed: int) -> Tensor:
    """x_t = φ x_{t−1} + ε_t from its stationary distribution: [chains, draws]."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, draws, generator=g, dtype=torch.float64)
    x = noise.clone()
    x[:, 0] /= math.sqrt(1 - phi**2)
    for t in range(1, draws):
        x[:, t] = phi * x[:, t - 1] + noise[:, t]
    return x


@pytest.mark.parametrize("chains", [2, 4])
@pytest.mark.parametrize("draws", [16, 37, 100, 501])
@pytest.mark.parametrize("phi", [-0.6, 0.0, 0.5, 0.9])
def test_agrees_with_arviz(chains: int, draws: int, phi: float) -> None:
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    x = autoregressive(phi, chains, draws, seed=draws + chains)
    axes = {"chain_axis": 0, "draw_axis": 1}
    for value in (x, x + 2 * torch.arange(chains).unsqueeze(1)):  # met, and apart
        array = value.numpy()
        assert float(rhat(value)) == pytest.approx(arviz.rhat(array, method="rank", **axes), 1e-9)
        assert float(ess_bulk(value)) == pytest.approx(
            arviz.ess(array, method="bulk", **axes), rel=1e-9
        )
        assert float(ess_tail(value)) == pytest.approx(
            arviz.ess(array, method="tail", prob=(0.05, 0.95), **axes), rel=1e-9
        )


def test_all_entries_at_once_are_each_by_itself() -> None:
    x = torch.stack([autoregressive(phi, 3, 80, seed=1) for phi in (0.0, 0.7)], 2)  # [3, 80, 2]
    for function in (rhat, ess_bulk, ess_tail):
        together = function(x)
        assert together.shape == (2,)
        for entry in range(2):
            assert float(together[entry]) == pytest.approx(float(function(x[..., entry])), 1e-12)


def test_the_worth_of_an_autoregressive_chain() -> None:
    """n (1 − φ)/(1 + φ): 4 × 4,000 draws at φ = 0.6 are worth 4,000; the estimate within 15 %, five
    times its spread over seeds (measured as 3 %)."""
    x = autoregressive(0.6, 4, 4000, seed=5)
    assert float(ess_bulk(x)) == pytest.approx(4000, rel=0.15)


def test_scale_is_seen_by_the_folded_half() -> None:
    """Two chains of equal means and threefold spread: the means alone would not tell."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2000, generator=g) * torch.tensor([[1.0], [3.0]])
    assert float(rhat(x)) > 1.05


def test_invariance_under_increasing_maps() -> None:
    """Bulk quantities rest on ranks: exp changes nothing of the effective size."""
    x = autoregressive(0.3, 4, 200, seed=3)
    assert float(ess_bulk(x.exp())) == pytest.approx(float(ess_bulk(x)), 1e-12)
    assert float(ess_tail(x.exp())) == pytest.approx(float(ess_tail(x)), rel=0.02)


def test_chains_that_stand_still_apart_have_not_met() -> None:
    still = torch.tensor([0.0, 1.0]).unsqueeze(1).expand(2, 50)
    assert math.isinf(float(rhat(still)))
    same = torch.zeros(2, 50)
    assert float(rhat(same)) == 1.0
    assert float(ess_bulk(same)) == 100.0


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(ShapeError, match="4 draws or more"):
        rhat(torch.zeros(2, 3))
    with pytest.raises(ShapeError):
        ess_bulk(torch.as_tensor(np.zeros(10)))


@pytest.mark.parametrize("block", [1, 5, 13, 1 << 20])
def test_what_moved_and_what_is_finite_do_not_depend_on_the_block(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doxa.posterior.chains._BLOCK", block)
    chosen = torch.rand(3, 9, 2, generator=torch.Generator().manual_seed(0))
    draws = (chosen < 0.2).double()
    expected = (draws[:, 1:] != draws[:, :-1]).any(2).double().mean(1)
    assert 0 < float(expected.min()) < 1
    torch.testing.assert_close(moved(draws), expected, rtol=0, atol=1e-15)
    draws[1, 3, 1], draws[2, 8, 0] = torch.nan, torch.inf
    assert torch.equal(finite(draws), torch.isfinite(draws).all(2))
    assert torch.equal(finite(draws[..., 0]), torch.isfinite(draws[..., 0]))  # scalars
