"""The room "Your run": its numbers are those of the library, to the last bit, and a page opens
nothing but what the command line has named."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from shell import doxa as command  # noqa: E402

import doxa  # noqa: E402
from doxa.app.fitting import load_run  # noqa: E402
from doxa.app.studio import runs  # noqa: E402
from doxa.app.studio.uploads import LARGEST, MOST, Uploads, place_of_upload, plain_name  # noqa: E402
from doxa.errors import DataError, DoxaError  # noqa: E402
from doxa.evaluate import pit, reliability  # noqa: E402
from doxa.http import Refusal  # noqa: E402
from doxa.studio.server import Room, build  # noqa: E402

NEW = {"named": 0}


class Call:
    """In place of a job: never cancelled."""

    def check(self) -> None:
        pass


def ask(task: str, **content: Any) -> Any:
    """The answer of the room, as it reaches a page."""
    found = runs.TASKS[task](content, Call())
    return json.loads(json.dumps(found, allow_nan=False, default=str))


def frame(rows: int, seed: int) -> Any:
    draw = np.random.default_rng(seed)
    made = pd.DataFrame({
        "area": draw.normal(90, 25, rows).round(2), "age": draw.uniform(0, 80, rows).round(2),
        "city": draw.choice(["Bonn", "<b>Trier</b>", "=1+1"], rows),
    })  # fmt: skip
    made["price"] = (2 * made.area - made.age + draw.normal(0, 10, rows)).round(3)
    made["kind"] = np.where(made.area + draw.normal(0, 20, rows) > 90, "large", "small")
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of numbers and one of classes, of one table; and a table of new rows."""
    root = tmp_path_factory.mktemp("runs")
    frame(120, 0).to_csv(root / "rows.csv", index=False)
    frame(90, 1).to_csv(root / "new.csv", index=False)
    fits = (
        ("plain", "price", "kind", ()), ("far", "price", "kind", ("--drop", "area")),
        ("classes", "kind", "price", ()),
    )  # fmt: skip
    for name, target, drop, more in fits:
        method = ("--method", "linear") if target == "price" else (
            "--method", "deep-ensemble", "--members", 3, "--steps", 40, "--hidden", 8
        )  # fmt: skip
        command(
            "fit", root / "rows.csv", "--target", target, "--drop", drop, *more, *method,
            "--allow-status", "--out", root / name,
        )  # fmt: skip
    return root


@pytest.fixture
def room(folder: Path) -> Iterator[Path]:
    uploads = Uploads()
    runs.begin({
        "runs": [str(folder / name) for name in ("plain", "far", "classes")],
        "tables": [str(folder / "new.csv"), str(folder / "rows.csv")],
        "uploads": str(uploads.folder), "net": None,
    })  # fmt: skip
    yield uploads.folder
    uploads.close()
    assert not uploads.folder.exists()


def of_library(folder: Path, name: str) -> tuple[Any, Any, Any, Any]:
    """(p, y, posterior, x) at the new rows, by the library alone."""
    posterior, schema = load_run(folder / name)
    rows = pd.read_csv(folder / "new.csv")
    x = schema.features(rows)[0]
    y = torch.as_tensor(schema.targets(rows))
    return posterior.predict(x), y, posterior, x


def test_predictions_and_surprise_of_numbers(room: Path, folder: Path) -> None:
    p, y, _, _ = of_library(folder, "plain")
    pages = [ask("rows", run=0, table=NEW, by="surprise", start=start) for start in (0, 50)]
    found = {row["row"]: row for page in pages for row in page["rows"]}
    assert len(found) == 90
    surprise = -p.log_prob(y.to(p.mean.dtype))
    for k, row in found.items():
        assert row["surprise"] == float(surprise[k])
        assert row["predicted"]["mean"] == float(p.mean[k])
        assert row["predicted"]["epistemic_std"] == float(np.sqrt(p.epistemic[k].double().numpy()))
        assert row["target"] == float(y[k])
    first = ask("rows", run=0, table=NEW, by="surprise", start=0)["rows"]
    assert [row["row"] for row in first] == torch.argsort(surprise, descending=True)[:50].tolist()
    widest = ask("rows", run=0, table=NEW, by="epistemic_std", start=0)["rows"][0]["row"]
    assert widest == int(p.epistemic.argmax())


