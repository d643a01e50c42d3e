"""Lessons: every state is one that its room can show, every step has its texts, and what a lesson
claims holds for the library's own numbers on these states."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa import evaluate
from doxa.studio import lessons, samplers, workers
from doxa.studio.classification import ClassRecipe
from doxa.studio.forms import is_exact
from doxa.studio.functions import Recipe
from doxa.studio.lessons import LESSONS
from doxa.studio.recipes import START, STEPS

STATES = {lesson.name: lesson.steps for lesson in LESSONS}
CATALOGUE = (Path(lessons.__file__).parent / "pages" / "strings.js").read_text(encoding="utf-8")
MIDDLE = 60  # of the grid of functions: x = 0, the middle of the gap


def recipe(lesson: str, step: int, panel: int = 0) -> Any:
    """The recipe that the page makes of a panel's state (`panel.js`, `recipe`)."""
    room, state = STATES[lesson][step].room, STATES[lesson][step].state
    given, view = state["panels"][panel], state["view"]
    name = given["method"]
    asked: dict[str, Any] = {
        "points": state["points"], "seed": state["seed"], "method": name,
        "settings": START.get(name, {}) | given.get("settings", {}),
    }  # fmt: skip
    if room == "functions":
        asked |= {"low": view["x0"], "high": view["x1"], "noise": given.get("noise")}
    else:
        asked |= {"classes": state["classes"], **view}
    if doxa.get_method(name).needs_network:
        asked |= given["network"]
    if not is_exact(name):
        draws = "draws" in dict(doxa.methods()[name].short)
        asked["steps"] = given.get("steps", None if draws else STEPS)
    if "members" in given:
        asked["members"] = given["members"]
    return {"functions": Recipe, "classification": ClassRecipe}[room].read(asked)


@cache
def fitted(lesson: str, step: int, panel: int = 0) -> Any:
    return recipe(lesson, step, panel).before_data.fit()


@cache
def predicted(lesson: str, step: int, panel: int = 0) -> Any:
    return fitted(lesson, step, panel).predict(recipe(lesson, step, panel).grid)


def epistemic(lesson: str, step: int, panel: int = 0) -> torch.Tensor:
    return predicted(lesson, step, panel).epistemic.reshape(-1)


def test_there_are_the_eight_lessons() -> None:
    names = {"noise", "averaging", "samplers", "particles", "elbo", "swag", "wide", "label"}
    assert set(STATES) == names
    assert json.dumps(lessons.facts(), allow_nan=False)


def test_every_step_has_a_sentence_and_a_question_with_answers() -> None:
    """Each lesson has as many sentences as states, and a question at every step but the last."""
    part = CATALOGUE[CATALOGUE.index("\n  lessons: {") :]
    for name, steps in STATES.items():
        found = re.search(rf"\n    {name}: {{\n(.*?)\n    }},\n", part, re.DOTALL)
        assert found is not None, name
        assert "title: " in found[1]
        assert "lead: " in found[1]
        assert len(re.findall(r"\bsay: ", found[1])) == len(steps)
        asked = re.findall(r"\bask: ", found[1])
        options = re.findall(r"options: \[(.*?)\], right: (\d)", found[1])
        assert len(asked) == len(options) == len(steps) - 1
        for texts, right in options:
            assert int(right) < len(re.findall(r'"[^"]+"', texts)) >= 2


def test_every_state_is_one_that_its_room_reads() -> None:
    for name, steps in STATES.items():
        for i, step in enumerate(steps):
            assert step.room in workers.ROOMS
            for k, panel in enumerate(step.state["panels"]):
                if step.room == "samplers":
                    chain(name, i, k)
                else:
                    assert recipe(name, i, k).method == panel["method"]


def test_lessons_without_their_room_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "ROOMS", {"functions": "", "lessons": ""})
    shown = [one["name"] for one in lessons.facts()["lessons"]]
    assert shown == ["noise", "particles", "elbo", "swag", "wide"]


@pytest.mark.slow
def test_noise_stays_and_uncertainty_about_the_function_falls() -> None:
    few, dense = predicted("noise", 0), predicted("noise", 1)
    assert torch.allclose(few.aleatoric, dense.aleatoric, rtol=1e-9)
    assert epistemic("noise", 1)[24:97].mean() < 0.3 * epistemic("noise", 0)[24:97].mean()
    one, two = predicted("noise", 2, 0).aleatoric, predicted("noise", 2, 1).aleatoric
    assert torch.allclose(one, one[0].expand_as(one))
    noise = float(one.reshape(-1)[0])
    assert two.reshape(-1)[30] < 0.2 * noise
    assert two.reshape(-1)[90] > 2 * noise
    gap = epistemic("noise", 3)
    assert gap[MIDDLE] > 10 * gap[87]


@pytest.mark.slow
def test_an_average_has_another_boundary_and_is_less_sure() -> None:
    one, many = predicted("averaging", 1, 0), predicted("averaging", 1, 1)
    decides = one.probs.argmax(1) != many.probs.argmax(1)
    assert 0 < int(decides.sum()) < len(decides) / 2
    one, many = predicted("averaging", 2, 0), predicted("averaging", 2, 1)
    assert one.probs[-1].max() > 0.999  # the corner that is far from all points
    assert many.probs[-1].max() < 0.9
    assert one.mutual_information.abs().max() < 1e-9
    assert many.mutual_information[-1] > 0.5 * many.entropy[-1]


