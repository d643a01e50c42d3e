"""Predictions and labels to score: random ones and the degenerate ones that break formulas."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doxa.likelihoods import Bernoulli
from doxa.predictive import Predictive

Table = tuple[NDArray[np.float64], NDArray[np.int64]]


def _random(rows: int, classes: int, seed: int = 0, sharp: float = 2.0) -> Table:
    source = np.random.default_rng(seed)
    logits = sharp * source.standard_normal((rows, classes))
    probs = np.exp(logits)
    return probs / probs.sum(1, keepdims=True), source.integers(classes, size=rows)


def _coarse() -> Table:
    """Probabilities in tenths: most lie on an edge of ten bins, and many are equal."""
    source = np.random.default_rng(1)
    first = source.integers(0, 11, size=200)
    second = source.integers(0, 11 - first)
    probs = np.stack([first, second, 10 - first - second], 1) / 10
    return probs, source.integers(3, size=200)


def _ties() -> Table:
    """Five distinct rows, repeated unequally often."""
    probs, _ = _random(5, 4, seed=3)
    rows = np.repeat(np.arange(5), [1, 40, 3, 25, 6])
    return probs[rows], np.random.default_rng(4).integers(4, size=len(rows))


def _calibrated() -> Table:
    """Labels drawn from their probabilities, in tenths: gaps of either sign, and ties."""
    probs, _ = _coarse()
    source = np.random.default_rng(8)
    return probs, np.array([source.choice(3, p=row) for row in probs])


_EYE = np.eye(3)
LABELS = np.array([0, 1, 2, 2, 1, 0, 1])
TABLES: dict[str, Table] = {
    "random": _random(300, 4),
    "sharp": _random(100, 10, seed=5, sharp=12.0),
    "two classes": _random(80, 2, seed=6),
    "on edges": _coarse(),
    "calibrated": _calibrated(),
    "ties": _ties(),
    "perfect": (_EYE[LABELS], LABELS),
    "worst": (_EYE[(LABELS + 1) % 3], LABELS),
    "uniform": (np.full((7, 3), 1 / 3), LABELS),
    "one class only": (_random(30, 3, seed=7)[0], np.ones(30, dtype=np.int64)),
    "one row": (np.array([[0.2, 0.7, 0.1]]), np.array([2])),
}


def of_probs(probs: NDArray[np.float64]) -> Predictive:
    return Predictive.from_probs(torch.as_tensor(probs))


def of_yes(probs: NDArray[np.float64]) -> Predictive:
    """A Bernoulli predictive with these probabilities of a 1; 0 and 1 allowed."""
    yes = torch.as_tensor(probs)
    return Predictive((yes.log() - torch.log1p(-yes)).unsqueeze(0), Bernoulli())


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
