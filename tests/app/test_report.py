"""`doxa report`: the page is sound, its numbers are right, its recipe gives the same posterior."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import of_rows, one_of_each_quick
from hostile_names import HOSTILE
from html_page import Node, parse
from likelihood_rows import outputs_of
from short import short
from typer.testing import CliRunner

import doxa as library
from doxa.app import report
from doxa.app.cli import app
from doxa.app.report.fitted import series
from doxa.errors import DataError, ShapeError, StoreError, Unavailable
from doxa.likelihoods import LIKELIHOODS

pd = pytest.importorskip("pandas")


def doxa(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def page(file: Path) -> Node:
    """The report, once it has no faults."""
    root, faults = parse(file.read_text(encoding="utf-8"))
    assert faults == []
    return root


def section(root: Node, key: str) -> Node:
    return next(n for n in root.all("section") if n.attributes["id"] == key)


def cells(table: Node) -> list[list[str]]:
    return [
        [c.text for c in row.walk() if c.name in ("th", "td")]
        for body in table.all("tbody")
        for row in body.all("tr")
    ]


def chart(root: Node, title: str) -> Node:
    return next(f for f in root.all("figure") if f.all("strong")[0].text == title)


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").removesuffix(" %"))


def arrays(n: int = 80) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=source)
    noise = torch.randn(n, 1, generator=source)
    return {
        "x": x,
        "y": x[:, :1].sin() + 0.1 * noise,
        "classes": (x.sum(1) > 0).long() + (x[:, 0] > 1).long(),
        "binary": (x[:, :1] > 0).float(),
        "counts": torch.poisson(x[:, :1].exp(), generator=source),
    }


def fit(method: str, likelihood: str, y: torch.Tensor, outputs: int) -> Any:
    chosen = short(method)
    net = library.nets.mlp(2, outputs, (8,)) if chosen.needs_network else None
    x = arrays()["x"]
    options = {"likelihood": likelihood, "standardize": True, "steps": 40}
    return library.fit(net, (x, y), chosen, **options)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A regression table and a run of it."""
    folder = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    n = 120
    frame = pd.DataFrame({"a": rng.normal(50, 10, n), "b": rng.normal(0, 1, n)})
    frame["colour"] = rng.choice(["red", "blue"], n)
    frame["left out"] = 1.0
    frame["y"] = frame["a"] + 3 * frame["b"] + 5 * (frame["colour"] == "red") + rng.normal(0, 1, n)
    frame.to_csv(folder / "data.csv", index=False)
    asked = "--target y --method deep-ensemble --members 4 --steps 150 --hidden 16,8 --lr 0.02"
    asked += " --validation 0.2"
    doxa("fit", folder / "data.csv", *asked.split(), "--seed", 7, "--out", folder / "run")
    return folder / "data.csv", folder / "run"


@pytest.fixture(scope="module")
def regression(table: tuple[Path, Path]) -> Node:
    data, run = table
    said = doxa("report", run, "--test", data, "--train", data, "--out", run.parent / "r.html")
    assert "report written to" in said
    return page(run.parent / "r.html")


@pytest.mark.slow
def test_every_part_is_there(regression: Node) -> None:
    found = [n.attributes["id"] for n in regression.all("section")]
    assert found == ["scores", "calibration", "uncertainty", "predictions", "rows", "functions",
                     "diagnostics", "training", "fitted", "recipe"]  # fmt: skip
    text = regression.text
    for words in ("deep-ensemble", "MLP 4–16–8–1", "data.csv", "SHA-256", "noise learned",
                  "inputs and target", "the fit ended as it should"):  # fmt: skip
        assert words in text
    assert "column 'left out' dropped: constant" in text