def chain(lesson: str, step: int, panel: int) -> samplers.Recipe:
    state = STATES[lesson][step].state
    shared = {k: state[k] for k in ("target", "start", "chains", "spread", "seed")}
    return samplers.Recipe.read(shared | state["panels"][panel])


@cache
def run(step: int, panel: int) -> tuple[float, float]:
    """The spread of the second half of the shown steps, and the bulk effective size."""
    count = STATES["samplers"][step].state["at"]
    steps = chain("samplers", step, panel).run(trace=False)
    x = torch.stack([one.draw["x"] for one in islice(steps, count)])[count // 2 :, :, 0]
    found = samplers.summary(steps, count)
    return float(x.std()), min(found["ess_bulk"]) if found else float("nan")


@pytest.mark.slow
def test_noise_makes_a_sampler_and_momentum_and_a_test_make_it_good() -> None:
    """Both coordinates of the target have a standard deviation of 1."""
    assert run(0, 0)[0] < 1e-6
    assert 0.05 < run(1, 1)[0] < 0.4
    assert 0.7 < run(2, 1)[0] < 1.4
    assert run(3, 1)[1] > 1.5 * run(2, 1)[1]
    assert run(4, 1)[1] > 10 * run(3, 1)[1]


@pytest.mark.slow
def test_few_particles_collapse_and_so_do_many_among_many_weights() -> None:
    three, fifty, hmc = (epistemic("particles", 2, k)[MIDDLE] for k in range(3))
    assert 2 * three < fifty < hmc
    assert epistemic("particles", 3, 0)[MIDDLE] < 0.05 * epistemic("particles", 3, 1)[MIDDLE]


@pytest.mark.slow
def test_an_elbo_prefers_small_networks_and_narrow_bands() -> None:
    assert epistemic("elbo", 1, 0)[MIDDLE] < 0.3 * epistemic("elbo", 1, 1)[MIDDLE]
    small, large = (float(fitted("elbo", 2, k).elbo) for k in (0, 1))
    near, far = (float(fitted("elbo", 3, k).log_evidence) for k in (0, 1))
    assert small - large > 30
    assert near - far < 6
    assert small < near  # a bound


@pytest.mark.slow
def test_swag_sees_its_basin_only() -> None:
    one, five, hmc = epistemic("swag", 2, 0), epistemic("swag", 2, 1), epistemic("swag", 3, 1)
    assert float(predicted("swag", 0).epistemic.abs().max()) < 1e-12
    assert 0 < one[MIDDLE] < five[MIDDLE]
    assert five[MIDDLE] < 0.05 * hmc[MIDDLE]


def excess(posterior: Any, grid: torch.Tensor) -> tuple[float, float]:
    """The variance of prior functions at x = 0, and the excess kurtosis of f(0.5) − f(−0.5)."""
    f = posterior.prior_functions(grid, n=4000).reshape(4000, -1)
    step = f[:, 66] - f[:, 54]
    return float(f[:, 60].var()), float((step / step.std()).pow(4).mean() - 3.0)


def test_wide_networks_become_gaussian_processes() -> None:
    """Variances are equal for any width; 4,000 draws of a Gaussian have an excess kurtosis of 0 ±
    0.08. With one unit a step is 0 mostly."""
    grid = recipe("wide", 0).grid
    one, many = excess(fitted("wide", 1, 0), grid), excess(fitted("wide", 1, 1), grid)
    process = excess(fitted("wide", 2, 1), grid)
    assert one[0] == pytest.approx(process[0], rel=0.1)
    assert many[0] == pytest.approx(process[0], rel=0.1)
    assert one[1] > 2.0
    assert abs(many[1]) < 0.4
    assert abs(process[1]) < 0.4


@pytest.mark.slow
def test_wide_networks_predict_like_the_process() -> None:
    narrow, wide, process = (predicted("wide", 3, k) for k in range(3))
    assert evaluate.total_variation(wide, process) < 0.15
    assert evaluate.total_variation(narrow, process) > 0.3
    assert fitted("wide", 3, 0).status == "not-converged"


def test_a_label_is_worth_what_it_changes() -> None:
    before, beside, inside = (float(epistemic("label", k)[MIDDLE]) for k in range(3))
    assert beside > 0.9 * before
    assert inside < 0.2 * before


@pytest.mark.slow
def test_the_most_ambiguous_place_is_not_where_draws_disagree() -> None:
    p, x = predicted("label", 3), recipe("label", 3).data[0]
    away = torch.cdist(recipe("label", 3).grid, x).amin(1)
    ambiguous, unknown = p.expected_entropy.argmax(), p.mutual_information.argmax()
    assert p.expected_entropy[ambiguous] > 0.8 * p.entropy[ambiguous]
    assert away[unknown] > 2 * away[ambiguous]
