"""The report is right: whose rows are scored, one overall status, one number for one thing."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import Node, parse
from typer.testing import CliRunner

import doxa as library
from doxa.app import report
from doxa.app.cli import app
from doxa.app.report import html
from doxa.app.report.report import SECTIONS, Part
from doxa.app.report.subject import HELD_OUT, rows_of_arrays, rows_of_files
from doxa.app.report.text import percent, points
from doxa.diagnose.advice import Advice
from doxa.diagnose.calibration import evaluated_coverage
from doxa.diagnose.finding import Diagnosis, Finding
from doxa.evaluate.table import SCORES, Score
from doxa.posterior import Status
from doxa.tables.schema import Schema

pd = pytest.importorskip("pandas")


def doxa(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def header(file: Path) -> str:
    return root(file).all("header")[0].text


def root(file: Path) -> Node:
    found, faults = parse(file.read_text(encoding="utf-8"))
    assert faults == []
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data.csv, new.csv and a run of data.csv."""
    folder = tmp_path_factory.mktemp("verdict")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=90), "b": rng.normal(size=90)})
    frame["y"] = frame["a"] + 0.3 * rng.normal(size=90)
    frame[:60].to_csv(folder / "data.csv", index=False)
    frame[60:].to_csv(folder / "new.csv", index=False)
    frame[40:80].to_csv(folder / "mixed.csv", index=False)
    frame[10:50].to_csv(folder / "part.csv", index=False)
    doxa("fit", folder / "data.csv", "--target", "y", "--method", "map", "--steps", 100,
         "--out", folder / "run")  # fmt: skip
    return folder


def written(run: Path, out: Path, *options: object) -> tuple[str, str]:
    """What the head says, and the terminal."""
    said = doxa("report", run / "run", *options, "--out", out / "r.html")
    return header(out / "r.html"), said


def test_the_training_file_is_never_called_held_out(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "data.csv", tmp_path / "copy.csv")
    for options in (("--test", run / "data.csv"), ("--test", tmp_path / "copy.csv"),
                    ("--test", run / "data.csv", "--train", run / "data.csv")):  # fmt: skip
        head, said = written(run, tmp_path, *options)
        assert "held out from the fit" not in head
        assert "the rows it was fitted to" in head
        assert "is the file of the fit (same checksum)" in said
        assert "checks on held-out rows would be more reliable" in head
    head, said = written(run, tmp_path, "--test", run / "new.csv", "--train", run / "data.csv")
    assert "30 rows (new.csv, held out from the fit)" in head
    assert "same checksum" not in said


def test_rows_of_the_fit_among_the_test_rows_are_counted(run: Path, tmp_path: Path) -> None:
    options = ("--train", run / "data.csv", "--no-diagnose")
    head, said = written(run, tmp_path, "--test", run / "mixed.csv", *options)
    assert "but 20 of them are also among the rows it was fitted to" in head
    assert "20 of 40 test rows" in said
    head, said = written(run, tmp_path, "--test", run / "part.csv", *options)
    assert "held out" not in head
    assert "all 40 test rows are among the rows it was fitted to" in said


def test_another_file_given_as_the_training_file_is_told(run: Path, tmp_path: Path) -> None:
    said = written(run, tmp_path, "--train", run / "new.csv", "--no-diagnose")[1]
    assert "new.csv is not the file of the fit (data.csv): its checksum differs" in said


def test_rows_that_the_fit_set_aside_are_scored(run: Path, tmp_path: Path) -> None:
    posterior = library.load(str(run / "run"))
    digest = hashlib.sha256((run / "data.csv").read_bytes()).hexdigest()
    posterior.metadata["held_out_rows"] = {"sha256": digest, "rows": [3, 7, *range(30, 55)]}
    posterior.metadata["calibration_rows"] = {"sha256": digest, "rows": [0, 1]}
    posterior.save(str(tmp_path / "run"))
    new, fitted, _ = rows_of_files(
        posterior.metadata, Schema.from_json(posterior.metadata["table"]), None, run / "data.csv"
    )
    assert new is not None and new.count == 27
    assert fitted is not None and fitted.count == 60 - 27 - 2
    for option in ("--train", "--test"):
        doxa("report", tmp_path / "run", option, run / "data.csv", "--out", tmp_path / "r.html")
        assert "27 rows (data.csv, held out by the fit)" in header(tmp_path / "r.html")
    frame = pd.read_csv(run / "data.csv")
    x = frame[["a", "b"]].to_numpy(np.float32)[[3, 7, *range(30, 55)]]
    y = frame["y"].to_numpy(np.float32)[[3, 7, *range(30, 55)]]
    rmse = float(np.sqrt(np.mean((posterior.predict(x).mean.numpy().ravel() - y) ** 2)))
    assert f"its error is {rmse:.3f} (RMSE)" in header(tmp_path / "r.html")
    texts = root(tmp_path / "r.html").text
    assert any(f"line {k + 2}" in texts for k in (3, 7, 30))  # where the file has them


