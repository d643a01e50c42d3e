"""What the rooms in which a fit follows points have in common: recipes, and pictures on the way.

A `BaseRecipe` holds what every fit of a room needs: points, a method with its settings, a network,
and the options of `doxa.fit`. A room adds what its points mean, and its grid. `fit` carries the
recipe out, and `fit_lines` writes the same calls as Python.

`Previews` shows pictures of the fit on its way (`doxa.Snapshots`), and `show_panel` ends with that
of the result. The last few results of a process are remembered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

import doxa
from doxa.errors import DataError, DoxaError, MethodError, ModelError, Unavailable
from doxa.posterior import Posterior
from doxa.studio.forms import describe, is_exact, methods_for, read_settings
from doxa.studio.workers import Call

MOST_POINTS = 300
MOST_MEMBERS = 20
LARGEST = 1e6  # of a coordinate
STEPS = 1000
ACTIVATIONS = ("tanh", "relu", "silu", "gelu", "elu", "softplus", "sigmoid")
PRIORS = {"normal": "Normal", "fan-in": "FanInNormal"}
_EVERY = 10  # steps between states that may be shown
_PAUSE = 0.1  # seconds between pictures, at least
_TOGETHER = 1e7  # weights × points from which `fit` would divide members into blocks
_KEPT = 4  # posteriors that a process remembers

# Settings that a panel starts with, where the defaults of the method are for longer fits.
START: dict[str, dict[str, Any]] = {
    "linear": {"features": "fourier"},
    "hmc": {"draws": 100, "burn_in": 100, "leapfrog": 20},
    "nuts": {"draws": 50, "burn_in": 100, "max_depth": 6},
    "swag": {"rank": 10},
}


@dataclass(frozen=True)
class BaseRecipe:
    """A fit to points.

    Parameters
    ----------
    points : tuple of tuples
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
    steps : int or None
        Steps of training; None: the method's default.
    members : int or None
        Members; None: the method's default.
    seed : int
        The seed of the fit.
    evaluate : bool
        Whether rows are held out to evaluate the fit.
    """

    TASK: ClassVar[str]  # of the registry
    HIDDEN: ClassVar[tuple[str, ...]]  # settings of methods that the room's forms do not have

    points: tuple[tuple[float, ...], ...]
    method: str
    settings: dict[str, Any]
    depth: int = 1
    width: int = 50
    activation: str = "tanh"
    prior: float = 1.0
    prior_kind: str = "normal"
    steps: int | None = None
    members: int | None = None
    seed: int = 0
    evaluate: bool = False

    @classmethod
    def read_common(cls, asked: Any, more: Sequence[str]) -> dict[str, Any]:
        """The fields of this class but the points, from the request of a page, which may also have
        the entries `more`."""
        if not isinstance(asked, dict):
            raise DataError("a request must be an object with points and a method")
        known = {
            "points", "method", "settings", "depth", "width", "activation", "prior", "prior_kind",
            "steps", "members", "seed", "evaluate", *more,
        }  # fmt: skip
        if unknown := sorted(set(asked) - known):
            raise DataError(f"a request has no {unknown[0]!r:.40}")
        name = asked.get("method")
        if not isinstance(name, str) or name not in {row.name for row in methods_for(cls.TASK)}:
            raise MethodError(f"this room has no method {name!r:.40}")
        activation = asked.get("activation", "tanh")
        if activation not in ACTIVATIONS:
            raise ModelError(f"activation must be one of {', '.join(ACTIVATIONS)}")
        kind = asked.get("prior_kind", "normal")
        if not (isinstance(kind, str) and kind in PRIORS):
            raise ModelError(f"prior_kind must be one of {', '.join(PRIORS)}")
        evaluate = asked.get("evaluate", False)
        if not isinstance(evaluate, bool):
            raise DataError("evaluate must be true or false")
        return {
            "method": name, "settings": read_settings(name, asked.get("settings", {}), cls.HIDDEN),
            "depth": read_whole(asked, "depth", 1, 1, 4),
            "width": read_whole(asked, "width", 50, 1, 256),
            "activation": activation, "prior": read_number(asked, "prior", 1.0, 1e-3, 100.0),
            "prior_kind": kind, "seed": read_whole(asked, "seed", 0, 0, 2**31),
            "evaluate": evaluate,
        } | {
            key: None if asked.get(key) is None else read_whole(asked, key, 0, 1, most)
            for key, most in (("steps", 20_000), ("members", MOST_MEMBERS))
        }  # fmt: skip

    @property
    def inputs(self) -> int:
        """The inputs of the network."""
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """The outputs of the network."""
        raise NotImplementedError

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def likelihood(self) -> Any:
        raise NotImplementedError

    @property
    def needs_network(self) -> bool:
        return bool(doxa.get_method(self.method).needs_network)

    @property
    def is_sampler(self) -> bool:
        """Whether the method has a number of draws in place of steps."""
        return "draws" in dict(doxa.methods()[self.method].short)

    @property
    def of_prior(self) -> dict[str, Any]:
        """The changes with which nothing of the prior of functions is learned."""
        if self.needs_network:
            return {
                "method": "map", "settings": {}, "steps": 1, "members": None, "evaluate": False,
            }  # fmt: skip
        if not is_exact(self.method):
            raise Unavailable(f"{self.method} learns its prior: add points")
        fixed: dict[str, Any] = {"learn_kernel": False}
        if self.method == "gp":
            fixed |= {"lengthscale": 1.0, "variance": 1.0}
        elif self.method == "linear":
            fixed = {"prior_std": 1.0}
        return {"settings": fixed | self.settings, "evaluate": False}

    def fit(
        self,
        stop: Callable[[], bool] | None = None,
        show: Callable[[doxa.Snapshot], None] | None = None,
    ) -> Posterior:
        """Fit the recipe. `stop` is asked now and then, and True ends the fit. `show` is given
        states on the way."""
        model, options = None, self._options
        if self.needs_network:
            hidden = (self.width,) * self.depth
            model = doxa.nets.mlp(self.inputs, self.outputs, hidden, self.activation).double()
            options["prior"] = getattr(doxa, PRIORS[self.prior_kind])(self.prior)
        method = doxa.get_method(self.method)(**self.settings)
        callbacks: list[Any] = [] if stop is None else [lambda step, info: stop()]
        if show is not None and not is_exact(self.method):
            callbacks.append(doxa.Snapshots(show, every=_EVERY))
        options["callbacks"] = callbacks
        return doxa.fit(
            model, self.data, method, likelihood=self.likelihood, progress=False, **options
        )

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
            options["block_size"] = MOST_MEMBERS  # a fit that is watched trains all together
        return options

    def fit_lines(self, likelihood: str) -> list[str]:
        """The lines of a script that fit x and y; `likelihood` as Python."""
        cls = doxa.get_method(self.method)
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        options = {name: repr(value) for name, value in self._options.items()}
        lines, model = [], "None"
        if self.needs_network:
            shape = f"{self.inputs}, {self.outputs}, {(self.width,) * self.depth!r}"
            lines.append(f"net = doxa.nets.mlp({shape}, {self.activation!r}).double()")
            model, options["prior"] = "net", f"doxa.{PRIORS[self.prior_kind]}({self.prior!r})"
        given = "".join(f"    {name}={value},\n" for name, value in options.items())
        return [
            *lines, f"method = doxa.{cls.__name__}({settings})", "posterior = doxa.fit(",
            f"    {model}, (x, y), method,", f"    likelihood={likelihood},", f"{given})",
        ]  # fmt: skip


def in_lines(points: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """Points as lists, four a line."""
    each = [list(point) for point in points]
    return [each[i : i + 4] for i in range(0, len(each), 4)]


def finite_number(value: Any) -> bool:
    """Whether a value of a request is a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -LARGEST <= value <= LARGEST


