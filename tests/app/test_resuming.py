"""Nothing is lost: a fit that was interrupted goes on by itself, to the same bits, and neither its
checkpoint nor a finished run is ever replaced unasked."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from shell import doxa, started

from doxa.app.commands import fit
from doxa.driver import Driver

pd = pytest.importorskip("pandas")

ANY = ["--allow-status"]  # of few steps


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(50, 10, 60), "b": rng.normal(size=60)})
    frame["y"] = 2 * frame["a"] + rng.normal(size=60)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


def interrupt(monkeypatch: pytest.MonkeyPatch, tick_number: int) -> None:
    """Ctrl-C at so many ticks of the next fit."""
    tick, ticks = Driver._tick, []

    def interrupted(self, *args):
        ticks.append(1)
        if len(ticks) == tick_number:
            signal.raise_signal(signal.SIGINT)
        return tick(self, *args)

    monkeypatch.setattr(Driver, "_tick", interrupted)


def weights(run: Path) -> bytes:
    return (run / "tensors.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("listening")
def test_the_same_command_goes_on_where_it_stopped(rows, tmp_path, monkeypatch) -> None:
    words = ["fit", rows, "-t", "y", "-m", "map", "--steps", "100", *ANY]
    doxa(*words, "-o", tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        said = doxa(*words, "-o", tmp_path / "part", code=130)
    assert "the same command continues" in said
    assert (tmp_path / "part.checkpoint").is_dir() and not (tmp_path / "part").exists()
    said = doxa(*words, "-o", tmp_path / "part")
    assert "continuing the interrupted fit from step 40" in said
    assert not (tmp_path / "part.checkpoint").exists()
    assert weights(tmp_path / "part") == weights(tmp_path / "whole")


@pytest.mark.usefixtures("listening")
def test_a_fit_that_asks_for_something_else_is_refused(rows, tmp_path, monkeypatch) -> None:
    words = ["fit", rows, "-t", "y", "-m", "map", "-o", tmp_path / "run", "--steps", 20, *ANY]
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        doxa(*words, code=130)
    kept = sorted(path.name for path in (tmp_path / "run.checkpoint").rglob("*"))
    assert any("-step-" in name for name in kept)
    said = doxa(*words, "--seed", 7, "--hidden", "9,9", code=2)
    assert "with other options: --hidden 50, now 9, 9; --seed 0, now 7. Repeat" in said
    text = rows.read_text()
    rows.write_text(text + "50,0,100\n")
    assert "the data file had other contents" in doxa(*words, "--resume", code=2)
    rows.write_text(text)
    assert sorted(path.name for path in (tmp_path / "run.checkpoint").rglob("*")) == kept
    doxa(*words, "--seed", 7, "--overwrite")
    assert (tmp_path / "run").is_dir() and not (tmp_path / "run.checkpoint").exists()


def test_a_fit_that_fails_leaves_nothing_to_go_on_with(rows, tmp_path, monkeypatch) -> None:
    words = ["fit", rows, "-t", "y", "-o", tmp_path / "run"]
    assert "cannot import" in doxa(*words, "--net", "no_such_module:f", code=2)
    assert not (tmp_path / "run.checkpoint").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # which saving would replace
    assert "is the current folder" in doxa("fit", rows, "-t", "y", "-o", ".", code=2)
    # killed before its first checkpoint: there is nothing to lose, and nothing is refused
    fit.claim_checkpoint(tmp_path / "run.checkpoint", {"seed": 1})
    said = doxa(*words, "-m", "map", "--steps", 2, *ANY)
    assert "saved to" in said and "continuing" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("listening")
def test_a_finished_run_is_replaced_only_when_asked_and_finished(
    rows, tmp_path, monkeypatch
) -> None:
    words = ["fit", rows, "-t", "y", "-m", "map", "-o", tmp_path / "run", "--steps", 20, *ANY]
    doxa(*words)
    before = weights(tmp_path / "run")
    said = doxa(*words, code=2)
    assert "already holds a finished run; --overwrite replaces it" in said
    assert "input columns" not in said  # before anything is read
    again = [*words, "--overwrite", "--seed", 3]
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        doxa(*again, code=130)
    assert weights(tmp_path / "run") == before
    assert "continuing the interrupted fit" in doxa(*again)
    assert weights(tmp_path / "run") != before
    assert "--resume: nothing to resume, starting from the beginning" in doxa(
        *words, "--overwrite", "--resume"
    )
    assert weights(tmp_path / "run") == before


def test_resume_reports_that_there_is_nothing_to_resume(rows, tmp_path) -> None:
    words = ["fit", rows, "-t", "y", "-m", "map", "--steps", 2, *ANY]
    message = "--resume: nothing to resume, starting from the beginning"
    assert message in doxa(*words, "-o", tmp_path / "one", "--resume")
    assert "nothing to resume" not in doxa(*words, "-o", tmp_path / "two")


def test_steps_are_those_of_optimisation_and_all_stages_are_printed(rows, tmp_path) -> None:
    """The noise of an ensemble has 100 steps of its own; a sampler has burn-in and draws."""
    words = ["fit", rows, "-t", "y", *ANY, "--steps", 30]
    said = doxa(*words, "-m", "deep-ensemble", "-o", tmp_path / "one")
    assert "--steps 30: 30 steps of optimisation" in said and "noise 100" in said
    settings = ["--set", "burn_in=20", "--set", "draws=5", "--set", "thin=2"]
    said = doxa(*words, "-m", "sgld", *settings, "-o", tmp_path / "two")
    assert "steps per stage: burn-in 20, sample 10" in said
    assert "steps of optimisation" not in doxa(
        *words[:-2], "-m", "linear", "-o", tmp_path / "three"
    )


def test_a_fit_that_diverged_is_saved_and_has_an_exit_code_of_its_own(rows, tmp_path) -> None:
    words = ["fit", rows, "-t", "y", "-m", "map", "--lr", "1e30", "--steps", 20]
    said = doxa(*words, "-o", tmp_path / "run", code=3)
    assert "map: diverged" in said and "saved to" in said and "do not use" in said
    assert (tmp_path / "run" / "meta.json").exists()
    assert "3 saved, but the fit diverged" in doxa("fit", "--help")


@pytest.mark.slow
def test_two_fits_into_one_folder(rows, tmp_path) -> None:
    run, log = tmp_path / ("r" * 250), tmp_path / "log"
    words = ["fit", rows, "-t", "y", "-m", "map", "-o", run, *ANY]
    first = started(*words, "--steps", 10_000_000, "--checkpoint-every", 0, log=log)
    try:
        limit = time.monotonic() + 120
        while not seen(".*.checkpoint/**/*-step-*", tmp_path):
            assert first.poll() is None, log.read_text()
            assert time.monotonic() < limit, sorted(tmp_path.iterdir())
            time.sleep(0.05)
        for other in ([], ["--overwrite", "--seed", 1]):
            said = doxa(*words, "--steps", 20, *other, code=2)
            assert f"is being written by process {first.pid} on" in said
            assert "input columns" not in said  # before anything is read
    finally:
        first.kill()
        first.wait()
    said = doxa(*words, "--steps", 20, "--overwrite")
    assert "saved to" in said
    assert {path.name for path in tmp_path.iterdir()} == {"log", "rows.csv", run.name}


def seen(pattern: str, folder: Path) -> set[Path]:
    """What a pattern finds while another process writes and removes there: an older checkpoint that
    goes away between two looks is an error inside `glob`, and simply not there."""
    while True:
        with suppress(FileNotFoundError):
            return set(folder.glob(pattern))


Moment = Callable[[Path], bool]


def after(seconds: float) -> Moment:
    at = time.monotonic() + seconds
    return lambda run: time.monotonic() > at


def new(pattern: str, run: Path) -> Moment:
    """When a file or folder of this name appears that was not there before."""
    before = seen(pattern.format(run.name), run.parent)
    return lambda run: bool(seen(pattern.format(run.name), run.parent) - before)


@pytest.mark.slow
def test_twenty_kills_and_the_same_command_lose_nothing(rows, tmp_path) -> None:
    """SIGKILL at random moments, and at those that random ones seldom meet; a run that is finished
    meanwhile is checked, and another one begun."""
    log = tmp_path / "log.txt"
    words = ["fit", rows, "-t", "y", "-m", "sghmc", "--set", "draws=60", "--set", "burn_in=300",
             "--checkpoint-every", 0.05, *ANY]  # fmt: skip
    began = time.monotonic()
    assert started(*words, "-o", tmp_path / "whole", log=log).wait() == 0
    whole = time.monotonic() - began
    first = "{}.checkpoint/asked.json"  # before any step
    watched = [first, "{}.checkpoint/**/*-step-*", "{}.checkpoint/**/.tmp-*", ".{}.tmp-*", "{}"]
    rng = np.random.default_rng(0)
    moments = itertools.cycle([*watched, *rng.uniform(0.0, 1.1 * whole, 6)])
    kills: list[str | float] = []
    runs = [tmp_path / "run0"]
    while len(kills) < 20:
        run, moment = runs[-1], next(moments)
        reached = new(moment, run) if isinstance(moment, str) else after(moment)
        process = started(*words, "-o", run, log=log)
        while process.poll() is None and not reached(run):
            time.sleep(0.001)
        process.kill()
        kills += [moment] * (process.wait() == -signal.SIGKILL)
        if (run / "meta.json").exists():
            assert "already holds a finished run" in doxa(*words, "-o", run, code=2)
            runs.append(tmp_path / f"run{len(runs)}")
    assert set(watched) <= set(kills)
    assert started(*words, "-o", runs[-1], log=log).wait() == 0
    assert len({weights(run) for run in [tmp_path / "whole", *runs]}) == 1
    said = log.read_text()
    assert "continuing the interrupted fit from step" in said
    assert "the interrupted fit had no checkpoint yet" in said
