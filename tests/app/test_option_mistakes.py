"""Mistakes in options, runs and places: exit code 2 and a line that names what is wrong, or a
result that the pages describe. None is a traceback, none is silent, and nothing is left behind.

Mistakes in tables, and the commonest in options, are in `test_cli.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import doxa
from doxa.app.cli import app

pd = pytest.importorskip("pandas")

NETS = """
from torch import nn
thing = 3
def three(inputs, outputs): return nn.Linear(inputs, 3)
def one(inputs): return nn.Linear(inputs, 1)
def number(inputs, outputs): return 5
def wide(inputs, outputs): return nn.Linear(inputs + 1, outputs)
def fine(inputs, outputs): return nn.Linear(inputs, outputs)
def broken(inputs, outputs): raise RuntimeError("boom")
"""


def shell(*words: object) -> tuple[int, str]:
    """The exit code, and what was said; an exception that is not an exit is the test's failure."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())  # out of typer's box
    return result.exit_code, said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, runs, damaged runs and a module of networks."""
    there = tmp_path_factory.mktemp("mistakes")
    rng = np.random.default_rng(0)
    numbers = pd.DataFrame(rng.normal(size=(60, 3)), columns=["a", "b", "y"])
    kinds = numbers[["a", "b"]].assign(kind=rng.choice(["k", "l", "m"], 60))
    tables = {
        "n": numbers, "c": kinds, "other": numbers + 1, "few": numbers.head(12),
        "counts": numbers.assign(y=rng.poisson(30, 60)), "unaimed": numbers[["a", "b"]],
        "unseen": kinds.assign(kind="zebra"),
    }  # fmt: skip
    for name, frame in tables.items():
        frame.to_csv(there / f"{name}.csv", index=False)
    (there / "nets_of_mine.py").write_text(NETS)
    (there / "nets_unwritten.py").write_text("def f(:\n")
    assert shell("fit", there / "n.csv", "-t", "y", "-m", "linear", "-o", there / "run")[0] == 0
    words = ["fit", there / "c.csv", "-t", "kind", "-m", "map", "--steps", 2, "--hidden", 4]
    assert shell(*words, "-o", there / "classifier")[0] == 0
    words = ["calibrate", there / "run", there / "other.csv", "--conformal", 0.9]
    assert shell(*words, "-o", there / "conformal")[0] == 0
    doxa.fit(None, (numbers[["a", "b"]].to_numpy(), numbers["y"].to_numpy()), "linear").save(
        there / "python"
    )
    damage(there)
    (there / "empty").mkdir()
    return there


def damage(there: Path) -> None:
    for name in ("truncated", "broken", "changed", "newer", "partial"):
        shutil.copytree(there / "run", there / name)
    tensors = there / "truncated" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    (there / "broken" / "meta.json").write_text("{")
    facts = there / "changed" / "meta.json"
    facts.write_text(facts.read_text().replace("linear", "lineal", 1))
    (there / "partial" / "tensors.safetensors").unlink()
    facts, sums = (there / "newer" / name for name in ("meta.json", "checksums.sha256"))
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"format": 99}))
    digest = hashlib.sha256(facts.read_bytes()).hexdigest()
    sums.write_text(re.sub(r"\w+  meta.json", f"{digest}  meta.json", sums.read_text()))


FIT = "fit n.csv -t y -m map --steps 2 --hidden 4 -o out"
KINDS = "fit c.csv -t kind -m map --steps 2 --hidden 4 -o out"
NUTS = "fit n.csv -t y -m nuts -o out"
COMPARE = "compare n.csv -t y --methods map --steps 2 --splits 1 --reference none --hidden 4"

MISTAKES = {
    # commands and settings
    "fitt n.csv": r"No such command 'fitt'\. Did you mean 'fit'",
    "fit": r"Missing (argument|option)",
    "fit n.csv": r"Missing option '--target'",
    f"{FIT} more.csv": r"unexpected extra argument.*more\.csv",
    f"{FIT} --sped 3": r"No such option: --sped .*--seed",
    f"{FIT} --set p=1": r"'map' has no setting 'p'; it has no settings",
    f"{NUTS} --set draws=many": r"draws must be a whole number, at least 1, not 'many'",
    f"{NUTS} --set draws=-3": r"draws must be a whole number, at least 1, not -3",
    f"{NUTS} --set max_depth=99": r"from 1 to 20, not 99",
    f"{NUTS} --set draws=1 --set draws=2": r"--set draws is given twice, as 1 and as 2",
    # numbers
    f"{FIT} --hidden 0": r"widths must be whole numbers, at least 1",
    f"{FIT} --members -2": r"'--members': Input should be greater than or equal to 1",
    f"{FIT} --members two": r"'--members': Input should be a valid integer",
    f"{FIT} --steps 0": r"'--steps': Input should be greater than or equal to 1",
    f"{FIT} --batch-size -1": r"'--batch-size': Input should be greater",
    f"{FIT} --lr -0.1": r"lr must be a positive number, not -0\.1",
    f"{FIT} --lr nan": r"lr must be a positive number, not nan",
    f"{FIT} --seed -1": r"'--seed': Input should be greater than or equal to 0",
    f"{FIT} --validation 1.5": r"'--validation': Input should be less than",
    # what is believed
    f"{KINDS} --likelihood gaussian": r"column 'kind', .* is not a number",
    f"{FIT} --likelihood bernoulli": r"60 classes .*--likelihood gaussian",
    f"{FIT} --net nets_of_mine": r"--net takes module:builder, such as mynets:wide",
    f"{FIT} --net nets_of_mine:thing": r"called as thing\(2, 1\).*not callable",
    f"{FIT} --net nets_of_mine:one": r"nets_of_mine:one: called as one\(2, 1\).* 1 positional",
    f"{FIT} --net nets_of_mine:number": r"gave int, not a torch\.nn\.Module",
    f"{FIT} --net nets_of_mine:three": r"outputs of shape \[N, 3\]",
    f"{FIT} --net nets_of_mine:wide": r"the network fails on one row of x",
    f"{FIT} --net nets_of_mine:broken": r"called as broken\(2, 1\).*boom",
    f"{FIT} --net nets_unwritten:f": r"cannot import 'nets_unwritten': invalid syntax",
    "fit n.csv -t y -m linear --net nets_of_mine:fine -o out": r"'linear' .*remove --net",
    f"{FIT} --device gpu": r"device 'gpu' cannot be used here",
    # rows held out
    f"{FIT} --split 1": r"--split must be between 0 and 1, not 1",
    f"{FIT} --split nan": r"--split must be between 0 and 1, not nan",
    f"{FIT} --split 0.99": r"60 rows: 59 to test and 0 to calibrate on leave too few",
    f"{FIT} --split 0.2 --test other.csv": r"--test or --split, not both",
    f"{FIT} --test n.csv": r"--test n\.csv is the file that is fitted; --split 0\.2",
    f"{FIT} --test unaimed.csv": r"--test unaimed\.csv: no column 'y'; known: a, b",
    f"{KINDS} --test unseen.csv": r"--test unseen\.csv: .*class 'zebra' was not seen",
    # calibration
    f"{FIT} --calibrate temprature": r"'temprature'; did you mean 'temperature'",
    f"{FIT} --calibrate temperature": r"'temperature' is not for numbers.*quantile, variance",
    f"{KINDS} --calibrate quantile": r"'quantile' is not for classes.*temperature",
    "fit few.csv -t y -m map -o out --calibrate": r"2 rows are too few to calibrate on: quantile",
    "fit counts.csv -t y -m map --likelihood poisson --calibrate -o out": r"counts.*--conformal",
    f"{FIT} --conformal 1.5": r"--conformal must be between 0 and 1, not 1\.5",
    f"{FIT} --conformal ninety": r"'--conformal': Input should be a valid number",
    f"{FIT} --conformal 0.99": r"12 rows are too few .* level of 0\.99 needs 99 at least",
    f"{FIT} --conformal-kind aps": r"--conformal-kind needs --conformal",
    f"{FIT} --conformal 0.9 --conformal-kind apps": r"'apps'; did you mean 'aps'",
    f"{FIT} --calibration-share 0.3": r"needs --calibrate or --conformal",
    f"{FIT} --calibrate --calibration-share 1.2": r"--calibration-share must be between 0 and 1",
    "calibrate run n.csv -o out": r"run was fitted to n\.csv itself.*rows that the fit has",
    "calibrate conformal few.csv -o out": r"conformal already, at level 0\.9",
    "calibrate run few.csv -o out": r"12 rows are too few .* needs 20 at least",
    "calibrate run unaimed.csv -o out": r"no column 'y'",
    "calibrate run other.csv -o run": r"run exists already",
    "calibrate classifier other.csv -m variance -o out": r"'variance' is not for classes",
    # runs
    "predict empty n.csv": r"empty is no run; give the folder that doxa fit saved",
    "predict n.csv n.csv": r"n\.csv is no run",
    "predict truncated n.csv": r"tensors\.safetensors does not match its checksum: it was",
    "predict broken n.csv": r"meta\.json does not match its checksum",
    "predict changed n.csv": r"meta\.json does not match its checksum.*use another copy",
    "predict newer n.csv": r"has format 99, this doxa reads 1: update doxa",
    "predict partial n.csv": r"is damaged: tensors\.safetensors is missing",
    "predict python n.csv": r"was not fitted from a table",
    "predict run n.csv --level 95%": r"'--level': Input should be a valid number",
    "predict run n.csv -o n.csv/p.csv": r"n\.csv is a file, not a folder",
    "predict run n.csv --net nets_of_mine:fine": r"without a network: remove --net",
    "predict classifier n.csv --net nets_of_mine:fine": r"structure is not the saved one",
    "predict conformal n.csv --level 0.5": r"calibrated for level 0\.9.*without a level",
    "report newer": r"has format 99",
    "report run --test none.csv": r"none\.csv does not exist",
    # places
    f"{FIT} -o n.csv/run": r"cannot be made in .*n\.csv: it is a file",
    f"{FIT} -o /proc/run": r"/proc/run cannot be made in /proc",
    "demo --out n.csv": r"n\.csv is a file; --out is a folder",
    # comparisons
    "compare n.csv -t y --methods map,map": r"--methods names 'map' twice",
    "compare c.csv -t kind --methods map,linear": r"'linear' is for regression only",
    f"{COMPARE} --splits 0": r"'--splits': Input should be greater",
    f"{COMPARE} --reference nuts": r"'auto', 'hmc' or 'none', not 'nuts'",
    f"{COMPARE} --keep laplace -o out": r"--keep 'laplace' is not among the compared",
    f"{COMPARE} --keep best": r"--keep needs --out",
    f"{COMPARE} --keep best -o t.csv": r"--out is the folder of the run.*--table t\.csv",
    f"{COMPARE} --keep best -o run": r"run exists already",
    "bench uicc": r"no benchmark 'uicc'; known: uci",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = [p for p in sorted(place.rglob("*")) if "__pycache__" not in p.parts]
    code, said = shell(*command.split())
    assert code == 2, said
    assert re.search(MISTAKES[command], said), said
    assert [p for p in sorted(place.rglob("*")) if "__pycache__" not in p.parts] == before


DOCUMENTED = {
    f"{COMPARE} -o table.csv": r"held-out scores.*map.*table written to table\.csv",
    "predict run n.csv -o p.csv": r"60 predictions written to p\.csv",
    "report run --no-diagnose --out r.html": r"report written to r\.html",
    f"{FIT} --hidden ,": r"saved to out",  # no hidden layer: a linear network
    "--help": r"calibrate .*compare",
}


@pytest.mark.parametrize("command", DOCUMENTED)
def test_what_looks_like_a_mistake_and_is_none(command, place, monkeypatch, tmp_path) -> None:
    """One method to compare, a file without the target, a report without rows."""
    for name in ("n.csv", "run"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    code, said = shell(*command.split())
    assert code == 0, said
    assert re.search(DOCUMENTED[command], said), said