def test_calibration_is_that_of_evaluate(room: Path, folder: Path) -> None:
    p, y, _, _ = of_library(folder, "plain")
    (found,) = ask("open", run=0, table=NEW)["calibration"]
    u = pit(p, y.to(p.mean.dtype), seed=0).double().numpy()
    assert found["pit"] == np.histogram(u, 10, (0, 1))[0].tolist()
    inside = np.array(
        [np.mean(np.abs(u - 0.5) <= 0.5 * level + 1e-12) for level in found["levels"]]
    )
    assert found["covered"] == inside.tolist()
    p, y, _, _ = of_library(folder, "classes")
    (found,) = ask("open", run=2, table=NEW)["calibration"]
    curve = reliability(p, y.long() if not p.likelihood.binary else y)
    some = curve.count > 0
    assert found["confidence"] == pytest.approx(curve.confidence[some].tolist(), abs=1e-7)
    assert found["count"] == curve.count[some].tolist()


def test_rows_of_classes(room: Path, folder: Path) -> None:
    p, y, _, _ = of_library(folder, "classes")
    rows = ask("rows", run=2, table=NEW, by="mutual_information", start=0)["rows"]
    order = torch.argsort(p.mutual_information, descending=True, stable=True)[:50]
    assert [row["row"] for row in rows] == order.tolist()
    surprise = -p.log_prob(y.to(p.mean.dtype) if y.is_floating_point() else y)
    for row in rows:
        assert row["surprise"] == pytest.approx(float(surprise[row["row"]]), rel=1e-12)
        assert row["predicted"]["entropy"] == float(p.entropy[row["row"]])
        assert row["target"] in ("large", "small")


def test_why_not_ok_is_said_in_the_words_of_the_library(room: Path, folder: Path) -> None:
    """The run without the column that explains the target scores worse, and rows of the fit are not
    taken for new ones."""
    found = ask("open", run=0, table=None)
    posterior, _ = load_run(folder / "plain")
    assert (found["status"], found["reason"]) == (str(posterior.status), posterior.status.reason)
    assert found["rows"] is None
    assert found["calibration"] == []
    there = ask("open", run=0, table=NEW)
    assert {f["check"] for f in there["findings"]} >= {"status", "coverage"}
    assert all(f["words"] for f in there["findings"])
    assert there["known_fit"]  # rows.csv was named, and has the checksum of the fit
    own = ask("open", run=0, table={"named": 1})
    assert own["rows"]["provenance"] == "the rows it was fitted to"
    assert any("same checksum" in note for note in own["notes"])


def test_what_if_is_a_prediction_and_says_where_it_leaves_the_fit(room: Path, folder: Path) -> None:
    _, _, posterior, _ = of_library(folder, "plain")
    schema = load_run(folder / "plain")[1]
    cells = {"area": 100.0, "age": 20.0, "city": "Bonn"}
    found = ask("what_if", run=0, table=NEW, cells=cells)
    p = posterior.predict(schema.features(pd.DataFrame([cells]))[0])
    assert found["predicted"]["mean"] == float(p.mean[0])
    assert found["outside"] == []
    assert found["distance"] <= found["far"]
    old = ask("what_if", run=0, table=NEW, cells=cells | {"age": 81.0})
    assert old["outside"] == ["age"]
    rows = pd.read_csv(folder / "rows.csv")
    assert rows.age.max() < 81.0
    away = ask("what_if", run=0, table=NEW, cells=cells | {"area": 400.0, "age": 200.0})
    assert away["outside"] == ["area", "age"]
    assert away["distance"] > away["far"]


