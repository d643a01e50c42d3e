"""The UCI tables: their cells, and how people read them, with published figures below.

A cell is one method on one set: all splits in one stacked fit, and scores of each split.

PBP: Hernández-Lobato & Adams (2015). MC dropout: Gal & Ghahramani (2016), and the grid-searched
figures of their code's readme. Deep ensembles: Lakshminarayanan et al. (2017). SWAG: Maddox et al.
(2019). Deep GP: Salimbeni & Deisenroth (2017), two layers, own splits. DVI: deterministic
variational inference, heteroscedastic, Wu et al. (2019). Concrete dropout: Gal et al. (2017), whose
log-likelihoods do not go with its errors. VIP: Ma et al. (2019), a BNN prior; fBNN: Sun et al.
(2019); both second-hand, on other splits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.app.bench import uci
from doxa.app.bench.cells import Result, Store, Table, Task, plus_minus
from doxa.app.bench.protocols import PROTOCOLS
from doxa.app.bench.uci import Answer, Problem
from doxa.errors import DataError, did_you_mean
from doxa.evaluate import log_likelihood, mae, metrics, rmse

FEW = 500  # samples that are enough for everything but a log-likelihood
SHORT = {"boston_housing": "boston", "naval_propulsion": "naval", "power_plant": "power",
         "wine_quality_red": "wine"}  # fmt: skip
DIGITS = {"naval_propulsion": 4, "kin8nm": 3}  # of an RMSE; two elsewhere

Cells = dict[tuple[str, str], dict[str, Any]]
Scores = tuple[float | None, float | None]

# (RMSE, mean test log-likelihood) that others report, standard splits.
COLUMNS: dict[str, dict[str, Scores]] = {
    "boston_housing": {
        "PBP": (3.01, -2.57), "MC dropout": (2.97, -2.46), "MC dropout tuned": (2.90, -2.40),
        "deep ensemble": (3.28, -2.41), "SWAG": (3.52, -2.76), "deep GP": (2.63, -2.41),
        "mean-field": (None, -3.12), "DVI": (None, -2.41),
        "VIP": (2.88, -2.45), "fBNN": (2.38, -2.30),
    },
    "concrete": {
        "PBP": (5.67, -3.16), "MC dropout": (5.23, -3.04), "MC dropout tuned": (4.82, -2.93),
        "deep ensemble": (6.03, -3.06), "SWAG": (5.23, -3.01), "deep GP": (5.96, -3.18),
        "mean-field": (None, -3.22), "DVI": (None, -3.06), "concrete dropout": (4.46, None),
        "VIP": (4.81, -3.02), "fBNN": (4.94, -3.10),
    },
    "energy": {
        "PBP": (1.80, -2.04), "MC dropout": (1.66, -1.99), "MC dropout tuned": (0.54, -1.21),
        "deep ensemble": (2.09, -1.38), "SWAG": (1.59, -1.68), "deep GP": (0.49, -0.72),
        "mean-field": (None, -0.93), "DVI": (None, -1.01),
        "VIP": (0.45, -0.60), "fBNN": (0.41, -0.68),
    },
    "kin8nm": {
        "PBP": (0.10, 0.90), "MC dropout": (0.10, 0.95), "MC dropout tuned": (0.079, 1.14),
        "deep ensemble": (0.09, 1.20), "mean-field": (None, 1.03),
        "VIP": (0.07, 1.12),
    },
    "naval_propulsion": {
        "PBP": (0.01, 3.73), "MC dropout": (0.01, 3.80), "MC dropout tuned": (0.0007, 4.45),
        "deep ensemble": (0.00, 5.63), "SWAG": (0.001, 6.71), "deep GP": (0.000, 6.75),
        "mean-field": (None, 6.12), "DVI": (None, 6.29),
        "VIP": (None, 5.62),
    },
    "power_plant": {
        "PBP": (4.12, -2.84), "MC dropout": (4.02, -2.80), "MC dropout tuned": (4.01, -2.80),
        "deep ensemble": (4.11, -2.79), "deep GP": (3.93, -2.79), "mean-field": (None, -2.85),
        "VIP": (4.11, -2.92),
    },
    "protein": {
        "PBP": (4.73, -2.97), "MC dropout": (4.36, -2.89), "MC dropout tuned": (4.27, -2.87),
        "deep ensemble": (4.71, -2.83), "deep GP": (4.17, -2.85), "mean-field": (None, -2.93),
        "VIP": (4.25, -2.87),
    },
    "wine_quality_red": {
        "PBP": (0.64, -0.97), "MC dropout": (0.62, -0.93), "MC dropout tuned": (0.62, -0.93),
        "deep ensemble": (0.64, -0.94), "deep GP": (0.63, -0.95), "mean-field": (None, -1.00),
        "VIP": (0.64, -0.97), "fBNN": (0.67, -1.04),
    },
    "yacht": {
        "PBP": (1.02, -1.63), "MC dropout": (1.11, -1.55), "MC dropout tuned": (0.67, -1.25),
        "deep ensemble": (1.58, -1.18), "SWAG": (0.97, -0.40), "deep GP": (0.48, -0.46),
        "mean-field": (None, -2.01), "DVI": (None, -0.47),
        "VIP": (0.32, 0.02), "fBNN": (0.61, -1.03),
    },
}  # fmt: skip

# The best log-likelihood seen anywhere.
BEST_LL = {
    "boston_housing": -2.33, "concrete": -2.93, "energy": -0.72, "kin8nm": 1.28,
    "naval_propulsion": 6.75, "power_plant": -2.75, "protein": -2.77, "wine_quality_red": -0.93,
    "yacht": -0.40,
}  # fmt: skip

# Which published column is the same method as one of ours.
SAME_METHOD = {
    "deep-ensemble": "deep ensemble", "swag": "SWAG", "mc-dropout": "MC dropout tuned",
    "mean-field": "mean-field", "vip": "VIP", "vip-deep": "VIP", "fbnn": "fBNN",
    "deep-gp": "deep GP",
}  # fmt: skip


def tasks(
    folder: Path,
    splits: str,
    sets: Sequence[str],
    methods: Sequence[str],
    seed: int = 0,
    device: str = "cpu",
) -> list[Task]:
    """The cells of a table, the quick ones first."""
    for name in sets:
        if name not in uci.SETS:
            raise DataError(f"no UCI set {name!r}{did_you_mean(name, uci.SETS)}")
    for method in methods:
        if method not in PROTOCOLS:
            hint = did_you_mean(method, list(PROTOCOLS))
            raise DataError(f"no UCI protocol for {method!r}{hint}")
    table = "uci" if splits == "standard" else "gap"
    where = {"folder": folder, "splits": splits, "seed": seed, "device": device}
    return [
        Task(
            {"table": table, "set": name, "method": method, "seed": seed},
            cell,
            where | {"name": name, "method": method},
        )
        for method in methods
        for name in sets
    ]


def cell(
    folder: Path, splits: str, name: str, method: str, seed: int, device: str = "cpu"
) -> Result:
    """Fit a method to all splits of a set and score it on the held-out rows of each."""
    data = uci.load(folder, name, splits)
    data = replace(data, x=data.x.to(device), y=data.y.to(device))
    problem = Problem(
        data.x, data.y, data.train, hidden=100 if name == "protein" else 50, seed=seed
    )
    protocol = PROTOCOLS[method]
    start = time.perf_counter()
    answer = protocol.fit(problem, name)
    fitted = time.perf_counter() - start
    scores = [score(answer, r, data.x[rows], data.y[rows]) for r, rows in enumerate(data.test)]
    each = {key: [row[key] for row in scores] for key in scores[0]}
    return {
        "protocol": protocol.description,
        "device": torch.device(device).type,
        "splits": len(scores),
        "rows": [len(data.train[0]), len(data.test[0])],
        "scores": {key: summary(values) | {"each": values} for key, values in each.items()},
        "fit_seconds": fitted,
        "last_fit_seconds": problem.seconds[-1],  # with the settings that were chosen
        "predict_seconds": time.perf_counter() - start - fitted,
        "status": answer.statuses(),
        **answer.facts,
    }


def score(answer: Answer, split: int, x: Tensor, y: Tensor) -> dict[str, float]:
    """The scores of one split, in units of y; the log-likelihood of the mixture itself and of
    the Gaussian with its moments, which some papers report."""
    p = answer.predict(split, x)
    matched = p.moment_matched().log_prob(y)
    if len(p.weights) > FEW:
        # The rest (CRPS, intervals) is as good from fewer samples, and takes their number squared.
        values = metrics(answer.predict(split, x, FEW), y)
        values |= {"log_likelihood": log_likelihood(p, y), "rmse": rmse(p, y), "mae": mae(p, y)}
    else:
        values = metrics(p, y)
    return values | {"log_likelihood_matched": float(matched.mean())}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean over splits and its standard error."""
    array = np.asarray(values, dtype=float)
    error = array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else None
    return {"mean": float(array.mean()), "error": None if error is None else float(error)}


