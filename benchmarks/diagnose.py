"""Diagnostics on forty good and forty deliberately broken runs: the confusion table of their page.

    python -m benchmarks.diagnose [--first 3000] [--every 1]

Run i has the seed first + i, which makes its data, its split and its fit. Thresholds and settings
were chosen on seeds below 1,000 and corrected after passes over 1,000 to 1,079 and 2,000 to 2,079,
whose results docs/doctor.md gives; the table is of fresh seeds, from 3,000 on. A broken run names
the checks that would be the right reason to raise an alarm. It counts as found when a warning or
worse comes from one of them, a good run as a false alarm when any check gives a warning or worse.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import doxa
from doxa.data.simulated import gap_regression, two_moons
from doxa.diagnose import data, doctor

RESULTS = Path(__file__).parent / "results" / "diagnose.json"
Array = np.ndarray[Any, np.dtype[Any]]


class Sets(NamedTuple):
    """Training and test rows; y is of integers for classes."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array

    @property
    def train(self) -> tuple[Array, Array]:
        return self.x, self.y

    @property
    def test(self) -> tuple[Array, Array]:
        return self.x_test, self.y_test


@dataclass(frozen=True)
class Case:
    """One run: `make(seed)` gives (posterior, train, test); `fault` is "" for a good one."""

    name: str
    make: Callable[[int], tuple[Any, Any, Any]]
    fault: str = ""
    reasons: tuple[str, ...] = ()


def split(x: Array, y: Array, seed: int, train: int) -> Sets:
    order = np.random.default_rng([seed, 7]).permutation(len(y))
    a, b = order[:train], order[train:]
    return Sets(x[a], y[a], x[b], y[b])


def plane(seed: int, n: int = 150, noise: float = 0.5, inputs: int = 5) -> Sets:
    """A linear function of five inputs."""
    rng = np.random.default_rng([seed, 1])
    x = rng.normal(size=(n + 200, inputs))
    y = x @ rng.normal(size=inputs) + noise * rng.normal(size=len(x))
    return split(x, y, seed, n)


def noisy(seed: int) -> Sets:
    return plane(seed, 200, 1.0)


def many(seed: int) -> Sets:
    return plane(seed, 300)


def short(seed: int) -> Sets:
    return plane(seed, 80, inputs=2)


def waves(seed: int, n: int = 300, noise: float = 0.3) -> Sets:
    """sin x₁ + x₂²/2 − x₃ of three inputs."""
    rng = np.random.default_rng([seed, 2])
    x = rng.uniform(-2, 2, size=(n + 200, 3))
    y = mean_of(x) + noise * rng.normal(size=len(x))
    return split(x, y, seed, n)


def mean_of(x: Array) -> Array:
    return np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 - x[:, 2]


def gap(seed: int, n: int = 120) -> Sets:
    d, test = gap_regression(n, seed=2 * seed), gap_regression(200, seed=2 * seed + 1)
    return Sets(d.x, d.y, test.x, test.y)


def short_gap(seed: int) -> Sets:
    return gap(seed, 80)


def short_noisy(seed: int) -> Sets:
    return plane(seed, 80, 1.0, 3)


def moons(seed: int, n: int = 200) -> Sets:
    d, test = two_moons(n, 0.25, seed=2 * seed), two_moons(200, 0.25, seed=2 * seed + 1)
    return Sets(d.x, d.y, test.x, test.y)


def blobs(seed: int, n: int = 200) -> Sets:
    """Three overlapping normal clouds in four dimensions."""
    rng = np.random.default_rng([seed, 3])
    y = rng.integers(0, 3, n + 200)
    x = 1.2 * rng.normal(size=(3, 4))[y] + rng.normal(size=(len(y), 4))
    return split(x, y, seed, n)


def bundled(name: str) -> Callable[[int], Sets]:
    def load(seed: int) -> Sets:
        from sklearn import datasets

        d = getattr(datasets, f"load_{name}")()
        return split(d.data, d.target, seed, round(0.7 * len(d.target)))

    return load


def counts(seed: int, n: int = 250, shape: float | None = None) -> Sets:
    """Counts with a log-linear rate; overdispersed (negative binomial) where `shape` is given."""
    rng = np.random.default_rng([seed, 4])
    x = rng.normal(size=(n + 200, 3))
    rate = np.exp(0.7 + 0.5 * x[:, 0] - 0.4 * x[:, 1])
    if shape is not None:
        rate = rate * rng.gamma(shape, 1 / shape, len(x))
    return split(x, rng.poisson(rate).astype(float), seed, n)