def regression(n: int = 60) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    y = x.sum(1) + 0.3 * torch.randn(n, generator=g)
    net = library.nets.mlp(2, 1, ())
    return library.fit(net, (x, y), "map", steps=100, progress=False), (x, y)


@pytest.fixture(scope="module")
def numbers() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    return regression()


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [("bad", "✕ Do not rely on it: 1 bad finding"), ("warning", "! Use it with care: 1 warning"),
     ("slight", "○ No alarm: 1 slight finding"), ("good", "✓ No fault was found in 3 checks")],
)  # fmt: skip
def test_there_is_one_overall_status_on_the_page(
    verdict: str, headline: str, numbers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior, (x, y) = numbers
    found = [Finding("coverage", verdict, 0.9, "so it is")]
    found += [Finding("calibration", "good", 0.0, "so it is")]
    monkeypatch.setattr("doxa.app.report.status.diagnose", lambda *_, **__: Diagnosis(found))
    report.write(posterior, tmp_path / "r.html", (x + 1, y + 2), (x, y))
    page = root(tmp_path / "r.html")
    pills = [node.text for node in page.all("header")[0].by_class("mark")]
    assert pills == [headline]
    if verdict != "good":
        assert "as expected" not in page.all("header")[0].text
        assert "without trouble" not in page.text


def test_too_sure_intervals_are_in_the_status_without_diagnostics(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g)
    y = x.sum(1) + torch.randn(60, generator=g)
    posterior = library.fit(library.nets.mlp(2, 1, ()), (x, y), "map", steps=100, progress=False,
                            likelihood=library.Gaussian(0.2), validation=None)  # fmt: skip
    report.write(posterior, tmp_path / "r.html", (x, y))
    head = header(tmp_path / "r.html")
    assert "✕ Do not rely on it: 1 bad finding" in head
    assert "it is overconfident" in head


def test_a_fit_that_did_not_end_well_is_in_the_overall_status(numbers: Any, tmp_path: Path) -> None:
    posterior, (x, y) = numbers
    posterior.record.status = Status("overconfident", "90 % intervals hold 60 %")
    try:
        report.write(posterior, tmp_path / "r.html", (x + 0.1, y + 0.1), diagnose=False)
        assert "! Use it with care: 1 warning" in header(tmp_path / "r.html")
        assert "90 % intervals hold 60 %" in header(tmp_path / "r.html")
        report.write(posterior, tmp_path / "r.html")
        assert "! Use it with care" in header(tmp_path / "r.html")
    finally:
        posterior.record.status = Status()
    report.write(posterior, tmp_path / "r.html")
    assert "– Nothing could be checked" in header(tmp_path / "r.html")


def test_the_terminal_says_what_the_head_says(run: Path, tmp_path: Path) -> None:
    head, said = written(run, tmp_path, "--test", run / "new.csv", "--train", run / "data.csv")
    summary = said[: said.index("report written")].strip()
    assert summary.endswith(".")
    assert summary.rstrip(".") in head


def test_the_calibration_error_is_one_number(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(200, 2, generator=g)
    y = (x[:, 0] + torch.randn(200, generator=g) > 0).long() + (x[:, 1] > 0.5).long()
    posterior = library.fit(library.nets.mlp(2, 3, (8,)), (x[:100], y[:100]), "map", steps=60,
                            likelihood="categorical", progress=False)  # fmt: skip
    report.write(posterior, tmp_path / "r.html", (x[100:], y[100:]), (x[:100], y[:100]))
    page = root(tmp_path / "r.html")
    ece = library.evaluate.ece(posterior.predict(x[100:]), y[100:])
    tiles = page.all("header")[0].by_class("tiles")[0].text
    assert f"{percent(ece)}ECE" in tiles
    figure = next(f for f in page.all("figure") if f.all("strong")[0].text == "Reliability")
    assert f"The mean gap is the ECE, {percent(ece)}." in figure.text
    diagnostics = next(n for n in page.all("section") if n.attributes["id"] == "diagnostics")
    assert f"expected calibration error {ece:.3f}" in diagnostics.text


def test_a_calibrated_run_alone_says_what_it_knows(tmp_path: Path) -> None:
    """Without any rows: how its intervals did on those it set aside, and each member's function,
    along columns and not along flags of missing cells."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"a": rng.normal(size=240), "b": rng.normal(size=240)})
    frame["y"] = frame["a"] + 0.3 * rng.normal(size=240)
    frame.loc[rng.permutation(240)[:40], "b"] = np.nan
    frame.to_csv(tmp_path / "data.csv", index=False)
    options = "--target y --steps 60 --hidden 8 --members 3 --missing impute --split .2"
    doxa("fit", tmp_path / "data.csv", *options.split(), "--conformal", 0.9, "-o", tmp_path / "run")
    doxa("report", tmp_path / "run", "--out", tmp_path / "r.html")
    scores = library.load(str(tmp_path / "run")).metadata["held_out_scores"]
    held = f"{percent(scores['scores']['coverage'])} of 48 rows of data.csv that were held out"
    words = " ".join(root(tmp_path / "r.html").text.split())
    assert f"{held} lay in their 90 % interval" in words
    assert "rows it was fitted to" not in header(tmp_path / "r.html")
    assert "Nothing could be checked" not in words
    assert "the method keeps no spread" not in words
    assert "Along a" in words and "Along b" in words and "Along b (missing)" not in words


def classifier(positives: int, rows: int = 300) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """One that has learned how rare the positives are, which is all that there is to learn."""
    x = 0.1 * torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(rows, dtype=torch.long)
    y[torch.linspace(0, rows - 1, positives).long()] = 1
    assert int(y.sum()) == positives
    net = library.nets.mlp(2, 2, ())
    return library.fit(net, (x, y), "map", likelihood="categorical", steps=600, lr=0.05,
                       validation=None, progress=False), (x, y)  # fmt: skip


@pytest.mark.parametrize("diagnose", [False, True])
def test_a_class_that_is_never_recognised_is_no_good_report(diagnose: bool, tmp_path: Path) -> None:
    posterior, (x, y) = classifier(positives=23)
    assert int(posterior.predict(x).probs.argmax(1).sum()) == 0
    report.write(posterior, tmp_path / "r.html", (x + 1e-3, y), (x, y), classes=["no", "yes"],
                 diagnose=diagnose)  # fmt: skip
    head = header(tmp_path / "r.html")
    assert "No fault was found" not in head
    assert "Class 'yes' is recognised in 0 of its 23 rows" in head
    scores = root(tmp_path / "r.html").all("table")[0].text
    assert "balanced accuracy50 %" in scores


def test_classes_that_are_recognised_raise_no_finding(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(300, 2, generator=g)
    y = (x[:, 0] + 0.3 * torch.randn(300, generator=g) > 1.4).long()  # about one in twelve
    posterior = library.fit(library.nets.mlp(2, 2, ()), (x, y), "map", likelihood="categorical",
                            steps=400, lr=0.05, progress=False)  # fmt: skip
    found = assess_of(posterior, (x + 1e-4, y)).find("classes")
    assert found is not None and found.status == "good"


def assess_of(posterior: Any, rows: tuple[Any, Any], **options: Any) -> Any:
    subject = report.Subject(
        posterior, test=rows_of_arrays(rows, "the test rows", HELD_OUT, None), **options
    )
    return report.render(subject, diagnose=False)[1]


@pytest.mark.parametrize("rows", [40, 200])
def test_intervals_that_are_far_too_wide_are_not_within_chance(rows: int, tmp_path: Path) -> None:
    """All targets inside 95 % intervals may be chance; all inside 20 % intervals is not."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=g)
    y = x.sum(1) + 0.1 * torch.randn(rows, generator=g)
    posterior = library.fit(library.nets.mlp(2, 1, ()), (x, y), "map", steps=400, lr=0.05,
                            progress=False, likelihood=library.Gaussian(5.0),
                            validation=None)  # fmt: skip
    report.write(posterior, tmp_path / "r.html", (x + 1e-3, y), diagnose=False)
    page, head = root(tmp_path / "r.html").text, header(tmp_path / "r.html")
    assert "percentage points above the level, beyond chance" in page
    assert "within chance" not in head
    assert "No fault was found" not in head
    assert "too wide" in page


def test_confidence_is_described_once(tmp_path: Path) -> None:
    """The head, the chart and the status agree on whether a gap is within chance."""
    posterior, (x, _) = classifier(positives=75)
    few, label = x[:40] + 1e-3, torch.arange(40) % 2  # as many of one as of the other
    gap = float(posterior.predict(few).probs.max(1).values.mean()) - 0.5
    assert 0.2 < gap < 0.3
    report.write(posterior, tmp_path / "r.html", (few, label), diagnose=False)
    page, head = root(tmp_path / "r.html").text, header(tmp_path / "r.html")
    assert f"Overall it is overconfident, by {points(gap)}" in page
    assert f"its mean confidence is {points(gap)} above that" in head
    assert "as its mean confidence says" not in head
    assert "No fault was found" not in head


def test_a_small_probability_is_not_called_good() -> None:
    found = evaluated_coverage(0.88, 0.95, 0.002, "88 % lie in their interval", Advice(""))
    assert found.status == "slight" and "p = 0.002" in found.words
    assert not found.alarms
    assert evaluated_coverage(0.93, 0.95, 0.2, "93 % lie in it", Advice("")).status == "good"


def test_the_recipe_names_the_likelihood_that_the_fit_chose(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=400), "b": rng.normal(size=400)})
    frame["y"] = 3 * frame["a"] + rng.standard_t(1.5, size=400)
    frame.to_csv(tmp_path / "data.csv", index=False)
    doxa("fit", tmp_path / "data.csv", "--target", "y", "--steps", 300, "-o", tmp_path / "run")
    posterior = library.load(str(tmp_path / "run"))
    assert posterior.base_likelihood.name == "student-t"
    doxa("report", tmp_path / "run", "--out", tmp_path / "r.html")
    page = root(tmp_path / "r.html")
    recipe = next(n for n in page.all("section") if n.attributes["id"] == "recipe").text
    assert "StudentT" in recipe
    assert "gaussian" not in recipe.lower()


