"""The room "Functions": posteriors over functions of one input that follow the points of a person.

A request is a `Recipe`: the points, a method with its settings, a network, a prior and a noise. It
is carried out by `doxa.fit`, and shown as numbers on a grid:

    before data   functions drawn from the prior
    with data     functions drawn from the posterior; the mean; the aleatoric and epistemic variance
                  of the prediction; status, evidence

`script` writes the same calls as Python. A test runs it for each method, and compares all numbers
to the last bit.

**First pictures.** Methods that train cannot answer at once. The state of the fit on its way is
shown (`recipes.Previews`), with the number of its steps: the weights so far, or the draws that a
sampler has kept. Neither changes a bit of the fit, whose result is the last picture.

**Paths.** A function f of a Gaussian process moves along a path of such functions:
μ + cos(t)(f₁ − μ) + sin(t)(f₂ − μ), with f₁ and f₂ independent draws, has the same distribution at
every t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import doxa
from doxa import evaluate
from doxa.errors import DataError, Unavailable
from doxa.exact.models import posterior_over_models
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.studio.forms import is_exact
from doxa.studio.recipes import (
    ACTIVATIONS,
    LARGEST,
    MOST_POINTS,
    BaseRecipe,
    describe_methods,
    drawn,
    finite_number,
    fitted,
    in_lines,
    read_number,
    scalar,
    show_panel,
    warm,
    what_it_says,
)  # fmt: skip
from doxa.studio.workers import Call

GRID = 121  # rows of the grid
DRAWS = 12  # functions that are drawn
FRAMES = 24  # steps of a path between two draws
HETEROSCEDASTIC = "heteroscedastic"
_DEGREES = 9


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """A fit of functions of one input, and a picture of it. Points are pairs (x, y).

    Parameters
    ----------
    noise : float, str or None
        The standard deviation of the noise; "heteroscedastic"; None: learned.
    low, high : float
        The ends of the grid.
    """

    TASK: ClassVar[str] = "regression"
    HIDDEN: ClassVar[tuple[str, ...]] = ("noise", "net")  # the room has a control for the noise

    noise: float | str | None = None
    low: float = -5.0
    high: float = 5.0

    @classmethod
    def read(cls, asked: Any) -> Recipe:
        """A recipe from the request of a page."""
        common = cls.read_common(asked, ("noise", "low", "high"))
        noise = asked.get("noise")
        if noise != HETEROSCEDASTIC:
            noise = None if noise is None else read_number(asked, "noise", 0, 1e-4, 100.0)
        low = read_number(asked, "low", -5.0, -LARGEST)
        high = read_number(asked, "high", 5.0, -LARGEST)
        if not low < high:
            raise DataError("the left end of the plane must be below its right end")
        return cls(_points(asked.get("points")), **common, noise=noise, low=low, high=high)

    @property
    def before_data(self) -> Recipe:
        """The recipe whose prior is shown where there are no points. The fit has one row, which
        the prior of its functions does not depend on: nothing of the prior is learned."""
        if self.points:
            return self
        one = replace(self, points=((0.0, 0.0),), **self.of_prior)
        return one if self.needs_network else replace(one, noise=self.noise or 0.1)

    @property
    def inputs(self) -> int:
        return 1

    @property
    def outputs(self) -> int:
        return 2 if self.noise == HETEROSCEDASTIC else 1

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        data = torch.tensor(self.points, dtype=torch.float64)
        return data[:, :1], data[:, 1]

    @property
    def likelihood(self) -> Any:
        return doxa.Gaussian(self.noise) if isinstance(self.noise, float) else self._named

    @property
    def _named(self) -> str:
        return self.noise if isinstance(self.noise, str) else "gaussian"

    @property
    def grid(self) -> Tensor:
        return torch.linspace(self.low, self.high, GRID, dtype=torch.float64)[:, None]

    def script(self, draws: int = DRAWS) -> str:
        """The calls as Python, which gives the numbers of the panel. `draws` is the number of
        functions that it shows."""
        fitted = self.before_data
        given = f"doxa.Gaussian({fitted.noise!r})" if isinstance(fitted.noise, float) else None
        lines = ["import torch", "import doxa", ""]
        if not self.points:
            lines.append("# The prior of these functions does not depend on this row.")
        lines += [
            "points = [",
            *(f"    {', '.join(map(repr, row))}," for row in in_lines(fitted.points)),
            "]",
            "data = torch.tensor(points, dtype=torch.float64)",
            "x, y = data[:, :1], data[:, 1]",
            *fitted.fit_lines(given or repr(fitted._named)),
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


def _points(given: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(given, list) or len(given) > MOST_POINTS:
        raise DataError(f"points must be a list of at most {MOST_POINTS} pairs")
    found = []
    for i, point in enumerate(given):
        if not (isinstance(point, list) and len(point) == 2 and all(map(finite_number, point))):
            raise DataError(f"point {i} must be two finite numbers, at most {LARGEST:g} in size")
        found.append((float(point[0]), float(point[1])))
    return tuple(found)


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
        "draws": _rows(drawn(posterior, grid, DRAWS)),
        "mean": p.mean.reshape(-1).tolist(),
        "aleatoric": p.aleatoric.reshape(-1).tolist(),
        "epistemic": p.epistemic.reshape(-1).tolist(),
    }
    return found | what_it_says(posterior)


def _rows(f: Tensor) -> list[list[float]]:
    return f.reshape(len(f), -1)[:, :GRID].tolist()


def panel(asked: Any, call: Call) -> dict[str, Any]:
    """The picture of a recipe; those of the fit on its way are shown before it."""
    recipe = Recipe.read(asked)
    found = show_panel(recipe, recipe.before_data, call, picture)
    return found | {"preview": False, "python": recipe.script(len(found.get("draws", ())))}


def path(asked: Any, call: Call) -> dict[str, Any]:
    """A closed path of functions, [draw, frame, grid]: each is a draw of the posterior (before
    data: of the prior). For processes and exact models, whose functions are Gaussian."""
    recipe = Recipe.read(asked)
    if not is_exact(recipe.method):
        raise Unavailable(f"the functions of {recipe.method} are not Gaussian")
    posterior = fitted(recipe.before_data, call)
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
        "log_evidence": [scalar(posterior.log_evidence) for posterior in each],
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
    p, q = (fitted(recipe, call).predict(both[0].grid) for recipe in both)
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
    return {
        "methods": describe_methods(Recipe), "presets": presets(), "activations": list(ACTIVATIONS),
        "most_points": MOST_POINTS,
    }  # fmt: skip


def warm_up() -> Iterator[Callable[[], object]]:
    """Calls that make later ones quick, the most likely first."""
    names = ("gp", "linear", "nngp", "map", "deep-ensemble", "mc-dropout", "laplace", "hmc")
    base = Recipe(tuple((float(i), float(i % 3)) for i in range(-4, 4)), "gp", {}, width=8)
    recipes = [
        replace(base, method=name, settings=dict(doxa.methods()[name].short), steps=4)
        for name in names
    ]
    return warm(recipes, picture)
