"""The room "Samplers": chains on densities of two parameters, step by step.

A request is a `Recipe`: a target, a sampler with its settings, chains, and the list of what was
changed on the way. It is carried out by `doxa.transitions` with traces, and sent as frames: where
every chain is after a step, and what the step did (`doxa.method.trace`). Every twentieth frame has
the summary of the draws so far, as `doxa.sample` returns it: R-hat, effective sizes, status.

A page asks for the frames that it shows next. The process keeps the chain, and continues it. If the
recipe has changed, or another process has the chain, the steps before are made again: the same
recipe gives the same bits. `script` writes the recipe as Python; a test runs it for each sampler.

Steps are executed eagerly (`engine="stack:eager"`), so that the numbers of a trace are those with
which the chain moved, to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.density import Transition, Transitions
from doxa.errors import DataError, DoxaError, MethodError
from doxa.method import Method
from doxa.method.method import rules
from doxa.method.trace import Record
from doxa.studio.forms import describe, read_settings
from doxa.studio.targets import (
    FUNCTIONS,
    NETWORK,
    ROWS,
    TARGETS,
    TYPED,
    TYPED_VIEW,
    View,
    density_of,
    picture,
    source,
)
from doxa.studio.workers import Call

LENGTH = 3000  # steps of a run
MOST_CHAINS = 8
MOST_CHANGES = 200
MOST_FRAMES = 200  # of one answer
EVERY = 20  # frames between two summaries
_MAXIMUM = 100  # steps in which constant SGD looks for the optimum
_ANSWER = 0.3  # seconds until an answer is sent, complete or not
_KEPT = 8  # chains that a process remembers
_LARGEST = 1e6  # of a coordinate
_ENGINE = "stack:eager"


@dataclass(frozen=True)
class Sampler:
    """A sampler of the room.

    Parameters
    ----------
    method : str
        The method of the library.
    controls : dict of str to float
        What may change between two steps, with its value at the start.
    start : dict
        Settings that a panel starts with.
    noisy : bool
        Whether a step sees an estimate of the density.
    momentum : float or None
        Of paths of an optimiser.
    hidden : tuple of str
        Settings without a field in the form.
    """

    method: str
    controls: dict[str, float]
    start: dict[str, Any] = field(default_factory=dict)
    noisy: bool = False
    momentum: float | None = None
    hidden: tuple[str, ...] = ()


SAMPLERS: dict[str, Sampler] = {
    "sgd": Sampler("map", {"lr": 0.02}, noisy=True, momentum=0.0),
    "momentum": Sampler("map", {"lr": 0.005}, noisy=True, momentum=0.9),
    "constant-sgd": Sampler("constant-sgd", {"step_size": 0.05}, noisy=True, hidden=("probes",)),
    "sgld": Sampler("sgld", {"step_size": 0.02, "temperature": 1.0}, {"decay": 0.0}, noisy=True),
    "sghmc": Sampler(
        "sghmc", {"step_size": 0.01, "temperature": 1.0, "friction": 0.1}, noisy=True
    ),
    "minibatch-mh": Sampler(
        "minibatch-mh", {"step_size": 0.05, "temperature": 1.0}, noisy=True,
        hidden=("target_accept",),
    ),
    "metropolis": Sampler(
        "metropolis", {"step_size": 1.0, "temperature": 1.0, "mass": 1.0}, hidden=("scale",)
    ),
    "mala": Sampler("mala", {"step_size": 0.5, "temperature": 1.0, "mass": 1.0}),
    "hmc": Sampler(
        "hmc", {"step_size": 0.15, "temperature": 1.0, "mass": 1.0},
        {"leapfrog": 15, "jitter": 1.0},
    ),
    "nuts": Sampler(
        "nuts", {"step_size": 0.25, "temperature": 1.0, "mass": 1.0}, {"max_depth": 6}
    ),
    "svgd": Sampler("svgd", {"lr": 0.1, "bandwidth": 1.0, "temperature": 1.0}, noisy=True),
}  # fmt: skip
_OF_THE_ROOM = ("draws", "thin")  # settings that the room sets itself
_LIMITS = {"burn_in": 1000, "leapfrog": 100, "max_depth": 8, "particles": 60}
NOISE, BATCH = 2.0, 8  # of the gradient, and rows of a batch
MOMENTUM = "momentum"


@dataclass(frozen=True)
class Recipe:
    """A run of a sampler on a target.

    Parameters
    ----------
    target : str
        One of `doxa.studio.targets.TARGETS`, or "typed".
    text : str
        The formula of a typed target.
    sampler : str
        One of `SAMPLERS`.
    settings : dict
        Settings that are not the method's defaults.
    initial : dict of str to float
        The controls at the start.
    changes : tuple of (int, str, float or tuple of float)
        Changes of controls, and restarts: (steps done, name, value).
    chains : int
        The number of chains.
    start : tuple of float
        Where chains start.
    spread : float
        Half the width of the square around the start in which they start.
    seed : int
        The seed.
    noise : float
        The standard deviation of the gradient's noise, for methods on mini-batches.
    """

    target: str
    text: str
    sampler: str
    settings: dict[str, Any]
    initial: dict[str, float]
    changes: tuple[tuple[int, str, Any], ...]
    chains: int
    start: tuple[float, float]
    spread: float
    seed: int
    noise: float

    @classmethod
    def read(cls, asked: Any) -> Recipe:
        """A recipe from the request of a page."""
        if not isinstance(asked, dict):
            raise DataError("a recipe must be an object with a target and a sampler")
        known = {each.name for each in dataclasses.fields(cls)}
        if unknown := sorted(set(asked) - known):
            raise DataError(f"a recipe has no {unknown[0]!r:.40}")
        target, text = _target(asked)
        name = asked.get("sampler")
        if not isinstance(name, str) or name not in SAMPLERS:
            raise MethodError(f"this room has no sampler {name!r:.40}")
        sampler = SAMPLERS[name]
        settings = _settings(name, asked.get("settings", sampler.start))
        controls = controls_of(name, target)
        initial = asked.get("initial", {})
        if not isinstance(initial, dict):
            raise DataError("initial must be names and values of controls")
        for each, value in initial.items():
            _control(controls, each, value)
        start = asked.get("start", list(_start(target)))
        recipe = cls(
            target, text, name, settings,
            controls | {k: _typed(k, v) for k, v in initial.items()},
            _changes(controls, asked.get("changes", [])),
            _whole(asked, "chains", 1, 1, MOST_CHAINS), _point(start, "the start"),
            _number(asked, "spread", 0.0, 0.0, 100.0), _whole(asked, "seed", 0, 0, 2**31),
            _number(asked, "noise", NOISE, 0.0, 1e3),
        )  # fmt: skip
        _ = recipe.method  # an error here if a setting has a wrong value
        return recipe

    @property
    def method(self) -> Method:
        """The method with its settings. A control that is a setting starts as such; others are
        changed before the first step."""
        own = {k: v for k, v in self.settings.items() if k != MOMENTUM}
        return doxa.get_method(SAMPLERS[self.sampler].method)(**own, **self._fixed)

    @property
    def _fixed(self) -> dict[str, Any]:
        cls = doxa.get_method(SAMPLERS[self.sampler].method)
        declared = rules(cls)
        fixed: dict[str, Any] = {}
        if "draws" in declared:
            fixed["draws"] = LENGTH
            fixed |= {"burn_in": 0} if "burn_in" not in self.settings else {}
            fixed |= {"thin": 1} if "thin" in declared else {}
        return fixed | {k: v for k, v in self.initial.items() if k in declared and k != "mass"}

    @property
    def options(self) -> dict[str, Any]:
        """Options of `doxa.transitions`."""
        sampler = SAMPLERS[self.sampler]
        found: dict[str, Any] = {"seed": self.seed, "engine": _ENGINE, "members": self.chains}
        found["jitter"] = max(self.spread, 0.01) if self.sampler == "svgd" else self.spread
        found |= {k: v for k, v in self.initial.items() if k in ("lr", "batch_size")}
        if sampler.momentum is not None or self.sampler == "svgd":
            found["steps"] = LENGTH
        if self.sampler == "constant-sgd":
            found["steps"] = _MAXIMUM
        if sampler.momentum is not None:
            momentum = self.settings.get(MOMENTUM, sampler.momentum)
            found["optimizer"] = doxa.optim.SGD(momentum=momentum)
        return found

    @property
    def all_changes(self) -> list[tuple[int, str, Any]]:
        """The changes of `doxa.transitions`, which begin with controls that are no settings."""
        given = set(self._fixed) | {"lr", "batch_size"}
        first = [(0, name, v) for name, v in self.initial.items() if name not in given]
        later = [
            (at, name, {"x": torch.tensor(v, dtype=torch.float64)} if name == "restart" else v)
            for at, name, v in self.changes
        ]
        return [*first, *later]

    @property
    def density(self) -> Any:
        noise = self.noise if SAMPLERS[self.sampler].noisy else 0.0
        return density_of(self.target, self.text, noise)

    def run(self, trace: bool = True) -> Transitions:
        """The chains, before their first step."""
        init = {"x": torch.tensor(self.start, dtype=torch.float64)}
        return doxa.transitions(
            self.density, init, self.method, trace=trace, changes=self.all_changes, **self.options
        )

    def script(self, steps: int) -> str:
        """Python that repeats these steps, and gives the points and the summary of the panel."""
        sampler = SAMPLERS[self.sampler]
        noise = self.noise if sampler.noisy else 0.0
        settings = {k: v for k, v in self.settings.items() if k != MOMENTUM} | self._fixed
        named = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        options = {k: repr(v) for k, v in self.options.items()}
        if "optimizer" in options:
            options["optimizer"] = f"doxa.optim.{options['optimizer']}"
        point = lambda v: f"torch.tensor({list(v)!r}, dtype=torch.float64)"  # noqa: E731
        changes = [
            f"    ({at}, {name!r}, "
            + (f'{{"x": {point(v["x"].tolist())}}}' if name == "restart" else repr(v))
            + "),"
            for at, name, v in self.all_changes
        ]
        cls = doxa.get_method(sampler.method).__name__
        head = ["import torch", "import doxa", "from itertools import islice", "", ""]
        lines = [
            *head,
            *source(self.target, self.text, noise),
            f"method = doxa.{cls}({named})",
            *(["changes = [", *changes, "]"] if changes else ["changes = []"]),
            "chain = doxa.transitions(",
            f'    density, {{"x": {point(self.start)}}}, method, changes=changes, trace=True,',
            *(f"    {name}={value}," for name, value in options.items()),
            ")",
            f"steps = list(islice(chain, {steps}))",
            'points = torch.stack([step.draw["x"] for step in steps])  # [steps, chains, ..., 2]',
            "traces = [step.trace for step in steps]",
        ]
        before = int(self.settings.get("burn_in", 0))
        before += _MAXIMUM if self.sampler == "constant-sgd" else 0
        if steps > before and sampler.momentum is None:
            lines += ["draws = chain.draws()", "table, status = draws.summary(), draws.status"]
        return "\n".join(lines) + "\n"


def _target(asked: dict[str, Any]) -> tuple[str, str]:
    target, text = asked.get("target"), asked.get("text", "")
    if target == TYPED:
        density_of(TYPED, text)  # an error here if it is no formula
        return TYPED, text
    if not isinstance(target, str) or target not in TARGETS:
        raise DataError(f"this room has no target {target!r:.40}")
    return target, ""


def _start(target: str) -> tuple[float, float]:
    return TARGETS[target].start if target in TARGETS else (0.5, 0.5)


def controls_of(sampler: str, target: str) -> dict[str, float]:
    """The controls of a sampler on a target, with their first values."""
    found = dict(SAMPLERS[sampler].controls)
    if target == NETWORK:  # its curvature is larger
        rate = "step_size" if "step_size" in found else "lr"
        found[rate] = _ON_NETWORK[sampler]
        if SAMPLERS[sampler].noisy:
            found["batch_size"] = BATCH
    return found


_ON_NETWORK = {
    "sgd": 0.02, "momentum": 0.005, "constant-sgd": 0.1, "sgld": 0.001, "sghmc": 0.001,
    "minibatch-mh": 0.003, "svgd": 0.05, "metropolis": 0.3, "mala": 0.12, "hmc": 0.05,
    "nuts": 0.08,
}  # fmt: skip


def _settings(name: str, given: Any) -> dict[str, Any]:
    sampler = SAMPLERS[name]
    own = given
    found: dict[str, Any] = {}
    if sampler.momentum is not None and isinstance(given, dict):
        own = {k: v for k, v in given.items() if k != MOMENTUM}
        if MOMENTUM in given:
            found[MOMENTUM] = _number(given, MOMENTUM, 0.9, 0.0, 0.999)
    found |= read_settings(sampler.method, own, _hidden(name))
    for key, most in _LIMITS.items():
        if isinstance(found.get(key), int) and found[key] > most:
            raise MethodError(f"{key} is at most {most} here, not {found[key]}")
    return found


def _hidden(name: str) -> tuple[str, ...]:
    sampler = SAMPLERS[name]
    controls = tuple(each for each in sampler.controls if each != "mass")
    return (*_OF_THE_ROOM, *sampler.hidden, *controls, "temperature")


def _control(controls: dict[str, float], name: Any, value: Any) -> None:
    if not isinstance(name, str) or name not in controls:
        raise DataError(f"this sampler has no control {name!r:.40}: there are {list(controls)}")
    if name == "batch_size":
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        if not whole or not 1 <= value <= ROWS:
            raise DataError(f"batch_size must be a whole number from 1 to {ROWS}")
    elif not _finite(value) or not 1e-9 <= value <= _LARGEST:
        raise DataError(f"{name} must be a positive number up to {_LARGEST:g}, not {value!r:.40}")


def _typed(name: str, value: Any) -> Any:
    return int(value) if name == "batch_size" else float(value)


def _changes(controls: dict[str, float], given: Any) -> tuple[tuple[int, str, Any], ...]:
    if not isinstance(given, list) or len(given) > MOST_CHANGES:
        raise DataError(f"changes must be a list of at most {MOST_CHANGES}")
    found: list[tuple[int, str, Any]] = []
    for each in given:
        if not (isinstance(each, list) and len(each) == 3):
            raise DataError("a change is a step, a name and a value")
        at, name, value = each
        if not isinstance(at, int) or isinstance(at, bool) or not 1 <= at <= 2 * LENGTH:
            raise DataError(f"the step of a change must be a whole number from 1 to {2 * LENGTH}")
        if found and at < found[-1][0]:
            raise DataError("changes must be in the order of their steps")
        if name == "restart":
            found.append((at, name, _point(value, "a restart")))
        else:
            _control(controls, name, value)
            found.append((at, name, _typed(name, value)))
    return tuple(found)


def _point(given: Any, what: str) -> tuple[float, float]:
    if not (isinstance(given, list) and len(given) == 2 and all(map(_finite, given))):
        raise DataError(f"{what} must be two finite numbers, at most {_LARGEST:g} in size")
    return float(given[0]), float(given[1])


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST


def _number(asked: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = asked.get(name, default)
    if not _finite(value) or not low <= value <= high:
        raise DataError(f"{name} must be a number from {low:g} to {high:g}, not {value!r:.40}")
    return float(value)


def _whole(asked: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = asked.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name} must be a whole number from {low} to {high}, not {value!r:.40}")
    return value


def frame(step: Transition) -> dict[str, Any]:
    """A step as a page draws it."""
    return {
        "number": step.number, "stage": step.stage, "kept": step.kept,
        "at": step.draw["x"].tolist(),
        "info": {name: value.tolist() for name, value in step.info.items()},
        "trace": [record(each) for each in step.trace],
    }  # fmt: skip


def record(each: Record) -> dict[str, Any]:
    """A record of a trace, with its kind: "proposal", "trajectory", "tree", "gradient" or
    "forces"."""
    found: dict[str, Any] = {"kind": type(each).__name__.lower()}
    for one in dataclasses.fields(each):
        value = getattr(each, one.name)
        found[one.name] = value.tolist() if isinstance(value, Tensor) else value
    return found


def starts_of(step: Transition) -> Any:
    """Where the chains were before a step."""
    first = step.trace[0]
    for name in ("start", "positions"):
        if hasattr(first, name):
            found = getattr(first, name)
            path = type(first).__name__ in ("Trajectory", "Tree")
            return (found[0] if path else found).tolist()
    return None


def summary(chain: Transitions, number: int) -> dict[str, Any] | None:
    """The summary of the draws so far, as the library gives it. None for paths of an optimiser, and
    before the first draw."""
    try:
        draws = chain.draws()
    except DoxaError:
        return None
    table, found = draws.summary(), draws.diagnostics
    columns = {
        name: table[name].tolist() for name in ("mean", "sd", "rhat", "ess_bulk", "ess_tail")
    }
    extra = {name: found[name] for name in ("accept", "divergences", "ebfmi") if name in found}
    return columns | extra | {
        "number": number, "draws": draws.count, "status": str(draws.status),
        "reason": draws.status.reason,
    }  # fmt: skip


@dataclass
class _Playing:
    """A run that a process continues."""

    recipe: Recipe
    chain: Transitions
    done: int = 0


_playing: dict[str, _Playing] = {}


def _key(recipe: Recipe) -> str:
    return json.dumps(repr(dataclasses.replace(recipe, changes=())))


def _continued(recipe: Recipe, done: int, call: Call) -> Transitions:
    """The chain of a recipe after so many steps: the one of the last answer, if it fits."""
    key = _key(recipe)
    found = _playing.pop(key, None)
    if found is not None and found.done == done:
        before = found.recipe.changes
        more = recipe.changes[len(before) :]
        if recipe.changes[: len(before)] == before and all(at == done for at, _, _ in more):
            for _, name, value in more:
                if name == "restart":
                    found.chain.restart({"x": torch.tensor(value, dtype=torch.float64)})
                else:
                    found.chain.change(name, value)
            return found.chain
    chain = recipe.run(trace=False)
    for i, _ in enumerate(islice(chain, done)):
        if i % 50 == 0:
            call.check()
    chain.traced = True
    return chain


def frames(asked: Any, call: Call) -> dict[str, Any]:
    """The next frames of a run. An answer has fewer than were asked for if they take long; the page
    asks for the rest."""
    if not isinstance(asked, dict) or set(asked) != {"recipe", "done", "count"}:
        raise DataError("a request of frames has a recipe, done and count")
    recipe = Recipe.read(asked["recipe"])
    done = _whole(asked, "done", 0, 0, 2 * LENGTH)
    count = _whole(asked, "count", 1, 1, MOST_FRAMES)
    chain = _continued(recipe, done, call)
    found: list[dict[str, Any]] = []
    summaries: list[dict[str, Any]] = []
    starts, ended = None, False
    deadline = time.monotonic() + _ANSWER
    while len(found) < count and (not found or time.monotonic() < deadline):
        call.check()
        step = next(chain, None)
        if step is None:
            ended = True
            break
        if step.number == 1:
            starts = starts_of(step)
        found.append(frame(step))
        if step.number % EVERY == 0 and (one := summary(chain, step.number)) is not None:
            summaries.append(one)
    if not ended:
        while len(_playing) >= _KEPT:
            del _playing[next(iter(_playing))]
        _playing[_key(recipe)] = _Playing(recipe, chain, done + len(found))
    return {
        "done": done, "frames": found, "summaries": summaries, "starts": starts, "ended": ended,
    }  # fmt: skip


def target(asked: Any, call: Call) -> dict[str, Any]:
    """A target on the grid of a plane."""
    if not isinstance(asked, dict) or not {"target", "view"} <= set(asked):
        raise DataError("a request of a target has a target and a view")
    name, text = _target(asked)
    return picture(name, text, _view(asked["view"])) | {"start": list(_start(name))}


def _view(given: Any) -> View:
    if not (isinstance(given, list) and len(given) == 4 and all(map(_finite, given))):
        raise DataError("a view must be four numbers: left, right, bottom, top")
    x0, x1, y0, y1 = map(float, given)
    if not (x1 - x0 > 1e-6 and y1 - y0 > 1e-6):
        raise DataError("a view must have its left end below its right end, and so for its height")
    return x0, x1, y0, y1


def python(asked: Any, call: Call) -> dict[str, str]:
    """The script that repeats the first steps of a run."""
    if not isinstance(asked, dict) or set(asked) != {"recipe", "done"}:
        raise DataError("a request of a script has a recipe and done")
    recipe = Recipe.read(asked["recipe"])
    return {"python": recipe.script(_whole(asked, "done", 0, 0, 2 * LENGTH))}


TASKS: dict[str, Callable[[Any, Call], Any]] = {
    "frames": frames, "target": target, "python": python,
}  # fmt: skip


def facts() -> dict[str, Any]:
    """What the page needs to know before anything is asked."""
    table = doxa.methods()
    samplers = []
    for name, one in SAMPLERS.items():
        about = describe(table[one.method], _hidden(name))
        settings = about["settings"]
        if one.momentum:
            settings = [{
                "name": MOMENTUM, "kind": "number", "default": one.momentum, "none": False,
                "least": 0.0, "most": 0.999, "help": "μ in u ← μu + g", "allowed": "0 to 0.999",
            }]  # fmt: skip
        samplers.append({
            "name": name, "method": one.method, "paper": about["paper"], "settings": settings,
            "start": one.start, "noisy": one.noisy,
            "controls": one.controls, "on_network": controls_of(name, NETWORK),
        })  # fmt: skip
    targets = {name: {"view": list(t.view), "start": list(t.start)} for name, t in TARGETS.items()}
    targets[TYPED] = {"view": list(TYPED_VIEW), "start": list(_start(TYPED))}
    return {
        "samplers": samplers, "targets": targets, "typed": TYPED, "network": NETWORK,
        "functions": list(FUNCTIONS), "length": LENGTH, "most_chains": MOST_CHAINS,
        "most_changes": MOST_CHANGES, "most_frames": MOST_FRAMES, "rows": ROWS, "noise": NOISE,
    }  # fmt: skip


def warm_up() -> Iterator[Callable[[], object]]:
    """Calls that make later ones quick, the most likely first."""
    for name in ("hmc", "nuts", "metropolis", "mala", "sgld", "svgd"):
        yield partial(_warm, name)


def _warm(name: str) -> None:
    recipe = Recipe.read({"target": "standard", "sampler": name})
    for step in islice(recipe.run(), 2):
        math.fsum(map(len, frame(step)["trace"]))
