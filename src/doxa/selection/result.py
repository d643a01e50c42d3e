"""The result of `evidence`: one row for each pair of network and prior, a figure and a table.

    p(M_i | D) = p(D | M_i) / Σ_j p(D | M_j)

Choices are made in each split, so that every criterion is evaluated on rows it has not seen. `draw`
makes the figure: the value of each criterion, and their agreement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa import describe
from doxa.errors import MethodError, MissingExtra, Unavailable
from doxa.exact import model_average
from doxa.posterior import MixturePosterior
from doxa.selection.splits import Array, standard_error

if TYPE_CHECKING:
    import pandas as pd


INK, FAINT = "#22303c", "#5b6b78"
COLOURS = ("#0b4f8a", "#c8553d", "#3a7d44", "#8e5ea2", "#c28f2c", "#5b6b78", "#3d8fd1", "#7f1d1d")
MARKERS = "osD^vPX*"
_LINEAR = 0.03  # nats per row: closer to the best than this, the axis is linear


def draw(found: Evidence, path: str | Path | None = None) -> Any:
    """One panel per criterion: nats per row behind the best candidate, against the priors, one line
    per network, with optimised scales shown apart; in the last panel, evidence against held-out
    rows."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'doxa[plots]'") from error
    titles = {"evidence": "evidence (Laplace)", "elbo": "bound (ELBO)",
              "held_out": "held-out rows"}  # fmt: skip
    shown = [name for name in titles if any(getattr(row, name) for row in found.fitted)]
    both = "held_out" in shown
    count = len(shown) + both
    figure = Figure(figsize=(3.3 * count + 1.2, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    given = [prior for prior in found.priors if prior not in _found(found)]
    priors = [*given, *(prior for prior in found.priors if prior not in given)]
    behind = {name: _behind(found, name) for name in shown}
    for axis, name in zip(axes, shown, strict=False):
        for k, net in enumerate(found.nets):
            value = {
                row.prior: v
                for row, v in zip(found.fitted, behind[name], strict=True) if row.net == net
            }  # fmt: skip
            for part, line in ((given, "-"), (priors[len(given) :], "")):
                here = [p for p in part if p in value]
                axis.plot(
                    [priors.index(p) for p in here], [value[p] for p in here],
                    MARKERS[k % len(MARKERS)] + line, color=_colour(k), ms=6, lw=1.3,
                    label=net if line else None,
                )  # fmt: skip
        axis.set_xticks(range(len(priors)), [_short(p) for p in priors], rotation=35, ha="right")
        axis.set_xlim(-0.4, len(priors) - 0.6)
        axis.set_title(titles[name], color=INK)
        _nats(axis.yaxis, axis.set_yscale, axis.set_ylim, behind[name])
    axes[0].set_ylabel("nats per row behind the best", color=INK)
    if both:
        last = axes[-1]
        for k, net in enumerate(found.nets):
            own = [i for i, row in enumerate(found.fitted) if row.net == net]
            last.plot(behind["evidence"][own], behind["held_out"][own], MARKERS[k % len(MARKERS)],
                      color=_colour(k), ms=6, alpha=0.85)  # fmt: skip
        last.set_title(f"rank correlation {found.agreement():.2f}", color=INK)
        last.set_xlabel("evidence", color=INK)
        last.set_ylabel("held-out rows", color=INK)
        _nats(last.xaxis, last.set_xscale, last.set_xlim, behind["evidence"])
        _nats(last.yaxis, last.set_yscale, last.set_ylim, behind["held_out"])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False,
                  title="network")  # fmt: skip
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _behind(found: Evidence, name: str) -> Array:
    """Nats per row below the best mean over splits, [candidates]."""
    mean = found.values(name).mean(1)
    rows = 1 if name == "held_out" else found.train_rows
    return np.asarray((mean.max() - mean) / rows)


def _found(found: Evidence) -> set[str]:
    """Priors whose scale was optimised: they are drawn apart from those with a given scale."""
    return {row.prior for row in found.fitted if row.scale}


def _short(prior: str) -> str:
    return prior.replace("std=", "").replace("scale=", "")


def _nats(axis: Any, scale: Any, limit: Any, values: Array) -> None:
    """An axis that ends at the best: linear near it, then logarithmic."""
    scale("symlog", linthresh=_LINEAR, linscale=0.5)
    most = 1.6 * max(float(values.max()), _LINEAR)
    limit(most, -0.3 * _LINEAR)
    ticks = [0.0, *(t for t in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0) if t < most)]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)
    axis.set_tick_params(labelcolor=FAINT)


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


