"""Recalibrated and conformal posteriors are posteriors: fitted, saved, loaded, stacked; and the
jackknife+ over runs that left rows out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import doxa
from doxa import store
from doxa.errors import DataError, MethodError, StoreError
from doxa.evaluate.conformal import conformal, rank
from doxa.evaluate.recalibrate import recalibrate
from doxa.posterior import TransformedPosterior


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = rng(seed)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=g, dtype=torch.float64)
    return x, x[:, :1].sin() * 2 + 0.3 * (1 + x[:, 1:].abs()) * noise


def classes(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = rng(seed)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    logits = torch.stack([2 * x[:, 0], x[:, 1], -x[:, 0]], 1)
    return x, torch.multinomial(torch.softmax(logits, 1), 1, generator=g).squeeze(1)


@pytest.fixture(scope="module")
def regressor() -> Any:
    net = doxa.nets.mlp(2, 1, hidden=(8,)).double()
    return doxa.fit(net, numbers(60), "deep-ensemble", members=2, steps=100, standardize=True)


@pytest.fixture(scope="module")
def classifier() -> Any:
    net = doxa.nets.mlp(2, 3, hidden=(8,)).double()
    return doxa.fit(
        net, classes(60), "deep-ensemble", members=2, steps=100, likelihood="categorical"
    )


@store.register("test.sign-of-first")
@dataclass(frozen=True)
class SignOfFirst:
    """A division of rows that can be saved."""

    at: float = 0.0

    def __call__(self, x: Any) -> Any:
        return (x[:, 0] > self.at).long()


NUMBERS: dict[str, Any] = {
    "quantile": lambda p: recalibrate(p, numbers(50, 1), "quantile"),
    "variance": lambda p: recalibrate(p, numbers(50, 1), "variance"),
    "split": lambda p: conformal(p, numbers(50, 1)),
    "split, scaled": lambda p: conformal(p, numbers(50, 1), scaled=True),
    "cqr": lambda p: conformal(p, numbers(50, 1), kind="cqr"),
    "infinite": lambda p: conformal(p, numbers(5, 1), allow_infinite=True),
    "mondrian": lambda p: conformal(
        p, numbers(99, 1), 0.8, "mondrian", groups=SignOfFirst(0.1), score="cqr"
    ),
    "variance, then quantile, then split": lambda p: conformal(
        recalibrate(recalibrate(p, numbers(50, 1), "variance"), numbers(50, 2), "quantile"),
        numbers(50, 3),
    ),
}
CLASSES: dict[str, Any] = {
    **{
        kind: (lambda p, kind=kind: recalibrate(p, classes(90, 1), kind))
        for kind in ("temperature", "vector", "dirichlet", "isotonic", "histogram")
    },
    "lac": lambda p: conformal(p, classes(50, 1)),
    "aps": lambda p: conformal(p, classes(50, 1), kind="aps", seed=3),
    "aps, deterministic": lambda p: conformal(p, classes(50, 1), kind="aps", randomized=False),
    "by class": lambda p: conformal(p, classes(90, 1), 0.8, "mondrian", score="aps"),
    "temperature, then by class": lambda p: conformal(
        recalibrate(p, classes(50, 1)), classes(90, 2), 0.8, "mondrian"
    ),
}


def same(a: Any, b: Any) -> bool:
    """Bit by bit, through tuples, dataclasses and NaN."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def check_round_trip(posterior: Any, path: Path, ask: Any) -> None:
    posterior.save(path)
    again = doxa.load(path)
    assert isinstance(again, TransformedPosterior)
    left, right = posterior, again
    while isinstance(left, TransformedPosterior):
        assert type(left.transform) is type(right.transform)
        for field in fields(left.transform):  # type: ignore[arg-type]
            values = [getattr(each.transform, field.name) for each in (left, right)]
            assert same(*values), field.name
        left, right = left.base, right.base
    assert type(left) is type(right)
    assert all(map(torch.equal, ask(posterior), ask(again)))


@pytest.mark.parametrize("name", NUMBERS)
def test_transforms_of_numbers_survive_saving(name: str, regressor: Any, tmp_path: Path) -> None:
    x, y = numbers(20, 9)

    def ask(posterior: Any) -> list[Tensor]:
        p = posterior.predict(x)
        level = None if hasattr(p.form, "level") else 0.7
        return [*p.interval(level), p.mean, p.std, p.log_prob(y), p.quantile(0.3)]

    check_round_trip(NUMBERS[name](regressor), tmp_path / "run", ask)


