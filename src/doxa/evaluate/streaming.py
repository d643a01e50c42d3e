"""The usual numbers of a predictive in one call, or batch by batch.

    stream = Streaming()
    for x, y in batches:
        stream.update(posterior.predict(x), y)
    stream.result()                                # equal to metrics() of all rows at once

Everything in `metrics` is a mean, a count or a sum over fixed bins: only those sums are kept, in
float64, and the result is that of the whole to 1e-12 (in float32 the quantiles of a mixture, and
with them coverage, width and pinball, are themselves only known to 1e-6). Two things differ: a
CRPS from draws (Student-t, counts) is drawn anew for each batch. And what depends on the ranks of
all rows, the adaptive ECE and the area under the risk-coverage curve, needs a number or two of
every label: `ranks=True` keeps them and adds "adaptive_ece" and "aurc" to the result. AUROC and
average precision depend on ranks, too: for one label per row, up to 2²³ probabilities are kept; of
more, the two scores are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, Unavailable
from doxa.evaluate import table
from doxa.evaluate.imbalance import ranking_scores
from doxa.evaluate.paired import (
    Labelled,
    bin_of,
    bin_sums,
    check_count,
    check_predictive,
    labelled,
    mass_bin_of,
    predicted_mean,
)
from doxa.evaluate.scores import (
    brier_each,
    crps_each,
    interval_and_target,
    log_likelihood_each,
    risk_coverage_of,
)
from doxa.likelihoods import Heads
from doxa.predictive import Predictive


def metrics(p: Predictive, y: Any, *, level: float = 0.95, bins: int = 15) -> dict[str, float]:
    """The metrics that fit the kind of target, in this order.

    Numbers: log_likelihood, rmse, mae, crps, coverage and width of the central interval at
    `level`, pinball. Classes: log_likelihood, accuracy, brier, ece (top-label, `bins` bins), and
    for one label per row roc_auc and average_precision, if two classes occur; of a conformal
    posterior set_coverage and set_size. Then any further score of `evaluate/table.py`.
    Several heads: y is a tuple, and the names carry the head's number, "0.rmse". The functions
    of the same names document each. Scores that a predictive does not have are omitted: if only
    moments were kept, all but rmse and mae (`p.moment_matched()` has the rest).

    Raises `DataError` for predictions that are not defined, for no rows, and when every label
    is ignored.

    Examples
    --------
    >>> import torch, doxa
    >>> p = doxa.Predictive.from_probs(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    >>> round(metrics(p, [0, 1])["brier"], 6)
    0.05
    """
    return Streaming(level=level, bins=bins).update(p, y).result()


class Streaming:
    """Collects batches; see `metrics` for what, and the module for how."""

    def __init__(self, *, level: float = 0.95, bins: int = 15, ranks: bool = False) -> None:
        if not 0.0 < level < 1.0:
            raise DataError(f"level must lie between 0 and 1, got {level}")
        self.level, self.bins, self.ranks = level, check_count("bins", bins), ranks
        self._parts: dict[str, _Numbers | _Classes] = {}

    def update(self, p: Predictive, y: Any) -> Streaming:
        """Add a batch. y is a tuple, one entry a head, where the model has several heads."""
        check_predictive(p)
        if not isinstance(p.likelihood, Heads):
            self._update("", p, y)
            return self
        heads = p.heads
        if not isinstance(y, tuple | list) or len(y) != len(heads):
            raise DataError(f"targets must be a tuple of {len(heads)}, one for each head")
        for i, (head, target) in enumerate(zip(heads, y, strict=True)):
            self._update(f"{i}.", head, target)
        return self

    def result(self) -> dict[str, float]:
        """The metrics of all batches so far, as `metrics` names them."""
        if not self._parts:
            raise DataError("no batch was added: call update first")
        return {
            prefix + name: value
            for prefix, part in self._parts.items()
            for name, value in part.result().items()
        }

    def _update(self, prefix: str, p: Predictive, y: Any) -> None:
        kind = _Classes if p.likelihood.classifies else _Numbers
        part = self._parts.get(prefix)
        if part is None:
            part = kind(self)
        elif not isinstance(part, kind):
            raise DataError("batches of numbers and of classes cannot be scored together")
        part.update(p, y)
        self._parts[prefix] = part


class _Sums:
    """Totals and kept values by name. A batch that raises leaves them as they were."""

    def __init__(self, settings: Streaming) -> None:
        self.settings, self.batches = settings, 0
        self.totals: dict[str, Tensor] = {}
        self.kept: dict[str, list[Tensor]] = {}

    def add(self, totals: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
        if self.batches and totals.keys() != self.totals.keys():
            differ = ", ".join(sorted(totals.keys() ^ self.totals.keys()))
            raise DataError(f"some batches have and some lack {differ}: predict all alike")
        for name, value in totals.items():
            self.totals[name] = value.double().cpu() + self.totals.get(name, 0.0)
        for name, values in kept.items():
            self.kept.setdefault(name, []).append(values.flatten().cpu())
        self.batches += 1

    def all(self, name: str) -> Tensor:
        return torch.cat(self.kept[name])

    def means(self, names: Sequence[str], count: str) -> dict[str, float]:
        """Those of the names that were there."""
        return {n: float(self.totals[n] / self.totals[count]) for n in names if n in self.totals}

    def declared(self) -> dict[str, float]:
        """The scores of the table that are means of `each`."""
        found: dict[str, float] = {}
        for row in table.SCORES:
            if row.each is not None and row.name in self.totals:
                found |= self.means([row.name], f"{row.name}.count")
        return found


def means_of(kind: str, p: Predictive, y: Any, level: float) -> dict[str, Tensor]:
    """The sums and counts of the scores that the table declares for a kind of targets."""
    totals = {}
    for row in table.SCORES:
        if row.each is None or row.of != kind:
            continue
        with suppress(Unavailable):
            values = row.values(p, y, level)
            totals[row.name] = values.double().sum()
            totals[f"{row.name}.count"] = torch.tensor(values.numel())
    return totals


class _Numbers(_Sums):
    def update(self, p: Predictive, y: Any) -> None:
        mean, target = predicted_mean(p, y)
        error = target - mean

        def interval() -> dict[str, Tensor]:
            low, high, _ = interval_and_target(p, y, self.settings.level)
            inside = (low <= target) & (target <= high)
            return {"coverage": inside.sum(), "width": (high - low).sum()}

        totals = {
            "rows": torch.tensor(len(target)),
            "elements": torch.tensor(target.numel()),
            "squared": error.square().sum(),
            "mae": error.abs().sum(),
        }
        for part in (
            lambda: {"log_likelihood": log_likelihood_each(p, y).sum()},
            lambda: {"crps": crps_each(p, y, seed=self.batches).sum()},
            interval,
        ):
            with suppress(Unavailable):
                totals |= part()
        totals |= means_of("numbers", p, y, self.settings.level)
        kept = {}
        if self.settings.ranks:
            kept = {"loss": error.square(), "uncertainty": p.variance.double()}
        self.add(totals, kept)

    def result(self) -> dict[str, float]:
        squared = float(self.totals["squared"] / self.totals["elements"])
        found = self.means(["log_likelihood"], "rows")
        found["rmse"] = squared**0.5
        found |= self.means(["mae", "crps", "coverage", "width"], "elements") | self.declared()
        if self.settings.ranks:
            found["aurc"] = risk_coverage_of(self.all("uncertainty"), self.all("loss")).area
        return found


_MOST_RANKED = 2**23  # probabilities that are kept


class _Classes(_Sums):
    ranked: list[tuple[Tensor, Tensor]] | None = None  # probabilities and labels; None: too many
    decimals = 12

    def update(self, p: Predictive, y: Any) -> None:
        labels, bins = labelled(p, y), self.settings.bins
        confidence, hit = labels.confidence, labels.hit
        # Hits minus confidences in each bin: all the ECE needs.
        ranked = labels.comparable(confidence)
        _, gaps = bin_sums(bin_of(ranked, bins), bins, hit - confidence)
        totals = {
            "labels": torch.tensor(len(hit)),
            "accuracy": hit.sum(),
            "brier": brier_each(labels).sum(),
            "gaps": gaps,
        }
        with suppress(Unavailable):
            totals["log_likelihood"] = log_likelihood_each(p, y).sum()
        totals |= means_of("classes", p, y, self.settings.level)
        kept = {"ranked": ranked, "gap": hit - confidence, "loss": 1.0 - hit}
        first = self.batches == 0
        self.add(totals, kept if self.settings.ranks else {})
        target = p.targets(y)
        if first and target.numel() == len(target):  # one label per row
            self.ranked = []
        self._keep_ranks(labels)

    def _keep_ranks(self, labels: Labelled) -> None:
        """Keep the probabilities for AUROC and average precision."""
        if self.ranked is None:
            return
        self.ranked.append((labels.probs.cpu(), labels.label.cpu()))
        self.decimals = min(self.decimals, labels.decimals)
        if sum(table.numel() for table, _ in self.ranked) > _MOST_RANKED:
            self.ranked = None

    def result(self) -> dict[str, float]:
        labels, bins = float(self.totals["labels"]), self.settings.bins
        found = self.means(["log_likelihood", "accuracy", "brier"], "labels")
        found["ece"] = float(self.totals["gaps"].abs().sum()) / labels
        if self.ranked:
            tables, truth = zip(*self.ranked, strict=True)
            found |= ranking_scores(torch.cat(tables), torch.cat(truth), self.decimals)
        found |= self.declared()
        if self.settings.ranks:
            ranked = self.all("ranked")
            _, gaps = bin_sums(mass_bin_of(ranked, bins), bins, self.all("gap"))
            found["adaptive_ece"] = float(gaps.abs().sum()) / labels
            found["aurc"] = risk_coverage_of(1.0 - ranked, self.all("loss")).area
        return found