def read_number(
    asked: dict[str, Any], name: str, default: float, low: float, high: float = LARGEST
) -> float:
    """A number of a request, from `low` to `high`."""
    value = asked.get(name, default)
    if not finite_number(value) or not low <= value <= high:
        raise DataError(f"{name} must be a number from {low:g} to {high:g}, not {value!r:.40}")
    return float(value)


def read_whole(asked: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    """A whole number of a request, from `low` to `high`."""
    value = asked.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name} must be a whole number from {low} to {high}, not {value!r:.40}")
    return value


def drawn(posterior: Posterior, grid: Tensor, n: int) -> Tensor:
    """Functions of the posterior: n, or all where fewer were kept."""
    try:
        return posterior.functions(grid, n=n)
    except MethodError:
        kept = next(iter(posterior.draw().values()))
        return posterior.functions(grid, n=len(kept))


def what_it_says(posterior: Posterior) -> dict[str, Any]:
    """What the library says about a fit: status and reason, evidence, the work."""
    return {
        "status": str(posterior.status),
        "reason": posterior.status.reason,
        "steps": posterior.diagnostics.steps,
        "seconds": posterior.diagnostics.seconds,
        "log_evidence": scalar(posterior.log_evidence),
        "elbo": scalar(posterior.elbo),
    }


