"""The predictions of a posterior at the scored rows, as arrays for the charts.

Rows are predicted in blocks, so that memory stays bounded. The predictive of a block is read and
then discarded. A target may have several elements, such as outputs or pixels. Arrays are flat over
rows × elements, and `row` is the row of each element. If a predictive lacks a quantity, the reason
is kept in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.app.report.subject import Array, Rows
from doxa.errors import DoxaError, MemoryBudgetError, Unavailable
from doxa.tables.predictions import conformal_level

LEVEL = 0.95
LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))
MOST_NUMBERS = 4_000_000  # largest size of one quantity, over all rows
BLOCK_NUMBERS = 4_000_000  # largest size of the draws of one block
MOST_ROWS = 100_000
MOST_COMPONENTS = 500_000  # largest rows × draws for quantiles of mixtures, which need bisection
LEAST_ROWS = 250


@dataclass
class Evaluation:
    """The predictions of one head. Arrays have one entry per element, unless a comment says
    otherwise."""

    label: str  # "" if there is one head
    kind: str  # "numbers", "counts" or "classes"
    rows: int  # number of scored rows
    total: int  # number of given rows
    site: tuple[int, ...]  # shape of the elements of one row
    index: Array  # [rows]: the number of each scored row among the given rows
    row: Array  # 0 … rows − 1: the row of each element
    place: Array  # the position of each element in its row
    truth: Array
    scores: dict[str, float] = field(default_factory=dict)
    mean: Array | None = None
    std: Array | None = None
    aleatoric: Array | None = None
    epistemic: Array | None = None
    low: Array | None = None
    high: Array | None = None
    pit: Array | None = None
    covered: Array | None = None  # [levels]: share of targets in the interval of each level
    probs: Array | None = None  # [elements, C]
    entropy: Array | None = None
    information: Array | None = None
    sets: Array | None = None  # [elements, C]: conformal sets of classes
    level: float = LEVEL  # the level of `low`, `high` and `sets`
    conformal: bool = False
    draws: int = 1
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def uncertainty(self) -> Array | None:
        """The measure by which rows are ranked: entropy for classes, and standard deviation for
        numbers."""
        return self.entropy if self.kind == "classes" else self.std

    @property
    def head(self) -> str:
        """The suffix that the names of this head's checks have."""
        return f" (head {int(self.label.rpartition(' ')[2]) - 1})" if self.label else ""

    def by_row(self, values: Array) -> Array:
        """The mean over the elements of each row, [rows]."""
        total = np.bincount(self.row, weights=values, minlength=self.rows)
        return total / np.maximum(np.bincount(self.row, minlength=self.rows), 1)

    def confusion(self) -> Array | None:
        """The confusion matrix [C, C]: how often each true class (row of the matrix) was predicted
        as each class (column)."""
        if self.probs is None or not self.truth.size:
            return None
        number = self.probs.shape[1]
        pairs = self.truth.astype(int) * number + self.probs.argmax(axis=1)
        return np.bincount(pairs, minlength=number**2).reshape(number, number)


