"""The posterior's answers at the scored rows, as plain arrays: what every chart is made from.

Rows are predicted in blocks, so that memory stays bounded; a block's predictive is read and let go.
A target may have several elements (outputs, pixels): arrays are flat over rows × elements, and
`row` says whose each is. What a predictive does not have is noted with its reason, not raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from doxa.app.report.block import Block, draws_of, heads, kind_of, read
from doxa.app.report.subject import Array, Rows
from doxa.errors import MemoryBudgetError

LEVEL = 0.95
MOST_NUMBERS = 4_000_000  # of one quantity, over all rows
BLOCK_NUMBERS = 4_000_000  # of one block's draws
MOST_ROWS = 100_000
MOST_COMPONENTS = 500_000  # rows × draws: quantiles of a mixture are found by bisection
LEAST_ROWS = 250


@dataclass
class Answer:
    """One head's answers; arrays over elements unless said otherwise."""

    label: str  # "" where there is one head
    kind: str  # "numbers", "counts" or "classes"
    rows: int  # scored
    of: int  # given
    site: tuple[int, ...]  # shape of one row's elements
    index: Array  # [rows]: which of the given rows
    row: Array  # whose each element is: 0 … rows − 1
    place: Array  # and where in its row
    truth: Array
    scores: dict[str, float] = field(default_factory=dict)
    mean: Array | None = None
    std: Array | None = None
    aleatoric: Array | None = None
    epistemic: Array | None = None
    low: Array | None = None
    high: Array | None = None
    pit: Array | None = None
    covered: Array | None = None  # [levels], shares
    probs: Array | None = None  # [elements, C]
    entropy: Array | None = None
    information: Array | None = None
    sets: Array | None = None  # [elements, C]: conformal sets of classes
    level: float = LEVEL  # of low, high and the sets
    conformal: bool = False
    draws: int = 1
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def uncertainty(self) -> Array | None:
        """What rows are ranked by: entropy of classes, the standard deviation of numbers."""
        return self.entropy if self.kind == "classes" else self.std

    def by_row(self, values: Array) -> Array:
        """The mean over each row's elements: [rows]."""
        total = np.bincount(self.row, weights=values, minlength=self.rows)
        return total / np.maximum(np.bincount(self.row, minlength=self.rows), 1)


def ask(posterior: Any, rows: Rows, seed: int = 0) -> list[Answer]:
    """One answer a head."""
    from doxa.evaluate import Streaming

    parts = heads(posterior.predict(rows.take(slice(0, 1))))
    numbers = max(math.prod(p.mean.shape[1:]) for p in parts)
    draws = max(draws_of(p) for p in parts)
    index = np.arange(rows.count)
    most = max(1, min(MOST_ROWS, MOST_NUMBERS // numbers))
    if any(kind_of(p.likelihood) != "classes" for p in parts):
        most = min(most, max(LEAST_ROWS, MOST_COMPONENTS // (draws * numbers)))
    if most < rows.count:
        index = np.sort(np.random.default_rng(seed).choice(rows.count, most, replace=False))
    size = int(np.clip(BLOCK_NUMBERS // (draws * numbers), 1, 8192))
    transform = getattr(posterior, "transform", None)
    conformal = hasattr(transform, "level")
    level = float(getattr(transform, "level", LEVEL))  # a conformal one knows its own only
    streams = [Streaming(level=level) for _ in parts]
    blocks: list[list[Block]] = [[] for _ in parts]
    for start in range(0, len(index), size):
        at = torch.as_tensor(index[start : start + size])
        for k, p in enumerate(heads(_predict(posterior, rows.take(at)))):
            y = rows.y[k] if isinstance(rows.y, tuple) else rows.y
            blocks[k].append(read(p, y[at], start, streams[k], conformal))
    answers = []
    for k, each in enumerate(blocks):
        answer = _joined(f"head {k + 1}" if len(parts) > 1 else "", each, index, rows.count)
        answer.level, answer.conformal = level, conformal
        if "scores" not in answer.missing:
            answer.scores = streams[k].result() | _set_scores(answer)
        answers.append(answer)
    return answers


def _predict(posterior: Any, x: Any) -> Any:
    """With all draws, or their moments where they do not fit the memory budget."""
    try:
        return posterior.predict(x)
    except MemoryBudgetError:
        return posterior.predict(x, keep="moments")


def _joined(label: str, blocks: Sequence[Block], index: Array, of: int) -> Answer:
    """Blocks put together; a quantity that one of them lacks is missing."""
    first = blocks[0]
    truth = np.concatenate([block.truth for block in blocks])
    rows = len(truth)
    answer = Answer(
        label, first.kind, rows, of, first.site, index,
        np.repeat(np.arange(rows), truth.shape[1]), np.tile(np.arange(truth.shape[1]), rows),
        truth.reshape(-1), draws=first.draws,
        missing={name: why for block in blocks for name, why in block.missing.items()},
    )  # fmt: skip
    for name in first.arrays.keys() - answer.missing.keys():
        if name == "covered":
            weights = [len(block.truth) for block in blocks]
            each = np.concatenate([block.arrays[name] for block in blocks])
            answer.covered = np.average(each, axis=0, weights=weights)
            continue
        whole = np.concatenate([block.arrays[name] for block in blocks])
        setattr(answer, name, whole.reshape(-1, *whole.shape[2:]))
    if answer.probs is not None:
        _drop_ignored(answer)
    return answer


def _drop_ignored(answer: Answer) -> None:
    """Elements whose label is no class (an ignored index) count nowhere."""
    assert answer.probs is not None
    known = (answer.truth >= 0) & (answer.truth < answer.probs.shape[1])
    if known.all():
        return
    for name in ("row", "place", "truth", "probs", "entropy", "information", "sets"):
        values = getattr(answer, name)
        if values is not None:
            setattr(answer, name, values[known])


def _set_scores(answer: Answer) -> dict[str, float]:
    if answer.sets is None or not answer.truth.size:
        return {}
    inside = answer.sets[np.arange(answer.truth.size), answer.truth.astype(int)]
    size = answer.sets.sum(axis=1)
    return {"set_coverage": float(inside.mean()), "set_size": float(size.mean())}