def test_scores_coverage_and_pit_are_those_of_a_naive_loop(
    regression: Node, table: tuple[Path, Path]
) -> None:
    data, run = table
    doxa("predict", run, data, "--out", run.parent / "p.csv", "--overwrite")
    p, y = pd.read_csv(run.parent / "p.csv"), pd.read_csv(data)["y"].to_numpy()
    shown = {row[0]: number(row[1]) for row in cells(section(regression, "scores").all("table")[0])}
    rmse = float(np.sqrt(np.mean((p["mean"] - y) ** 2)))
    inside = float(np.mean((p["low"] <= y) & (y <= p["high"])))
    assert shown["RMSE"] == pytest.approx(rmse, rel=5e-3)
    assert shown["95 % coverage"] == pytest.approx(100 * inside, abs=0.06)
    assert shown["95 % width"] == pytest.approx(float(np.mean(p["high"] - p["low"])), rel=5e-3)
    posterior = library.load(str(run))
    columns = pd.read_csv(data)
    x = np.stack([columns["a"], columns["b"], columns["colour"] == "blue",
                  columns["colour"] == "red"], 1).astype(float)  # fmt: skip
    curve = cells(chart(regression, "Coverage").all("table")[0])
    assert len(curve) == 19
    predictive = posterior.predict(x)
    for promised, observed in curve[::6]:
        low, high = (b.numpy().ravel() for b in predictive.interval(number(promised)))
        assert number(observed) == pytest.approx(np.mean((low <= y) & (y <= high)), abs=5e-3)
    density = [number(row[1]) for row in cells(chart(regression, "PIT histogram").all("table")[0])]
    assert np.mean(density) == pytest.approx(1.0, abs=0.01)


def test_ranked_rows_are_the_most_and_the_least_certain(
    regression: Node, table: tuple[Path, Path]
) -> None:
    data, run = table
    doxa("predict", run, data, "--out", run.parent / "p.csv", "--overwrite")
    order = np.argsort(pd.read_csv(run.parent / "p.csv")["std"].to_numpy())
    least, most = (cells(t) for t in section(regression, "rows").all("table"))
    assert least[0][0] == f"line {order[-1] + 2}"
    assert most[0][0] == f"line {order[0] + 2}"
    frame = pd.read_csv(data)
    assert least[0][-1] == frame["colour"][order[-1]]
    assert number(least[0][1]) == pytest.approx(frame["y"][order[-1]], rel=5e-3)


@pytest.mark.slow
def test_the_command_in_the_recipe_gives_the_same_posterior(
    regression: Node, table: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = table
    monkeypatch.chdir(data.parent)
    command, python = (pre.text for pre in section(regression, "recipe").all("pre"))
    words = shlex.split(command)
    assert words[:3] == ["doxa", "fit", "data.csv"]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    doxa(*words[1:])
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    expected = library.load(str(run)).predict(x).samples
    assert torch.equal(library.load(str(tmp_path / "again")).predict(x).samples, expected)
    names: dict[str, Any] = {}
    exec(python, names)
    torch.testing.assert_close(names["posterior"].predict(x).samples, expected)


def test_training_curves_are_the_history(regression: Node, table: tuple[Path, Path]) -> None:
    """In nats a row and in units of y: −log p(y) is larger by log s where y was divided by s."""
    posterior = library.load(str(table[1]))
    history, shift = posterior.history["loss"], float(posterior.scales.y_scale.log().sum())
    rows = cells(chart(regression, "Loss").all("table")[0])
    assert len(rows) == len(history)
    for (step, *shown), (at, values) in zip(rows, history, strict=True):
        assert number(step) == at
        expected = [sum(sorted(values)[1:3]) / 2, min(values), max(values)]  # of four members
        expected = [each + shift for each in expected]
        assert [number(each) for each in shown] == pytest.approx(expected, rel=6e-3)


def test_held_out_scores_are_those_of_a_row_and_the_kept_step_is_marked(
    regression: Node, table: tuple[Path, Path]
) -> None:
    """The last record at the kept step is what each member, kept there, scores on those rows."""
    posterior = library.load(str(table[1]))
    kept, held = (posterior.diagnostics["stopping"][name] for name in ("kept_step", "rows"))
    assert held == [24.0] * 4
    scores = dict(posterior.history["validation"])
    shift = float(posterior.scales.y_scale.log().sum())
    means = [scores[step][m] / 24 - shift for m, step in enumerate(kept)]
    assert [scores[step][m] for m, step in enumerate(kept)] == [
        max(v[m] for _, v in posterior.history["validation"]) for m in range(4)
    ]
    # the mixture of members is at least as good as their mean (Jensen)
    assert posterior.validation >= np.mean(means) - 1e-6
    drawing = chart(regression, "Held-out log likelihood")
    assert len(drawing.by_class("two")) == 4 + 1  # a circle a member, and the key
    assert "Circles mark what was kept" in drawing.text
    assert "nats per row" in drawing.text


def test_without_rows_it_says_what_is_missing(table: tuple[Path, Path], tmp_path: Path) -> None:
    doxa("report", table[1], "--out", tmp_path / "r.html")
    root = page(tmp_path / "r.html")
    assert "No rows were given" in root.text
    assert "need the rows the posterior was fitted to" in root.text
    assert section(root, "functions").all("svg")  # from the stored standardisation alone


def test_training_rows_alone_are_said_to_be_optimistic(
    table: tuple[Path, Path], tmp_path: Path
) -> None:
    doxa("report", table[1], "--train", table[0], "--no-diagnose", "--out", tmp_path / "r.html")
    assert "optimistic" in section(page(tmp_path / "r.html"), "scores").text


def test_errors_come_before_the_work(table: tuple[Path, Path], tmp_path: Path) -> None:
    assert "written as .html" in doxa("report", table[1], "--out", tmp_path / "r.pdf", code=2)
    assert "is a folder" in doxa("report", table[1], "--out", _folder(tmp_path), code=2)
    assert "does not exist" in doxa("report", table[1], "--test", tmp_path / "no.csv", code=2)
    pd.DataFrame({"a": [1.0], "y": [2.0]}).to_csv(tmp_path / "few.csv", index=False)
    assert "no columns 'b', 'colour'" in doxa(
        "report", table[1], "--test", tmp_path / "few.csv", code=2
    )


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "folder.html").mkdir()
    return tmp_path / "folder.html"


