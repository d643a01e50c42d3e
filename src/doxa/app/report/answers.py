"""The posterior's answers at the scored rows, as plain arrays: what every chart is made from.

Rows are predicted in blocks, so that memory stays bounded; a block's predictive is read and let go.
A target may have several elements (outputs, pixels): arrays are flat over rows × elements, and
`row` says whose each is. What a predictive does not have is noted with its reason, not raised.
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
from doxa.likelihoods import Bernoulli

LEVEL = 0.95
LEVELS = tuple(round(0.05 * k, 2) for k in range(1, 20))
MOST_NUMBERS = 4_000_000  # of one quantity, over all rows
BLOCK_NUMBERS = 4_000_000  # of one block's draws
MOST_ROWS = 100_000


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
    truth: Array
    scores: dict[str, float]
    log_prob: Array | None = None  # [rows]
    mean: Array | None = None
    std: Array | None = None
    aleatoric: Array | None = None
    epistemic: Array | None = None
    low: Array | None = None
    high: Array | None = None
    pit: Array | None = None
    covered: Array | None = None  # [len(LEVELS)], shares
    probs: Array | None = None  # [elements, C]
    entropy: Array | None = None
    information: Array | None = None
    level: float = LEVEL
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
    first = posterior.predict(rows.take(slice(0, 1)))
    parts = heads(first)
    numbers = max(math.prod(p.mean.shape[1:]) for p in parts)
    draws = max(_draws(p) for p in parts)
    most = max(1, min(rows.count, MOST_ROWS, MOST_NUMBERS // max(numbers, 1)))
    index = np.arange(rows.count)
    if most < rows.count:
        chosen = np.random.default_rng(seed).choice(rows.count, most, replace=False)
        index = np.sort(chosen)
    block = int(np.clip(BLOCK_NUMBERS // (draws * numbers), 1, 8192))
    collected: list[list[dict[str, Any]]] = [[] for _ in parts]
    for start in range(0, len(index), block):
        at = torch.as_tensor(index[start : start + block])
        for k, p in enumerate(heads(predict(posterior, rows.take(at)))):
            y = rows.y[k] if isinstance(rows.y, tuple) else rows.y
            collected[k].append(_read(p, y[at], start))
    several = len(parts) > 1
    return [
        _answer(f"head {k + 1}" if several else "", blocks, index, rows.count)
        for k, blocks in enumerate(collected)
    ]


def predict(posterior: Any, x: Any) -> Any:
    """All draws, or fewer where they do not fit the memory budget."""
    try:
        return posterior.predict(x)
    except MemoryBudgetError:
        return posterior.predict(x, keep="moments")


def heads(p: Any) -> Sequence[Any]:
    try:
        return p.heads
    except Unavailable:
        return (p,)


def kind_of(likelihood: Any) -> str:
    if likelihood.classifies:
        return "classes"
    return "counts" if likelihood.discrete else "numbers"


def array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()


def _draws(p: Any) -> int:
    try:
        return max(1, len(p.weights))
    except Unavailable:
        return 1


def _read(p: Any, y: Tensor, seed: int) -> dict[str, Any]:
    """One block: arrays [rows, elements], scores weighted later, reasons of what is missing."""
    kind = kind_of(p.likelihood)
    if y.is_floating_point():
        y = y.to(p.mean.dtype)
    truth = p.targets(y)
    n = len(truth)
    read: dict[str, Any] = {
        "kind": kind, "rows": n, "draws": _draws(p), "missing": {}, "level": LEVEL,
        "site": tuple(truth.shape[1:]), "truth": array(truth).reshape(n, -1),
    }  # fmt: skip
    missing = read["missing"]

    def get(name: str, value: Callable[[], Any]) -> None:
        try:
            found = value()
        except DoxaError as error:
            missing[name] = str(error)
            return
        read[name] = found

    flat = lambda t: array(t).reshape(n, -1)  # noqa: E731
    get("log_prob", lambda: array(p.log_prob(y)))
    if kind == "classes":
        probs = array(p.probs)
        if isinstance(p.likelihood, Bernoulli):
            probs = np.stack([1.0 - probs, probs], axis=1)
        read["probs"] = np.moveaxis(probs, 1, -1).reshape(n, -1, probs.shape[1])
        get("entropy", lambda: flat(p.entropy))
        get("information", lambda: flat(p.mutual_information))
        return read
    for name in ("mean", "std", "aleatoric", "epistemic"):
        get(name, lambda name=name: flat(getattr(p, name)))  # type: ignore[misc]
    get("interval", lambda: _interval(p, read))
    if "interval" in read:
        read["low"], read["high"] = map(flat, read.pop("interval"))
    get("pit", lambda: _pit(p, y, seed))
    if "pit" not in read or kind == "counts":
        get("covered", lambda: _covered(p, truth))
    get("scores", lambda: _scores(p, y))
    return read


def _interval(p: Any, read: dict[str, Any]) -> Any:
    """At our level; a conformal predictive knows its own only."""
    try:
        return p.interval(LEVEL)
    except DoxaError:
        own = getattr(p._form, "level", None)
        if own is None:
            raise
        read["level"] = float(own)
        return p.interval(float(own))


def _pit(p: Any, y: Tensor, seed: int) -> Array:
    from doxa.evaluate.uniformity import pit

    return array(pit(p, y, seed=seed)).reshape(len(y), -1)


def _covered(p: Any, truth: Tensor) -> Array:
    """[levels]: how many elements each central interval holds. Closed at both ends."""
    inside = []
    for level in LEVELS:
        low, high = p.interval(level)
        inside.append(float(((low <= truth) & (truth <= high)).double().mean()))
    return np.array(inside)


def _scores(p: Any, y: Tensor) -> dict[str, float]:
    from doxa.evaluate import metrics

    return dict(metrics(p, y, level=LEVEL))


def _answer(label: str, blocks: Sequence[dict[str, Any]], index: Array, of: int) -> Answer:
    """Blocks put together."""
    first = blocks[0]
    missing = {name: why for block in blocks for name, why in block["missing"].items()}

    def whole(name: str) -> Array | None:
        if name in missing or name not in first:
            return None
        joined = np.concatenate([block[name] for block in blocks])
        return joined.reshape(-1, joined.shape[2]) if name == "probs" else joined.reshape(-1)

    rows = sum(block["rows"] for block in blocks)
    truth = np.concatenate([block["truth"] for block in blocks])
    weight = np.array([block["rows"] for block in blocks]) / rows
    answer = Answer(
        label, first["kind"], rows, of, first["site"], index,
        np.repeat(np.arange(rows), truth.shape[1]), truth.reshape(-1), {},
        level=first["level"], draws=first["draws"], missing=missing,
        **{
            name: whole(name)
            for name in ("log_prob", "mean", "std", "aleatoric", "epistemic", "low", "high",
                         "pit", "probs", "entropy", "information")
        },
    )  # fmt: skip
    if "covered" in first and "covered" not in missing:
        answer.covered = np.einsum("b,bl->l", weight, np.array([b["covered"] for b in blocks]))
    if answer.kind == "classes":
        _without_ignored(answer)
        answer.scores = _class_scores(answer)
    elif "scores" not in missing:
        answer.scores = _averaged([block["scores"] for block in blocks], weight)
    return answer


def _averaged(blocks: Sequence[dict[str, float]], weight: Array) -> dict[str, float]:
    """Means over rows add up; a root mean square is squared before."""
    result = {}
    for name in blocks[0]:
        power = 2.0 if name == "rmse" else 1.0
        values = np.array([block[name] for block in blocks]) ** power
        result[name] = float(np.sum(weight * values) ** (1.0 / power))
    return result


def _without_ignored(answer: Answer) -> None:
    """Elements whose label is no class (an ignored index) count nowhere."""
    assert answer.probs is not None
    known = (answer.truth >= 0) & (answer.truth < answer.probs.shape[1])
    if known.all():
        return
    for name in ("row", "truth", "probs", "entropy", "information"):
        values = getattr(answer, name)
        if values is not None:
            setattr(answer, name, values[known])


def _class_scores(answer: Answer) -> dict[str, float]:
    from doxa import Predictive
    from doxa.evaluate import metrics

    if answer.probs is None or not answer.truth.size:
        return {}
    p = Predictive.from_probs(torch.as_tensor(answer.probs))
    try:
        return dict(metrics(p, torch.as_tensor(answer.truth).long()))
    except DoxaError as error:
        answer.missing["scores"] = str(error)
        return {}
