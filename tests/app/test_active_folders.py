"""A campaign's folder and sheet come back from other hands and programs: nothing in them is run,
no file outside is touched, and no answer is lost."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import doxa

from doxa.decide.active.labels import load, save
from doxa.tables.files import read_table

pd = pytest.importorskip("pandas")

QUICK = ("--method", "map", "--by", "max_entropy", "--steps", 2, "--hidden", 4, "--count", 3)
NAMES = ("=1+1", "-a", "@x", "-3.5", "+b", "'tis", "'=1+1", "''-a", "plain")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A campaign of forty rows, six of them labelled, that has asked for three."""
    x = np.random.default_rng(0).normal(size=(40, 2)).round(3)
    kind = np.where(x[:, 0] > 0, "cat", "dog").astype(object)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": kind})
    frame.loc[6:, "kind"] = None
    frame.to_csv(tmp_path / "pool.csv", index=False)
    where = tmp_path / "campaign"
    doxa("active", "start", tmp_path / "pool.csv", "--target", "kind", "--out", where, *QUICK)
    doxa("active", "next", where)
    return where


def lines_of(sheet: Path) -> list[dict[str, str]]:
    with sheet.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def write(
    sheet: Path, rows: list[dict[str, str]], sep: str = ",", encoding: str = "utf-8",
    columns: list[str] | None = None,
) -> None:  # fmt: skip
    with sheet.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, columns or list(rows[0]), delimiter=sep)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("sep", "encoding", "order"),
    [(";", "utf-8", 1), ("\t", "utf-16", 1), (",", "utf-8-sig", -1), (";", "utf-8-sig", -1)],
)
def test_a_half_filled_sheet_of_a_spreadsheet_program_stays(
    folder: Path, sep: str, encoding: str, order: int
) -> None:
    """With its separator, its mark and its columns moved and added to; and it is taken."""
    sheet = folder / "to_label.csv"
    rows = lines_of(sheet)
    rows[1]["kind"] = "dog"
    columns = [*list(rows[0])[::order], "notes"]
    rows[0]["notes"] = "which one?"
    write(sheet, rows, sep, encoding, columns)
    before = sheet.read_bytes()
    assert "still open" in doxa("active", "next", folder)
    assert sheet.read_bytes() == before
    assert "1 labels entered" in doxa("active", "label", folder, "--partial")
    assert "still open" in doxa("active", "next", folder)
    assert "2 wait for one" in doxa("active", "status", folder)


def test_a_sheet_whose_answers_cannot_be_read_is_kept(folder: Path) -> None:
    sheet = folder / "to_label.csv"
    rows = lines_of(sheet)
    first = rows[0]["line"]
    answered = [row | {"kind": "cat"} for row in rows]
    other = next(str(n) for n in range(8, 42) if str(n) not in {row["line"] for row in rows})

    def kept(words: str) -> None:
        before = sheet.read_bytes()
        assert words in doxa("active", "next", folder, code=2)
        assert sheet.read_bytes() == before

    write(sheet, [{"line": row["line"], "Kind of animal": "cat"} for row in rows])
    kept("no column 'kind'")
    write(sheet, answered[1:])
    kept(f"line {first} is not in the sheet")
    write(sheet, [*answered, answered[0] | {"line": other}])
    kept(f"line {other} was not asked about")
    write(sheet, [answered[0] | {"line": "999"}])
    kept("no line '999'")
    sheet.write_bytes(b"PK\x03\x04 a workbook")
    kept("cannot be decompressed")
    write(sheet, answered)
    doxa("active", "label", folder)
    write(sheet, [row | {"kind": "dog"} for row in answered])  # changed after it was taken
    kept(f"line {first} was answered 'cat', but the sheet has 'dog'")
    assert "no row is open" in doxa("active", "label", folder, code=2)
    assert "3 labels entered, 9 in all" in doxa("active", "label", folder, "--correct")
    assert "3 rows to label, by max_entropy, after 9 labels" in doxa("active", "next", folder)
    found = load(folder)
    assert found is not None
    assert [found[0][0].answers[int(row["line"]) - 2] for row in rows] == ["dog"] * 3


def test_one_answer_is_corrected_while_others_are_open(folder: Path) -> None:
    waiting = [row["line"] for row in lines_of(folder / "to_label.csv")]
    old = doxa("active", "status", folder)
    found = load(folder)
    assert found is not None
    other = "dog" if found[0][0].answers[0] == "cat" else "cat"
    label = ("active", "label", folder, "--answer", f"2={other}")
    assert "--correct replaces it" in doxa(*label, code=2)
    assert "1 labels entered, 6 in all, 3 still open" in doxa(*label, "--correct")
    assert doxa("active", "status", folder) != old
    assert [row["line"] for row in lines_of(folder / "to_label.csv")] == waiting


