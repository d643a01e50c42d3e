"""Groups and times on simulated tables: coverage for new groups, and columns that leak.

    python -m benchmarks.groups [fits|leaks] [--out FILE] [--seeds 10] [--limit CELLS] [--table]

`fits`: 90 persons with eight rows each. Three inputs belong to the person, so that a network can
recognise it; the target has an intercept and a slope of each person. In `unequal` a person has 2
to 20 rows, in `nothing` persons do not differ. A fit, with `groups=` and without, is scored on
1,000 new persons with two rows each: the share inside 90 % intervals and the log score, beside what
the fit reports. `drift`: 600 rows whose level is a random walk, with the time as an input; the new
rows are the 60 that follow, and the fits are with `time=` and without.

`leaks`: what `doxa fit` says about a table without `--group` and `--time`. A table leaks if its
persons differ and inputs identify them (as above; with classes as the target; with whole numbers
as names), or if its level is a random walk and it has a column of dates. The others do not: persons
who do not differ, persons who differ but are not identified by inputs, a category with an effect,
dates without a trend, three columns of names at once, and heavy tails. Counted are tables in which
a column is named.

Results are added to FILE (benchmarks/results/groups.jsonl), one line of JSON per cell; cells that
are there are not computed again, so that a run can be continued. The summary is written to a page
beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import doxa
from doxa.tables.schema import infer_schema
from doxa.tabular import leaking_columns

RESULTS = Path(__file__).parent / "results" / "groups.jsonl"
METHODS = ("deep-ensemble", "map", "laplace", "bootstrap", "mean-field")
PERSONS, VISITS, ROWS, LATER = 90, 8, 600, 60
Array = np.ndarray[Any, Any]
Rows = tuple[Array, Array, Array]  # x, y, and the group or time


def persons(
    random: np.random.Generator, visits: Array, spread: float = 1.0, identified: bool = True
) -> Rows:
    """y = x₀ + z₀/2 + a + b x₁ + noise, with a person's own z, a and b."""
    who = np.arange(len(visits)).repeat(visits)
    z = random.normal(size=(len(visits), 3))
    a, b = spread * random.normal(size=len(visits)), 0.5 * spread * random.normal(size=len(visits))
    x = random.normal(size=(len(who), 2))
    y = x[:, 0] + a[who] + b[who] * x[:, 1] + 0.3 * random.normal(size=len(who))
    if not identified:
        return x, y, who
    return np.column_stack([x, z[who]]), y + 0.5 * z[who, 0], who


def drift(random: np.random.Generator, rows: int, step: float = 0.07) -> Rows:
    """y = x₀ + a random walk + noise; the time is an input."""
    x = random.normal(size=(rows, 2))
    level = step * random.normal(size=rows).cumsum()
    time = np.arange(rows, dtype=float)
    return np.column_stack([x, time]), x[:, 0] + level + 0.5 * random.normal(size=rows), time


def sizes(random: np.random.Generator, unequal: bool) -> Array:
    return random.integers(2, 21, PERSONS) if unequal else np.full(PERSONS, VISITS)


def fit_cell(kind: str, method: str, known: str, seed: int) -> dict[str, Any]:
    """One fit, its own scores and those on new rows."""
    random = np.random.default_rng([seed, 1])
    if kind == "drift":
        x, y, by = drift(random, ROWS + LATER)
        new, (x, y, by) = (x[ROWS:], y[ROWS:]), (x[:ROWS], y[:ROWS], by[:ROWS])
        options = {"time": by}
    else:
        spread = 0.0 if kind == "nothing" else 1.0
        x, y, by = persons(random, sizes(random, kind == "unequal"), spread)
        new = persons(random, np.full(1000, 2), spread)[:2]
        options = {"groups": by}
    net = doxa.nets.mlp(x.shape[1], 1)
    data = (x.astype(np.float32), y.astype(np.float32))
    given: Any = options if known == "with" else {}
    posterior = doxa.fit(net, data, method, standardize=True, progress=False, seed=seed, **given)
    p, truth = posterior.predict(new[0].astype(np.float32)), torch.as_tensor(new[1])
    low, high = (bound.reshape(-1).double() for bound in p.interval(0.9))
    held_out = posterior.diagnostics["held_out"]
    return {
        "status": str(posterior.status), "coverage": held_out["coverage"],
        "score": held_out["log_prob"], "groups": held_out.get("groups"),
        "new_coverage": float(((truth >= low) & (truth <= high)).double().mean()),
        "new_score": float(p.log_prob(truth.reshape(p.mean.shape).float()).double().mean()),
    }  # fmt: skip


def named(rows: Rows, name: str = "person", **more: Any) -> pd.DataFrame:
    x, y, who = rows
    frame = pd.DataFrame({f"x{k}": x[:, k] for k in range(x.shape[1])})
    frame[name] = [f"p{k:03}" for k in who]
    return frame.assign(y=y, **more)


def dates(random: np.random.Generator, step: float) -> pd.DataFrame:
    x, y, time = drift(random, ROWS, step)
    days = pd.Timestamp("2022-01-01") + pd.to_timedelta(time, unit="D")
    return pd.DataFrame({"x0": x[:, 0], "x1": x[:, 1], "day": days.strftime("%Y-%m-%d"), "y": y})


def equal(random: np.random.Generator) -> Array:
    return sizes(random, False)


