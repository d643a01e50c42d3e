"""The image tables as people read them: quality, out-of-distribution inputs, shifted inputs.

Two of the tables compare methods with long chains of HMC, in the manner of Izmailov et al. (2021):
agreement of the likeliest classes, and total variation of the class probabilities. One is of the
last layer, on the features of one network; the other of all weights of a LeNet on few images. There
the reference of a method is the mean of all chains of all seeds, and that of the chains themselves
the mean of the other seeds: what two such runs differ by.

This module is a part of `python -m benchmarks.images`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.image_cells import (
    CHAINS,
    MNIST_METHODS,
    MNIST_PUBLISHED,
    SCORES,
    cifar_cell,
    mnist_cell,
    ood_cell,
    reference_cell,
    unpacked,
)
from benchmarks.image_methods import PROTOCOLS, REGRESSION_ONLY
from doxa.app.bench.cells import Result, Store, Table, Task, mean_of, plus_minus
from doxa.app.bench.uci import data_folder
from doxa.errors import DataError, MissingExtra, did_you_mean
from doxa.evaluate.reference_distance import agreement, total_variation
from doxa.evaluate.shifts import SHIFTS
from doxa.predictive import Predictive

Grouped = dict[tuple[str, str], list[dict[str, Any]]]  # (set, method) → its cells, one per seed

NAMES = {
    "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "kmnist": "KMNIST",
    "notmnist": "notMNIST", "cifar10": "CIFAR-10", "camvid": "CamVid",
}  # fmt: skip
# LeNet-5 in the literature: accuracy in %, negative log-likelihood.
Published = Mapping[str, Mapping[str, tuple[float, float | None]]]
LENET: Published = {
    "mnist": {"one network": (99.1, 0.037), "ensemble of 10": (99.4, 0.016), "VI": (98.5, 0.048)},
    "fashion_mnist": {
        "one network": (91.0, 0.321), "ensemble of 10": (93.2, 0.200), "VI": (89.5, 0.292),
    },
}  # fmt: skip
MLP: Published = {"mnist": {who: (100 - error, None) for who, error in MNIST_PUBLISHED.items()}}
RANKING = {
    "auroc": "AUROC, higher is better, .5 says nothing",
    "aupr_out": "AUPR, out-of-distribution inputs as positives",
    "aupr_in": "AUPR, the trained set as positives",
    "fpr95": (
        "FPR95, out-of-distribution inputs accepted when 95 % of the trained set is; "
        "lower is better"
    ),
}
INK = "#22303c"
# Of the methods that are drawn: a line for each of twenty would show none.
COLOURS = {
    "map": "#8a949c", "deep-ensemble": "#0b4f8a", "mean-field": "#3f8f6b", "mc-dropout": "#c8553d",
    "laplace": "#8a5fa8", "hmc": "#d19a2a", "multiswag": "#2fa4a8", "ivon": "#7a9a1f",
    "rank1": "#b0417a",
}  # fmt: skip
FIELDS = {
    "accuracy": "accuracy",
    "log_likelihood": "log-likelihood",
    "entropy": "entropy (nats)",
    "mutual_information": "mutual information (nats)",
}
Sweep = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class ImageTable:
    """A table of cells (set, method, seed), made by one function of the same names."""

    name: str
    title: str
    sets: tuple[str, ...]
    methods: tuple[str, ...]
    make: Callable[..., Result]
    published: Published | None = None

    def tasks(
        self,
        data: str | Path | None,
        sets: Sequence[str] | None = None,
        methods: Sequence[str] | None = None,
        device: str | None = None,
        seed: int = 0,
        scale: str = "full",
    ) -> list[Task]:
        """One for each set and method. A method that is not for classes is refused by its cell."""
        folder = data_folder(data)
        for name in sets or ():
            if name not in self.sets:
                raise DataError(f"no set {name!r} in {self.name}{did_you_mean(name, self.sets)}")
        known = [*self.methods, *REGRESSION_ONLY]
        for method in methods or ():
            if method not in known:
                raise DataError(f"no method {method!r} here{did_you_mean(method, known)}")
        common = {"folder": folder, "seed": seed, "device": device or "cpu", "scale": scale}
        marked = {} if scale == "full" else {"scale": scale}
        return [
            Task(
                {"table": self.name, "set": name, "method": method, "seed": seed, **marked},
                self.make,
                {"name": name, "method": method, **common},
            )
            for name in sets or self.sets
            for method in methods or self.methods
        ]

    def tables(self, store: Store) -> list[Table]:
        cells = self.cells(store)
        made = [self._quality(cells)]
        for name in self.sets:
            made += [*self._closeness(cells, name), *self._outside(cells, name)]
        made += self._shifted(cells)
        made[0].notes += self._notes(cells)
        return [table for table in made if table.rows]

    def figures(self, store: Store, folder: Path) -> list[Path]:
        """Those that there are cells for."""
        cells = self.cells(store)
        first = {key: own[0]["result"] for key, own in cells.items()}
        made = []
        first = {key: own for key, own in first.items() if key[1] in COLOURS}
        turned = {m: r["rotation"] for (_, m), r in first.items() if "rotation" in r}
        if turned:
            made.append(rotation_figure(turned, folder / "rotation.png"))
        worse = {m: r["corrupted"] for (_, m), r in first.items() if "corrupted" in r}
        if worse:
            own = "" if self.name == "cifar" else f"{self.name}_"
            made.append(corruption_figure(worse, folder / f"{own}corrupted.png"))
        return made

    def cells(self, store: Store) -> Grouped:
        """Known and not refused, in the order of sets and methods."""
        found: Grouped = {}
        known = list(store.cells(table=self.name))
        full = [cell for cell in known if "scale" not in cell["key"]]
        for cell in full or known:  # small ones are shown by themselves, never beside full ones
            result = cell["result"]
            for one in result.get("seeds", [result]):  # of seeds that were fitted side by side
                if "scores" in one:
                    key = (cell["key"]["set"], cell["key"]["method"])
                    found.setdefault(key, []).append({**cell, "result": {**result, **one}})
        order = [(name, method) for name in self.sets for method in self.methods]
        return {key: found[key] for key in order if key in found}

    def _quality(self, cells: Grouped) -> Table:
        table = Table(
            f"{self.title}: test rows",
            [
                "trained on",
                "method",
                "seeds",
                "error %",
                "NLL",
                "Brier",
                "ECE",
                "fit s",
                "predict s",
                "cost",
            ],
        )
        for name in self.sets:
            for method in self.methods:
                own = cells.get((name, method))
                if own is None:
                    continue
                of = lambda key, own=own: [c["result"]["scores"][key] for c in own]  # noqa: E731
                seconds = [
                    mean_of([c["result"][f"{part}_seconds"] for c in own], 1)
                    for part in ("fit", "predict")
                ]
                table.rows.append(
                    [
                        NAMES[name], method, str(len(own)),
                        mean_of([100 - 100 * v for v in of("accuracy")], 2),
                        mean_of([-v for v in of("log_likelihood")], 3), mean_of(of("brier"), 3),
                        mean_of(of("ece"), 3), *seconds, _cost(own, cells.get((name, "map"))),
                    ]
                )  # fmt: skip
            if any(key[0] == name for key in cells):
                table.rows += [
                    [NAMES[name], f"published: {who}", "–", f"{100 - a:.2f}",
                     plus_minus(nll, digits=3), *"–––––"]
                    for who, (a, nll) in (self.published or {}).get(name, {}).items()
                ]  # fmt: skip
        return table

    def _closeness(self, cells: Grouped, name: str) -> Iterable[Table]:
        title = f"{self.title}: trained on {NAMES[name]}"
        chains = [c["result"] for c in cells.get((name, "hmc"), [])]
        yield last_layer_table(f"{title}: the last layer against chains on it", chains)
        own = {m: [c["result"] for c in seeds] for (on, m), seeds in cells.items() if on == name}
        yield chains_table(f"{title}: against chains on all weights", own)

    def _outside(self, cells: Grouped, name: str) -> Iterable[Table]:
        for metric, words in RANKING.items():
            table = Table(
                f"{self.title}: trained on {NAMES[name]}: {words}",
                ["tested on", "method", *(score.replace("_", " ") for score in SCORES)],
            )
            own = {m: c for (trained, m), c in cells.items() if trained == name}
            others = next((list(c[0]["result"].get("ood", {})) for c in own.values()), [])
            for other in others:
                for method, seeds in own.items():
                    each = [c["result"]["ood"][other] for c in seeds]
                    shown = [
                        mean_of([e[score][metric] for e in each], 3) if score in each[0] else "–"
                        for score in SCORES
                    ]
                    table.rows.append([NAMES[other], method, *shown])
            yield table

    def _shifted(self, cells: Grouped) -> Iterable[Table]:
        """Accuracy, NLL, entropy and mutual information: against the angle of MNIST, and against
        the severity of corruption, averaged over its kinds."""
        for key, title, head in (
            ("rotation", "rotated MNIST, degrees", "{:.0f}"),
            ("corrupted", "corrupted, severity, mean of the kinds", "{}"),
        ):
            rows = {m: c[0]["result"][key] for (_, m), c in cells.items() if key in c[0]["result"]}
            if not rows:
                continue
            if key == "corrupted":
                rows = {m: mean_over_shifts(v) for m, v in rows.items()}
            levels = [head.format(row["level"]) for row in next(iter(rows.values()))]
            for field, words in (
                ("accuracy", "accuracy"), ("log_likelihood", "log-likelihood"),
                ("entropy", "entropy, nats"), ("mutual_information", "mutual information, nats"),
            ):  # fmt: skip
                table = Table(f"{self.title}: {title}: {words}", ["method", *levels])
                for method, own in rows.items():
                    shown = [plus_minus(row.get(field), digits=3) for row in own]
                    table.rows.append([method, *shown])
                yield table

    def _notes(self, cells: Grouped) -> list[str]:
        notes = [
            "mean ± standard error over seeds, where there are several",
            "cost: the time of the fit, one MAP fit = 1; of several seeds the shortest",
            f"{', '.join(REGRESSION_ONLY)}: for regression only, so not in this table",
        ]
        if self.name == "mnist":
            notes.append("seconds are those of all seeds together, which are one stacked fit")
        if self.name.startswith("cifar"):
            notes.append(
                "10,000 training and 2,000 test images of CIFAR-10, no augmentation; "
                "out-of-distribution inputs are 32 × 32 patches of CamVid's test frames; "
                f"corruptions: {', '.join(SHIFTS)}"
            )
        known: set[str] = set()
        for (name, method), own in cells.items():
            result = own[0]["result"]
            note = f"{method}: {result['protocol']}"
            if note not in known:
                known.add(note)
                notes.append(note)
            if result["status"] != "ok":
                notes.append(f"{method} on {NAMES[name]}: {result['status']}: {result['reason']}")
        return notes


def _cost(own: Sequence[dict[str, Any]], one: Sequence[dict[str, Any]] | None) -> str:
    """In MAP fits, of cells that one kind of machine made."""
    if one is None or own[0]["machine"]["gpu"] != one[0]["machine"]["gpu"]:
        return "–"
    shortest = [min(c["result"]["fit_seconds"] for c in cells) for cells in (own, one)]
    return f"{shortest[0] / shortest[1]:.1f}"


def chains_table(title: str, cells: Mapping[str, Sequence[Result]]) -> Table:
    """Rows of all weights: {method: its results, one per seed}."""
    table = Table(title, ["method", "agreement", "total variation"])
    known = {m: [unpacked(r["probs"]) for r in own] for m, own in cells.items() if _has_probs(own)}
    chains = known.get(CHAINS, [])
    for method, seeds in known.items() if chains else ():
        found = []
        for i, probs in enumerate(seeds):
            others = chains[:i] + chains[i + 1 :] if method == CHAINS else chains
            if others:
                p, q = (Predictive.from_probs(t) for t in (probs, torch.stack(others).mean(0)))
                found.append((agreement(p, q), total_variation(p, q)))
        if found:
            table.rows.append(
                [method, *(mean_of(values, 3) for values in zip(*found, strict=True))]
            )
    return table


def _has_probs(own: Sequence[Result]) -> bool:
    return all("probs" in result for result in own)


def last_layer_table(title: str, results: Sequence[Result]) -> Table:
    """Of approximations to the last layer's posterior, from chains on the same features."""
    table = Table(title, ["method", "agreement", "total variation"])
    each = [result["closeness"] for result in results if "closeness" in result]
    for method in each[0] if each else ():
        columns = [
            [one[method][key] for one in each] for key in ("agreement", "total_variation")
        ]  # fmt: skip
        table.rows.append([method, *(mean_of(values, 4) for values in columns)])
    return table


