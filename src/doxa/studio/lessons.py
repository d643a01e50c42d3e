"""Lessons: guided tours through states of the rooms.

A lesson is a list of `Step`s. Each is the state of a room, as the room writes it into its address.
The sentence and the question of a step are in the catalogue of the pages (`pages/strings.js`), by
the name of the lesson. The page asks the question before it goes to the next state, whose numbers
are computed there and then.

What a lesson claims is a claim about these states. `tests/studio/test_lessons.py` computes each
with the same requests, and compares the numbers.

A lesson is shown if the server has the rooms of all its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from doxa.studio import classification, functions
from doxa.studio.workers import ROOMS, Call

_NETWORK = {"depth": 1, "width": 50, "activation": "tanh", "prior": 2, "prior_kind": "fan-in"}
_NOISE = 0.15  # the standard deviation that the presets "gap" and "few" are shown with


@dataclass(frozen=True)
class Step:
    """A state of a room.

    Parameters
    ----------
    room : str
        The name of the room.
    state : dict
        The state, as the room's page writes it into the address.
    """

    room: str
    state: dict[str, Any]


@dataclass(frozen=True)
class Lesson:
    """A tour through states.

    Parameters
    ----------
    name : str
        The name in addresses and in the catalogue.
    steps : tuple of Step
        The states in order.
    """

    name: str
    steps: tuple[Step, ...]


def _panel(method: str, width: int = 50, prior: float = 2, **state: Any) -> dict[str, Any]:
    return {"method": method, "network": _NETWORK | {"width": width, "prior": prior}} | state


def _functions(points: list[list[float]], *panels: dict[str, Any], hidden: str = "prior") -> Step:
    view = {"x0": -5, "x1": 5, "y0": -3, "y1": 3}
    return Step("functions", {
        "points": points, "view": view, "seed": 0, "hidden": hidden.split(), "panels": [*panels],
    })  # fmt: skip


def _classes(preset: str, map_: str, *panels: dict[str, Any], hidden: str = "marks") -> Step:
    view = {"x0": -4.8, "x1": 4.8, "y0": -3, "y1": 3}
    return Step("classification", {
        **classification.presets()[preset], "view": view, "seed": 0, "hidden": hidden.split(),
        "map": map_, "ambiguity": False, "panels": [*panels],
    })  # fmt: skip


def _samplers(*panels: dict[str, Any], at: int = 400) -> Step:
    return Step("samplers", {
        "target": "correlated", "start": [-2.0, 2.0], "chains": 4, "spread": 0, "seed": 0, "at": at,
        "panels": [*panels],
    })  # fmt: skip


def _lessons() -> Iterator[Lesson]:
    points = functions.presets()
    few, gap = points["few"], points["gap"]
    chain = {"draws": 200, "burn_in": 200, "leapfrog": 30}
    hmc = _panel("hmc", noise=_NOISE, settings=chain)
    small_hmc = _panel("hmc", 3, noise=_NOISE, settings=chain)
    gp = _panel("gp", noise=0.2)
    yield Lesson("noise", (
        _functions(few, gp),
        _functions(points["sine"], gp),
        _functions(points["two noises"], _panel("gp"), _panel("laplace", noise="heteroscedastic")),
        _functions(gap, gp),
    ))  # fmt: skip
    one, many = _panel("map", prior=4), _panel("hmc", prior=4)
    yield Lesson("averaging", (
        _classes("few", "probability", one),
        _classes("few", "probability", one, many),
        _classes("far", "entropy", one, many),
        _classes("far", "epistemic", one, many),
    ))  # fmt: skip

    sgd, sgld, sghmc, hmc_ = ({"sampler": name} for name in ("sgd", "sgld", "sghmc", "hmc"))
    yield Lesson("samplers", (
        _samplers(sgd | {"noise": 0}),
        _samplers(sgd | {"noise": 0}, sgd),
        _samplers(sgd, sgld),
        _samplers(sgld, sghmc),
        _samplers(sghmc, hmc_),
    ))  # fmt: skip

    def svgd(particles: int, width: int) -> dict[str, Any]:
        return _panel("svgd", width, noise=_NOISE, settings={"particles": particles})

    yield Lesson("particles", (
        _functions(gap, svgd(3, 3)),
        _functions(gap, svgd(3, 3), small_hmc),
        _functions(gap, svgd(3, 3), svgd(50, 3), small_hmc),
        _functions(gap, svgd(50, 50), hmc),
    ))  # fmt: skip

    def mean_field(width: int) -> dict[str, Any]:
        return _panel("mean-field", width, noise=_NOISE)

    yield Lesson("elbo", (
        _functions(gap, mean_field(3)),
        _functions(gap, mean_field(3), small_hmc),
        _functions(gap, mean_field(3), mean_field(10)),
        _functions(gap, *(_panel("laplace", width, noise=_NOISE) for width in (3, 10))),
    ))  # fmt: skip

    def swag(**options: Any) -> dict[str, Any]:
        return _panel("swag", noise=_NOISE, settings={"rank": 10}, **options)

    yield Lesson("swag", (
        _functions(gap, _panel("map", noise=_NOISE)),
        _functions(gap, _panel("map", noise=_NOISE), swag()),
        _functions(gap, swag(), swag(members=5)),
        _functions(gap, swag(members=5), hmc),
    ))  # fmt: skip
    limit = {"depth": 1, "activation": "tanh", "weight_std": 2.0, "bias_std": 2.0}
    wide = _panel("nngp", noise=_NOISE, settings=limit | {"learn_kernel": False})
    yield Lesson("wide", (
        _functions([], _panel("map", 1), hidden=""),
        _functions([], _panel("map", 1), _panel("map", 200), hidden=""),
        _functions([], _panel("map", 200), wide, hidden=""),
        _functions(few, _panel("hmc", 1, noise=_NOISE), _panel("hmc", noise=_NOISE), wide),
    ))  # fmt: skip
    process = _panel("gp", noise=_NOISE)
    yield Lesson("label", (
        _functions(gap, process),
        _functions([*gap, [2.5, -0.6]], process),
        _functions([*gap, [0.0, 0.0]], process),
        _classes("overlap", "entropy", _panel("hmc", prior=4), hidden=""),
        _classes("overlap", "epistemic", _panel("hmc", prior=4), hidden=""),
    ))  # fmt: skip


LESSONS = tuple(_lessons())
TASKS: dict[str, Callable[[Any, Call], Any]] = {}  # a lesson's numbers are those of its rooms


def facts() -> dict[str, Any]:
    """The lessons whose rooms the server has."""
    shown = [one for one in LESSONS if all(step.room in ROOMS for step in one.steps)]
    return {"lessons": [asdict(lesson) for lesson in shown]}


def warm_up() -> Iterator[Callable[[], object]]:
    """Nothing is computed here."""
    return iter(())