@dataclass(frozen=True)
class UCITable:
    """`standard` or `gap` splits of every set."""

    name: str
    splits: str
    title: str

    def tasks(
        self,
        data: str | Path | None,
        sets: Sequence[str] | None = None,
        methods: Sequence[str] | None = None,
        device: str | None = None,
        seed: int = 0,
    ) -> list[Task]:
        folder = uci.data_folder(data)
        full = {short: name for name, short in SHORT.items()}
        chosen = [full.get(name, name) for name in sets or uci.SETS]
        return tasks(folder, self.splits, chosen, methods or list(PROTOCOLS), seed, device or "cpu")

    def tables(self, store: Store) -> list[Table]:
        cells = {(c["key"]["set"], c["key"]["method"]): c for c in store.cells(table=self.name)}
        sets = [name for name in uci.SETS if any(key[0] == name for key in cells)]
        methods = [name for name in PROTOCOLS if any(key[1] == name for key in cells)]
        scores = {
            "log_likelihood": "test log-likelihood, the mixture's own; higher is better",
            "log_likelihood_matched": "test log-likelihood of the moment-matched Gaussian",
            "rmse": "test RMSE",
            "crps": "CRPS; lower is better",
            "coverage": "share of test rows inside the 95 % interval",
        }
        made = [self._scores(cells, sets, methods, *score) for score in scores.items()]
        made[0].notes += self._notes(cells, methods)
        made.append(self._times(cells, sets, methods))
        more = _costs(self.title, cells, sets, methods), _dropped(self.title, cells, sets)
        return [*made, *(table for table in more if table.rows)]

    def figures(self, store: Store, folder: Path) -> list[Path]:
        return []

    def _scores(
        self, cells: Cells, sets: Sequence[str], methods: Sequence[str], score: str, title: str
    ) -> Table:
        table = Table(
            f"{self.title}: {title}", ["method", *(SHORT.get(name, name) for name in sets)]
        )
        for method in methods:
            table.rows.append([method, *(_score(cells, name, method, score) for name in sets)])
        if self.splits == "standard" and score in ("log_likelihood", "rmse"):
            table.rows += _published(sets, score)
        return table

    def _times(self, cells: Cells, sets: Sequence[str], methods: Sequence[str]) -> Table:
        title = f"{self.title}: seconds for all splits, prediction included"
        table = Table(title, ["method", *(SHORT.get(name, name) for name in sets), "together"])
        everything = 0.0
        for method in methods:
            each = [cells.get((name, method), {}).get("seconds") for name in sets]
            known = [seconds for seconds in each if seconds]
            everything += sum(known)
            shown = [plus_minus(seconds or None, digits=1) for seconds in each]
            table.rows.append([method, *shown, f"{sum(known):.0f}"])
        table.notes.append(f"all cells together: {everything / 60:.0f} minutes of one thread")
        return table

    def _notes(self, cells: Cells, methods: Sequence[str]) -> list[str]:
        notes = ["mean ± standard error over splits (20; protein 5), in units of y"]
        if self.splits == "gap":
            notes = ["mean ± standard error over splits, one a feature, in units of y"]
        else:
            notes += [note for method in methods if (note := _against(cells, method))]
        for method in methods:
            notes += _protocols(cells, method)
        for (name, method), cell in cells.items():
            status = cell["result"].get("status", {})
            bad = {k: v for k, v in status.items() if k != "ok"}
            if bad:
                counts = ", ".join(f"{count} splits {word}" for word, count in bad.items())
                notes.append(f"{method} on {SHORT.get(name, name)}: {counts}")
        return notes


