"""The UCI tables as people read them: methods down, data sets across, published figures below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doxa.app.bench import uci
from doxa.app.bench.cells import Store
from doxa.app.bench.protocols import PROTOCOLS
from doxa.app.bench.published import BEST_LL, COLUMNS
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
        return uci.tasks(folder, self.splits, chosen, methods or list(PROTOCOLS), seed)

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
        return [*made, self._times(cells, sets, methods)]

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
        notes += [f"{method}: {PROTOCOLS[method].words}" for method in methods]
        for (name, method), cell in cells.items():
            status = cell["result"].get("status", {})
            bad = {k: v for k, v in status.items() if k != "ok"}
            if bad:
                said = ", ".join(f"{count} splits {word}" for word, count in bad.items())
                notes.append(f"{method} on {SHORT.get(name, name)}: {said}")
        return notes


def _score(cells: Cells, name: str, method: str, score: str) -> str:
    result = cells.get((name, method), {}).get("result", {})
    if "scores" not in result:
        return "–" if result else ""
    value = result["scores"][score]
    digits = DIGITS.get(name, 2) if score in ("rmse", "crps") else 2
    return plus_minus(value["mean"], value["error"], digits)


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
