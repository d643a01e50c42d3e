"""A person's campaign in the shell: what is asked, what is taken, what is refused."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from shell import doxa

from doxa.app.figures import encode

pd = pytest.importorskip("pandas")

QUICK = ("--method", "map", "--by", "max_entropy", "--steps", 2, "--hidden", 4, "--count", 3)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Forty rows, the first six labelled."""
    x = np.random.default_rng(0).normal(size=(40, 2)).round(3)
    kind = np.where(x[:, 0] > 0, "cat", "dog").astype(object)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": kind})
    frame.loc[6:, "kind"] = None
    frame.to_csv(tmp_path / "pool.csv", index=False)
    return tmp_path / "pool.csv"


def fill(sheet: Path, label: str = "cat") -> list[int]:
    frame = pd.read_csv(sheet)
    frame.assign(kind=label).to_csv(sheet, index=False)
    return frame["line"].tolist()


@pytest.mark.slow
def test_a_campaign_from_start_to_status(table: Path) -> None:
    """No row is asked twice, a lost file is written again, and one that is filled in stays."""
    folder = table.parent / "campaign"
    sheet = folder / "to_label.csv"
    doxa("active", "start", table, "--target", "kind", "--out", folder, *QUICK)
    assert "3 rows to label, by max_entropy, after 6 labels" in doxa("active", "next", folder)
    first = pd.read_csv(sheet)["line"].tolist()
    sheet.unlink()  # as if killed before it was written
    assert "still open" in doxa("active", "next", folder)
    assert fill(sheet) == first
    doxa("active", "next", folder)
    assert set(pd.read_csv(sheet)["kind"]) == {"cat"}
    assert "3 labels entered, 9 in all, none open" in doxa("active", "label", folder)
    doxa("active", "next", folder)
    second = pd.read_csv(sheet)["line"].tolist()
    assert not set(first) & set(second)
    assert not set(second) & set(range(2, 8))  # those that came with a label
    doxa("active", "label", folder, "--answer", f"{second[0]}=dog", "--partial")
    said = doxa("active", "status", folder)
    assert "10 of 40 rows have a label, 2 wait for one, 28 have not been chosen" in said
    assert doxa("predict", folder / "run", table)  # the last posterior is an ordinary run


def test_bad_answers_are_refused_by_their_row(table: Path) -> None:
    folder = table.parent / "campaign"
    sheet = folder / "to_label.csv"
    doxa("active", "start", table, "--target", "kind", "--out", folder, *QUICK)
    assert "no row is open" in doxa("active", "label", folder, code=2)
    doxa("active", "next", folder)
    lines = pd.read_csv(sheet)["line"].tolist()
    other = next(n for n in range(8, 42) if n not in lines)
    for answers, words in (
        ([f"{lines[0]}=fox"], f"line {lines[0]}: 'fox' is no class; classes are cat, dog"),
        (["99=cat"], "no line '99' in the pool"),
        ([f"{other}=cat"], f"line {other} was not asked about"),
        ([f"{lines[0]}=cat"], f"1 answers for 3 rows: line {lines[1]} has none"),
        ([f"{lines[0]}=cat", f"{lines[0]}=dog"], f"line {lines[0]} is answered twice"),
        (["2=cat", "3=cat", "4=cat", "5=cat"], "has an answer already"),
        (["cat"], "ROW=LABEL"),
    ):
        flags = [word for answer in answers for word in ("--answer", answer)]
        assert words in doxa("active", "label", folder, *flags, code=2)
    assert "6 of 40 rows have a label, 3 wait" in doxa("active", "status", folder)


def test_what_cannot_be_started_is_said(table: Path) -> None:
    folder = table.parent / "campaign"
    start = ("active", "start", table, "--out", folder, *QUICK, "--target")
    assert "--classes a,b,c" in doxa(*start, "absent", code=2)
    assert "no acquisition 'bold'" in doxa(*start, "kind", "--by", "bold", code=2)
    assert "holds no session" in doxa("active", "next", folder, code=2)
    doxa(*start, "kind")
    assert "holds a session already" in doxa(*start, "kind", code=2)
    (folder / "pool.csv").write_text("a,b\n1,2\n")
    assert "has changed since the session began" in doxa("active", "next", folder, code=2)
    shutil.rmtree(folder)
    small = pd.read_csv(table).head(5)
    small.assign(kind=["cat", "dog"] * 2 + ["cat"]).to_csv(table, index=False)
    doxa(*start, "kind")
    assert "pool is empty" in doxa("active", "next", folder, code=2)


def test_images_are_asked_about_as_files(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 5, 4)).astype(np.uint8)
    np.save(tmp_path / "x.npy", images)
    folder = tmp_path / "campaign"
    doxa(
        "active", "start", tmp_path / "x.npy", "--target", "digit", "--classes", "0,1,2",
        "--out", folder, *QUICK,
    )  # fmt: skip
    assert "at random" in doxa("active", "next", folder)
    sheet = pd.read_csv(folder / "to_label.csv")
    row, file = sheet.loc[0, ["row", "file"]]
    assert pixels(folder / file).tolist() == images[row].tolist()


@pytest.mark.parametrize("kind", ["png", "npy"])
def test_a_folder_of_pictures_is_a_pool(tmp_path: Path, kind: str) -> None:
    """Rows are called as their files; those that are asked about have the pixels of their files."""
    images = np.random.default_rng(0).integers(0, 256, (12, 5, 4)).astype(np.uint8)
    pool, folder = tmp_path / "pictures", tmp_path / "campaign"
    pool.mkdir()
    start = ("active", "start", pool, "--target", "a", "--classes", "0,1", "--out", folder, *QUICK)
    assert "holds no image" in doxa(*start, code=2)
    (pool / "notes.txt").write_text("left alone")
    for i, image in enumerate(images):
        name = pool / f"scan, {i:02}.{kind}"
        if kind == "npy":
            np.save(name, image)
        else:
            pytest.importorskip("PIL")
            name.write_bytes(encode(image))
    odd = pool / "z.npy"
    np.save(odd, images[0, 1:])
    assert f"z.npy is 4×4 of uint8, and scan, 00.{kind} is 5×4" in doxa(*start, code=2)
    odd.unlink()
    assert "12 rows, 0 with a label" in doxa(*start)
    shutil.rmtree(pool)  # the campaign has its own
    doxa("active", "next", folder)
    sheet = pd.read_csv(folder / "to_label.csv")
    name, file = sheet.loc[0, ["image", "file"]]
    assert pixels(folder / file).tolist() == images[int(name[6:8])].tolist()
    assert f"image {name}: '7' is no class" in doxa(
        "active", "label", folder, "--answer", f"{name}=7", code=2
    )
    sheet.assign(a="1").to_csv(folder / "to_label.csv", index=False)
    doxa("active", "next", folder)  # what is filled in stays
    assert "3 labels entered" in doxa("active", "label", folder)


def pixels(path: Path) -> np.ndarray:
    """Of a grey PNG without filters, by the specification."""
    data, at, parts = path.read_bytes(), 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            kind + content
        )
        parts[kind] = content
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert (depth, colour) == (8, 0)
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, width + 1)
    return lines[:, 1:]


def test_a_picture_is_read_by_another_program(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.image")
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    (tmp_path / "a.png").write_bytes(encode(image))
    assert (pyplot.imread(tmp_path / "a.png") * 255).round().astype(int).tolist() == image.tolist()