@pytest.mark.slow
@pytest.mark.parametrize("method", one_of_each_quick([row.name for row in of_rows()]))
def test_every_method_has_a_report(method: str, tmp_path: Path) -> None:
    data = arrays()
    cases = [("gaussian", "y", 1)]
    if "classification" in library.methods()[method].tasks:
        cases += [("categorical", "classes", 3), ("bernoulli", "binary", 1)]
    for likelihood, target, outputs in cases:
        posterior = fit(method, likelihood, data[target], outputs)
        file = report.write(posterior, tmp_path / "r.html", (data["x"], data[target]),
                            diagnose=False)  # fmt: skip
        root = page(file)
        assert method in root.all("h1")[0].text
        assert len(root.all("svg")) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "target", "outputs"),
    [
        (name, "counts" if kind.counts else "y", outputs_of(name, 1)[0])
        for name, kind in LIKELIHOODS.items()
        if not kind.classifies and name != "gaussian"
    ],
)
def test_every_likelihood_has_a_report(
    likelihood: str, target: str, outputs: int, tmp_path: Path
) -> None:
    data = arrays()
    posterior = fit("deep-ensemble", likelihood, data[target], outputs)
    file = report.write(posterior, tmp_path / "r.html", (data["x"], data[target]), diagnose=False)
    root = page(file)
    assert chart(root, "Coverage")
    assert chart(root, "95 % intervals and targets")