Values = tuple[float, ...]  # one per split

# The criteria for a choice, and their names in a table.
CRITERIA = {
    "evidence": "log evidence", "elbo": "ELBO", "validation": "validation",
    "held_out": "held-out log-likelihood",
}  # fmt: skip
_SHOWN = 12  # rows in the printed summary


@dataclass(frozen=True)
class Candidate:
    """One network with one prior; after a failure it has a reason and no values.

    Attributes
    ----------
    net, prior : str
        The labels of the network and the prior.
    weights : int
        The number of weights.
    evidence : tuple of float
        log p(D | M) by Laplace, of all training rows, in units of y; one value per split, as below.
    elbo : tuple of float
        The variational lower bound on it.
    held_out : tuple of float
        Mean log likelihood per held-out row under the predictive of Laplace.
    elbo_held_out : tuple of float
        The same under the variational posterior.
    validation : tuple of float
        The same for validation rows, which a second fit has not seen.
    scale : tuple of float
        The optimised scale of the prior, relative to the given one.
    status, reason : str
        The worst status of the fits, and its reason.
    posteriors : tuple of Posterior
        The Laplace posteriors, one per split.
    """

    net: str
    prior: str
    weights: int = 0
    evidence: Values = ()
    elbo: Values = ()
    held_out: Values = ()
    elbo_held_out: Values = ()
    validation: Values = ()
    scale: Values = ()
    status: str = "ok"
    reason: str = ""
    posteriors: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.net}, {self.prior}"

    @property
    def failed(self) -> bool:
        return not self.evidence

    def mean(self, what: str) -> float:
        values: Values = getattr(self, what)
        return float(np.mean(values)) if values else math.nan


