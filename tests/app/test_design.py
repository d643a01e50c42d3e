"""`doxa design`: a session that narrows, is kept, goes on, and refuses what it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

from shell import doxa
from typer.testing import CliRunner

from doxa.app.cli import app
from doxa.decide.design import Study, working_memory


def typed(folder: Path, text: str, *words: str) -> str:
    result = CliRunner().invoke(app, ["design", str(folder), *words], input=text)
    assert result.exit_code == 0, result.output
    return result.output


def trials(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "session.json").read_text())["trials"]


def test_a_simulated_person_in_two_sittings_is_one_in_one(tmp_path: Path) -> None:
    whole = doxa("design", tmp_path / "a", "--simulate", 6.0, "--trials", 10)
    doxa("design", tmp_path / "b", "--simulate", 6.0, "--trials", 4)
    doxa("design", tmp_path / "b", "--simulate", 6.0, "--trials", 10)
    assert trials(tmp_path / "a") == trials(tmp_path / "b")
    study = Study(working_memory())
    for trial in trials(tmp_path / "a"):
        study.tell(trial["length"], trial["outcome"])
    assert f"span {float(study.posterior.mean):.2f} ± {float(study.posterior.std):.2f}" in whole
    assert float(study.posterior.std) < 1.0


def test_a_person_types_digits(tmp_path: Path) -> None:
    """What is no answer is refused with what to type, and asked again; nothing is lost."""
    said = typed(tmp_path / "s", "seven\n\n123\nq\n")
    assert "'seven' is no list of digits: type the digits you saw" in said
    assert "the same command continues" in said
    (first,) = trials(tmp_path / "s")
    assert first["length"] == 7 and first["outcome"] == 0
    shown = json.loads((tmp_path / "s" / "session.json").read_text())
    assert shown["shows"] == 2  # the second list was seen, and is not shown again
    said = typed(tmp_path / "s", "")
    assert "1 done" in said and len(trials(tmp_path / "s")) == 1
    lists = [line.split(": ")[1] for line in said.splitlines() if line.startswith("remember")]
    right = typed(tmp_path / "t", "3 0 3 4 0 2 8\nq\n")  # the first list of seed 0
    assert "right" in right and lists != ["9 2 9 2 2 3"]


def test_by_hand_and_mistakes(tmp_path: Path) -> None:
    said = typed(tmp_path / "s", "maybe\ny\nn\n", "--by-hand", "--trials", "2")
    assert "'maybe' is not y or n: type y if all digits were right" in said
    assert [trial["outcome"] for trial in trials(tmp_path / "s")] == [1, 0]
    assert "started with way = by hand" in doxa("design", tmp_path / "s", code=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "holds something else" in doxa("design", tmp_path / "full", code=2)
    assert "--prior takes a finite mean" in doxa("design", tmp_path / "n", "--prior", "7", code=2)
    for prior in ("nan,2", "7,inf", "7,nan", "inf,2", "7,-1", "7,2,1"):
        refused = doxa("design", tmp_path / "n", "--prior", prior, "--simulate", 7.0, code=2)
        assert "--prior takes a finite mean and a finite, positive std" in refused
    assert "--simulate takes a finite span" in doxa(
        "design", tmp_path / "n", "--simulate", "nan", code=2
    )
    assert not (tmp_path / "n").exists()
    (tmp_path / "s" / "session.json").write_text("{")
    assert "cannot be read as a session" in doxa("design", tmp_path / "s", "--by-hand", code=2)


def test_a_session_that_was_tampered_with_is_one_error(tmp_path: Path) -> None:
    doxa("design", tmp_path / "s", "--simulate", 7, "--trials", 1)
    place = tmp_path / "s" / "session.json"
    kept = json.loads(place.read_text())
    for bad in (3, [3], [{}], [{"length": "5", "outcome": 1}], [{"length": 5, "outcome": 7}]):
        place.write_text(json.dumps(kept | {"trials": bad}))
        said = doxa("design", tmp_path / "s", "--simulate", 7, "--trials", 2, code=2)
        assert "cannot be read as a session" in said
