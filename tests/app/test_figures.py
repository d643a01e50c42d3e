"""Figures are written, and show the bands they were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from doxa.app import figures
from doxa.data import simulated

pytest.importorskip("matplotlib")


def read_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_one_panel_a_method(tmp_path: Path) -> None:
    grid = np.linspace(-4.0, 4.0, 50)
    truth = simulated.gap_function(grid)
    points = simulated.gap_regression(40)
    flat = np.full(50, 0.01)
    panel = figures.Panel("map", "one point", truth, flat, flat, truth[None])
    for count in (1, 3, 5):
        path = tmp_path / f"{count}.png"
        panels = [panel] * count
        figures.regression_figure(
            path, grid, truth, points.x[:, 0], points.y, panels, simulated.GAP
        )
        width, height = read_size(path)
        assert width > 0 and height > 0
    one, five = read_size(tmp_path / "1.png"), read_size(tmp_path / "5.png")
    assert five[0] > one[0] and five[1] > one[1]  # two rows of four


def test_maps_of_the_plane(tmp_path: Path) -> None:
    xs, ys = np.linspace(-2, 3, 30), np.linspace(-2, 2, 20)
    probability = np.broadcast_to(np.linspace(0, 1, 30), (20, 30))
    fields = [("p", probability, "probability"), ("mi", probability * 0.5, "information")]
    figures.moons_figure(tmp_path / "m.png", xs, ys, fields, simulated.two_moons(40))
    assert read_size(tmp_path / "m.png")[0] > 1000
