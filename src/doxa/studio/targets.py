"""Log densities of two parameters for the room "Samplers": ready-made ones, and typed formulas.

A target is a function of {"x": [2]}, as `doxa.sample` takes it. `source` is its Python, for scripts
that repeat what the room shows.

**Formulas** are parsed by `ast` and evaluated by the functions of this module: nothing is executed
as code. The grammar:

    formula = number | x | y | pi | e | (formula) | -formula | formula op formula | f(formula, …)
    op      = + - * / **
    f       = one of `FUNCTIONS`

A formula has at most 300 characters, 120 parts, and 25 levels. Parts without x and y are computed
while it is read, in floating point, so that no integer can grow.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.density import GradientNoise, RowSum
from doxa.errors import DataError
from doxa.noise import generator

Log = Callable[..., Tensor]
View = tuple[float, float, float, float]  # left, right, bottom, top

LONGEST = 300  # characters of a formula
MOST_PARTS = 120
MOST_LEVELS = 25
_LARGEST = 1e12  # of a number

NUMBERS = {"pi": math.pi, "e": math.e}
# Of each function: how many arguments it has, in torch and for numbers.
FUNCTIONS: dict[str, tuple[int, Callable[..., Tensor], Callable[..., float]]] = {
    "exp": (1, torch.exp, math.exp), "log": (1, torch.log, math.log),
    "log1p": (1, torch.log1p, math.log1p), "sqrt": (1, torch.sqrt, math.sqrt),
    "abs": (1, torch.abs, abs), "sin": (1, torch.sin, math.sin), "cos": (1, torch.cos, math.cos),
    "tanh": (1, torch.tanh, math.tanh), "cosh": (1, torch.cosh, math.cosh),
    "atan": (1, torch.atan, math.atan),
    "maximum": (2, torch.maximum, max), "minimum": (2, torch.minimum, min),
    "logaddexp": (
        2, torch.logaddexp, lambda a, b: max(a, b) + math.log1p(math.exp(-abs(a - b)))
    ),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", lambda a, b: a + b), ast.Sub: ("-", lambda a, b: a - b),
    ast.Mult: ("*", lambda a, b: a * b), ast.Div: ("/", lambda a, b: a / b),
    ast.Pow: ("**", lambda a, b: a**b),
}  # fmt: skip

Value = Tensor | float


@dataclass(frozen=True)
class Part:
    """A part of a formula: its value at (x, y), and its Python."""

    value: Callable[[Tensor, Tensor], Value]
    text: str
    number: float | None = None  # the value, where the part has neither x nor y


@dataclass(frozen=True)
class Formula:
    """A typed log density.

    Parameters
    ----------
    text : str
        The formula as it was typed.

    Examples
    --------
    >>> import torch
    >>> found = Formula("-x**2/2 - y**2")
    >>> float(found({"x": torch.tensor([1.0, 2.0])}))
    -4.5
    >>> found.python
    '((-(x ** 2.0)) / 2.0) - (y ** 2.0)'
    """

    text: str

    def __post_init__(self) -> None:
        if self._part.number is not None:
            raise DataError("a log density must depend on x or y")

    @property
    def _part(self) -> Part:
        return _Reader(self.text).read()

    @property
    def python(self) -> str:
        """The formula in Python, with x and y as tensors. It computes the same bits."""
        text = self._part.text
        whole = text.startswith("(") and _closes(text) == len(text) - 1
        return text[1:-1] if whole else text

    def compile(self) -> Log:
        """The log density as a function of {"x": [2]}."""
        value = self._part.value

        def log_density(p: dict[str, Tensor]) -> Tensor:
            x, y = p["x"]
            found = value(x, y)
            assert isinstance(found, Tensor)
            return found

        return log_density

    def __call__(self, p: dict[str, Tensor]) -> Tensor:
        return self.compile()(p)


def _closes(text: str) -> int:
    """Where the bracket that opens a text closes."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return -1


