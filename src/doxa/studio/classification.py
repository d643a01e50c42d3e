"""The room "Classes": posteriors over classifiers of two inputs that follow the points of a person.

A request is a `ClassRecipe`: points (x, y, class), a method with its settings and a network. It is
carried out by `doxa.fit`, and shown on a grid of the plane:

    before data   the decision boundaries of functions drawn from the prior
    with data     the mean probability of each class; the predictive entropy H and its parts, in
                  nats; the decision boundaries of functions drawn from the posterior; status,
                  evidence

**The two parts.** H(E p) = E H(p) + I: the expected entropy is aleatoric, the mutual information I
between the class and the function is epistemic. Where classes overlap every function says that
either may be, and H is aleatoric. Far from the points the functions disagree, and I is large.
`ambiguity` shows this: the parts by the distance to the nearest point, and the place where each is
largest.

**Boundaries.** A function decides for the class with the largest output. The boundary of class c is
the zero line of f_c − max of the others; `boundaries` finds it between grid points, linearly.

`script` writes the same calls as Python. A test compares all numbers to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import doxa
from doxa.errors import DataError, Unavailable
from doxa.noise import generator
from doxa.posterior import Posterior
from doxa.studio.recipes import (
    ACTIVATIONS,
    LARGEST,
    MOST_POINTS,
    BaseRecipe,
    describe_methods,
    drawn,
    finite_number,
    in_lines,
    read_number,
    read_whole,
    show_panel,
    warm,
    what_it_says,
)
from doxa.studio.workers import Call

COLUMNS, ROWS = 49, 31  # of the grid
DRAWS = 8  # functions whose boundaries are drawn
MOST_CLASSES = 4
BINS = 12  # of the distance to the nearest point
_PLACES = 4  # decimals of a boundary, which is a drawing


@dataclass(frozen=True)
class ClassRecipe(BaseRecipe):
    """A classifier of two inputs, and a picture of it. Points are (x, y, class).

    Parameters
    ----------
    classes : int
        The number of classes, of which a network has an output each.
    x0, x1, y0, y1 : float
        The ends of the grid.
    """

    TASK: ClassVar[str] = "classification"
    HIDDEN: ClassVar[tuple[str, ...]] = ("net",)

    classes: int = 2
    x0: float = -4.8
    x1: float = 4.8
    y0: float = -3.0
    y1: float = 3.0

    @classmethod
    def read(cls, asked: Any) -> ClassRecipe:
        """A recipe from the request of a page."""
        ends = ("x0", "x1", "y0", "y1")
        common = cls.read_common(asked, ("classes", *ends))
        classes = read_whole(asked, "classes", 2, 2, MOST_CLASSES)
        view: dict[str, Any] = {
            name: read_number(asked, name, getattr(cls, name), -LARGEST) for name in ends
        }
        if not (view["x0"] < view["x1"] and view["y0"] < view["y1"]):
            raise DataError("the plane must end to the right of and above its beginning")
        points = _points(asked.get("points"), classes)
        if points and len({point[2] for point in points}) < 2:
            raise DataError("all points are of one class: add points of another one")
        return cls(points, **common, classes=classes, **view)

    @property
    def before_data(self) -> ClassRecipe:
        """The recipe whose prior is shown where there are no points. The fit has one row of each
        class, which the prior of its functions does not depend on: nothing of it is learned."""
        if self.points:
            return self
        rows = tuple((float(c), 0.0, c) for c in range(self.classes))
        return replace(self, points=rows, **self.of_prior)

    @property
    def inputs(self) -> int:
        return 2

    @property
    def outputs(self) -> int:
        return self.classes

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        data = torch.tensor(self.points, dtype=torch.float64)
        return data[:, :2], data[:, 2].long()

    @property
    def likelihood(self) -> Any:
        return "categorical"

    @property
    def axes(self) -> tuple[Tensor, Tensor]:
        """The coordinates of the grid: [COLUMNS] and [ROWS]."""
        x = torch.linspace(self.x0, self.x1, COLUMNS, dtype=torch.float64)
        return x, torch.linspace(self.y0, self.y1, ROWS, dtype=torch.float64)

    @property
    def grid(self) -> Tensor:
        """[ROWS · COLUMNS, 2], row after row."""
        x, y = self.axes
        return torch.cartesian_prod(y, x).flip(1)

    def script(self, draws: int = DRAWS) -> str:
        """The calls as Python, which gives the numbers of the panel. `draws` is the number of
        functions that it shows."""
        fitted = self.before_data
        lines = ["import torch", "import doxa", ""]
        if not self.points:
            lines.append("# The prior of these functions does not depend on these rows.")
        lines += [
            "points = [  # x, y, class",
            *(f"    {', '.join(map(repr, row))}," for row in in_lines(fitted.points)),
            "]",
            "data = torch.tensor(points, dtype=torch.float64)",
            "x, y = data[:, :2], data[:, 2].long()",
            *fitted.fit_lines("'categorical'"),
            "",
            f"across = torch.linspace({self.x0!r}, {self.x1!r}, {COLUMNS}, dtype=torch.float64)",
            f"up = torch.linspace({self.y0!r}, {self.y1!r}, {ROWS}, dtype=torch.float64)",
            "grid = torch.cartesian_prod(up, across).flip(1)",
        ]
        if self.points:
            lines += [
                "p = posterior.predict(grid)",
                "probability, entropy = p.probs, p.entropy",
                "aleatoric, epistemic = p.expected_entropy, p.mutual_information",
                f"draws = posterior.functions(grid, n={draws})",
                "status, reason = posterior.status, posterior.status.reason",
            ]
        else:
            lines.append(f"prior = posterior.prior_functions(grid, n={DRAWS})")
        return "\n".join(lines) + "\n"


def _points(given: Any, classes: int) -> tuple[tuple[float, float, int], ...]:
    if not isinstance(given, list) or len(given) > MOST_POINTS:
        raise DataError(f"points must be a list of at most {MOST_POINTS} triples")
    found = []
    for i, point in enumerate(given):
        if not (isinstance(point, list) and len(point) == 3 and all(map(finite_number, point))):
            raise DataError(
                f"point {i} must be two finite numbers, at most {LARGEST:g} in size, and a class"
            )
        if point[2] not in range(classes):
            raise DataError(f"the class of point {i} must be from 0 to {classes - 1}")
        found.append((float(point[0]), float(point[1]), int(point[2])))
    return tuple(found)


def picture(recipe: ClassRecipe, posterior: Posterior) -> dict[str, Any]:
    """The numbers of a panel. Maps are lists over the grid, row after row."""
    grid, (across, up) = recipe.grid, recipe.axes
    found: dict[str, Any] = {
        "x": across.tolist(), "y": up.tolist(), "points": len(recipe.points),
        "classes": recipe.classes,
    }  # fmt: skip
    if not recipe.points:
        try:
            prior = posterior.prior_functions(grid, n=DRAWS)
            return found | {"draws": [boundaries(f, across, up) for f in prior]}
        except Unavailable as error:
            return found | {"draws": [], "no_prior": str(error)}
    p = posterior.predict(grid)
    functions = drawn(posterior, grid, DRAWS)
    maps = {
        "entropy": p.entropy, "aleatoric": p.expected_entropy, "epistemic": p.mutual_information,
    }  # fmt: skip
    found |= {
        "probability": p.probs.T.tolist(),  # [C][G]
        **{name: values.tolist() for name, values in maps.items()},
        "boundary": boundaries(p.probs, across, up),
        "draws": [boundaries(f, across, up) for f in functions],
        "ambiguity": ambiguity(recipe, maps["aleatoric"], maps["epistemic"]),
    }
    return found | what_it_says(posterior)


def ambiguity(recipe: ClassRecipe, aleatoric: Tensor, epistemic: Tensor) -> dict[str, Any]:
    """Ambiguity against distance: the parts of the entropy by the distance to the nearest point.

    The result has the means over the grid points of each `distance` (the middle of a bin), and the
    index of the grid point where each part is largest, with its distance."""
    x, _ = recipe.data
    away = torch.cdist(recipe.grid, x).amin(1)  # [G]
    width = away.amax() / BINS
    which = (away / width).long().clamp(max=BINS - 1)
    filled = which.bincount(minlength=BINS) > 0
    mean = {
        name: torch.stack([values[which == b].mean() for b in range(BINS) if filled[b]]).tolist()
        for name, values in (("aleatoric", aleatoric), ("epistemic", epistemic))
    }
    middle = (torch.arange(BINS, dtype=torch.float64)[filled] + 0.5) * width
    most = {"ambiguous": int(aleatoric.argmax()), "unknown": int(epistemic.argmax())}
    return {
        "distance": middle.tolist(), **mean,
        "most": {name: {"at": i, "distance": float(away[i])} for name, i in most.items()},
    }  # fmt: skip


def boundaries(f: Tensor, across: Tensor, up: Tensor) -> list[list[float]]:
    """The decision boundaries of one function with outputs f [G, C]: pieces x, y, x, y.

    Each boundary is between two classes, of which one is not the last: the zero lines of all
    classes but the last one are all boundaries."""
    outputs = f.reshape(len(up), len(across), -1)
    found: list[list[float]] = []
    for c in range(outputs.shape[2] - 1):
        others = outputs[:, :, [k for k in range(outputs.shape[2]) if k != c]].amax(2)
        found += _zero_lines(outputs[:, :, c] - others, across, up)
    return found


def _zero_lines(m: Tensor, across: Tensor, up: Tensor) -> list[list[float]]:
    """Marching squares. The corners of a cell are met in the order a, b, c, d, against the clock
    from below left; a side with a change of sign has a point of the line. Where all four sides have
    one, the sign of the mean of the corners says which points belong together."""
    a, b, c, d = m[:-1, :-1], m[:-1, 1:], m[1:, 1:], m[1:, :-1]
    signs = (a > 0).int() + 2 * (b > 0).int() + 4 * (c > 0).int() + 8 * (d > 0).int()
    cells = ((signs > 0) & (signs < 15)).nonzero().tolist()
    x, y, value = across.tolist(), up.tolist(), m.tolist()
    found = []
    for j, i in cells:
        corners = [
            (x[i], y[j], value[j][i]), (x[i + 1], y[j], value[j][i + 1]),
            (x[i + 1], y[j + 1], value[j + 1][i + 1]), (x[i], y[j + 1], value[j + 1][i]),
        ]  # fmt: skip
        ends = []
        for k in range(4):
            (x0, y0, v0), (x1, y1, v1) = corners[k], corners[(k + 1) % 4]
            if (v0 > 0) != (v1 > 0):
                t = v0 / (v0 - v1)
                ends += [[x0 + t * (x1 - x0), y0 + t * (y1 - y0)]]
        middle = sum(corner[2] for corner in corners) > 0
        if len(ends) == 4 and (corners[0][2] > 0) != middle:
            ends = [ends[3], *ends[:3]]  # around the corners a and c, in place of b and d
        found += [
            [round(v, _PLACES) for v in ends[k] + ends[k + 1]] for k in range(0, len(ends), 2)
        ]
    return found


def panel(asked: Any, call: Call) -> dict[str, Any]:
    """The picture of a recipe; those of the fit on its way are shown before it."""
    recipe = ClassRecipe.read(asked)
    found = show_panel(recipe, recipe.before_data, call, picture)
    return found | {"preview": False, "python": recipe.script(len(found["draws"]))}


TASKS: dict[str, Callable[[Any, Call], Any]] = {"panel": panel}


def presets() -> dict[str, dict[str, Any]]:
    """Points to start from, with the number of classes."""
    g = generator("studio presets of classes", 0)

    def draw(n: int, std: float, x: float = 0.0, y: float = 0.0) -> Tensor:
        return torch.randn(n, 2, dtype=torch.float64, generator=g) * std + torch.tensor([x, y])

    turn = torch.linspace(0, torch.pi, 20, dtype=torch.float64)
    moon = torch.stack([turn.cos(), turn.sin()], 1)
    around = torch.linspace(0, 2 * torch.pi, 25, dtype=torch.float64)[:-1]
    ring = torch.stack([around.cos(), around.sin()], 1)
    few = torch.tensor([[-1.5, 0.6], [-0.7, -0.9], [1.1, 0.9], [1.8, -0.4]], dtype=torch.float64)
    found = {
        "moons": [
            1.6 * moon + torch.tensor([-0.8, -0.4]) + draw(20, 0.14),
            -1.6 * moon + torch.tensor([0.8, 0.4]) + draw(20, 0.14),
        ],
        "rings": [draw(16, 0.3), 1.9 * ring + draw(24, 0.13)],
        "gap": [draw(18, 0.45, -2.4), draw(18, 0.45, 2.4)],
        "overlap": [draw(30, 0.8, -0.7), draw(30, 0.8, 0.7)],
        "few": [few[:2], few[2:]],
        "far": [draw(14, 0.3, -3.9, -2.0), draw(14, 0.3, -2.7, -1.4)],
        "three": [draw(14, 0.5, -1.8, -0.9), draw(14, 0.5, 1.8, -0.9), draw(14, 0.5, 0.0, 1.4)],
        "four": [draw(10, 0.4, x, y) for x, y in ((-2, 1.2), (2, 1.2), (-2, -1.2), (2, -1.2))],
    }
    return {
        name: {
            "classes": len(groups),
            "points": [
                [round(float(x), 2), round(float(y), 2), c]
                for c, group in enumerate(groups) for x, y in group
            ],
        }
        for name, groups in found.items()
    }  # fmt: skip


def facts() -> dict[str, Any]:
    """What the page needs to know before anything is asked."""
    return {
        "methods": describe_methods(ClassRecipe), "presets": presets(),
        "activations": list(ACTIVATIONS), "most_points": MOST_POINTS,
        "most_classes": MOST_CLASSES,
    }  # fmt: skip


def warm_up() -> Iterator[Callable[[], object]]:
    """Calls that make later ones quick, the most likely first."""
    points = tuple((float(i), float(i % 3), i % 2) for i in range(-4, 4))
    base = ClassRecipe(points, "map", {}, width=8, steps=4)
    names = ("nngp", "laplace", "deep-ensemble", "hmc")
    methods = doxa.methods()
    return warm(
        [replace(base, method=name, settings=dict(methods[name].short)) for name in names], picture
    )
