"""The image tables as people read them: quality, strangers found, doubt against shift."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from doxa.app.bench import closeness, image_figures, mnist
from doxa.app.bench.cells import Result, Store
from doxa.app.bench.image_cells import SCORES, cifar_cell, ood_cell
from doxa.app.bench.image_methods import PROTOCOLS, REGRESSION_ONLY
from doxa.app.bench.tables import Table, mean_of, plus_minus
from doxa.app.bench.uci import data_folder
from doxa.app.bench.work import Task
from doxa.errors import DataError, did_you_mean
from doxa.evaluate.shifts import SHIFTS

Grouped = dict[tuple[str, str], list[dict[str, Any]]]  # (set, method) → its cells, one a seed

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
MLP: Published = {"mnist": {who: (100 - error, None) for who, error in mnist.PUBLISHED.items()}}
RANKING = {
    "auroc": "AUROC, higher is better, .5 says nothing",
    "aupr_out": "AUPR, strangers as positives",
    "aupr_in": "AUPR, the trained set as positives",
    "fpr95": "strangers let in when 95 % of the trained set is; lower is better",
}


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
            made += [*self._closeness(cells, name), *self._strangers(cells, name)]
        made += self._shifted(cells)
        made[0].notes += self._notes(cells)
        return [table for table in made if table.rows]

    def figures(self, store: Store, folder: Path) -> list[Path]:
        """Those that there are cells for."""
        cells = self.cells(store)
        first = {key: own[0]["result"] for key, own in cells.items()}
        made = []
        first = {key: own for key, own in first.items() if key[1] in image_figures.COLOURS}
        turned = {m: r["rotation"] for (_, m), r in first.items() if "rotation" in r}
        if turned:
            made.append(image_figures.rotation_figure(turned, folder / "rotation.png"))
        worse = {m: r["corrupted"] for (_, m), r in first.items() if "corrupted" in r}
        if worse:
            own = "" if self.name == "cifar" else f"{self.name}_"
            made.append(image_figures.corruption_figure(worse, folder / f"{own}corrupted.png"))
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
        yield closeness.last_layer(f"{title}: the last layer against chains on it", chains)
        own = {m: [c["result"] for c in seeds] for (on, m), seeds in cells.items() if on == name}
        yield closeness.against_chains(f"{title}: against chains on all weights", own)

    def _strangers(self, cells: Grouped, name: str) -> Iterable[Table]:
        for metric, words in RANKING.items():
            table = Table(
                f"{self.title}: trained on {NAMES[name]}: {words}",
                ["stranger", "method", *(score.replace("_", " ") for score in SCORES)],
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
                rows = {m: image_figures.mean_over_shifts(v) for m, v in rows.items()}
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
                "10,000 training and 2,000 test images of CIFAR-10, no augmentation; strangers are "
                f"32 × 32 patches of CamVid's test frames; corruptions: {', '.join(SHIFTS)}"
            )
        said: set[str] = set()
        for (name, method), own in cells.items():
            result = own[0]["result"]
            note = f"{method}: {result['protocol']}"
            if note not in said:
                said.add(note)
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


# All weights by Kronecker factors, and flows in every layer, are for the smaller network.
_LARGE = tuple(
    name for name in PROTOCOLS if name not in ("mnf", "laplace-kronecker", closeness.CHAINS)
)

_POSTERIORS = tuple(name for name in PROTOCOLS if name != closeness.CHAINS)
OOD = ImageTable("ood", "LeNet-5", ("mnist", "fashion_mnist"), _POSTERIORS, ood_cell, LENET)
CIFAR = ImageTable("cifar", "ResNet-20", ("cifar10",), _LARGE, cifar_cell)
CIFAR_FRN = ImageTable(
    "cifar-frn", "ResNet-20-FRN", ("cifar10",), _LARGE, partial(cifar_cell, table="cifar-frn")
)
REFERENCE = ImageTable(
    "reference", "LeNet-5 on 2,000 images", ("fashion_mnist",),
    tuple(name for name in PROTOCOLS if name != "hmc"), closeness.reference_cell,
)  # fmt: skip
MNIST = ImageTable("mnist", "MLP 784-400-400-10", ("mnist",), mnist.METHODS, mnist.mnist_cell, MLP)
