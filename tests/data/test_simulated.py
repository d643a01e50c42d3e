"""Toy data follow their stated laws."""

from __future__ import annotations

import numpy as np
from scipy import stats

from doxa.data import simulated


def test_the_gap_is_empty_and_its_inside_is_not() -> None:
    points = simulated.gap_regression(500, seed=3)
    assert points.x.shape == (500, 1) and points.y.shape == (500,)
    low, high = simulated.GAP
    assert not np.any((points.x > low) & (points.x < high))
    inside = simulated.gap_regression(500, seed=3, inside=True)
    assert np.all((inside.x >= low) & (inside.x <= high))


def test_the_noise_is_the_stated_gaussian() -> None:
    points = simulated.gap_regression(4000, seed=1)
    residual = points.y - simulated.gap_function(points.x[:, 0])
    # a fixed seed; a right implementation fails for one seed in a thousand
    assert stats.kstest(residual / simulated.GAP_NOISE, "norm").pvalue > 1e-3


def test_without_noise_the_moons_are_half_circles() -> None:
    points = simulated.two_moons(300, noise=0.0, seed=2)
    upper, lower = points.x[points.y == 0], points.x[points.y == 1]
    assert np.allclose(np.linalg.norm(upper, axis=1), 1.0) and np.all(upper[:, 1] >= 0)
    assert np.allclose(np.linalg.norm(lower - [1.0, 0.5], axis=1), 1.0)
    assert np.all(lower[:, 1] <= 0.5)
    assert abs(len(upper) - len(lower)) <= 1


def test_a_seed_fixes_the_data_and_another_changes_them() -> None:
    for make in (simulated.gap_regression, simulated.two_moons):
        assert np.array_equal(make(50, seed=5).x, make(50, seed=5).x)
        assert not np.array_equal(make(50, seed=5).x, make(50, seed=6).x)
