"""How far a fit is: on a narrow terminal, on a wide one, and where there is none."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from doxa.driver import bar as bars
from doxa.driver.bar import Bar, Lines, Pace, clock

VALUES = {"loss": [0.123456, 0.2], "log_density": [-12345.678], "accept": [0.81]}


def drawn(width: int, monkeypatch: pytest.MonkeyPatch, name: str = "deep-ensemble") -> str:
    """The last line that a bar draws, 100 s after it began, at step 1,500 of 2,000."""
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with Bar(name, 2000, console=console) as bar:
        now[0] = 1.0
        bar.show(15, "training", VALUES)
        now[0] = 100.0
        bar.show(1500, "training", VALUES)
        bar._bar.refresh()
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", file.getvalue())
    return [line for line in lines if line.strip()][-1].rstrip()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_bar_count_and_time_left_survive_any_width(width, monkeypatch) -> None:
    line = drawn(width, monkeypatch)
    assert len(line) <= width
    assert "1,500/2,000 0:00:33 left" in line
    assert line.count("━") >= 5
    assert "…" not in line


def test_figures_give_way_before_names(monkeypatch) -> None:
    assert drawn(200, monkeypatch).endswith("loss 0.1617  log_density -1.235e+04  accept 0.81")
    line = drawn(80, monkeypatch)
    assert line.startswith("deep-ensemble: training") and "log_density" not in line
    assert not drawn(40, monkeypatch).startswith("deep")


def test_without_a_terminal_there_are_plain_lines_further_and_further_apart(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    said: list[float] = []
    with Lines("nuts", 20_000, stream=stream) as lines:
        assert stream.getvalue() == "nuts: 20,000 steps\n"
        for step in range(1, 20_001):
            now[0] = float(step)
            before = stream.tell()
            lines.show(step, "draws", VALUES)
            said += [now[0]] if stream.tell() > before else []
    text = stream.getvalue()
    assert said[:4] == [10.0, 30.0, 70.0, 150.0]
    gaps = [b - a for a, b in pairwise(said)]
    assert gaps == sorted(gaps) and gaps[-1] == 600.0
    assert "nuts: step 10 of 20,000, 5:33:10 left, draws, loss 0.1617" in text
    assert text.endswith("nuts: done at step 20,000 after 5:33:20\n")
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) is None  # no control characters


def test_an_interrupted_fit_says_where_it_stopped() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Lines("map", 100, 40, stream=stream) as lines:
        lines.show(60, "training", {})
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines() == [
        "map: 100 steps, from step 40",
        "map: stopped at step 60 after 0:00:00",
    ]


def test_the_pace_is_that_of_this_session() -> None:
    pace = Pace(100)
    pace.note(2.0, 101)
    assert pace.left(10.0, 105, 125) == "0:00:40 left"
    assert pace.left(10.0, 101, 125) == "-:--:-- left"
    assert clock(3725.4) == "1:02:05"


def test_a_slow_first_step_does_not_announce_half_a_day() -> None:
    """One step of 5 s, which compiles, and then a hundred steps a second."""
    pace, said = Pace(), []
    for k in range(2000):
        spent, done = 5.0 + 0.01 * k, 1 + k
        pace.note(spent, done)
        said.append(pace.left(spent, done, 10_000))
        assert len(pace._marks) < 40
    assert said[0] == "-:--:-- left"
    assert {text[:6] for text in said[1:]} == {"0:01:3", "0:01:4", "0:01:2"}, set(said)


def test_a_fit_that_goes_on_has_its_first_part_filled() -> None:
    bar = Bar("map", 10, 4, console=Console(file=io.StringIO(), width=80))
    assert bar._bar.tasks[0].completed == 4 and bar._bar.tasks[0].total == 10