@pytest.mark.parametrize("name", CLASSES)
def test_transforms_of_classes_survive_saving(name: str, classifier: Any, tmp_path: Path) -> None:
    x, y = classes(20, 9)

    def ask(posterior: Any) -> list[Tensor]:
        p = posterior.predict(x)
        level = None if hasattr(p.form, "level") else 0.7
        return [p.prediction_set(level), p.probs, p.entropy, p.mutual_information, p.log_prob(y)]

    check_round_trip(CLASSES[name](classifier), tmp_path / "run", ask)


@pytest.mark.slow
def test_another_process_loads_it_by_itself(classifier: Any, tmp_path: Path) -> None:
    """Nothing but doxa is imported there."""
    x, _ = classes(5, 9)
    posterior = CLASSES["temperature, then by class"](classifier)
    posterior.save(tmp_path / "run")
    store.write_artefact(tmp_path / "x", {"x": x}, {})
    code = f"""
import sys, doxa
from doxa import store
x = store.read_artefact({str(tmp_path / "x")!r})[0]["x"]
chosen = doxa.load({str(tmp_path / "run")!r}).predict(x).prediction_set()
sys.stdout.write(repr(chosen.long().tolist()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == repr(posterior.predict(x).prediction_set().long().tolist())


def test_a_function_that_is_not_registered_cannot_be_saved(regressor: Any, tmp_path: Path) -> None:
    posterior = conformal(regressor, numbers(60, 1), 0.8, "mondrian", groups=lambda x: x[:, 0] > 0)
    posterior.predict(numbers(5)[0])
    with pytest.raises(StoreError, match=r"groups\.by"):
        posterior.save(tmp_path / "run")


def test_a_column_of_x_divides_rows() -> None:
    """Errors are ten times as large where column 1 is 1."""
    g = rng(0)
    x = torch.randn(400, 2, generator=g, dtype=torch.float64)
    x[:, 1] = torch.randint(2, (400,), generator=g).double()
    y = x[:, :1] + 10 ** x[:, 1:] * 0.1 * torch.randn(400, 1, generator=g, dtype=torch.float64)
    base = doxa.fit(None, (x[:100], y[:100]), doxa.BayesianLinear())
    posterior = conformal(base, (x[100:], y[100:]), 0.9, "mondrian", groups=1)
    low, high = posterior.predict(x[:100]).interval()
    width = (high - low).flatten()
    ratio = width[x[:100, 1] == 1].mean() / width[x[:100, 1] == 0].mean()
    assert 7.0 < float(ratio) < 14.0
    with pytest.raises(DataError, match=r"group 2\.0"):
        posterior.predict(torch.full((1, 2), 2.0).double())
    with pytest.raises(DataError, match="no column 2"):
        conformal(base, (x[100:], y[100:]), 0.9, "mondrian", groups=2)


def test_dropout_and_other_methods_are_transformed_alike(tmp_path: Path) -> None:
    """A method that rewrites its network is not rewritten twice when loaded."""
    x, y = numbers(40)
    net = doxa.nets.mlp(2, 1, hidden=(8,)).double()
    for method in (doxa.MCDropout(p=0.1), doxa.Laplace(structure="diagonal")):
        base: Any = doxa.fit(net, (x, y), method, steps=20)
        posterior = conformal(base, numbers(30, 1), 0.9)
        posterior.save(tmp_path / base.kind)
        again = doxa.load(tmp_path / base.kind)
        assert all(map(torch.equal, again.predict(x).interval(), posterior.predict(x).interval()))
        assert torch.equal(again.functions(x, 2), base.functions(x, 2))
        assert posterior.status == base.status


@pytest.mark.slow
def test_fitted_networks_hold_their_level_end_to_end() -> None:
    """A straight line fitted to a sine, 150 times anew with 50 calibration and 200 new rows: mean
    coverage inside the 99 % band of its exact law, while the line's own intervals are far off."""
    hits, own = [], []
    for r in range(150):
        x, y = numbers(280, r)
        base: Any = doxa.fit(None, (x[:30], y[:30]), doxa.BayesianLinear(noise=0.2, prior_std=1.0))
        posterior = conformal(base, (x[30:80], y[30:80]), 0.9)
        for p, kept in ((posterior.predict(x[80:]), hits), (base.predict(x[80:]), own)):
            low, high = p.interval(0.9)
            kept.append(float(((low <= y[80:]) & (y[80:] <= high)).double().mean()))
    mean = rank(50, 0.9) / 51
    between = mean * (1 - mean) / 52
    half = 2.576 * ((between + (mean * (1 - mean) - between) / 200) / 150) ** 0.5
    assert abs(sum(hits) / 150 - mean) < half
    assert sum(own) / 150 < 0.6