def evaluate(posterior: Any, rows: Rows, seed: int = 0) -> list[Evaluation]:
    """Evaluate a posterior at given rows.

    Parameters
    ----------
    posterior : Posterior
        The posterior.
    rows : Rows
        The rows.
    seed : int
        The seed of random numbers in the scores.

    Returns
    -------
    list of Evaluation
        One evaluation per head.
    """
    from doxa.evaluate import Streaming

    parts = posterior.predict(rows.take(slice(0, 1))).heads
    numbers = max(math.prod(p.mean.shape[1:]) for p in parts)
    draws = max(draws_of(p) for p in parts)
    index = np.arange(rows.count)
    most = max(1, min(MOST_ROWS, MOST_NUMBERS // numbers))
    if any(kind_of(p.likelihood) != "classes" for p in parts):
        most = min(most, max(LEAST_ROWS, MOST_COMPONENTS // (draws * numbers)))
    if most < rows.count:
        index = np.sort(np.random.default_rng(seed).choice(rows.count, most, replace=False))
    size = int(np.clip(BLOCK_NUMBERS // (draws * numbers), 1, 8192))
    guaranteed = conformal_level(posterior)
    conformal, level = guaranteed is not None, guaranteed or LEVEL
    streams = [Streaming(level=level) for _ in parts]
    blocks: list[list[_Block]] = [[] for _ in parts]
    for start in range(0, len(index), size):
        at = torch.as_tensor(index[start : start + size])
        for k, p in enumerate(_predict(posterior, rows.take(at)).heads):
            y = rows.y[k] if isinstance(rows.y, tuple) else rows.y
            blocks[k].append(_read(p, y[at], start, streams[k], conformal))
    found = []
    for k, each in enumerate(blocks):
        label = f"head {k + 1}" if len(parts) > 1 else ""
        evaluation = _joined(label, each, index, rows.count)
        evaluation.level, evaluation.conformal = level, conformal
        if "scores" not in evaluation.missing:
            evaluation.scores = streams[k].result()
        found.append(evaluation)
    return found


def kind_of(likelihood: Any) -> str:
    if likelihood.classifies:
        return "classes"
    return "counts" if likelihood.discrete else "numbers"


def draws_of(p: Any) -> int:
    try:
        return max(1, len(p.weights))
    except Unavailable:
        return 1


def array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()


@dataclass
class _Block:
    """The quantities of some rows by name: arrays [rows, elements], and [rows, elements, C] for
    probabilities and sets."""

    kind: str
    draws: int
    truth: Array
    site: tuple[int, ...]
    arrays: dict[str, Array] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, value: Callable[[], Array]) -> None:
        """Compute and keep a quantity, or the reason why it does not exist."""
        try:
            self.arrays[name] = value()
        except DoxaError as error:
            self.missing[name] = str(error)


def _predict(posterior: Any, x: Any) -> Any:
    """Predict and keep all draws, or only moments if the draws exceed the memory budget."""
    try:
        return posterior.predict(x)
    except MemoryBudgetError:
        return posterior.predict(x, keep="moments")


def _read(p: Any, y: Tensor, seed: int, stream: Any, conformal: bool) -> _Block:
    """The quantities of one predictive that a report needs. `stream` collects its scores."""
    from doxa.evaluate import pit

    if y.is_floating_point():
        y = y.to(p.mean.dtype)
    truth = p.targets(y)
    n = len(truth)

    def flat(values: Tensor) -> Array:
        return array(values).reshape(n, -1)

    def by_class(values: Tensor) -> Array:  # [n, C, *site] to [n, elements, C]
        return np.moveaxis(array(values), 1, -1).reshape(n, -1, values.shape[1])

    def class_probs() -> Array:
        two = p.likelihood.binary
        return by_class(torch.stack([1.0 - p.probs, p.probs], dim=1) if two else p.probs)

    def ends() -> Array:  # the upper end comes with the lower one
        low, high = p.interval(stream.level)
        block.arrays["high"] = flat(high)
        return flat(low)

    def covered() -> Array:  # [1, levels]: the ends of an interval belong to it
        bounds = [p.interval(level) for level in LEVELS]
        inside = [((low <= truth) & (truth <= high)).double().mean() for low, high in bounds]
        return np.array([[float(share) for share in inside]])

    block = _Block(kind_of(p.likelihood), draws_of(p), flat(truth), tuple(truth.shape[1:]))
    try:
        stream.update(p, y)
    except DoxaError as error:
        block.missing["scores"] = str(error)
    if block.kind == "classes":
        block.get("probs", class_probs)
        block.get("entropy", lambda: flat(p.entropy))
        block.get("information", lambda: flat(p.mutual_information))
        if conformal:
            block.get("sets", lambda: by_class(p.prediction_set()))
        return block
    block.get("mean", lambda: flat(p.mean))
    block.get("std", lambda: flat(p.std))
    block.get("aleatoric", lambda: flat(p.aleatoric))
    block.get("epistemic", lambda: flat(p.epistemic))
    block.get("low", ends)
    block.get("pit", lambda: flat(pit(p, y, seed=seed)))
    if block.kind == "counts" or "pit" in block.missing:
        block.get("covered", covered)
    return block


def _joined(label: str, blocks: Sequence[_Block], index: Array, total: int) -> Evaluation:
    """Concatenate blocks. If one block lacks a quantity, the result lacks it too."""
    first = blocks[0]
    truth = np.concatenate([block.truth for block in blocks])
    rows = len(truth)
    found = Evaluation(
        label, first.kind, rows, total, first.site, index,
        np.repeat(np.arange(rows), truth.shape[1]), np.tile(np.arange(truth.shape[1]), rows),
        truth.reshape(-1), draws=first.draws,
        missing={name: why for block in blocks for name, why in block.missing.items()},
    )  # fmt: skip
    for name in first.arrays.keys() - found.missing.keys():
        whole = np.concatenate([block.arrays[name] for block in blocks])
        if name == "covered":
            weights = [len(block.truth) for block in blocks]
            found.covered = np.average(whole, axis=0, weights=weights)
        else:
            setattr(found, name, whole.reshape(-1, *whole.shape[2:]))
    if found.probs is not None:
        _drop_ignored(found)
    return found


def _drop_ignored(found: Evaluation) -> None:
    """Drop the elements whose label is an ignored index, and not a class."""
    assert found.probs is not None
    known = (found.truth >= 0) & (found.truth < found.probs.shape[1])
    if known.all():
        return
    for name in ("row", "place", "truth", "probs", "entropy", "information", "sets"):
        values = getattr(found, name)
        if values is not None:
            setattr(found, name, values[known])