def rotation_figure(rows: Mapping[str, Sweep], path: Path) -> Path:
    """One line per method against the angle."""
    return _lines(rows, path, "degrees", "MNIST digits turned")


def corruption_figure(rows: Mapping[str, Mapping[str, Sweep]], path: Path) -> Path:
    """One line per method against severity, the mean of all kinds of corruption."""
    means = {method: mean_over_shifts(kinds) for method, kinds in rows.items()}
    return _lines(means, path, "severity", "CIFAR-10 corrupted")


def mean_over_shifts(kinds: Mapping[str, Sweep]) -> list[dict[str, float]]:
    """The mean row at each severity, whose number is then the level."""
    table = []
    for severity, rows in enumerate(zip(*kinds.values(), strict=True)):
        known = [field for field in FIELDS if field in rows[0]]
        means = {field: float(np.mean([row[field] for row in rows])) for field in known}
        table.append({"level": severity, **means})
    return table


def _lines(rows: Mapping[str, Sweep], path: Path, axis: str, title: str) -> Path:
    figure = blank_figure((13.0, 3.4))
    axes = figure.subplots(1, len(FIELDS))
    for ax, (field, name) in zip(axes, FIELDS.items(), strict=True):
        for method, own in rows.items():
            level, value = [row["level"] for row in own], [row[field] for row in own]
            ax.plot(level, value, "o-", ms=3, lw=1.6, color=COLOURS.get(method, INK), label=method)
        ax.set_title(name, fontsize=11, color=INK, loc="left")
        ax.set_xlabel(axis)
        ax.grid(color="#e3e8ec")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0.0, 1.0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def blank_figure(size: tuple[float, float]) -> Any:
    """An empty figure of so many inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'doxa[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# All weights by Kronecker factors, and flows in every layer, are for the smaller network.
_LARGE = tuple(name for name in PROTOCOLS if name not in ("mnf", "laplace-kronecker", CHAINS))

_POSTERIORS = tuple(name for name in PROTOCOLS if name != CHAINS)
OOD = ImageTable("ood", "LeNet-5", ("mnist", "fashion_mnist"), _POSTERIORS, ood_cell, LENET)
CIFAR = ImageTable("cifar", "ResNet-20", ("cifar10",), _LARGE, cifar_cell)
CIFAR_FRN = ImageTable(
    "cifar-frn", "ResNet-20-FRN", ("cifar10",), _LARGE, partial(cifar_cell, table="cifar-frn")
)
REFERENCE = ImageTable(
    "reference", "LeNet-5 on 2,000 images", ("fashion_mnist",),
    tuple(name for name in PROTOCOLS if name != "hmc"), reference_cell,
)  # fmt: skip
MNIST = ImageTable("mnist", "MLP 784-400-400-10", ("mnist",), MNIST_METHODS, mnist_cell, MLP)
