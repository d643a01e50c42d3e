"""Toy data for the demo, examples and tests: simulated, seeded, no files, no network."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

GAP = (-1.2, 1.6)  # where `gap_regression` has no observations
GAP_NOISE = 0.15


class Points(NamedTuple):
    """Inputs [N, D] and targets [N]."""

    x: Array
    y: Array


def gap_function(x: Array) -> Array:
    """The noise-free curve of `gap_regression`."""
    return np.sin(1.2 * x) + 0.35 * x


def gap_regression(n: int = 80, seed: int = 0, inside: bool = False) -> Points:
    """y = sin(1.2 x) + 0.35 x + ε, ε ~ N(0, 0.15²), with no x between −1.2 and 1.6.

    `inside=True` gives points from the gap alone: what a fit could not see.
    """
    rng = np.random.default_rng([seed, int(inside)])
    if inside:
        x = rng.uniform(*GAP, n)
    else:
        left = rng.uniform(-4.0, GAP[0], n // 2)
        x = np.concatenate([left, rng.uniform(GAP[1], 4.0, n - n // 2)])
    y = gap_function(x) + GAP_NOISE * rng.normal(size=n)
    return Points(x[:, None], y)


def two_moons(n: int = 200, noise: float = 0.15, seed: int = 0) -> Points:
    """Two interleaved half circles, classes 0 and 1."""
    rng = np.random.default_rng(seed)
    half = n // 2
    upper = rng.uniform(0.0, np.pi, half)
    lower = rng.uniform(0.0, np.pi, n - half)
    x = np.concatenate(
        [
            np.stack([np.cos(upper), np.sin(upper)], axis=1),
            np.stack([1.0 - np.cos(lower), 0.5 - np.sin(lower)], axis=1),
        ]
    )
    y = np.repeat([0, 1], [half, n - half])
    return Points(x + noise * rng.normal(size=x.shape), y)