@dataclass(frozen=True, repr=False)
class Evidence(describe.Described):
    """The candidates, the highest evidence first; networks and priors in the given order."""

    rows: tuple[Candidate, ...]
    nets: tuple[str, ...]
    priors: tuple[str, ...]
    splits: int
    train_rows: int
    test_rows: int
    seconds: float

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Candidate:
        return self.rows[k]

    @property
    def fitted(self) -> list[Candidate]:
        """The candidates that did not fail."""
        return [row for row in self.rows if not row.failed]

    def values(self, by: str) -> Array:
        """The value of a criterion for each fitted candidate and split, [candidates, splits]."""
        if by not in CRITERIA:
            raise MethodError(f"choose by one of {list(CRITERIA)}, not {by!r}")
        table = [getattr(row, by) for row in self.fitted]
        if not table or not all(table):
            raise Unavailable(f"no {CRITERIA[by]} was computed: see the arguments of doxa.evidence")
        return np.array(table)

    def best(self, by: str = "evidence") -> Candidate:
        """The candidate with the highest mean over splits."""
        return self.fitted[int(self.values(by).mean(1).argmax())]

    def chosen(self, by: str = "evidence") -> list[Candidate]:
        """The candidate with the highest value in each split."""
        return [self.fitted[k] for k in self.values(by).argmax(0)]

    def held_out_of(self, by: str) -> Values:
        """Held-out log likelihood per row of the choice of a criterion in each split."""
        at = self.values(by).argmax(0)
        return tuple(float(v) for v in self.values("held_out")[at, np.arange(self.splits)])

    def gain(self, by: str = "evidence", over: str = "validation") -> tuple[float, float]:
        """The gain in held-out log likelihood per row of the choices of one criterion over those of
        another: the mean over splits, and its standard error. "held_out" is the best choice in
        hindsight."""
        away = np.subtract(self.held_out_of(by), self.held_out_of(over))
        return float(away.mean()), standard_error(away)

    def agreement(self, by: str = "evidence", with_: str = "held_out") -> float:
        """Spearman's rank correlation of two criteria over candidates, the mean over splits."""
        one, other = _ranks(self.values(by)), _ranks(self.values(with_))
        pairs = zip(one.T, other.T, strict=True)
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs]))

    def probabilities(self, split: int = 0) -> Array:
        """p(M_i | D) of each fitted candidate, under a uniform prior over candidates."""
        logs = self.values("evidence")[:, split]
        weight: Array = np.exp(logs - logs.max())
        weight /= weight.sum()
        return weight

    def average(self, split: int = 0) -> MixturePosterior:
        """The posterior that averages over candidates, each by p(M_i | D)."""
        return model_average([row.posteriors[split] for row in self.fitted])

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary per candidate: means over splits, and their standard errors."""
        names = [name for name in (*CRITERIA, "elbo_held_out", "scale") if self._has(name)]
        return [
            {"net": row.net, "prior": row.prior, "weights": row.weights}
            | {name: row.mean(name) for name in names}
            | {f"{name}_se": standard_error(np.array(getattr(row, name))) for name in names}
            | {"status": row.status, "reason": row.reason}
            for row in self.rows
        ]

    def frame(self) -> pd.DataFrame:
        """The table, by network and prior."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("a frame needs pandas: pip install 'doxa[tables]'") from error
        return pandas.DataFrame(self.records()).set_index(["net", "prior"])

    def figure(self, path: str | Path | None = None) -> Any:
        """A figure of the evidence, ELBO and held-out log likelihood of every candidate; it is
        written to `path`, if given."""
        return draw(self, path)

    def described(self) -> describe.Words:
        shown = [name for name in CRITERIA if self._has(name)]
        facts = [(row.name, _line(row, shown)) for row in self.rows[:_SHOWN]]
        if len(self.rows) > _SHOWN:
            facts.append(("…", f"{len(self.rows) - _SHOWN} more: frame() has them all"))
        for by in shown[:-1] if self._has("held_out") else ():
            gain, error = self.gain(by, "held_out")
            lost = describe.number(abs(gain)) + (f" ± {error:.2g}" if error > 0 else "")
            facts.append((f"chosen by {by}", f"{lost} nats per row behind the best in hindsight"))
        runs = describe.plural(self.splits, "split")
        state = f"{self.train_rows} training and {self.test_rows} held-out rows, {runs}"
        return describe.Words(f"Evidence of {len(self.rows)} candidates", state, facts)

    def _has(self, name: str) -> bool:
        return any(getattr(row, name) for row in self.fitted)


def ranked(rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The highest evidence first; failures come last."""
    return tuple(sorted(rows, key=lambda r: math.inf if r.failed else -r.mean("evidence")))


def _line(row: Candidate, shown: Sequence[str]) -> str:
    if row.failed:
        return f"failed: {row.reason}"
    parts = [f"{CRITERIA[name]} {_decimals(row.mean(name))}" for name in shown]
    return ", ".join(parts) + ("" if row.status == "ok" else f" [{row.status}]")


def _decimals(value: float) -> str:
    """Nats: absolute differences matter, not leading digits."""
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _ranks(values: Array) -> Array:
    """The rank of each entry in its column; ties share the mean rank."""
    below: Array = (values[None] < values[:, None]).sum(1)
    alike: Array = (values[None] == values[:, None]).sum(1)
    return np.asarray(below + 0.5 * (alike - 1))