def heavy(seed: int, n: int = 250) -> Sets:
    """The waves with Student-t noise of 3 degrees of freedom."""
    rng = np.random.default_rng([seed, 5])
    x = rng.uniform(-2, 2, size=(n + 200, 3))
    return split(x, mean_of(x) + 0.3 * rng.standard_t(3, len(x)), seed, n)


def uneven(seed: int, n: int = 250) -> Sets:
    """The waves with noise that grows with the first input, by a factor of nine."""
    rng = np.random.default_rng([seed, 6])
    x = rng.uniform(-2, 2, size=(n + 200, 3))
    noise = 0.25 * np.exp(0.55 * x[:, 0])
    return split(x, mean_of(x) + noise * rng.normal(size=len(x)), seed, n)


def many_uneven(seed: int) -> Sets:
    return uneven(seed, 500)


def many_heavy(seed: int) -> Sets:
    return heavy(seed, 500)


HMC = doxa.HMC(draws=300, burn_in=200, leapfrog=3)
LONG = doxa.HMC(draws=250, burn_in=200, leapfrog=8, target_accept=0.65)  # for correlated weights
DROPOUT = doxa.MCDropout(p=0.05)
NARROW = {"prior": doxa.Normal(0.3)}  # for what is nearly linear
OWN = ("linear", "gp")


def fitted(
    sets: Sets,
    method: Any,
    likelihood: Any,
    seed: int,
    hidden: tuple[int, ...] = (20,),
    **options: Any,
) -> Any:
    """A fit as a person would make it: standardised, 1,000 steps, a small tanh network."""
    name = method if isinstance(method, str) else method.name
    outputs = {"categorical": int(sets.y.max()) + 1, "heteroscedastic": 2}
    net = None
    if name not in OWN:
        net = doxa.nets.mlp(
            sets.x.shape[1], outputs.get(likelihood, 1), hidden=hidden, activation="tanh"
        )
    chosen = {"standardize": True, "progress": False, "seed": seed, "steps": 1000, **options}
    return doxa.fit(net, sets.train, method, likelihood=likelihood, **chosen)


def good(
    source: Callable[[int], Sets], method: Any, likelihood: Any = "gaussian", **options: Any
) -> Case:
    def make(seed: int) -> tuple[Any, Any, Any]:
        sets = source(seed)
        return fitted(sets, method, likelihood, seed, **options), sets.train, sets.test

    name = method if isinstance(method, str) else method.name
    return Case(f"{name}, {getattr(source, 'label', source.__name__)}", make)


def _bundled(name: str) -> Callable[[int], Sets]:
    load = bundled(name)
    load.label = name  # type: ignore[attr-defined]
    return load


DIABETES, IRIS, WINE, CANCER = (
    _bundled(name) for name in ("diabetes", "iris", "wine", "breast_cancer")
)
CLASSES = {"likelihood": "categorical"}
POLYNOMIAL = doxa.BayesianLinear(features="polynomial", degree=7)

GOOD = [
    good(plane, "linear"), good(DIABETES, "linear"), good(gap, POLYNOMIAL),
    good(short, "gp"), good(short_gap, "gp"), good(short_noisy, "gp"),
    good(many, "map", **NARROW), good(DIABETES, "map", **NARROW), good(IRIS, "map", **CLASSES),
    good(CANCER, "map", **CLASSES), good(moons, "map", **CLASSES),
    good(gap, "deep-ensemble"), good(DIABETES, "deep-ensemble", **NARROW),
    good(waves, "deep-ensemble"),
    good(IRIS, "deep-ensemble", **CLASSES), good(WINE, "deep-ensemble", **CLASSES),
    good(CANCER, "deep-ensemble", **CLASSES), good(moons, "deep-ensemble", **CLASSES),
    good(gap, "laplace"), good(plane, "laplace"), good(DIABETES, "laplace", **NARROW),
    good(moons, "laplace", **CLASSES), good(IRIS, "laplace", **CLASSES),
    good(WINE, "laplace", **CLASSES),
    good(plane, "mean-field", hidden=()), good(DIABETES, "mean-field"),
    good(blobs, "mean-field", **CLASSES), good(CANCER, "mean-field", **CLASSES),
    good(noisy, DROPOUT, **NARROW), good(DIABETES, DROPOUT, **NARROW),
    good(WINE, DROPOUT, **CLASSES),
    good(moons, DROPOUT, **CLASSES), good(CANCER, DROPOUT, **CLASSES),
    good(plane, HMC, hidden=()), good(short, HMC, hidden=()),
    good(IRIS, LONG, hidden=(), **CLASSES), good(blobs, LONG, hidden=(), **CLASSES),
    good(many_uneven, "deep-ensemble", "heteroscedastic"),
    good(many_heavy, "deep-ensemble", "student-t"),
    good(counts, "deep-ensemble", "poisson"),
]  # fmt: skip