def folds(n: int, k: int) -> list[Tensor]:
    """The training rows of each of k folds."""
    number = torch.arange(n) % k
    return [(number != i).nonzero().flatten() for i in range(k)]


def line(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = rng(seed)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g, dtype=torch.float64)


def fit_runs(data: tuple[Tensor, Tensor], rows: list[Tensor]) -> Any:
    method = doxa.BayesianLinear(noise=1.0, prior_std=10.0)
    return doxa.fit(None, data, method, runs=doxa.Runs(rows=rows))


def bootstraps(n: int, count: int, seed: int) -> list[Tensor]:
    return [torch.randint(n, (n,), generator=rng(1000 * seed + i)) for i in range(count)]


@pytest.mark.parametrize("how", ["folds", "bootstrap"])
def test_jackknife_plus_is_the_papers_interval(how: str) -> None:
    """Every row, run and order statistic by a loop."""
    n, level = 23, 0.8
    x, y = line(n, 0)
    rows = folds(n, 5) if how == "folds" else bootstraps(n, 25, 1)
    sweep = fit_runs((x, y), rows)
    new, _ = line(7, 1)
    low, high = conformal(sweep, (x, y), level, "jackknife+").predict(new).interval()
    at_rows = [run.predict(x).mean.flatten().numpy() for run in sweep]
    at_new = [run.predict(new).mean.flatten().numpy() for run in sweep]
    below, above = [], []
    for i in range(n):
        without = [r for r, seen in enumerate(rows) if i not in seen.tolist()]
        residual = abs(float(y[i]) - np.mean([at_rows[r][i] for r in without]))
        centre = np.mean([at_new[r] for r in without], axis=0)
        below.append(centre - residual)
        above.append(centre + residual)
    # ⌊(n + 1) α⌋ = ⌊4.8⌋ = 4 and ⌈(n + 1)(1 - α)⌉ = ⌈19.2⌉ = 20
    np.testing.assert_allclose(low.flatten().numpy(), np.sort(below, 0)[4 - 1], rtol=1e-9)
    np.testing.assert_allclose(high.flatten().numpy(), np.sort(above, 0)[20 - 1], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["folds", "bootstrap"])
def test_jackknife_plus_covers(how: str) -> None:
    """40 repetitions of 60 rows and 100 new ones: above the guarantee 1 - 2α, and 1 - α to within
    0.03, four times its standard error over repetitions."""
    hits = []
    for r in range(40):
        x, y = line(160, r)
        rows = folds(60, 6) if how == "folds" else bootstraps(60, 30, r)
        sweep = fit_runs((x[:60], y[:60]), rows)
        low, high = conformal(sweep, (x[:60], y[:60]), 0.9).predict(x[60:]).interval()
        hits.append(float(((low <= y[60:]) & (y[60:] <= high)).double().mean()))
    coverage = sum(hits) / 40
    assert coverage >= 0.8
    assert abs(coverage - 0.9) < 0.03


def test_jackknife_plus_over_networks_saves_and_loads(tmp_path: Path) -> None:
    x, y = numbers(40)
    net = doxa.nets.mlp(2, 1, hidden=(6,)).double()
    sweep: Any = doxa.fit(net, (x, y), "map", runs=doxa.Runs(rows=folds(40, 4)), steps=50)
    posterior = conformal(sweep, (x, y), 0.8)
    p = posterior.predict(x)
    means = torch.stack([run.predict(x).mean for run in sweep])
    torch.testing.assert_close(p.mean, means.mean(0))
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run").predict(x)
    assert all(map(torch.equal, again.interval(0.8), p.interval()))
    moments = posterior.predict(x, keep="moments")
    assert all(map(torch.equal, moments.interval(), p.interval()))