class _Reader:
    """Reads a formula: every node of its syntax tree is checked against the grammar."""

    def __init__(self, text: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise DataError("type a log density, such as -x**2/2 - y**2/2")
        if len(text) > LONGEST:
            raise DataError(f"a formula has at most {LONGEST} characters, not {len(text)}")
        self.text, self.parts = text.strip(), 0

    def read(self) -> Part:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            hint = "; write powers as x**2" if "^" in self.text else ""
            raise DataError(f"this is not a formula: {self.text!r:.80}{hint}") from error
        return self._node(tree.body, 0)

    def _node(self, node: ast.AST, level: int) -> Part:
        self.parts += 1
        if self.parts > MOST_PARTS or level > MOST_LEVELS:
            raise DataError(
                f"a formula has at most {MOST_PARTS} parts and {MOST_LEVELS} levels: simplify it"
            )
        if isinstance(node, ast.Constant):
            return _constant(node.value)
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = self._node(node.operand, level + 1)
            if isinstance(node.op, ast.UAdd):
                return inner
            if inner.number is not None:
                return _constant(-inner.number)
            return Part(lambda x, y: -inner.value(x, y), f"(-{inner.text})")
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = self._node(node.left, level + 1), self._node(node.right, level + 1)
            return _operation(type(node.op), left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, node.args, level + 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
            raise DataError("write powers as x**2: ^ is not in the grammar of formulas")
        raise DataError(
            f"{type(node).__name__} is not in the grammar of formulas: use numbers, x, y, pi, e, "
            f"+ - * / ** and {', '.join(FUNCTIONS)}"
        )

    def _name(self, name: str) -> Part:
        if name in NUMBERS:
            return _constant(NUMBERS[name])
        if name == "x":
            return Part(lambda x, y: x, "x")
        if name == "y":
            return Part(lambda x, y: y, "y")
        what = "a function: write its argument in brackets" if name in FUNCTIONS else "not known"
        raise DataError(f"{name!r:.40} is {what}; the parameters are x and y")

    def _call(self, name: str, arguments: list[ast.expr], level: int) -> Part:
        if name not in FUNCTIONS:
            raise DataError(
                f"there is no function {name!r:.40} in formulas; there are {', '.join(FUNCTIONS)}"
            )
        count, function, of_numbers = FUNCTIONS[name]
        if len(arguments) != count:
            raise DataError(f"{name} has {count} argument{'s' * (count > 1)}, not {len(arguments)}")
        given = [self._node(each, level) for each in arguments]
        numbers = [part.number for part in given]
        if None not in numbers:
            return _constant(_folded(lambda: of_numbers(*numbers)))
        values = [_filled(part) for part in given]
        text = ", ".join(part.text for part in values)
        return Part(
            lambda x, y: function(*(v.value(x, y) for v in values)), f"torch.{name}({text})"
        )


def _constant(value: Any) -> Part:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{value!r:.40} is not in the grammar of formulas")
    if not abs(value) <= _LARGEST:
        raise DataError(f"numbers of a formula are at most {_LARGEST:g} in size")
    number = float(value)
    return Part(lambda x, y: number, repr(number) if number >= 0 else f"({number!r})", number)


def _filled(part: Part) -> Part:
    """A number as a tensor, for functions that take tensors only."""
    number = part.number
    if number is None:
        return part
    return Part(lambda x, y: torch.full_like(x, number), f"torch.full_like(x, {number!r})")


def _operation(kind: type[ast.operator], left: Part, right: Part) -> Part:
    sign, apply = OPERATORS[kind]
    if left.number is not None and right.number is not None:
        a, b = left.number, right.number
        return _constant(_folded(lambda: apply(a, b)))
    return Part(
        lambda x, y: apply(left.value(x, y), right.value(x, y)),
        f"({left.text} {sign} {right.text})",
    )


def _folded(compute: Callable[[], Any]) -> float:
    """A number that is computed while a formula is read."""
    try:
        found = compute()
    except (ArithmeticError, ValueError) as error:
        raise DataError(f"a part of the formula is no number: {error}") from error
    if not isinstance(found, float):
        raise DataError("a part of the formula is no real number")
    return found


def standard(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    return -0.5 * (x**2 + y**2)


def correlated(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    return -0.5 * (x**2 - 1.9 * x * y + y**2) / (1 - 0.95**2)


def banana(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    return -0.5 * (x / 1.5) ** 2 - 0.5 * ((y - 0.6 * x**2 + 1.5) / 0.5) ** 2


def donut(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    r = (x**2 + y**2 + 1e-9).sqrt()
    return -0.5 * ((r - 2.5) / 0.25) ** 2


def mixture(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    return torch.logsumexp(
        torch.stack([
            -((x + 2) ** 2 + (y + 1) ** 2) / (2 * 0.7**2),
            -((x - 2) ** 2 + (y + 1) ** 2) / (2 * 0.7**2),
            -(x**2 + (y - 2) ** 2) / (2 * 0.7**2),
        ]), 0,
    )  # fmt: skip


def funnel(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]  # y ~ N(0, 3²), x ~ N(0, exp(y))
    return -0.5 * (y / 3) ** 2 - 0.5 * x**2 * torch.exp(-y) - 0.5 * y


def squiggle(p: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = p["x"]
    z = y + torch.sin(5 * x)
    return -0.5 * (0.5 * x**2 - 0.5 * x * z + 2 * z**2) / 0.9375


def network_likelihood(
    p: dict[str, torch.Tensor], rows: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    a, b = p["x"]  # the network b tanh(a t)
    t, observed = rows
    return -0.5 * ((observed - b * torch.tanh(a * t)) / 0.4) ** 2


def network_prior(p: dict[str, torch.Tensor]) -> torch.Tensor:
    return -0.5 * (p["x"] / 2).square().sum()


NETWORK = "network"
TYPED = "typed"


@dataclass(frozen=True)
class Target:
    """A log density of two parameters that the room knows.

    Parameters
    ----------
    function : callable
        The log density; of the network, the log-likelihood of rows.
    view : tuple of float
        What a plane shows: left, right, bottom, top.
    start : tuple of float
        Where chains start.
    """

    function: Log
    view: View
    start: tuple[float, float]


TARGETS: dict[str, Target] = {
    "standard": Target(standard, (-4, 4, -3.5, 3.5), (-2.5, 2.0)),
    "correlated": Target(correlated, (-4, 4, -3.5, 3.5), (-2.0, 2.0)),
    "banana": Target(banana, (-5, 5, -3.5, 5.5), (-3.0, 0.0)),
    "donut": Target(donut, (-4.5, 4.5, -4, 4), (-1.0, 0.5)),
    "mixture": Target(mixture, (-5, 5, -4, 5), (-2.0, -1.0)),
    "funnel": Target(funnel, (-12, 12, -8, 8), (0.0, 3.0)),
    "squiggle": Target(squiggle, (-5, 5, -4, 4), (-2.0, 1.0)),
    NETWORK: Target(network_likelihood, (-4.5, 4.5, -4, 4), (-0.6, 0.6)),
}
TYPED_VIEW: View = (-5, 5, -4, 4)
ROWS = 40


def network_rows() -> tuple[list[float], list[float]]:
    """The rows of the network with two weights: inputs and targets."""
    g = generator("studio network rows", 0)
    t = torch.linspace(-2, 2, ROWS, dtype=torch.float64)
    noise = torch.randn(ROWS, dtype=torch.float64, generator=g)
    observed = 1.2 * torch.tanh(1.1 * t) + 0.4 * noise
    rounded = lambda v: [round(float(each), 3) for each in v]  # noqa: E731
    return rounded(t), rounded(observed)


def density_of(name: str, text: str = "", noise: float = 0.0) -> Any:
    """The log density of a target, for `doxa.sample`.

    Parameters
    ----------
    name : str
        One of `TARGETS`, or "typed".
    text : str
        The formula, of "typed".
    noise : float
        The standard deviation of stated noise of the gradient. The network has that of its batches.
    """
    if name == NETWORK:
        rows = tuple(torch.tensor(each, dtype=torch.float64) for each in network_rows())
        return RowSum(network_likelihood, rows, network_prior)
    log_density = Formula(text).compile() if name == TYPED else TARGETS[name].function
    return GradientNoise(log_density, std=noise) if noise else log_density


def source(name: str, text: str = "", noise: float = 0.0) -> list[str]:
    """Lines of Python that define `density` as `density_of` makes it."""
    if name == NETWORK:
        t, observed = network_rows()
        rows = [f"{each!r}" for each in (t, observed)]
        return [
            *textwrap.dedent(inspect.getsource(network_likelihood)).splitlines(), "", "",
            *textwrap.dedent(inspect.getsource(network_prior)).splitlines(), "", "",
            *textwrap.wrap(f"t = {rows[0]}", 96, subsequent_indent="    "),
            *textwrap.wrap(f"observed = {rows[1]}", 96, subsequent_indent="    "),
            "rows = tuple(torch.tensor(each, dtype=torch.float64) for each in (t, observed))",
            "density = doxa.density.RowSum(network_likelihood, rows, network_prior)",
        ]  # fmt: skip
    if name == TYPED:
        own = "log_density"
        lines = [f"def {own}(p):", '    x, y = p["x"]', f"    return {Formula(text).python}"]
    else:
        own = TARGETS[name].function.__name__
        lines = textwrap.dedent(inspect.getsource(TARGETS[name].function)).splitlines()
    made = f"doxa.density.GradientNoise({own}, std={noise!r})" if noise else own
    return [*lines, "", "", f"density = {made}"]


GRID = 121  # points of the contours along each side
_FINE = 301  # of the marginals
_MASSES = (0.25, 0.5, 0.75, 0.9, 0.98)


def picture(name: str, text: str, view: View) -> dict[str, Any]:
    """A target on a grid: its log density, the levels that hold a share of the probability, and the
    marginals, by the trapezoidal rule on a region of twice the view's size in each direction."""
    log_density = density_of(name, text)
    x0, x1, y0, y1 = view
    x, y, values = _grid(log_density, view, GRID)
    wide = (1.5 * x0 - 0.5 * x1, 1.5 * x1 - 0.5 * x0, 1.5 * y0 - 0.5 * y1, 1.5 * y1 - 0.5 * y0)
    fine_x, fine_y, fine = _grid(log_density, wide, _FINE)
    top = fine.max()
    if not bool(torch.isfinite(top)):
        raise DataError("the log density is not finite anywhere on the plane")
    mass = (fine - top).exp()
    total = float(mass.sum())
    dx, dy = float(fine_x[1] - fine_x[0]), float(fine_y[1] - fine_y[0])
    over_x, over_y = mass.sum(0) / total, mass.sum(1) / total
    ordered = mass.flatten().sort(descending=True).values
    held = ordered.cumsum(0) / total
    at = torch.searchsorted(held, torch.tensor(_MASSES, dtype=held.dtype)).clamp_max(len(held) - 1)
    mean = [float((over_x * fine_x).sum()), float((over_y * fine_y).sum())]
    variance = [
        float((over_x * (fine_x - mean[0]).square()).sum()),
        float((over_y * (fine_y - mean[1]).square()).sum()),
    ]
    rows = dict(zip(("t", "observed"), network_rows(), strict=True)) if name == NETWORK else None
    return {
        "x": x.tolist(), "y": y.tolist(), "log_density": values.tolist(),
        "levels": (ordered[at].log() + top).tolist(), "masses": list(_MASSES),
        "marginals": [
            {"at": fine_x.tolist(), "density": (over_x / dx).tolist()},
            {"at": fine_y.tolist(), "density": (over_y / dy).tolist()},
        ],
        "mean": mean, "sd": [v**0.5 for v in variance], "rows": rows,
    }  # fmt: skip


def _grid(log_density: Log, view: View, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log density [count, count] on a grid, one row per y; −∞ where it is undefined."""
    x = torch.linspace(view[0], view[1], count, dtype=torch.float64)
    y = torch.linspace(view[2], view[3], count, dtype=torch.float64)
    points = torch.stack([each.flatten() for each in torch.meshgrid(x, y, indexing="xy")], 1)
    with torch.no_grad():
        values = torch.func.vmap(lambda at: log_density({"x": at}))(points)
    values = torch.nan_to_num(values, nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    return x, y, values.reshape(count, count)