def broken(fault: str, reasons: str, what: str) -> Callable[[Callable[..., Any]], Case]:
    """Registers a function of a seed as a broken run."""

    def take(make: Callable[[int], tuple[Any, Any, Any]]) -> Case:
        case = Case(what, make, fault, tuple(reasons.split(", ")))
        BROKEN.append(case)
        return case

    return take


BROKEN: list[Case] = []


def plain(
    fault: str, reasons: str, what: str, source: Callable[[int], Sets], method: Any,
    likelihood: Any = "gaussian", **options: Any,
) -> None:  # fmt: skip
    """A broken run whose fault lies in the settings, or in data that do not fit them."""

    @broken(fault, reasons, what)
    def make(seed: int) -> tuple[Any, Any, Any]:
        sets = source(seed)
        return fitted(sets, method, likelihood, seed, **options), sets.train, sets.test


DIVERGED = ("diverged", "status, training")
plain(*DIVERGED, "map, lr 1e4", plane, "map", lr=1e4)
plain(*DIVERGED, "deep-ensemble, lr 100", waves, "deep-ensemble", lr=100.0)
plain(*DIVERGED, "deep-ensemble of classes, lr 1e6", moons, "deep-ensemble", "categorical", lr=1e6)
plain(*DIVERGED, "mean-field, lr 30", gap, "mean-field", lr=30.0)
plain(*DIVERGED, "mc-dropout, lr 1e3", DIABETES, "mc-dropout", lr=1e3)
plain(*DIVERGED, "mean-field of classes, lr 20", IRIS, "mean-field", "categorical", lr=20.0)
plain(*DIVERGED, "map of classes, constant lr 5", WINE, "map", "categorical", lr=5.0,
      schedule="constant")  # fmt: skip

STUCK = ("stuck chain", "chains")
COLD = doxa.HMC(draws=60, burn_in=0, leapfrog=5)
plain(*STUCK, "no burn-in, tiny noise", plane, COLD, doxa.Gaussian(1e-3))
plain(*STUCK, "no burn-in, tiny noise, network", gap, COLD, doxa.Gaussian(1e-4))
plain(*STUCK, "twenty draws without burn-in", waves, doxa.HMC(draws=20, burn_in=0, leapfrog=2))
plain(*STUCK, "classes, one leapfrog step, no burn-in", moons,
      doxa.HMC(draws=40, burn_in=0, leapfrog=1), "categorical")  # fmt: skip


def freeze(posterior: Any, chains: list[int]) -> Any:
    posterior.samples[chains] = posterior.samples[chains, :1]
    return posterior


@broken(*STUCK, "one chain of four frozen")
def one_frozen(seed: int) -> tuple[Any, Any, Any]:
    sets = plane(seed)
    return freeze(fitted(sets, HMC, "gaussian", seed, ()), [2]), sets.train, sets.test


@broken(*STUCK, "all chains frozen, classes")
def all_frozen(seed: int) -> tuple[Any, Any, Any]:
    sets = IRIS(seed)
    return freeze(fitted(sets, LONG, "categorical", seed, ()), [0, 1, 2, 3]), sets.train, sets.test


@broken(*STUCK, "one chain in another place")
def one_elsewhere(seed: int) -> tuple[Any, Any, Any]:
    sets = plane(seed)
    posterior = fitted(sets, HMC, "gaussian", seed, ())
    posterior.samples[1, :, 0] += 5 * posterior.samples[1, :, 0].std()
    return posterior, sets.train, sets.test