def _costs(title: str, cells: Cells, sets: Sequence[str], methods: Sequence[str]) -> Table:
    """In MAP fits: seconds of different machines do not compare."""
    title = f"{title}: time of the last fit, one MAP fit = 1"
    table = Table(title, ["method", *(SHORT.get(name, name) for name in sets)])
    for method in methods:
        row = []
        for name in sets:
            own, reference = cells.get((name, method)), cells.get((name, "map"))
            spent, one = _last_fit(own), _last_fit(reference)
            alike = own and reference and _place(own) == _place(reference)
            row.append(plus_minus(spent / one, digits=1) if spent and one and alike else "–")
        if any(text != "–" for text in row):
            table.rows.append([method, *row])
    table.notes.append(
        "all splits and members in one stacked fit, without the search for settings (Laplace: with "
        "its four priors); – where the cell is of another machine than MAP's, or older than this"
    )
    return table


def _place(cell: dict[str, Any]) -> tuple[Any, str]:
    return cell["machine"], cell["result"].get("device", "cpu")


def _last_fit(cell: dict[str, Any] | None) -> float | None:
    return None if cell is None else cell["result"].get("last_fit_seconds")


def _dropped(title: str, cells: Cells, sets: Sequence[str]) -> Table:
    """The probability to drop that validation chose from a grid, beside the learned ones."""
    title = f"{title}: probability to drop, mean over splits"
    table = Table(title, ["", *(SHORT.get(name, name) for name in sets)])
    grid = [cells.get((name, "mc-dropout"), {}).get("result", {}) for name in sets]
    rows = {"mc-dropout, of a grid": [r.get("chosen", {}).get("p") for r in grid]}
    learned = [
        cells.get((name, "concrete-dropout"), {}).get("result", {}).get("p", {}) for name in sets
    ]
    sites = next((list(own) for own in learned if own), [])
    for site, what in zip(sites, ("inputs", "hidden units"), strict=False):
        rows[f"concrete-dropout, {what}"] = [own.get(site) for own in learned]
    for row, each in rows.items():
        shown = [plus_minus(sum(p) / len(p) if p else None, digits=4) for p in each]
        if any(text != "–" for text in shown):
            table.rows.append([row, *shown])
    return table


