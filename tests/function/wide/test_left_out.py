"""Rows left out of wide networks in closed form, against fits without them."""

from __future__ import annotations

import pytest
import torch

import doxa
from doxa.function.wide.posterior import noise_of, residuals


def data(rows: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin() + noise * torch.randn(rows, 1, generator=g).double()
    return x, y


def test_rows_left_out_are_those_of_fits_without_them() -> None:
    x, y = data(12, 0.1)
    method = doxa.NTK(depth=1, noise=0.2, learn_kernel=False)
    whole = doxa.fit(None, (x, y), method, likelihood="gaussian")
    left, spread = residuals(whole._solved, whole._among)
    for i in (0, 5):
        kept = torch.arange(12) != i
        without = doxa.fit(None, (x[kept], y[kept]), method, likelihood="gaussian")
        f, variance = without.marginals(x[i : i + 1])
        assert float(left[0, 0, i, 0]) == pytest.approx(float(y[i] - f[0]), abs=1e-8)
        assert float(spread[0, 0, i]) == pytest.approx(float(variance), abs=1e-8)


def test_the_noise_is_what_rows_left_out_show_beside_the_spread() -> None:
    x, y = data(12, 0.5)
    method = doxa.NTK(depth=1, noise=0.2, learn_kernel=False)
    whole = doxa.fit(None, (x, y), method, likelihood="gaussian")
    shown = []
    for i in range(12):
        kept = torch.arange(12) != i
        without = doxa.fit(None, (x[kept], y[kept]), method, likelihood="gaussian")
        f, variance = without.marginals(x[i : i + 1])
        shown.append(float(y[i] - f[0]) ** 2 - float(variance))
    found = noise_of(whole._solved, whole._among, whole._levels)
    assert sum(shown) / 12 > 0.04  # σ², below which it does not fall
    assert float((2 * found).exp()) == pytest.approx(sum(shown) / 12, rel=1e-8)


def test_intervals_hold_where_all_networks_are_wrong_alike() -> None:
    """Ten columns of which one matters: wide networks cannot see that from few rows, and agree."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(500, 10, generator=g, dtype=torch.float64)
    y = (12 * x[:, :1]).sin() + 0.1 * torch.randn(500, 1, generator=g).double()
    posterior = doxa.fit(None, (x[:100], y[:100]), "ntk", standardize=True, likelihood="gaussian")
    low, high = posterior.predict(x[100:]).interval(0.9)
    inside = ((y[100:] > low) & (y[100:] < high)).double().mean()
    assert 0.85 < float(inside) < 0.97  # with σ alone: 0.79


def test_rows_of_weight_zero_show_no_noise() -> None:
    x, y = data(40, 0.3)
    far = torch.cat([y[:30], torch.full((10, 1), 50.0).double()])
    weight = torch.cat([torch.ones(30), torch.zeros(10)])
    kept = doxa.fit(None, (x[:30], y[:30]), "ntk", likelihood="gaussian")
    with_far = doxa.fit(None, (x, far), "ntk", likelihood="gaussian", sample_weight=weight)
    assert torch.allclose(kept.theta()["log_noise"], with_far.theta()["log_noise"], atol=1e-6)