COLLAPSED = ("collapsed ensemble", "members, width")
GIVEN = {"init": "given", "batch_size": 10_000}
plain(*COLLAPSED, "same start, full batches", waves, "deep-ensemble", **GIVEN)
plain(*COLLAPSED, "same start, full batches, classes", moons, "deep-ensemble", "categorical",
      **GIVEN)  # fmt: skip
plain(*COLLAPSED, "same start, diabetes", DIABETES, "deep-ensemble", init="given", **NARROW)
plain(*COLLAPSED, "mean-field of tiny width", plane,
      doxa.MeanField(temperature=1e-8, initial_std=1e-4))  # fmt: skip
plain(*COLLAPSED, "laplace at temperature 1e-8", gap, doxa.Laplace(temperature=1e-8))


def copied(source: Callable[[int], Sets], likelihood: str) -> Callable[[int], tuple[Any, Any, Any]]:
    def make(seed: int) -> tuple[Any, Any, Any]:
        sets = source(seed)
        posterior = fitted(sets, "deep-ensemble", likelihood, seed)
        posterior.samples[:] = posterior.samples[:1].clone()
        return posterior, sets.train, sets.test

    return make


broken(*COLLAPSED, "one member copied")(copied(gap, "gaussian"))
broken(*COLLAPSED, "one member copied, classes")(copied(WINE, "categorical"))

WRONG = "wrong likelihood"
plain(WRONG, "noise tails", "gaussian on heavy tails", heavy, "deep-ensemble")
plain(WRONG, "noise by input", "one noise level for uneven noise", uneven, "deep-ensemble")
plain(WRONG, "noise level", "poisson on overdispersed counts", lambda s: counts(s, shape=0.8),
      "map", "poisson")  # fmt: skip
plain(WRONG, "targets", "gaussian on counts", counts, "laplace")
plain(WRONG, "targets", "gaussian on two classes", moons, "deep-ensemble")
plain(WRONG, "noise level, coverage", "noise fixed at a half", plane, "laplace", doxa.Gaussian(0.1))
plain(WRONG, "noise level, coverage", "noise fixed at twice", waves, "map", doxa.Gaussian(0.6))

TINY = ("tiny data", "sample size")
plain(*TINY, "8 rows, map", lambda s: plane(s, 8), "map")
plain(*TINY, "12 rows, deep-ensemble", lambda s: gap(s, 12), "deep-ensemble")
plain(*TINY, "15 rows, laplace", lambda s: waves(s, 15), "laplace")
plain(*TINY, "30 rows of ten inputs, mean-field", lambda s: plane(s, 30, inputs=10), "mean-field")
plain(*TINY, "14 rows of classes, mc-dropout", lambda s: moons(s, 14), "mc-dropout", "categorical")
plain(*TINY, "10 rows of classes, hmc", lambda s: blobs(s, 10), LONG, "categorical", hidden=())

LEAKED = "leaked scaling"


def scaled_by(rows: Array, x: Array) -> Array:
    return (x - rows.mean(0)) / rows.std(0)


def leak(
    what: str, source: Callable[[int], Sets], method: str, change: Callable[[Sets], Sets],
    likelihood: str = "gaussian", reasons: str = "scaling", **options: Any,
) -> None:  # fmt: skip
    """The rows are changed before the fit."""

    @broken(LEAKED, reasons, what)
    def make(seed: int) -> tuple[Any, Any, Any]:
        sets = change(source(seed))
        return fitted(sets, method, likelihood, seed, **options), sets.train, sets.test


def scaled_together(s: Sets) -> Sets:
    rows = np.concatenate([s.x, s.x_test])
    y, y_test = scaled_by(s.y, s.y), scaled_by(s.y, s.y_test)
    return s._replace(x=scaled_by(rows, s.x), x_test=scaled_by(rows, s.x_test), y=y, y_test=y_test)


def ranged_together(s: Sets) -> Sets:
    rows = np.concatenate([s.x, s.x_test])
    low, high = rows.min(0), rows.max(0)
    return s._replace(x=(s.x - low) / (high - low), x_test=(s.x_test - low) / (high - low))


def scaled_apart(s: Sets) -> Sets:
    return s._replace(x=scaled_by(s.x, s.x), x_test=scaled_by(s.x_test, s.x_test))


def test_left_raw(s: Sets) -> Sets:
    return s._replace(x=scaled_by(s.x, s.x))


def never_scaled(s: Sets) -> Sets:
    return s