def _score(cells: Cells, name: str, method: str, score: str) -> str:
    result = cells.get((name, method), {}).get("result", {})
    if "scores" not in result:
        return "–" if result else ""
    value = result["scores"][score]
    digits = DIGITS.get(name, 2) if score in ("rmse", "crps") else 2
    return plus_minus(value["mean"], value["error"], digits)


def _protocols(cells: Cells, method: str) -> list[str]:
    """What was done, as the cells have it: on which sets, where that is not the same for all."""
    sets: dict[str, list[str]] = {}
    for (name, other), cell in cells.items():
        if other == method:
            text = cell["result"].get("protocol", PROTOCOLS[method].description)
            sets.setdefault(text, []).append(SHORT.get(name, name))
    if len(sets) == 1:
        return [f"{method}: {text}" for text in sets]
    return [f"{method} on {', '.join(own)}: {text}" for text, own in sets.items()]


def _against(cells: Cells, method: str) -> str | None:
    """On how many sets a method is above what others report for it."""
    column = SAME_METHOD.get(method, "")
    pairs = []
    for name in uci.SETS:
        scores = cells.get((name, method), {}).get("result", {}).get("scores")
        _, theirs = COLUMNS[name].get(column, (None, None))
        if scores is not None and theirs is not None:
            pairs.append((scores["log_likelihood"]["mean"], theirs))
    if not pairs:
        return None
    above = sum(own > theirs for own, theirs in pairs)
    return f"{method}: above published {column} on {above} of {len(pairs)} sets, not rounded"


def _published(sets: Sequence[str], score: str) -> list[list[str]]:
    """Rows of other people's figures, the best anywhere last."""
    which = 0 if score == "rmse" else 1
    names = list(dict.fromkeys(column for name in sets for column in COLUMNS[name]))
    rows = []
    for column in names:
        pairs = [COLUMNS[name].get(column, (None, None)) for name in sets]
        if any(pair[which] is not None for pair in pairs):
            shown = [plus_minus(pair[which], digits=3 if which == 0 else 2) for pair in pairs]
            rows.append([f"published: {column}", *shown])
    if which == 1:
        best = [plus_minus(BEST_LL[name]) for name in sets]
        rows.append(["published: best seen", *best])
    return rows


STANDARD = UCITable("uci", "standard", "UCI regression")
GAP = UCITable("gap", "gap", "UCI gap splits")
