"""The room "Functions": posteriors over functions of one input that follow the points of a person.

A request is a `Recipe`: the points, a method with its settings, a network, a prior and a noise. It
is carried out by `doxa.fit`, and shown as numbers on a grid:

    before data   functions drawn from the prior
    with data     functions drawn from the posterior; the mean; the aleatoric and epistemic variance
                  of the prediction; status, evidence

`script` writes the same calls as Python. A test runs it for each method, and compares all numbers
to the last bit.

**First pictures.** Methods that train cannot answer at once. `Previews` shows the state of the fit
on its way (`doxa.Snapshots`), with the number of its steps: the weights so far, or the draws that a
sampler has kept. Neither changes a bit of the fit, whose result is the last picture.

**Paths.** A function f of a Gaussian process moves along a path of such functions:
μ + cos(t)(f₁ − μ) + sin(t)(f₂ − μ), with f₁ and f₂ independent draws, has the same distribution at
every t.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa import evaluate
from doxa.errors import DataError, DoxaError, MethodError, ModelError, Unavailable
from doxa.exact.models import posterior_over_models
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.studio.forms import describe, is_exact, read_settings, regression_methods
from doxa.studio.workers import Call

MOST_POINTS = 300
_MEMBERS = 20  # at most
GRID = 121  # rows of the grid
DRAWS = 12  # functions that are drawn
FRAMES = 24  # steps of a path between two draws
HETEROSCEDASTIC = "heteroscedastic"
ACTIVATIONS = ("tanh", "relu", "silu", "gelu", "elu", "softplus", "sigmoid")
PRIORS = {"normal": "Normal", "fan-in": "FanInNormal"}
_HIDDEN = ("noise", "net")  # the room has a control of its own for the noise
_EVERY = 10  # steps between states that may be shown
_PAUSE = 0.1  # seconds between pictures, at least
_TOGETHER = 1e7  # weights × points from which `fit` would divide members into blocks
_LARGEST = 1e6  # of a coordinate
_DEGREES = 9
_KEPT = 4  # posteriors that a process remembers

# Settings that a panel starts with, where the defaults of the method are for longer fits.
START: dict[str, dict[str, Any]] = {
    "linear": {"features": "fourier"},
    "hmc": {"draws": 100, "burn_in": 100, "leapfrog": 20},
    "nuts": {"draws": 50, "burn_in": 100, "max_depth": 6},
    "swag": {"rank": 10},
}
STEPS = 1000


@dataclass(frozen=True)
class Recipe:
    """A fit and a picture of it.

    Parameters
    ----------
    points : tuple of (float, float)
        The rows of the data. Without any, the picture is that of the prior.
    method : str
        The name of the method.
    settings : dict
        Settings of the method that are not its defaults.
    depth, width, activation
        The network, for methods that need one.
    prior : float
        The standard deviation of the weights' prior.
    prior_kind : {"normal", "fan-in"}
        "fan-in" divides it by the root of a layer's inputs.
    noise : float, str or None
        The standard deviation of the noise; "heteroscedastic"; None: learned.
    steps : int or None
        Steps of training; None: the method's default.
    members : int or None
        Members; None: the method's default.
    seed : int
        The seed of the fit.
    evaluate : bool
        Whether rows are held out to evaluate the fit.
    low, high : float
        The ends of the grid.
    """

    points: tuple[tuple[float, float], ...]
    method: str
    settings: dict[str, Any]
    depth: int = 1
    width: int = 50
    activation: str = "tanh"
    prior: float = 1.0
    prior_kind: str = "normal"
    noise: float | str | None = None
    steps: int | None = None
    members: int | None = None
    seed: int = 0
    evaluate: bool = False
    low: float = -5.0
    high: float = 5.0

    @classmethod
    def read(cls, asked: Any) -> Recipe:
        """A recipe from the request of a page."""
        if not isinstance(asked, dict):
            raise DataError("a request must be an object with points and a method")
        known = {
            "points", "method", "settings", "depth", "width", "activation", "prior", "prior_kind",
            "noise", "steps", "members", "seed", "evaluate", "low", "high",
        }  # fmt: skip
        if unknown := sorted(set(asked) - known):
            raise DataError(f"a request has no {unknown[0]!r:.40}")
        name = asked.get("method")
        rows = {row.name for row in regression_methods()}
        if not isinstance(name, str) or name not in rows:
            raise MethodError(f"this room has no method {name!r:.40}")
        noise = asked.get("noise")
        if noise != HETEROSCEDASTIC:
            noise = None if noise is None else _number(asked, "noise", 0, 1e-4, 100.0)
        activation = asked.get("activation", "tanh")
        if activation not in ACTIVATIONS:
            raise ModelError(f"activation must be one of {', '.join(ACTIVATIONS)}")
        kind = asked.get("prior_kind", "normal")
        if not (isinstance(kind, str) and kind in PRIORS):
            raise ModelError(f"prior_kind must be one of {', '.join(PRIORS)}")
        low, high = _number(asked, "low", -5.0, -_LARGEST), _number(asked, "high", 5.0, -_LARGEST)
        if not low < high:
            raise DataError("the left end of the plane must be below its right end")
        evaluate = asked.get("evaluate", False)
        if not isinstance(evaluate, bool):
            raise DataError("evaluate must be true or false")
        optional = {
            key: None if asked.get(key) is None else _whole(asked, key, 0, 1, most)
            for key, most in (("steps", 20_000), ("members", _MEMBERS))
        }
        return cls(
            _points(asked.get("points")), name,
            read_settings(name, asked.get("settings", {}), _HIDDEN),
            _whole(asked, "depth", 1, 1, 4), _whole(asked, "width", 50, 1, 256), activation,
            _number(asked, "prior", 1.0, 1e-3, 100.0), kind, noise, **optional,
            seed=_whole(asked, "seed", 0, 0, 2**31), evaluate=evaluate, low=low, high=high,
        )  # fmt: skip

    @property
    def needs_network(self) -> bool:
        return bool(doxa.get_method(self.method).needs_network)

    @property
    def is_sampler(self) -> bool:
        """Whether the method has a number of draws in place of steps."""
        return "draws" in dict(doxa.methods()[self.method].short)

    @property
    def before_data(self) -> Recipe:
        """The recipe whose prior is shown where there are no points. The fit has one row, which
        the prior of its functions does not depend on: nothing of the prior is learned."""
        if self.points:
            return self
        one = replace(self, points=((0.0, 0.0),), evaluate=False)
        if self.needs_network:
            return replace(one, method="map", settings={}, steps=1, members=None)
        if not is_exact(self.method):
            raise Unavailable(f"{self.method} learns its prior: add points")
        fixed: dict[str, Any] = {"learn_kernel": False}
        if self.method == "gp":
            fixed |= {"lengthscale": 1.0, "variance": 1.0}
        elif self.method == "linear":
            fixed = {"prior_std": 1.0}
        return replace(one, settings=fixed | self.settings, noise=self.noise or 0.1)

    def fit(
        self,
        stop: Callable[[], bool] | None = None,
        show: Callable[[doxa.Snapshot], None] | None = None,
    ) -> Posterior:
        """Fit the recipe. `stop` is asked now and then, and True ends the fit. `show` is given
        states on the way."""
        model, likelihood, options = None, self._likelihood, self._options
        if self.needs_network:
            outputs = 2 if self.noise == HETEROSCEDASTIC else 1
            hidden = (self.width,) * self.depth
            model = doxa.nets.mlp(1, outputs, hidden, self.activation).double()
            options["prior"] = getattr(doxa, PRIORS[self.prior_kind])(self.prior)
        method = doxa.get_method(self.method)(**self.settings)
        callbacks: list[Any] = [] if stop is None else [lambda step, info: stop()]
        if show is not None and not is_exact(self.method):
            callbacks.append(doxa.Snapshots(show, every=_EVERY))
        options["callbacks"] = callbacks
        data = torch.tensor(self.points, dtype=torch.float64)
        return doxa.fit(
            model, (data[:, :1], data[:, 1]), method, likelihood=likelihood, progress=False,
            **options,
        )  # fmt: skip

    @property
    def _likelihood(self) -> Any:
        if isinstance(self.noise, float):
            return doxa.Gaussian(self.noise)
        return self.noise or "gaussian"

    @property
    def _options(self) -> dict[str, Any]:
        """Options of `fit` that a script can write as they are."""
        options: dict[str, Any] = {"seed": self.seed}
        if not self.evaluate:
            options["validation"] = None
        if self.steps is not None and not is_exact(self.method):
            options["steps"] = self.steps
        if self.members is not None:
            options["members"] = self.members
        if self.needs_network and self.depth * self.width**2 * len(self.points) > _TOGETHER:
            options["block_size"] = _MEMBERS  # a fit that is watched trains all members together
        return options

    @property
    def grid(self) -> Tensor:
        return torch.linspace(self.low, self.high, GRID, dtype=torch.float64)[:, None]

    def script(self, draws: int = DRAWS) -> str:
        """The calls as Python, which gives the numbers of the panel. `draws` is the number of
        functions that it shows."""
        fitted = self.before_data
        cls = doxa.get_method(fitted.method)
        settings = ", ".join(f"{name}={value!r}" for name, value in fitted.settings.items())
        noise = fitted._likelihood
        likelihood = repr(noise) if isinstance(noise, str) else f"doxa.Gaussian({fitted.noise!r})"
        lines = ["import torch", "import doxa", ""]
        if not self.points:
            lines.append("# The prior of these functions does not depend on this row.")
        lines += [
            "points = [",
            *(f"    {', '.join(map(repr, row))}," for row in _in_lines(fitted.points)),
            "]",
            "data = torch.tensor(points, dtype=torch.float64)",
            "x, y = data[:, :1], data[:, 1]",
        ]
        options = {name: repr(value) for name, value in fitted._options.items()}
        model = "None"
        if fitted.needs_network:
            outputs = 2 if self.noise == HETEROSCEDASTIC else 1
            hidden = (self.width,) * self.depth
            lines.append(
                f"net = doxa.nets.mlp(1, {outputs}, {hidden!r}, {self.activation!r}).double()"
            )
            model, options["prior"] = "net", f"doxa.{PRIORS[self.prior_kind]}({self.prior!r})"
        given = "".join(f"    {name}={value},\n" for name, value in options.items())
        lines += [
            f"method = doxa.{cls.__name__}({settings})",
            "posterior = doxa.fit(",
            f"    {model}, (x, y), method,",
            f"    likelihood={likelihood},",
            f"{given})",
            "",
            f"low, high = {self.low!r}, {self.high!r}",
            f"grid = torch.linspace(low, high, {GRID}, dtype=torch.float64)[:, None]",
            f"prior = posterior.prior_functions(grid, n={DRAWS})",
        ]
        if self.points:
            lines += [
                f"draws = posterior.functions(grid, n={draws})",
                "p = posterior.predict(grid)",
                "mean, aleatoric, epistemic = p.mean, p.aleatoric, p.epistemic",
                "status, reason = posterior.status, posterior.status.reason",
            ]
        return "\n".join(lines) + "\n"


def _in_lines(points: tuple[tuple[float, float], ...]) -> list[list[list[float]]]:
    """Points as lists, four a line."""
    each = [list(point) for point in points]
    return [each[i : i + 4] for i in range(0, len(each), 4)]


def drawn(posterior: Posterior, grid: Tensor) -> Tensor:
    """Functions of the posterior: `DRAWS`, or all where fewer were kept."""
    try:
        return posterior.functions(grid, n=DRAWS)
    except MethodError:
        kept = next(iter(posterior.draw().values()))
        return posterior.functions(grid, n=len(kept))


def _points(given: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(given, list) or len(given) > MOST_POINTS:
        raise DataError(f"points must be a list of at most {MOST_POINTS} pairs")
    found = []
    for i, point in enumerate(given):
        if not (isinstance(point, list) and len(point) == 2 and all(map(_finite, point))):
            raise DataError(f"point {i} must be two finite numbers, at most {_LARGEST:g} in size")
        found.append((float(point[0]), float(point[1])))
    return tuple(found)


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST


def _number(
    asked: dict[str, Any], name: str, default: float, low: float, high: float = _LARGEST
) -> float:
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


class Previews:
    """Shows pictures of a fit on its way.

    Parameters
    ----------
    recipe : Recipe
        What is fitted.
    call : Call
        Where pictures are sent.
    """

    def __init__(self, recipe: Recipe, call: Call) -> None:
        self.recipe, self.call = recipe, call
        self._next = 0.0  # on the monotonic clock

    def __call__(self, snapshot: doxa.Snapshot) -> None:
        """Show the state after a step, unless a picture was shown just now. At most a fifth of the
        time is spent on pictures."""
        began = time.monotonic()
        if snapshot.last or began < self._next:
            return
        with suppress(DoxaError):  # no posterior yet, in this stage of the method
            shown = picture(self.recipe, snapshot.posterior)
            steps = None if self.recipe.is_sampler else self.recipe.steps
            self.call.show(shown | {"preview": True, "of": steps})
        now = time.monotonic()
        self._next = now + max(_PAUSE, 4 * (now - began))


def picture(recipe: Recipe, posterior: Posterior) -> dict[str, Any]:
    """The numbers of a panel."""
    grid = recipe.grid
    found: dict[str, Any] = {"grid": grid[:, 0].tolist(), "points": len(recipe.points)}
    try:
        found["prior"] = _rows(posterior.prior_functions(grid, n=DRAWS))
    except Unavailable as error:
        found["prior"], found["no_prior"] = [], str(error)
    if not recipe.points:
        return found
    p = posterior.predict(grid)
    found |= {
        "draws": _rows(drawn(posterior, grid)),
        "mean": p.mean.reshape(-1).tolist(),
        "aleatoric": p.aleatoric.reshape(-1).tolist(),
        "epistemic": p.epistemic.reshape(-1).tolist(),
        "status": str(posterior.status),
        "reason": posterior.status.reason,
        "steps": posterior.diagnostics.steps,
        "seconds": posterior.diagnostics.seconds,
        "log_evidence": _scalar(posterior.log_evidence),
        "elbo": _scalar(posterior.elbo),
    }
    return found


def _rows(f: Tensor) -> list[list[float]]:
    return f.reshape(len(f), -1)[:, :GRID].tolist()


def _scalar(value: Any) -> float | None:
    return None if value is None else float(value)


_posteriors: dict[str, Posterior] = {}  # the last ones of this process


def _fitted(recipe: Recipe, call: Call, show: Previews | None = None) -> Posterior:
    key = json.dumps([repr(recipe)])
    if key not in _posteriors:
        posterior = recipe.fit(lambda: call.cancelled, show)
        call.check()
        while len(_posteriors) >= _KEPT:
            del _posteriors[next(iter(_posteriors))]
        _posteriors[key] = posterior
    return _posteriors[key]


def panel(asked: Any, call: Call) -> dict[str, Any]:
    """The picture of a recipe; those of the fit on its way are shown before it."""
    recipe = Recipe.read(asked)
    previews = Previews(recipe, call) if recipe.points else None
    found = picture(recipe, _fitted(recipe.before_data, call, previews))
    python = recipe.script(len(found.get("draws", ())))
    return found | {"preview": False, "python": python}


def path(asked: Any, call: Call) -> dict[str, Any]:
    """A closed path of functions, [draw, frame, grid]: each is a draw of the posterior (before
    data: of the prior). For processes and exact models, whose functions are Gaussian."""
    recipe = Recipe.read(asked)
    if not is_exact(recipe.method):
        raise Unavailable(f"the functions of {recipe.method} are not Gaussian")
    posterior = _fitted(recipe.before_data, call)
    if posterior.members != 1:
        raise Unavailable("the functions of several members are not Gaussian")
    if recipe.points:
        draws = posterior.functions(recipe.grid, n=DRAWS)
        mean = posterior.predict(recipe.grid).mean.reshape(-1)
    else:
        draws = posterior.prior_functions(recipe.grid, n=DRAWS)
        mean = torch.zeros(GRID, dtype=torch.float64)
    return {"frames": _path(draws.reshape(DRAWS, GRID), mean)}


def _path(draws: Tensor, mean: Tensor) -> list[list[list[float]]]:
    """Circles through pairs of draws: [pair, frame, grid]."""
    angle = torch.arange(4 * FRAMES, dtype=torch.float64) * (2 * math.pi / (4 * FRAMES))
    first, second = draws[0::2][:3] - mean, draws[1::2][:3] - mean  # [3, G]
    circle = mean + angle.cos()[:, None] * first[:, None] + angle.sin()[:, None] * second[:, None]
    return circle.tolist()


def orders(asked: Any, call: Call) -> dict[str, Any]:
    """Polynomials of degree 0, 1, …: the log evidence of each, the posterior over models, and the
    mean of each prediction."""
    recipe = Recipe.read(asked)
    if len(recipe.points) < 2:
        raise DataError("add at least two points to compare polynomials")
    data = torch.tensor(recipe.points, dtype=torch.float64)
    likelihood = doxa.Gaussian(recipe.noise) if isinstance(recipe.noise, float) else "gaussian"
    posteriors = doxa.fit(
        None, (data[:, :1], data[:, 1]), doxa.BayesianLinear("polynomial", degree=_DEGREES - 1),
        runs=doxa.Runs(grid={"degree": list(range(_DEGREES))}), likelihood=likelihood,
        seed=recipe.seed, progress=False,
    )  # fmt: skip
    each = list(posteriors)
    return {
        "degrees": list(range(_DEGREES)),
        "log_evidence": [_scalar(posterior.log_evidence) for posterior in each],
        "probability": posterior_over_models(each).tolist(),
        "grid": recipe.grid[:, 0].tolist(),
        "mean": [p.predict(recipe.grid).mean.reshape(-1).tolist() for p in each],
    }


def distance(asked: Any, call: Call) -> dict[str, Any]:
    """How far the predictions of one recipe are from those of another, a reference: the means over
    the grid of the total variation and of the Wasserstein distance W2 (`doxa.evaluate`)."""
    if not isinstance(asked, dict) or set(asked) != {"of", "reference"}:
        raise DataError("a distance needs two requests: of and reference")
    both = [Recipe.read(asked[name]) for name in ("of", "reference")]
    if not all(recipe.points for recipe in both):
        raise DataError("add points to compare predictions")
    p, q = (_fitted(recipe, call).predict(both[0].grid) for recipe in both)
    return {
        "total_variation": evaluate.total_variation(p, q),
        "wasserstein2": evaluate.wasserstein2(p, q),
    }


TASKS: dict[str, Callable[[Any, Call], Any]] = {
    "panel": panel, "path": path, "orders": orders, "distance": distance,
}  # fmt: skip


def presets() -> dict[str, list[list[float]]]:
    """Points to start from."""
    g = generator("studio presets", 0)
    draw = lambda n: torch.randn(n, dtype=torch.float64, generator=g)  # noqa: E731
    left, right = torch.linspace(-3.5, -1.2, 15), torch.linspace(1.2, 3.5, 15)
    away = torch.cat([left, right]).double()
    line = torch.linspace(-3.5, 3.5, 40, dtype=torch.float64)
    few = torch.tensor([-2.0, -0.4, 0.6, 2.2], dtype=torch.float64)
    found = {
        "gap": (away, (1.5 * away).sin() + 0.15 * draw(30)),
        "two noises": (line, line.sin() + torch.where(line < 0, 0.05, 0.5) * draw(40)),
        "step": (line, line.sign() + 0.1 * draw(40)),
        "sine": (line, (2 * line).sin() + 0.2 * draw(40)),
        "few": (few, torch.tensor([-0.8, 0.9, 0.4, -1.0], dtype=torch.float64)),
        "quadratic": (line[::2], 0.3 * line[::2] ** 2 - 1.5 + 0.2 * draw(20)),
    }
    return {
        name: [[round(float(a), 3), round(float(b), 3)] for a, b in zip(x, y, strict=True)]
        for name, (x, y) in found.items()
    }


def facts() -> dict[str, Any]:
    """What the page needs to know before anything is asked."""
    methods = []
    for row in regression_methods():
        one = describe(row, _HIDDEN)
        methods.append(one | {"start": START.get(row.name, {}), "steps": STEPS})
    return {
        "methods": methods, "presets": presets(), "activations": list(ACTIVATIONS),
        "most_points": MOST_POINTS,
    }  # fmt: skip


def warm_up() -> Iterator[Callable[[], object]]:
    """Calls that make later ones quick, the most likely first."""
    names = ("gp", "linear", "nngp", "map", "deep-ensemble", "mc-dropout", "laplace", "hmc")
    base = Recipe(tuple((float(i), float(i % 3)) for i in range(-4, 4)), "gp", {}, width=8)
    for name in names:
        short = dict(doxa.methods()[name].short)
        recipe = replace(base, method=name, settings=short, steps=4)
        yield partial(_warm, recipe)


def _warm(recipe: Recipe) -> None:
    picture(recipe, recipe.fit())