def test_dependence_is_a_mean_of_predictions(room: Path, folder: Path) -> None:
    posterior, schema = load_run(folder / "plain")
    rows = pd.read_csv(folder / "new.csv")
    found = ask("dependence", run=0, table=NEW, column="area")
    assert found["rows"] == 90
    assert len(found["values"]) == 31
    for k in (0, 17, 30):
        p = posterior.predict(schema.features(rows.assign(area=found["values"][k]))[0])
        assert found["mean"][k] == p.mean.double().numpy().mean()
        assert found["aleatoric"][k] == math.sqrt(p.aleatoric.double().numpy().mean())
        assert found["epistemic"][k] == math.sqrt(p.epistemic.double().numpy().mean())
    of_classes = ask("dependence", run=2, table=NEW, column="city")
    assert of_classes["values"] == sorted(set(rows.city))
    posterior, schema = load_run(folder / "classes")
    p = posterior.predict(schema.features(rows.assign(city="Bonn"))[0])
    assert sum(of_classes["mean"][1 if of_classes["values"][1] == "Bonn" else 2]) == pytest.approx(
        1
    )
    k = of_classes["values"].index("Bonn")
    assert of_classes["epistemic"][k] == float(p.mutual_information.double().numpy().mean())


def test_two_runs_are_compared_on_the_same_rows(room: Path, folder: Path) -> None:
    found = ask("compare", run=0, other=1, table=NEW)
    assert found["rows"] == 90
    each = []
    for name, scores in zip(("plain", "far"), found["scores"], strict=True):
        p, y, _, _ = of_library(folder, name)
        y = y.to(p.mean.dtype)
        assert scores == {k: float(v) for k, v in doxa.evaluate.metrics(p, y).items()}
        each.append(-p.log_prob(y).double().numpy())
    away = each[0] - each[1]
    assert found["difference"] == away.mean()
    assert found["error"] == away.std(ddof=1) / math.sqrt(90)
    assert found["difference"] < 0  # the run with the column knows more
    with pytest.raises(DataError, match="different targets"):
        ask("compare", run=0, other=2, table=NEW)


def test_rows_are_exported_with_their_cells_as_text(room: Path, folder: Path) -> None:
    found = ask("export", run=0, table=NEW, by="surprise")
    lines = list(csv.DictReader(io.StringIO(found["text"])))
    p, y, _, _ = of_library(folder, "plain")
    surprise = -p.log_prob(y.to(p.mean.dtype)).double()
    assert [float(line["surprise"]) for line in lines] == surprise.sort(descending=True)[0].tolist()
    assert {line["city"] for line in lines} == {"Bonn", "<b>Trier</b>", "'=1+1"}  # no formula
    assert list(room.iterdir()) == []


def test_a_page_opens_nothing_else(room: Path, folder: Path) -> None:
    for run in (-1, 3, True, "0", "plain", None, str(folder / "plain")):
        with pytest.raises(DataError, match="runs have the numbers"):
            ask("open", run=run, table=None)
    for table in (
        {"named": 2}, {"named": -1}, {"named": True}, {"named": "rows.csv"},
        str(folder / "new.csv"),
        {"path": str(folder / "new.csv")}, {"upload": "../new.csv"}, {"upload": "0" * 32},
        {"upload": None}, {"upload": "0" * 32, "named": 0}, [], 1,
    ):  # fmt: skip
        with pytest.raises(DataError, match=r"table"):
            ask("open", run=0, table=table)
    for by in ("price", None, ["surprise"], "__class__"):
        with pytest.raises(DataError, match="rows are sorted by"):
            ask("rows", run=0, table=NEW, by=by, start=0)
    for cells in (None, [], {}, {"area": 1}, {"area": [1], "age": 1, "city": "Bonn"},
                  {"area": 1, "age": 1, "city": "B" * 201}):  # fmt: skip
        with pytest.raises(DataError, match="cell"):
            ask("what_if", run=0, table=NEW, cells=cells)
    with pytest.raises(DataError, match="column"):
        ask("dependence", run=0, table=NEW, column="price")