def targets_together(s: Sets) -> Sets:
    rows = np.concatenate([s.y, s.y_test])
    return s._replace(y=scaled_by(rows, s.y), y_test=scaled_by(rows, s.y_test))


RAW = {"standardize": False}
leak("scaled with the test rows", DIABETES, "deep-ensemble", scaled_together, **RAW)
leak("range from train and test", WINE, "laplace", ranged_together, "categorical", **RAW)
leak("test scaled by itself", waves, "map", scaled_apart, **RAW)
leak("test left raw", CANCER, "mc-dropout", test_left_raw, "categorical", **RAW)
leak("never scaled", WINE, "map", never_scaled, "categorical", **RAW)
leak("y scaled with the test rows", DIABETES, "laplace", targets_together)


def visit(case: Case, seed: int) -> dict[str, Any]:
    """Fit, diagnose, and compare the alarms with the planted fault."""
    start = time.process_time()
    posterior, train, test = case.make(seed)
    fitted = time.process_time()
    diagnosis = doctor(posterior, train, test)
    seconds = time.process_time() - fitted
    alarms = {finding.check: finding.status for finding in diagnosis.alarms}
    found = any(check in case.reasons for check in alarms)
    return {
        "run": case.name, "fault": case.fault, "seed": seed, "reasons": list(case.reasons),
        "alarms": alarms, "found": found, "ok": diagnosis.ok, "fit_seconds": fitted - start,
        "doctor_seconds": seconds,
        "findings": {f.check: [f.status, f.value, f.words] for f in diagnosis.alarms},
    }  # fmt: skip


def visits(cases: Sequence[Case], seeds: Sequence[int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    logging.getLogger("doxa").setLevel(logging.ERROR)
    return [visit(case, seed) for case, seed in zip(cases, seeds, strict=True)]


def confusion(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{planted fault: {runs, right reason, other reason only, no alarm}}."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        name = row["fault"] or "none (good)"
        counts = table.setdefault(name, {"runs": 0, "right": 0, "other": 0, "none": 0})
        counts["runs"] += 1
        kind = "none" if row["ok"] else "right" if row["found"] else "other"
        counts[kind] += 1
    return table


def markdown(table: dict[str, dict[str, int]]) -> str:
    lines = ["| planted fault | runs | alarm, right reason | alarm, other reason only | no alarm |"]
    lines.append("|---|---|---|---|---|")
    for name, counts in table.items():
        right = "–" if name.startswith("none") else str(counts["right"])
        lines.append(
            f"| {name} | {counts['runs']} | {right} | {counts['other']} | {counts['none']} |"
        )
    return "\n".join(lines)


def shares(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(broken runs found for the right reason, good runs with an alarm)."""
    broken = [row["found"] for row in rows if row["fault"]]
    good = [not row["ok"] for row in rows if not row["fault"]]
    return sum(broken) / max(1, len(broken)), sum(good) / max(1, len(good))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=3000, help="the seed of the first run")
    parser.add_argument("--every", type=int, default=1, help="only every so many runs")
    parser.add_argument("--out", type=Path, default=None, help="where to write; default: results/")
    asked = parser.parse_args()
    cases = [*GOOD, *BROKEN]
    chosen = range(0, len(cases), asked.every)
    rows = visits([cases[i] for i in chosen], [asked.first + i for i in chosen])
    right, false = shares(rows)
    for row in rows:
        wrong = not row["found"] if row["fault"] else not row["ok"]
        if wrong:
            print(f"wrong: {row['fault'] or 'good'}: {row['run']} (seed {row['seed']})")
            for check, (verdict, _, words) in row["findings"].items():
                print(f"    {check}: {verdict}: {words}")
    print(markdown(confusion(rows)))
    print(f"right reason: {right:.1%} of the broken; false alarms: {false:.1%} of the good")
    result = {
        "first_seed": asked.first, "right_reason": right, "false_alarms": false,
        "confusion": confusion(rows), "alpha": data.ALPHA,
        "cpu_seconds": {
            "fits": sum(r["fit_seconds"] for r in rows),
            "doctor": sum(r["doctor_seconds"] for r in rows),
        },
        "machine": platform.processor() or platform.machine(), "threads": 1,
        "python": platform.python_version(), "torch": torch.__version__,
        "doxa": doxa.__version__, "runs": rows,
    }  # fmt: skip
    path = asked.out or (RESULTS if asked.every == 1 else None)
    if path is not None:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
