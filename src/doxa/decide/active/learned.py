"""What an active learner leaves: learning curves, labels, and the last posterior of each run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from doxa.decide.active.book import Book
from doxa.errors import MethodError


@dataclass
class Learner:
    """One run: how it chooses, its seed, its book, and the posterior of its last round; None while
    all of its labels are of one class."""

    by: str
    seed: int
    book: Book
    posterior: Any = None

    @property
    def curve(self) -> list[dict[str, Any]]:
        """{"labels": 20, "accuracy": 0.7, …} after each fit."""
        return self.book.rounds


@dataclass
class Learned:
    """The runs of `learn`, acquisitions × seeds.

    `waiting` is true where a person has been asked: rows are in `learners[i].book.asked`.
    """

    learners: list[Learner]
    waiting: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.learners)

    def __getitem__(self, i: int) -> Learner:
        return self.learners[i]

    def labels_to(self, metric: str, value: float) -> dict[str, list[int | None]]:
        """How many labels each run of each acquisition needed until `metric` first reached a value
        (fell to it, for errors such as rmse): None where it has not."""
        enough = reaches(metric, value)
        found: dict[str, list[int | None]] = {}
        for one in self.learners:
            first = next((r["labels"] for r in one.curve if enough(_get(r, metric))), None)
            found.setdefault(one.by, []).append(first)
        return found

    def mean_curve(self, by: str, metric: str) -> list[tuple[int, float, float]]:
        """(labels, mean, standard deviation) over the seeds of an acquisition, at the numbers of
        labels that all of them were fitted to."""
        curves = [one.curve for one in self.learners if one.by == by]
        if not curves:
            known = ", ".join(dict.fromkeys(one.by for one in self.learners))
            raise MethodError(f"no learner chose by {by!r}: there are {known}")
        found = [{r["labels"]: _get(r, metric) for r in curve} for curve in curves]
        shared = [k for k in found[0] if all(k in other for other in found)]
        each = [(k, torch.tensor([values[k] for values in found])) for k in shared]
        return [(k, float(v.mean()), float(v.std(correction=0))) for k, v in each]

    def table(self, metric: str, *values: float) -> str:
        """Markdown: the median labels to reach each value, over seeds."""
        heads = "".join(f" {metric} {value:g} |" for value in values)
        lines = [f"| chosen by |{heads}", "|---|" + "---|" * len(values)]
        columns = [self.labels_to(metric, value) for value in values]
        for by in dict.fromkeys(one.by for one in self.learners):
            cells = "".join(f" {_median(column[by])} |" for column in columns)
            lines.append(f"| {by} |{cells}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Curves and chosen rows, as numbers and text."""
        return {
            "facts": self.facts,
            "runs": [
                {"by": one.by, "seed": one.seed, "curve": one.curve, "stopped": one.book.stopped,
                 "rows": list(one.book.answers)}
                for one in self.learners
            ],
        }  # fmt: skip


SMALLER_IS_BETTER = ("rmse", "mae", "crps", "brier", "ece", "pinball", "width")


def reaches(metric: str, value: float) -> Callable[[float], bool]:
    """Whether a number is as good as a value of the metric."""
    if metric in SMALLER_IS_BETTER:
        return lambda found: found <= value
    return lambda found: found >= value


def _get(found: dict[str, Any], metric: str) -> float:
    if metric not in found:
        raise MethodError(f"no score {metric!r} was kept: pass test=(x, y) to learn")
    return float(found[metric])


def _median(found: list[int | None]) -> str:
    """Of runs that got there; the number of those is said where some did not."""
    there = [n for n in found if n is not None]
    if not there:
        return "–"
    words = f"{statistics.median(there):g}"
    return words if len(there) == len(found) else f"{words} ({len(there)} of {len(found)} runs)"
