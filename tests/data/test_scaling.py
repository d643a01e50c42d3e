"""Scales: weighted moments against numpy's, and a word where nothing is standardised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.data import standardise


def table(n: int = 30) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.2 * torch.randn(n, 1, generator=g, dtype=torch.float64)


def with_outlier() -> tuple[Tensor, Tensor, Tensor]:
    """A row of weight 0 far away in x and y."""
    x, y = table()
    x, y = torch.cat([x, x.new_full((1, 2), -1e4)]), torch.cat([y, y.new_full((1, 1), 1e5)])
    weight = torch.ones(31, dtype=torch.float64)
    weight[30] = 0.0
    return x, y, weight


@pytest.mark.parametrize("method", ["linear", "map"])
def test_a_row_of_weight_0_changes_no_scale(method: str) -> None:
    x, y, weight = with_outlier()
    net = None if method == "linear" else nn.Linear(2, 1).double()
    options: dict[str, Any] = {"standardize": True, "steps": 300, "batch_size": 40}
    weighted = doxa.fit(net, (x, y), method, sample_weight=weight, **options)
    without = doxa.fit(net, (x[:30], y[:30]), method, **options)
    for name in ("x_loc", "x_scale", "y_loc", "y_scale"):
        ours, other = (getattr(fit.scales, name) for fit in (weighted, without))
        torch.testing.assert_close(ours, other, rtol=1e-14, atol=1e-14)
    ours, other = (fit.predict(x[:30]) for fit in (weighted, without))
    torch.testing.assert_close(ours.std, other.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.mean, other.mean, rtol=1e-6, atol=1e-6)


def test_scales_are_weighted_moments_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's of rows repeated as often as they count; also in blocks of 7 rows, and of images."""
    monkeypatch.setattr("doxa.data.scaling.rows_per_block", lambda t: 7)
    x, y = table()
    counts = np.random.default_rng(0).integers(0, 4, 30)
    images = torch.randn(30, 2, 3, 3, dtype=torch.float64)
    rows = [torch.arange(20), torch.arange(5, 30)]
    weight = torch.from_numpy(counts).double()
    found = standardise((x, images), y, rows, scale_y=True, weight=weight)
    for index, scales in zip(rows, found, strict=True):
        again = np.repeat(index.numpy(), counts[index])
        table_, pixels = x.numpy()[again], images.numpy()[again]
        np.testing.assert_allclose(scales.x_loc[0], table_.mean(0), rtol=1e-12)
        np.testing.assert_allclose(scales.x_scale[0], table_.std(0), rtol=1e-12)
        np.testing.assert_allclose(scales.x_loc[1], pixels.mean(), rtol=1e-10)
        np.testing.assert_allclose(scales.x_scale[1], pixels.std(), rtol=1e-12)
        np.testing.assert_allclose(scales.y_scale, y.numpy()[again].std(0), rtol=1e-12)


def test_a_task_of_weight_0_changes_no_scale() -> None:
    g = torch.Generator().manual_seed(1)
    tasks = [(torch.randn(n, 1, generator=g), torch.randn(n, 1, generator=g)) for n in (5, 7, 6)]
    far = (torch.full((4, 1), 1e4), torch.full((4, 1), 1e5))
    rows, weight = [torch.arange(4)], torch.tensor([1.0, 1.0, 1.0, 0.0])
    (ours,) = doxa.data.Tasks([*tasks, far]).scales(rows, True, weight)
    (other,) = doxa.data.Tasks(tasks).scales([torch.arange(3)], True)
    torch.testing.assert_close(ours.y_scale, other.y_scale)
    torch.testing.assert_close(ours.x_loc["target_x"], other.x_loc["target_x"])


def said(caplog: pytest.LogCaptureFixture, x: Tensor, y: Tensor, **options: Any) -> list[str]:
    caplog.clear()
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), int(options.pop("outputs", 1))))
    with caplog.at_level("WARNING", logger="doxa"):
        doxa.fit(net.to(x.dtype), (x, y), "map", steps=2, **options)
    return [r.getMessage() for r in caplog.records if "standardize" in r.getMessage()]


def test_columns_far_from_unit_size_are_named(caplog: pytest.LogCaptureFixture) -> None:
    x, y = table()
    x = torch.cat([x, 1e5 * x[:, :1], x[:, 1:] + 2020.0], 1)
    (words,) = said(caplog, x, y)
    assert words.startswith("x: column 2, 3 of size ")
    assert "standardize=True" in words
    assert said(caplog, x, y, standardize=True) == []


@pytest.mark.parametrize(
    ("scale", "shift", "count"),
    [(1.0, 0.0, 0), (5.0, 0.0, 0), (0.1, 0.0, 0), (1.0, 100.0, 1), (1e3, 0.0, 1), (1e-3, 0.0, 1)],
)
def test_targets_far_from_unit_size(
    caplog: pytest.LogCaptureFixture, scale: float, shift: float, count: int
) -> None:
    x, y = table()
    words = said(caplog, x, scale * y + shift)
    assert len(words) == count
    assert all(w.startswith("y: its numbers of size") for w in words)


def test_pixels_and_indicators(caplog: pytest.LogCaptureFixture) -> None:
    """0 to 255 is said, 0 to 1 is not; nor are rare indicators, constants and edges of images."""
    g = torch.Generator().manual_seed(0)
    pixels = torch.rand(200, 1, 6, 6, generator=g)
    pixels[..., 0, :] = 0.0
    pixels[3, 0, 0, 2] = 0.01
    classes = torch.arange(200) % 3
    options = {"likelihood": "categorical", "outputs": 3}
    assert said(caplog, pixels, classes, **options) == []
    assert said(caplog, pixels.flatten(1), classes, **options) == []
    assert len(said(caplog, 255 * pixels, classes, **options)) == 1
    (words,) = said(caplog, 255 * pixels.flatten(1), classes, **options)
    assert "column 6, 7, 8, 9, 10, …" in words
    rare = torch.cat([pixels.flatten(1)[:, 6:8], torch.zeros(200, 1), torch.ones(200, 1)], 1)
    rare[7, 2] = 1.0
    assert said(caplog, rare, classes, **options) == []


def test_a_row_of_weight_0_is_not_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x, y, weight = with_outlier()
    assert said(caplog, x, y, sample_weight=weight) == []
    assert len(said(caplog, x, y)) == 2


def test_rows_that_are_unlike_all_that_were_fitted_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A code for a missing value, new to the fit: networks are as sure there as anywhere."""
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    frame = pd.DataFrame(x.numpy(), columns=["age", "income", "debt"])
    options: dict[str, Any] = {"steps": 5, "progress": False, "standardize": True}
    posterior = doxa.fit(doxa.nets.mlp(3, 1, (4,)), (frame, x[:, 0].numpy()), "map", **options)
    new = frame.copy()
    new.iloc[7, 1], new.iloc[9, 1], new.iloc[9, 2] = 999_999.0, 500.0, -300.0
    with caplog.at_level("WARNING", logger="doxa"):
        posterior.predict(frame * 10.0)  # far, and yet not beyond all that was seen
    assert not caplog.records
    with caplog.at_level("WARNING", logger="doxa"):
        posterior.predict(new)
    (record,) = caplog.records
    assert "2 of 200 rows are far from all" in record.getMessage()
    assert "row 7 is in column 'income' 1" in record.getMessage()
    caplog.clear()
    raw = doxa.fit(doxa.nets.mlp(3, 1, (4,)), (x, x[:, 0]), "map", steps=5, progress=False)
    raw.predict(x * 1e6)  # of which sizes are usual nothing is known
    assert not caplog.records
