"""The UCI tables as people read them: methods down, data sets across, published figures below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doxa.app.bench import uci
from doxa.app.bench.cells import Store
from doxa.app.bench.protocols import PROTOCOLS
from doxa.app.bench.published import BEST_LL, COLUMNS, SAME_METHOD
from doxa.app.bench.tables import Table, plus_minus
from doxa.app.bench.work import Task

SHORT = {"boston_housing": "boston", "naval_propulsion": "naval", "power_plant": "power",
         "wine_quality_red": "wine"}  # fmt: skip
DIGITS = {"naval_propulsion": 4, "kin8nm": 3}  # of an RMSE; two elsewhere

Cells = dict[tuple[str, str], dict[str, Any]]


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
        return uci.tasks(
            folder, self.splits, chosen, methods or list(PROTOCOLS), seed, device or "cpu"
        )

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
        self, cells: Cells, sets: Sequence[str], methods: Sequence[str], score: str, words: str
    ) -> Table:
        title = f"{self.title}: {words}"
        table = Table(title, ["method", *(SHORT.get(name, name) for name in sets)])
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
                said = ", ".join(f"{count} splits {word}" for word, count in bad.items())
                notes.append(f"{method} on {SHORT.get(name, name)}: {said}")
        return notes


def _costs(title: str, cells: Cells, sets: Sequence[str], methods: Sequence[str]) -> Table:
    """Seconds of different machines say nothing about methods."""
    words = "time of the last fit, one MAP fit = 1"
    table = Table(f"{title}: {words}", ["method", *(SHORT.get(name, name) for name in sets)])
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
    words = "probability to drop, mean over splits"
    table = Table(f"{title}: {words}", ["", *(SHORT.get(name, name) for name in sets)])
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
            words = cell["result"].get("protocol", PROTOCOLS[method].words)
            sets.setdefault(words, []).append(SHORT.get(name, name))
    if len(sets) == 1:
        return [f"{method}: {words}" for words in sets]
    return [f"{method} on {', '.join(own)}: {words}" for words, own in sets.items()]


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