def category(random: np.random.Generator) -> pd.DataFrame:
    frame = named(persons(random, equal(random), 0.0))
    town = random.integers(0, 30, len(frame))
    effect = random.normal(size=30)
    return frame.drop(columns="person").assign(
        town=[f"town {k}" for k in town], y=frame["y"] + effect[town]
    )


def labels(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(y=np.where(frame["y"] > 0, "yes", "no"))


def numbered(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(person=1000 + 7 * frame["person"].str[1:].astype(int)).rename(
        columns={"person": "person_id"}
    )


def three_names(random: np.random.Generator) -> pd.DataFrame:
    frame = named(persons(random, equal(random), 0.0))
    for name in ("site", "device"):
        frame[name] = [f"{name} {k}" for k in random.integers(0, 60, len(frame))]
    return frame


def heavy_tailed(random: np.random.Generator) -> pd.DataFrame:
    frame = named(persons(random, equal(random), 0.0))
    return frame.assign(y=frame["y"] + random.standard_t(3, len(frame)))


LEAKING: dict[str, Callable[[np.random.Generator], pd.DataFrame]] = {
    "persons": lambda r: named(persons(r, equal(r))),
    "unequal": lambda r: named(persons(r, sizes(r, True))),
    "numbers as names": lambda r: numbered(named(persons(r, equal(r)))),
    "classes": lambda r: labels(named(persons(r, equal(r), 2.0))),
    "random walk": lambda r: dates(r, 0.07),
}
NOT_LEAKING: dict[str, Callable[[np.random.Generator], pd.DataFrame]] = {
    "equal persons": lambda r: named(persons(r, equal(r), 0.0)),
    "equal persons, classes": lambda r: labels(named(persons(r, equal(r), 0.0))),
    "not identified": lambda r: named(persons(r, equal(r), 1.0, identified=False)),
    "category": category,
    "no trend": lambda r: dates(r, 0.0),
    "three names": three_names,
    "heavy tails": heavy_tailed,
}


def leak_cell(kind: str, seed: int) -> dict[str, Any]:
    """The columns that are named for one table."""
    frame = (LEAKING | NOT_LEAKING)[kind](np.random.default_rng([seed, 2]))
    schema = infer_schema(frame, "y")
    x, _ = schema.features(frame)
    found = leaking_columns(frame, schema, x, schema.targets(frame), 0)
    return {"named": [leak["column"] for leak in found], "loss": [leak["loss"] for leak in found]}


def cells(seeds: int, parts: tuple[str, ...]) -> Iterator[tuple[list[Any], Callable[..., Any]]]:
    """The key of each cell, seed by seed, and its function."""
    for seed in range(seeds):
        if "fits" in parts:
            kinds = ("persons", "unequal", "nothing", "drift")
            for kind, method, known in itertools.product(kinds, METHODS, ("with", "without")):
                yield ["fits", kind, method, known, seed], fit_cell
    for seed in range(4 * seeds):
        if "leaks" in parts:
            for kind in (*LEAKING, *NOT_LEAKING):
                yield ["leaks", kind, seed], leak_cell


def summary(found: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """The page: means over seeds."""
    fits, leaks = defaultdict(list), defaultdict(list)
    for key, cell in found.items():
        if key[0] == "fits":
            fits[key[1:4]].append(cell)
        else:
            leaks[key[1]].append(bool(cell["named"]))
    lines = [
        "# Groups and times", "",
        "`python -m benchmarks.groups`. Coverage of 90 % intervals and log score of new persons "
        "(for drift of the rows that follow), and in parentheses what the fit reported; means over "
        "seeds. `with`: `groups=` or `time=` was given.", "",
        "| table | method | | coverage | score | not ok | fits |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (kind, method, known), each in sorted(fits.items()):
        mean = {k: np.mean([c[k] for c in each]) for k in
                ("new_coverage", "coverage", "new_score", "score")}  # fmt: skip
        bad = sum(c["status"] != "ok" for c in each)
        coverage = f"{mean['new_coverage']:.3f} ({mean['coverage']:.3f})"
        score = f"{mean['new_score']:.2f} ({mean['score']:.2f})"
        lines.append(
            f"| {kind} | {method} | {known} | {coverage} | {score} | {bad} | {len(each)} |"
        )
    lines += ["", "Tables in which `doxa fit` names a column:", "",
              "| table | leaks | named | tables |", "|---|---|---|---|"]  # fmt: skip
    for group, word in ((LEAKING, "yes"), (NOT_LEAKING, "no")):
        whole = [leaks[kind] for kind in group if leaks[kind]]
        for kind in group:
            if leaks[kind]:
                lines.append(f"| {kind} | {word} | {sum(leaks[kind])} | {len(leaks[kind])} |")
        if whole:
            hits, total = sum(map(sum, whole)), sum(map(len, whole))
            lines.append(f"| all | {word} | {hits / total:.1%} | {total} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", nargs="?", choices=("fits", "leaks"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=10**9)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("doxa").setLevel(logging.ERROR)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    if arguments.out.exists():
        for line in arguments.out.read_text(encoding="utf-8").splitlines():
            cell = json.loads(line)
            found[tuple(cell.pop("key"))] = cell
    parts = (arguments.part,) if arguments.part else ("fits", "leaks")
    left = 0 if arguments.table else arguments.limit
    for key, compute in cells(arguments.seeds, parts):
        if tuple(key) in found:
            continue
        if left <= 0:
            break
        left -= 1
        cell = found[tuple(key)] = compute(*key[1:])
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **cell}) + "\n")
    page = summary(found)
    arguments.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
