"""When to stop asking: no budget, good enough, no gain, nothing left."""

from __future__ import annotations

from dataclasses import dataclass

from doxa import checks
from doxa.decide.active.book import Book
from doxa.decide.active.learned import SMALLER_IS_BETTER
from doxa.errors import MethodError


@dataclass(frozen=True)
class Stopping:
    """The rules; the first that holds ends a campaign.

    budget: labels in all. target: a value of `metric` that is good enough. patience: rounds without
    a better value than before. metric: one of `doxa.evaluate.metrics`, on the test rows.
    """

    budget: int | None = None
    target: float | None = None
    patience: int | None = None
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        for name in ("budget", "patience"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name))

    @property
    def needs_scores(self) -> bool:
        return self.target is not None or self.patience is not None

    def reason(self, book: Book) -> str:
        """Why to stop now; "" to go on."""
        sign = -1.0 if self.metric in SMALLER_IS_BETTER else 1.0
        values = [sign * self._value(found) for found in book.rounds] if self.needs_scores else []
        if self.target is not None and values and values[-1] >= sign * self.target:
            return f"{self.metric} reached {self.target:g}"
        if self.patience is not None and len(values) > self.patience:
            before = max(values[: -self.patience])
            if max(values[-self.patience :]) <= before:
                return f"no better {self.metric} for {self.patience} rounds"
        if self.budget is not None and len(book.answers) >= self.budget:
            return f"the budget of {self.budget} labels is spent"
        if len(book.answers) == book.rows:
            return "the pool is empty: every row has a label"
        return ""

    def _value(self, found: dict[str, float]) -> float:
        if self.metric not in found:
            known = ", ".join(name for name in found if name not in ("labels", "seconds"))
            raise MethodError(
                f"no score {self.metric!r} to stop by: pass test=(x, y)"
                + (f", or choose among {known}" if known else "")
            )
        return found[self.metric]