def test_too_many_cells_are_refused(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_CELLS", 90 * 5 - 1)
    with pytest.raises(DataError, match="449 cells are read here"):
        ask("open", run=0, table=NEW)


def test_a_table_without_the_target_is_predicted_and_not_scored(room: Path, folder: Path) -> None:
    made = pd.read_csv(folder / "new.csv").drop(columns=["price", "kind"])
    upload = Uploads()
    try:
        key = upload.keep("plain.csv", made.to_csv(index=False).encode())
        runs._given.uploads = upload.folder
        found = ask("open", run=0, table={"upload": key})
        assert found["rows"] == {
            "count": 90, "source": "plain.csv", "provenance": "", "scored": False,
        }  # fmt: skip
        assert found["sortable"] == ["epistemic_std", "std"]
        p, _, _, _ = of_library(folder, "plain")
        row = ask("rows", run=0, table={"upload": key}, by="std", start=0)["rows"][0]
        assert row["row"] == int(p.std.argmax())
        assert "surprise" not in row
    finally:
        upload.close()


def test_posteriors_of_tensors_have_columns_x1_and_so_on(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=draw)
    y = x[:, 0] - x[:, 1] + 0.1 * torch.randn(80, generator=draw)
    net = doxa.nets.mlp(2, 3, (8,))
    label = (y > 0).long() + (y > 1).long()
    fits = {
        "numbers": doxa.fit(None, (x, y), "linear", seed=0),
        "classes": doxa.fit(net, (x, label), "map", likelihood="categorical", steps=20, seed=0),
    }
    for name, posterior in fits.items():
        posterior.save(tmp_path / name)
    table = pd.DataFrame(x.double().numpy(), columns=["x1", "x2"])
    table.assign(y=y.double().numpy()).to_csv(tmp_path / "numbers.csv", index=False)
    new = table + 0.05
    new.assign(y=label.numpy()).to_csv(tmp_path / "classes.csv", index=False)
    runs.begin({
        "runs": [str(tmp_path / name) for name in fits], "uploads": None,
        "tables": [str(tmp_path / f"{name}.csv") for name in fits],
    })  # fmt: skip
    found = ask("open", run=0, table=NEW)
    assert [column["name"] for column in found["columns"]] == ["x1", "x2"]
    assert found["rows"]["provenance"] == "the rows it was fitted to"  # the posterior has seen them
    rows = ask("rows", run=0, table=NEW, by="surprise", start=0)["rows"]
    p = doxa.load(str(tmp_path / "numbers")).predict(table.to_numpy())
    assert rows[0]["predicted"]["mean"] == float(p.mean[rows[0]["row"]])
    found = ask("open", run=1, table={"named": 1})
    assert found["classes"] == ["0", "1", "2"]
    assert found["rows"]["provenance"] == "held out from the fit"


def test_a_run_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    runs.begin({
        "runs": [str(tmp_path / "empty"), str(tmp_path / "absent"), str(folder / "plain")],
        "tables": [], "uploads": None,
    })  # fmt: skip
    for warm_up in runs.warm_up():
        warm_up()
    for number in (0, 1):
        with pytest.raises(DoxaError):
            ask("open", run=number, table=None)
    assert ask("open", run=2, table=None)["method"] == "linear"


def test_names_of_nothing_are_errors_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    studio = ("studio", "--no-browser")
    assert "is no folder" in command(*studio, tmp_path / "absent", code=2)
    assert "is no folder" in command(*studio, "--label", tmp_path / "absent", code=2)
    table = ("--table", tmp_path / "absent.csv")
    assert "there is no such file" in command(*studio, tmp_path / "run", *table, code=2)


# ---- uploads


def test_names_of_uploads() -> None:
    assert plain_name("my rows (2).CSV") == "my rows (2).CSV"
    for name in (
        "../rows.csv",
        "/etc/rows.csv",
        ".csv.csv",
        "a\nb.csv",
        "<b>.csv",
        "x" * 90 + ".csv",
        "rows.csv/",
    ):
        assert plain_name(name) == "table.csv"
    for name in ("", "rows", "rows.exe", "rows.html", ".csv"):
        with pytest.raises(Refusal):
            plain_name(name)


def test_old_uploads_go_and_the_folder_is_private() -> None:
    uploads = Uploads()
    try:
        assert uploads.folder.stat().st_mode & 0o077 == 0
        made = [uploads.keep("a.csv", b"x\n1\n") for _ in range(MOST + 1)]
        assert len(list(uploads.folder.iterdir())) == MOST
        assert place_of_upload(uploads.folder, made[-1]).read_bytes() == b"x\n1\n"
        with pytest.raises(DataError, match="no longer there"):
            place_of_upload(uploads.folder, made[0])
        for other in ("..", ".", "", str(uploads.folder.parent), f"../{uploads.folder.name}", None):
            with pytest.raises(DataError, match="named by the id"):
                place_of_upload(uploads.folder, other)
    finally:
        uploads.close()
    assert not uploads.folder.exists()


def post(body: list[bytes], **changes: Any) -> tuple[int, Any, Uploads]:
    """An upload through the doors, as a browser sends it."""
    uploads = Uploads()
    host = "127.0.0.1:8765"

    async def main() -> tuple[int, Any]:
        room = Room("run", "doxa.app.studio.runs", {}, {"/upload": uploads.receive}, uploads.close)
        doors, _ = build(8765, rooms=[room])
        cookie = f"{doors.cookie}={doors.open_session()}"
        headers = {
            "host": host, "origin": f"http://{host}", "cookie": cookie, "x-name": "rows.csv",
            "sec-fetch-site": "same-origin",
        } | changes  # fmt: skip
        parts = [{"type": "http.request", "body": b, "more_body": True} for b in body]
        parts.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[Any] = []

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = [(k.encode(), v.encode()) for k, v in headers.items() if v is not None]
        scope = {
            "type": "http", "path": "/upload", "raw_path": b"/upload", "method": "POST",
            "query_string": b"", "headers": pairs, "root_path": "", "scheme": "http",
            "server": ("127.0.0.1", 8765), "http_version": "1.1",
        }  # fmt: skip
        await asyncio.wait_for(doors(scope, receive, send), 30)
        return sent[0]["status"], json.loads(b"".join(m["body"] for m in sent[1:]))

    status, found = asyncio.run(main())
    return status, found, uploads


def test_an_upload_is_kept_under_an_id() -> None:
    status, found, uploads = post([b"a,b\n", b"1,2\n"])
    try:
        assert status == 200
        assert found["name"] == "rows.csv"
        assert place_of_upload(uploads.folder, found["upload"]).read_bytes() == b"a,b\n1,2\n"
    finally:
        uploads.close()


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (401, {"cookie": None}), (403, {"origin": None}), (403, {"origin": "http://evil.example"}),
        (421, {"host": "evil.example"}), (403, {"sec-fetch-site": "cross-site"}),
        (415, {"x-name": "rows.exe"}), (415, {"content-encoding": "gzip"}),
        (413, {"content-length": str(LARGEST + 1)}),
    ],
)  # fmt: skip
def test_an_upload_that_breaks_a_rule_is_not_kept(status: int, changes: Any) -> None:
    found, _, uploads = post([b"a,b\n1,2\n"], **changes)
    try:
        assert found == status
        assert list(uploads.folder.iterdir()) == []
    finally:
        uploads.close()


def test_a_large_upload_is_refused_while_it_arrives() -> None:
    status, _, uploads = post([bytes(1 << 20)] * 51)
    try:
        assert status == 413
        assert list(uploads.folder.iterdir()) == []
    finally:
        uploads.close()