def test_jackknife_plus_needs_rows_that_were_left_out() -> None:
    x, y = line(30, 0)
    sweep = fit_runs((x, y), [torch.arange(20), torch.arange(10, 30)])
    with pytest.raises(DataError, match=r"10 of 30 rows \(the first is row 10\) were seen by ev"):
        conformal(sweep, (x, y))
    sweep = fit_runs((x, y), folds(30, 3))
    with pytest.raises(DataError, match=r"run 0 was fitted to row 29, but there are 20 rows"):
        conformal(sweep, (x[:20], y[:20]))
    with pytest.raises(DataError, match="at least 99"):
        conformal(sweep, (x, y), 0.99)
    low, high = conformal(sweep, (x, y), 0.99, allow_infinite=True).predict(x).interval()
    assert bool((low == -torch.inf).all() & (high == torch.inf).all())
    with pytest.raises(MethodError, match=r"sweep\[r\]"):
        conformal(sweep, (x, y), kind="split")


def test_jackknife_plus_is_for_numbers(tmp_path: Path) -> None:
    x, y = classes(30)
    net = doxa.nets.mlp(2, 3, hidden=(4,)).double()
    sweep: Any = doxa.fit(
        net, (x, y), "map", runs=doxa.Runs(rows=folds(30, 3)), steps=5, likelihood="categorical"
    )
    with pytest.raises(MethodError, match=r"for numbers.*categorical"):
        conformal(sweep, (x, y))


def test_jackknife_plus_by_group_is_a_loop_and_saves(tmp_path: Path) -> None:
    """Every row has the weight 1/size of its group; the runs that held out a part of a group have
    seen it."""
    n, level = 30, 0.7
    x, y = line(n, 0)
    group = torch.arange(n) // 5
    rows = [(group % 3 != k).nonzero().flatten() for k in range(3)]
    rows.append(torch.arange(2, n))  # without two of the five rows of group 0
    sweep = fit_runs((x, y), rows)
    new, _ = line(4, 1)
    posterior = conformal(sweep, (x, y), level, groups=group)
    low, high = posterior.predict(new).interval()
    at_rows = [run.predict(x).mean.flatten().numpy() for run in sweep]
    at_new = [run.predict(new).mean.flatten().numpy() for run in sweep]
    sides: Any = {-1: [], 1: []}
    for i in range(n):
        r = int(group[i]) % 3
        residual = abs(float(y[i]) - at_rows[r][i])
        for sign, each in sides.items():
            each.append(sign * at_new[r] + residual)
    # weights 1/(7 · 5): at least .7 · 35 = 24.5, so the 25th smallest
    np.testing.assert_allclose(-low.flatten().numpy(), np.sort(sides[-1], 0)[24], rtol=1e-9)
    np.testing.assert_allclose(high.flatten().numpy(), np.sort(sides[1], 0)[24], rtol=1e-9)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run").predict(new).interval()
    assert all(map(torch.equal, again, (low, high)))
    with pytest.raises(DataError, match="6 groups"):
        conformal(sweep, (x, y), 0.9, groups=group)
    with pytest.raises(DataError, match="all rows of its group"):
        conformal(fit_runs((x, y), folds(n, 5)), (x, y), level, groups=group)


def test_fits_in_order_of_time_have_no_guarantee(caplog: pytest.LogCaptureFixture) -> None:
    x, y = numbers(80)
    net = doxa.nets.mlp(2, 1, hidden=(6,)).double()
    late: Any = doxa.fit(net, (x[:60], y[:60]), "map", time=range(60), steps=20)
    with pytest.raises(MethodError, match="fitted with time="):
        conformal(late, (x[60:], y[60:]), 0.8)
    group = torch.arange(80) // 2
    grouped: Any = doxa.fit(net, (x[:60], y[:60]), "map", groups=group[:60], steps=20)
    with caplog.at_level("WARNING", "doxa"):
        conformal(grouped, (x[60:], y[60:]), 0.8, groups=group[60:])
        assert "groups" not in caplog.text
        conformal(grouped, (x[60:], y[60:]), 0.8)
    assert "may not hold for new groups" in caplog.text