def test_classes_are_called_by_their_names(tmp_path: Path) -> None:
    """In the findings of the diagnostics, and where a run knows the names."""
    rng = np.random.default_rng(0)
    names = ["ant", "bee", "cat", "dog"]
    frame = pd.DataFrame({"a": rng.normal(size=160), "b": rng.normal(size=160)})
    frame["kind"] = [names[k % 3] for k in range(157)] + ["dog"] * 3
    frame.to_csv(tmp_path / "data.csv", index=False)
    doxa("fit", tmp_path / "data.csv", "--target", "kind", "--method", "map", "--steps", 60,
         "-o", tmp_path / "run")  # fmt: skip
    doxa("report", tmp_path / "run", "--train", tmp_path / "data.csv", "-o", tmp_path / "r.html")
    text = root(tmp_path / "r.html").text
    assert "class 'dog' has 3 rows" in text
    assert "class 3" not in text
    posterior = library.load(str(tmp_path / "run"))
    x = frame[["a", "b"]].to_numpy(np.float32)
    y = np.array([names.index(name) for name in frame["kind"]])
    report.write(posterior, tmp_path / "p.html", (x, y), diagnose=False)
    text = root(tmp_path / "p.html").text
    assert "dog" in text and "class 3" not in text


def test_a_score_is_one_row_of_the_table(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new score is in the table and among the tiles, with its explanation."""
    bias = Score("bias", "bias", "lower", "mean of prediction minus target", tile=True,
                 compute=lambda found: float(np.mean(found.mean - found.truth)))  # fmt: skip
    monkeypatch.setattr("doxa.evaluate.table.SCORES", (*SCORES, bias))
    posterior, (x, y) = numbers
    subject = report.Subject(posterior, test=rows_of_arrays((x, y), "rows", HELD_OUT, None))
    page, faults = parse(report.render(subject, diagnose=False)[0])
    assert faults == []
    value = float(np.mean(posterior.predict(x).mean.numpy().ravel() - y.numpy()))
    shown = f"{value:.3g}".replace("-", "−")
    assert f"{shown}biaslower is better" in page.all("header")[0].by_class("tiles")[0].text
    assert f"bias{shown}lowermean of prediction minus target" in page.all("table")[0].text


def test_a_section_is_one_row_of_the_list(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Part("own", "A section of one's own", lambda subject: html.paragraph("<b>own</b>"))
    monkeypatch.setattr("doxa.app.report.report.SECTIONS", (*SECTIONS, own))
    page, faults = parse(report.render(report.Subject(numbers[0]), diagnose=False)[0])
    assert faults == []
    assert page.all("section")[-1].attributes["id"] == "own"
    assert "<b>own</b>" in page.all("section")[-1].text
