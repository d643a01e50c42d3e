"""Figures are written, and show the bands they were given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doxa.app import figures
from doxa.data import simulated

pytest.importorskip("matplotlib")


def read_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def drawn(path: Path, count: int, trouble: str = "") -> Any:
    """A figure of so many panels, the last in trouble."""
    grid = np.linspace(-4.0, 4.0, 50)
    truth = simulated.gap_function(grid)
    points = simulated.gap_regression(40)
    flat = np.full(50, 0.01)
    panel = figures.Panel("map", "one point", truth, flat, flat, truth[None])
    panels = [panel] * (count - 1) + [replace(panel, trouble=trouble)]
    return figures.regression_figure(
        path, grid, truth, points.x[:, 0], points.y, panels, simulated.GAP
    )


@pytest.mark.slow
def test_one_panel_a_method(tmp_path: Path) -> None:
    for count in (1, 5):
        drawn(tmp_path / f"{count}.png", count)
    one, five = read_size(tmp_path / "1.png"), read_size(tmp_path / "5.png")
    assert five[0] > one[0] and five[1] > one[1]  # two rows of four


@pytest.mark.slow
def test_every_panel_can_be_read_alone(tmp_path: Path) -> None:
    """Numbers under each, words for the bands, and a mark on the one that is not to be trusted."""
    figure = drawn(tmp_path / "5.png", 5, "not-converged")
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert len(panels) == 5
    for ax in panels:
        shown = [t.get_text() for t in ax.get_xticklabels() if t.get_visible()]
        assert {"−2", "0", "2"} <= set(shown)
    words = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert all(word in words for word in ("noise", "uncertainty", "without data", "not reliable"))
    marks = [[text.get_text() for text in ax.texts] for ax in panels]
    assert marks == [[], [], [], [], ["not-converged"]]


def test_maps_of_the_plane(tmp_path: Path) -> None:
    xs, ys = np.linspace(-2, 3, 30), np.linspace(-2, 2, 20)
    probability = np.broadcast_to(np.linspace(0, 1, 30), (20, 30))
    fields = [("p", probability, "probability"), ("mi", probability * 0.5, "information")]
    figures.moons_figure(tmp_path / "m.png", xs, ys, fields, simulated.two_moons(40))
    assert read_size(tmp_path / "m.png")[0] > 1000