def scalar(value: Any) -> float | None:
    """A tensor of one number as a float."""
    return None if value is None else float(value)


Picture = Callable[[Any, Posterior], dict[str, Any]]  # of a recipe, the numbers of a panel


class Previews:
    """Shows pictures of a fit on its way.

    Parameters
    ----------
    recipe : BaseRecipe
        What is fitted.
    call : Call
        Where pictures are sent.
    picture : callable
        The picture of a recipe and a posterior.
    """

    def __init__(self, recipe: BaseRecipe, call: Call, picture: Picture) -> None:
        self.recipe, self.call, self.picture = recipe, call, picture
        self._next = 0.0  # on the monotonic clock

    def __call__(self, snapshot: doxa.Snapshot) -> None:
        """Show the state after a step, unless a picture was shown just now. At most a fifth of the
        time is spent on pictures."""
        began = time.monotonic()
        if snapshot.last or began < self._next:
            return
        with suppress(DoxaError):  # no posterior yet, in this stage of the method
            shown = self.picture(self.recipe, snapshot.posterior)
            steps = None if self.recipe.is_sampler else self.recipe.steps
            self.call.show(shown | {"preview": True, "of": steps})
        now = time.monotonic()
        self._next = now + max(_PAUSE, 4 * (now - began))


_posteriors: dict[str, Posterior] = {}  # the last ones of this process


def fitted(recipe: BaseRecipe, call: Call, show: Previews | None = None) -> Posterior:
    """The posterior of a recipe, which is remembered."""
    key = f"{recipe.TASK} {recipe!r}"
    if key not in _posteriors:
        posterior = recipe.fit(lambda: call.cancelled, show)
        call.check()
        while len(_posteriors) >= _KEPT:
            del _posteriors[next(iter(_posteriors))]
        _posteriors[key] = posterior
    return _posteriors[key]


def show_panel(
    recipe: BaseRecipe, before_data: BaseRecipe, call: Call, picture: Picture
) -> dict[str, Any]:
    """The picture of a recipe, which is fitted as `before_data` where it has no points. Pictures of
    the fit on its way are shown before it."""
    previews = Previews(recipe, call, picture) if recipe.points else None
    return picture(recipe, fitted(before_data, call, previews))


def describe_methods(cls: type[BaseRecipe]) -> list[dict[str, Any]]:
    """The methods of a room, for its forms."""
    return [
        describe(row, cls.HIDDEN) | {"start": START.get(row.name, {}), "steps": STEPS}
        for row in methods_for(cls.TASK)
    ]


def warm(recipes: Sequence[BaseRecipe], picture: Picture) -> Iterator[Callable[[], object]]:
    """Calls that make later ones quick: fits with the least work."""
    for recipe in recipes:
        yield partial(_warm, recipe, picture)


def _warm(recipe: BaseRecipe, picture: Picture) -> None:
    picture(recipe, recipe.fit())
