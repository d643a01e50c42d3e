"""The example on functional VI: its sampler makes step functions, and its figure is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples import load


def test_its_prior_is_of_steps() -> None:
    """Over a fine grid a draw changes at six places at most, and is flat elsewhere."""
    example = load("functional_vi")
    prior = example.problems()[2].prior
    f = prior.sample(torch.linspace(-3, 3, 2001), 50)[..., 0]
    assert int(((f[:, 1:] - f[:, :-1]).abs() > 1e-5).sum(1).max()) <= example.STEPS


@pytest.mark.slow
def test_its_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load("functional_vi").main(tmp_path, steps=20)
    assert (tmp_path / "functional_vi.png").stat().st_size > 10_000