def test_classes_are_counted_as_a_naive_loop_counts_them(tmp_path: Path) -> None:
    data = arrays()
    posterior = fit("deep-ensemble", "categorical", data["classes"], 3)
    file = report.write(posterior, tmp_path / "r.html", (data["x"], data["classes"]),
                        classes=["ant", "bee", "cat"], diagnose=False)  # fmt: skip
    root = page(file)
    probs = posterior.predict(data["x"]).probs.numpy()
    counts = np.zeros((3, 3), int)
    for row, truth in zip(probs, data["classes"].tolist(), strict=True):
        counts[truth, row.argmax()] += 1
    shown = cells(chart(root, "Confusion matrix").all("table")[0])
    assert [row[0] for row in shown] == ["ant", "bee", "cat"]
    assert [[int(c) for c in row[1:]] for row in shown] == counts.tolist()
    risk = cells(chart(root, "Risk and coverage").all("table")[0])
    order = np.argsort(-probs.max(1))
    wrong = (probs.argmax(1) != data["classes"].numpy())[order]
    for kept, share in risk[:: len(risk) // 5]:
        n = round(number(kept) * len(order))
        assert number(share) == pytest.approx(wrong[:n].mean(), abs=0.02)
    bins = cells(chart(root, "Reliability").all("table")[0])
    assert sum(int(row[2]) for row in bins) == len(probs)


def test_two_classes_are_told_apart(tmp_path: Path) -> None:
    data = arrays()
    posterior = fit("deep-ensemble", "bernoulli", data["binary"], 1)
    file = report.write(posterior, tmp_path / "r.html", (data["x"], data["binary"]),
                        classes=["no", "yes"], diagnose=False)  # fmt: skip
    root = page(file)
    yes = posterior.predict(data["x"]).probs.flatten() > 0.5
    truth = data["binary"].flatten() > 0.5
    expected = [[int(((truth == t) & (yes == g)).sum()) for g in (False, True)] for t in (0, 1)]
    shown = cells(chart(root, "Confusion matrix").all("table")[0])
    assert [row[0] for row in shown] == ["no", "yes"]
    assert [[int(c) for c in row[1:]] for row in shown] == expected
    assert "P(yes)" in section(root, "functions").text


@pytest.mark.slow
def test_findings_come_the_worst_first_and_a_doctor_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from doxa.diagnose.finding import Diagnosis, Finding

    data = arrays()
    posterior = fit("map", "gaussian", data["y"], 1)
    rows = (data["x"], data["y"])
    found = [Finding("first", "good", 1.0, "fine"), Finding("second", "not checked", None, "no"),
             Finding("third", "bad", 2.0, "<b>broken</b>", "mend it")]  # fmt: skip
    monkeypatch.setattr("doxa.app.report.status.diagnose", lambda *_, **__: Diagnosis(found))
    root = page(report.write(posterior, tmp_path / "r.html", rows, rows))
    texts = [li.text for li in section(root, "diagnostics").all("li")]
    assert texts[0].split(":")[0] == "✕ badthird"
    assert texts[1].split(":")[0] == "✓ goodfirst"
    assert texts[-1].split(":")[0] == "– not checkedsecond"
    assert "<b>broken</b>Try: mend it" in texts[0]
    assert "✕ Do not rely on it: 1 bad finding" in root.all("header")[0].text
    assert "1 bad finding (third)" in root.all("header")[0].text

    def fails(*_: object, **__: object) -> None:
        raise Unavailable("the doctor is out")

    monkeypatch.setattr("doxa.app.report.status.diagnose", fails)
    root = page(report.write(posterior, tmp_path / "r.html", rows, rows))
    assert "the doctor is out" in section(root, "diagnostics").text


@pytest.mark.slow
def test_a_single_row_a_single_class_and_a_single_input(tmp_path: Path) -> None:
    data = arrays()
    x, y, c = data["x"], data["y"], data["classes"]
    numbers, classes = fit("deep-ensemble", "gaussian", y, 1), fit("map", "categorical", c, 3)
    page(report.write(numbers, tmp_path / "a.html", (x[:1], y[:1]), diagnose=False))
    root = page(report.write(classes, tmp_path / "b.html", (x[:1], c[:1]), diagnose=False))
    assert "The only row" in root.text
    one = c == 1
    page(report.write(classes, tmp_path / "c.html", (x[one], c[one]), diagnose=False))
    line = library.fit(library.nets.mlp(1, 1, (8,)), (x[:, :1], y), "deep-ensemble", steps=40)
    root = page(report.write(line, tmp_path / "d.html", (x[:, :1], y), diagnose=False))
    drawing = chart(root, "Along x1")
    assert len(drawing.by_class("thin")) == 5 + 1  # a draw a member, and the key
    assert len(drawing.by_class("dim")) == len(x) + 1


@pytest.mark.slow
def test_heads_images_maps_and_several_outputs(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    data = arrays()
    x, y = data["x"], data["y"]

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    both = (y, data["classes"])
    posterior = library.fit(Two(), (x, both), "deep-ensemble", steps=10,
                            likelihood=(library.Gaussian(), library.Categorical()))  # fmt: skip
    root = page(report.write(posterior, tmp_path / "a.html", (x, both), diagnose=False))
    assert "head 2" in section(root, "scores").text
    pictures = torch.rand(30, 1, 8, 8, generator=source)
    label = (pictures.mean((1, 2, 3)) > 0.5).long()
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    posterior = library.fit(net, (pictures, label), "map", likelihood="categorical", steps=10)
    root = page(report.write(posterior, tmp_path / "b.html", (pictures, label), diagnose=False))
    assert len(root.all("img")) == 16
    scene = torch.rand(6, 3, 12, 16, generator=source)
    labels = (scene.mean(1) > 0.5).long()
    labels[:, 0] = -1
    posterior = library.fit(torch.nn.Conv2d(3, 2, 3, padding=1), (scene, labels), "deep-ensemble",
                            likelihood=library.Categorical(ignore_index=-1), steps=10)  # fmt: skip
    root = page(report.write(posterior, tmp_path / "c.html", (scene, labels), diagnose=False))
    shown = cells(chart(root, "Confusion matrix").all("table")[0])
    assert (
        sum(number(c) for row in shown for c in row[1:]) == 6 * 11 * 16
    )  # the ignored row of pixels counts nowhere
    several = torch.cat([y, -y, 2 * y], 1)
    posterior = library.fit(library.nets.mlp(2, 3, (8,)), (x, several), "map", steps=10)
    page(report.write(posterior, tmp_path / "d.html", (x, several), diagnose=False))


def test_a_diverged_run_says_so_first_and_its_gaps_are_counted(tmp_path: Path) -> None:
    data = arrays()
    posterior = library.fit(library.nets.mlp(2, 1, (8,)), (data["x"], data["y"]), "map", steps=40,
                            lr=1e12)  # fmt: skip
    assert posterior.status == "diverged"
    posterior.history["loss"].append([41, [float("inf")]])
    root = page(report.write(posterior, tmp_path / "r.html", (data["x"], data["y"])))
    assert "✕ Do not rely on it: 1 bad finding" in root.all("header")[0].text
    assert "1 bad finding and 2 warnings (status, " in root.all("header")[0].text
    assert "The fit ended as 'diverged'" in root.all("header")[0].text
    assert "smaller learning rate" in root.all("header")[0].text
    assert "Gaps mark values that are not finite (" in section(root, "training").text


def test_history_that_is_not_a_series_is_left_out() -> None:
    found = series({"step": [1, 2, [3, [0.5, 0.7]]], "stage": ["a", "b"], "loss": [[1, [2.0]]]})
    assert set(found) == {"step", "loss"}
    assert found["step"][1].tolist() == [[0.5, 0.7]]


@pytest.mark.slow
def test_recalibrated_and_conformal_posteriors_have_reports(tmp_path: Path) -> None:
    from doxa.evaluate.conformal import conformal
    from doxa.evaluate.recalibrate import recalibrate

    data = arrays()
    x, y, c = data["x"], data["y"], data["classes"]
    classes, numbers = fit("map", "categorical", c, 3), fit("deep-ensemble", "gaussian", y, 1)
    near = x + 0.01  # rows that the fit has not seen
    warm = recalibrate(classes, (near, c), kind="temperature")
    root = page(report.write(warm, tmp_path / "a.html", (x, c), diagnose=False))
    assert "Temperature" in section(root, "fitted").text
    held = conformal(numbers, (near, y), level=0.9)
    root = page(report.write(held, tmp_path / "b.html", (x, y), diagnose=False))
    shown = {row[0]: number(row[1]) for row in cells(section(root, "scores").all("table")[0])}
    low, high = held.predict(x).interval()
    assert shown["90 % coverage"] == pytest.approx(
        100 * float(((low <= y) & (y <= high)).float().mean()), abs=0.06
    )
    sets = conformal(classes, (near, c), level=0.8)
    root = page(report.write(sets, tmp_path / "c.html", (x, c), diagnose=False))
    shown = {row[0]: number(row[1]) for row in cells(section(root, "scores").all("table")[0])}
    chosen = sets.predict(x).prediction_set()
    assert shown["80 % set size"] == pytest.approx(float(chosen.float().sum(1).mean()), rel=5e-3)


@pytest.mark.slow
def test_many_rows_make_a_small_file_and_say_what_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = arrays()
    x = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    posterior = fit("deep-ensemble", "categorical", data["classes"], 3)
    file = report.write(posterior, tmp_path / "r.html", (x, y), diagnose=False)
    assert file.stat().st_size < 2_000_000
    root = page(file)
    assert "100,000 rows" in section(root, "scores").text
    monkeypatch.setattr("doxa.app.report.evaluation.MOST_COMPONENTS", 3000)
    posterior = fit("deep-ensemble", "gaussian", data["y"], 1)
    file = report.write(posterior, tmp_path / "s.html", (x, x[:, :1]), diagnose=False)
    root = page(file)
    assert "a random 600 of 100,000 rows" in section(root, "scores").text
    assert "60 of 600 predictions" in root.text
    assert file.stat().st_size < 2_000_000


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    frame, target = hostile_frame()
    file = tmp_path / "<img src=x onerror=alert(9)>.parquet"
    frame.to_parquet(file)
    doxa("fit", file, "--target", target, "--method", "map", "--steps", 20, "--out", tmp_path / "r")
    doxa("report", tmp_path / "r", "--test", file, "--train", file, "--title",
         "<b>title</b>\u202e", "--out", tmp_path / "r.html")  # fmt: skip
    source = (tmp_path / "r.html").read_text(encoding="utf-8")
    root = page(tmp_path / "r.html")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", source)
    assert root.all("h1")[0].text == "<b>title</b>⟨U+202E⟩"
    assert len(source) < 2_000_000
    assert "<script>alert(1)</script>" in root.text
    assert "⟨U+202E⟩gnp.exe" in root.text
    assert HOSTILE[8] in section(root, "names").text  # the whole of the long one


def hostile_frame(n: int = 40) -> tuple[Any, str]:
    """Columns, classes, categories and row names that are all hostile."""
    rng = np.random.default_rng(0)
    names = [name.strip() for name in HOSTILE]
    frame = pd.DataFrame({name: rng.normal(size=n) for name in names[1:]})
    frame["category"] = [names[k % 5] for k in range(n)]
    frame[names[0]] = [names[k % 3 + 8] for k in range(n)]
    frame.index = pd.Index([names[k % len(names)] + str(k) for k in range(n)], name="row")
    return frame, names[0]


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    data = arrays()
    posterior = fit("map", "gaussian", data["y"], 1)
    with pytest.raises(ShapeError, match="80 rows and y 79"):
        report.write(posterior, tmp_path / "r.html", (data["x"], data["y"][:-1]))
    with pytest.raises(DataError, match="N = 0"):
        report.write(posterior, tmp_path / "r.html", (data["x"][:0], data["y"][:0]))
    with pytest.raises(DataError, match="must be a pair"):
        report.write(posterior, tmp_path / "r.html", data["x"])
    with pytest.raises(DataError, match="1 names for 2"):
        report.write(posterior, tmp_path / "r.html", (data["x"], data["y"]), names=["a"])
    with pytest.raises(StoreError, match=r"\.html"):
        report.write(posterior, tmp_path / "r.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_rare_class_has_a_section_with_a_threshold(tmp_path: Path) -> None:
    """The numbers of `doxa.evaluate`, under the class's own name; without a rare class there is no
    such section."""
    source = torch.Generator().manual_seed(4)
    x = torch.randn(400, 2, generator=source)
    y = (x[:, 0] + 0.5 * torch.randn(400, generator=source) > 1.8).long()
    net = library.nets.mlp(2, 2, (8,))
    posterior = library.fit(net, (x, y), "map", likelihood="categorical", steps=200)
    report.write(posterior, tmp_path / "a.html", (x, y), classes=["fine", "<faulty>"])
    text = next(
        n for n in page(tmp_path / "a.html").all("section") if n.attributes["id"] == "rare-class"
    ).text
    p, share = posterior.predict(x), float(y.double().mean())
    assert 0.01 < share < 0.1
    found = library.evaluate.threshold(p, y, 1.0, (1 - share) / share)
    rare = library.evaluate.rare_class(p, y)
    assert "The class <faulty> is rare" in text and f"observed are {int(y.sum())}" in text
    assert f"{100 * share:.1f} %" in text and f"{rare.expected:.1f} ±" in text
    assert found.probability == pytest.approx(share, abs=1e-9)
    assert f"{int(found.confusion[1, 1])}" in text and f"{int(found.confusion[0, 1])}" in text
    even = (x[:, 0] > 0).long()
    posterior = library.fit(net, (x, even), "map", likelihood="categorical", steps=20)
    report.write(posterior, tmp_path / "b.html", (x, even))
    assert "rare-class" not in (tmp_path / "b.html").read_text()


def test_settings_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    """They are shown as numbers, and the Python lines need no numpy."""
    x = torch.linspace(-1, 1, 30)[:, None]
    method = library.SVGD(particles=np.int64(4), temperature=np.float32(0.5))
    net = library.nets.mlp(1, 1, hidden=(3,))
    posterior = library.fit(net, (x, x[:, 0]), method, steps=3, progress=False)
    report.write(posterior, tmp_path / "r.html", test=(x, x[:, 0]), diagnose=False)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "doxa.SVGD(particles=4, temperature=0.5)" in parse(page)[0].text
    assert "np." not in page
