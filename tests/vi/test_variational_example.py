"""The example on variational posteriors: its evidence is right, and bounds lie below it."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from examples import load
from torch.distributions import Normal

pytest.importorskip("zuko")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("variational")


def test_the_evidence_is_the_mean_likelihood_of_prior_draws(example: ModuleType) -> None:
    """400,000 draws of all four weights: within 4 standard errors (chance 1e-4)."""
    x, y = example.few_rows()
    g = torch.Generator().manual_seed(3)
    w, b, v, c = torch.randn(4, 400_000, 1, generator=g, dtype=torch.float64)
    fits = Normal(v * torch.tanh(w * x.T + b) + c, example.NOISE).log_prob(y.T).sum(1)
    ratio = (fits - example.evidence()).exp()
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / math.sqrt(400_000)


@pytest.mark.slow
def test_every_picture_is_drawn(example: ModuleType, tmp_path: Path) -> None:
    """From short fits: every bound is below the evidence, every method has a width."""
    found, exact = example.bounds(steps=20, seeds=(0,)), example.evidence(101)
    assert all(value < exact for values in found.values() for value in values)
    example.draw_bounds(found, exact, tmp_path / "bound.png")
    rates = example.dropout_rates(steps=20, seeds=(0,))
    assert all(bool(((p > 0) & (p < 1)).all()) for p in rates.values())
    example.draw_dropout(rates, tmp_path / "dropout.png")
    widths = example.widths(steps=20, draws=20)
    assert all(example.in_gap(std) > 0 for _, std in widths.values())
    example.draw_widths(widths, tmp_path / "width.png")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