def campaign(tmp_path: Path, sep: str = ",") -> tuple[Path, dict[str, str], Any]:
    """Names that a spreadsheet would run, as ids, categories, headers and labels: the folder, what
    each row's label is, and the table."""
    count = 8 * len(NAMES)
    ids = [f"{NAMES[i % len(NAMES)]}{i:03}" if i >= len(NAMES) else NAMES[i] for i in range(count)]
    truth = [NAMES[(i // 2) % len(NAMES)] for i in range(count)]
    frame = pd.DataFrame({
        "@id": ids, "=size": np.random.default_rng(1).normal(size=count).round(3),
        "-group": [NAMES[i % len(NAMES)] for i in range(count)], "+kind": truth,
    })  # fmt: skip
    assert len(set(ids)) == count
    shown = frame.assign(**{"+kind": [t if i < 36 else None for i, t in enumerate(truth)]})
    shown.to_parquet(tmp_path / "pool.parquet", index=False)
    frame.drop(columns="+kind").to_parquet(tmp_path / "new.parquet", index=False)
    where = tmp_path / "campaign"
    doxa(
        "active", "start", tmp_path / "pool.parquet", "--target", "+kind", "--index", "@id",
        "--out", where, *QUICK, "--count", 12,
    )  # fmt: skip
    return where, dict(zip(ids, truth, strict=True)), frame


def is_safe(cell: str) -> bool:
    """A spreadsheet program does not run it."""
    try:
        float(cell)
        return True
    except ValueError:
        return not cell.startswith(("=", "+", "-", "@", "\t", "\r"))


def test_names_that_spreadsheets_would_run_come_back_as_they_were(tmp_path: Path) -> None:
    folder, truth, frame = campaign(tmp_path)
    doxa("active", "next", folder)
    sheet = folder / "to_label.csv"
    with sheet.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert all(is_safe(cell) for cells in (header, *rows) for cell in cells)
    shown = {name.lstrip("'") for name in header}
    assert shown == {"@id", "=size", "-group", "+kind"}
    book = load(folder)
    assert book is not None
    asked = [frame["@id"][row] for row in book[0][0].asked]
    written = dict(zip([cells[0] for cells in rows], asked, strict=True))
    with sheet.open("w", newline="", encoding="utf-8-sig") as file:  # an edit, saved with ;
        writer = csv.writer(file, delimiter=";")
        writer.writerow(header[::-1])
        for cells in rows:
            label = truth[written[cells[0]]]
            typed = f"'{label}" if label == "'=1+1" else label  # as a sheet would have it
            writer.writerow([typed, *cells[:-1][::-1]])
    doxa("active", "label", folder)
    found = load(folder)
    assert found is not None
    assert {found[0][0].answers[i] for i in range(36)} == set(NAMES)
    for row, label in found[0][0].answers.items():
        assert label == truth[frame["@id"][row]]
    doxa("active", "next", folder)
    out = tmp_path / "predictions.csv"
    doxa("predict", folder / "run", tmp_path / "new.parquet", "--out", out)
    with out.open(newline="") as file:
        cells = list(csv.reader(file))
    assert all(is_safe(cell) for line in cells for cell in line)
    back = read_table(out, index="@id").frame
    assert list(back.index) == list(frame["@id"])
    assert set(back["predicted"]) <= set(NAMES)
    assert {f"p({name})" for name in NAMES} <= set(back.columns)
    last = load(folder)
    assert last is not None
    name = frame["@id"][last[0][0].asked[0]]
    flags = [f"--answer={name}=@x", "--partial"]  # whose name may hold = itself
    assert "1 labels entered" in doxa("active", "label", folder, *flags)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "import pathlib\nfrom torch import nn\npathlib.Path('ran').touch()\n"
        "def build(inputs, outputs):\n    return nn.Linear(inputs, outputs)\n"
    )
    (tmp_path / "trap_of_a_folder.py").write_text(code)
    return tmp_path / "ran"


def changed(folder: Path, **facts: Any) -> None:
    """As someone who sends the folder may write it, checksums and all."""
    found = load(folder)
    assert found is not None
    save(folder, found[0], found[1] | facts)


def test_what_a_folder_names_is_not_imported(folder: Path, trap: Path) -> None:
    sheet = folder / "to_label.csv"
    write(sheet, [row | {"kind": "cat"} for row in lines_of(sheet)])
    doxa("active", "label", folder)
    found = load(folder)
    assert found is not None
    net = "trap_of_a_folder:build"
    changed(folder, plan=found[1]["plan"] | {"net": net})
    for words in (("next",), ("status",)):
        doxa("active", words[0], folder, code=2 if words == ("next",) else 0)
        assert not trap.exists()
        assert "trap_of_a_folder" not in sys.modules
    assert f"pass --net {net}" in doxa("active", "next", folder, code=2)
    assert "is another network" in doxa("active", "next", folder, "--net", "other:build", code=2)
    assert not trap.exists()
    try:
        assert "after 9 labels" in doxa("active", "next", folder, "--net", net)
        assert trap.exists()  # as the command line asked
    finally:
        sys.modules.pop("trap_of_a_folder", None)


def test_a_network_that_the_folder_does_not_know_is_refused(folder: Path, trap: Path) -> None:
    said = doxa("active", "next", folder, "--net", "trap_of_a_folder:build", code=2)
    assert "remove --net" in said
    assert not trap.exists()


def test_rows_outside_the_folder_are_not_read(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "pool.csv"  # the same bytes: the checksum holds
    assert outside.read_bytes() == (folder / "pool.csv").read_bytes()
    shutil.copytree(folder, folder / "inner")
    for name in (str(outside), "../pool.csv", "inner/pool.csv", "..", ".", "", 3, None):
        changed(folder, file=name)
        doxa("active", "status", folder, code=2)
    changed(folder, file="pool.csv")
    doxa("active", "status", folder)
    (folder / "pool.csv").unlink()
    (folder / "pool.csv").symlink_to(outside)
    assert "has changed since the session began" in doxa("active", "status", folder, code=2)


def test_facts_that_are_not_as_they_were_written_are_one_error(folder: Path) -> None:
    found = load(folder)
    assert found is not None
    books, facts = found
    plan, asked = facts["plan"], facts["asked"]
    for bad in (
        {"plan": plan | {"steps": "2"}}, {"plan": plan | {"unknown": 1}}, {"plan": 3},
        {"plan": plan | {"hidden": 4}}, {"plan": plan | {"net": ["os:system"]}},
        {"asked": asked | {"target": 1}}, {"asked": {}}, {"asked": asked | {"dialect": None}},
        {"asked": asked | {"dialect": {"sep": "abc", "decimal": None, "encoding": None}}},
        {"classes": [1, 2]}, {"settings": "lr"}, {"count": 0}, {"count": "3"}, {"by": None},
        {"method": 7}, {"by": "no such way"}, {"sha256": None},
    ):  # fmt: skip
        save(folder, books, facts | bad)
        for command in ("status", "next"):
            result = doxa("active", command, folder, code=0 if _harmless(bad, command) else 2)
            assert result
    save(folder, [*books, *books], facts)
    assert "does not hold a session" in doxa("active", "status", folder, code=2)


def _harmless(bad: dict[str, Any], command: str) -> bool:
    """Open rows are asked again without a look at the acquisition."""
    return bad == {"by": "no such way"}


def test_a_pipe_is_never_waited_for(folder: Path, tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no pipes here")
    sheet = folder / "to_label.csv"
    sheet.unlink()
    os.mkfifo(sheet)
    assert "no regular file" in doxa("active", "next", folder, code=2)
    assert "no regular file" in doxa("active", "label", folder, code=2)
    (folder / "pool.csv").unlink()
    os.mkfifo(folder / "pool.csv")
    assert "restore it" in doxa("active", "status", folder, code=2)
    pipe = tmp_path / "x.npy"
    os.mkfifo(pipe)
    start = ("active", "start", pipe, "--target", "y", "--classes", "a,b", "--out", tmp_path / "n")
    assert "no regular file" in doxa(*start, code=2)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", "..", "", "a\0b"])
def test_pictures_are_not_written_outside_the_folder(tmp_path: Path, name: str) -> None:
    images = np.zeros((12, 5, 4), np.uint8)
    names = np.array([name, *(f"p{i}" for i in range(11))])
    np.savez(tmp_path / "x.npz", x=images, names=names)
    start = (
        "active", "start", tmp_path / "x.npz", "--target", "y", "--classes", "a,b", "--out",
        tmp_path / "campaign", "--count", 12,
    )  # fmt: skip
    said = doxa(*start, code=2)
    assert "is not a file name" in said or "different names" in said


def test_links_in_a_folder_are_not_written_through(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "to_label.csv").unlink()
    for name in (".to_label.csv", "to_label.csv"):
        (folder / name).symlink_to(victim)
    assert "is kept" in doxa("active", "next", folder, code=2)
    (folder / "to_label.csv").unlink()
    doxa("active", "next", folder)
    assert victim.read_text() == "mine"
    assert not (folder / "to_label.csv").is_symlink()


def test_numbers_with_decimal_commas_are_taken_from_a_sheet_with_semicolons(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.random.default_rng(0).normal(size=20).round(3)})
    frame.to_csv(tmp_path / "pool.csv", index=False)
    where = tmp_path / "campaign"
    start = ("active", "start", tmp_path / "pool.csv", "--target", "y", "--out", where, *QUICK)
    doxa(*start, "--likelihood", "gaussian", "--by", "predictive_variance")
    doxa("active", "next", where)
    sheet = where / "to_label.csv"
    rows = lines_of(sheet)
    write(sheet, [row | {"y": f"-{i},25"} for i, row in enumerate(rows)], ";")
    doxa("active", "label", where)
    found = load(where)
    assert found is not None
    given = found[0][0].answers
    assert [given[int(row["line"]) - 2] for row in rows] == [-0.25, -1.25, -2.25]
