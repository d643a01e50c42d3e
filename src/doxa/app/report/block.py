"""One block of rows, read off its predictive: arrays, and why what is missing is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.app.report.subject import Array
from doxa.errors import DoxaError, Unavailable
from doxa.likelihoods import Bernoulli

LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))


@dataclass
class Block:
    """Arrays by name: [rows, elements], probabilities and sets [rows, elements, C]."""

    kind: str  # "numbers", "counts" or "classes"
    draws: int
    truth: Array
    site: tuple[int, ...]
    arrays: dict[str, Array] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, value: Callable[[], Array]) -> None:
        """Keep a quantity, or the reason why there is none."""
        try:
            self.arrays[name] = value()
        except DoxaError as error:
            self.missing[name] = str(error)


def read(p: Any, y: Tensor, seed: int, stream: Any, conformal: bool) -> Block:
    """What a report needs of one predictive; its scores go into `stream`."""
    if y.is_floating_point():
        y = y.to(p.mean.dtype)
    truth = p.targets(y)
    n = len(truth)
    block = Block(
        kind_of(p.likelihood), draws_of(p), array(truth).reshape(n, -1), tuple(truth.shape[1:])
    )

    def flat(values: Tensor) -> Array:
        return array(values).reshape(n, -1)

    def rows(values: Tensor) -> Array:  # [n, C, *site] to [n, elements, C]
        return np.moveaxis(array(values), 1, -1).reshape(n, -1, values.shape[1])

    try:
        stream.update(p, y)
    except DoxaError as error:
        block.missing["scores"] = str(error)
    if block.kind == "classes":
        block.get("probs", lambda: rows(_table(p)))
        block.get("entropy", lambda: flat(p.entropy))
        block.get("information", lambda: flat(p.mutual_information))
        if conformal:
            block.get("sets", lambda: rows(p.prediction_set()))
        return block
    block.get("mean", lambda: flat(p.mean))
    block.get("std", lambda: flat(p.std))
    block.get("aleatoric", lambda: flat(p.aleatoric))
    block.get("epistemic", lambda: flat(p.epistemic))
    block.get("low", lambda: _ends(p, stream.level, block, flat))
    block.get("pit", lambda: flat(_pit(p, y, seed)))
    if block.kind == "counts" or "pit" in block.missing:
        block.get("covered", lambda: _covered(p, truth))
    return block


def heads(p: Any) -> Sequence[Any]:
    try:
        return p.heads
    except Unavailable:
        return (p,)


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


def _table(p: Any) -> Tensor:
    """[N, C, *site], two classes for a Bernoulli."""
    probs = p.probs
    if isinstance(p.likelihood, Bernoulli):
        return torch.stack([1.0 - probs, probs], dim=1)
    return probs


def _pit(p: Any, y: Tensor, seed: int) -> Tensor:
    from doxa.evaluate import pit

    return pit(p, y, seed=seed)


def _ends(p: Any, level: float, block: Block, flat: Callable[[Tensor], Array]) -> Array:
    """The lower end; the upper one, which comes with it, is kept too."""
    low, high = p.interval(level)
    block.arrays["high"] = flat(high)
    return flat(low)


def _covered(p: Any, truth: Tensor) -> Array:
    """[1, levels]: the share of elements that each central interval holds, its ends included."""
    inside = []
    for level in LEVELS:
        low, high = p.interval(level)
        inside.append(float(((low <= truth) & (truth <= high)).double().mean()))
    return np.array([inside])
