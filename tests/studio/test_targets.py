"""The grammar of typed log densities: what it takes, what it refuses, and that both forms of a
formula (the one that is evaluated, and the Python that is shown) have the same bits."""

from __future__ import annotations

import ast
import inspect
import random
from typing import Any

import pytest
import torch

from doxa.errors import DataError
from doxa.studio import targets
from doxa.studio.targets import FUNCTIONS, LONGEST, MOST_LEVELS, MOST_PARTS, Formula

POINTS = torch.tensor([[0.3, -1.2], [2.5, 0.7], [-1.1, 3.0], [0.01, 0.02]], dtype=torch.float64)


def both(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of a formula at the points, and those of its Python."""
    formula = Formula(text)
    code = compile(formula.python, "shown", "eval")
    one = torch.stack([formula({"x": p}) for p in POINTS])
    shown = [eval(code, {"torch": torch}, {"x": p[0], "y": p[1]}) for p in POINTS]
    return one, torch.stack(shown)


@pytest.mark.parametrize(
    ("text", "written"),
    [("-x**2/2 - y**2/2", lambda x, y: -(x**2) / 2 - y**2 / 2),
     ("-(y - sin(2*x))**2 - abs(x)", lambda x, y: -((y - (2 * x).sin()) ** 2) - x.abs()),
     ("logaddexp(-(x-2)**2, -(x+2)**2) - y*y",
      lambda x, y: torch.logaddexp(-((x - 2) ** 2), -((x + 2) ** 2)) - y * y),
     ("-exp(x)*y**2 + 0.5*x - x**2/18", lambda x, y: -x.exp() * y**2 + 0.5 * x - x**2 / 18),
     ("maximum(x, 0) - x**2 - y**2/(2*pi*e)",
      lambda x, y: x.clamp(min=0) - x**2 - y**2 / (2 * 3.141592653589793 * 2.718281828459045)),
     ("+x--y-1e-3*(x**2+y**2)**2", lambda x, y: x + y - 1e-3 * (x**2 + y**2) ** 2),
     ("-cosh(x) + tanh(y) - log1p(y**2) - sqrt(x**2+1) + atan(x) + cos(y) + minimum(x, y) - x**4",
      lambda x, y: -x.cosh() + y.tanh() - (y**2).log1p() - (x**2 + 1).sqrt() + x.atan() + y.cos()
      + torch.minimum(x, y) - x**4),
     ("log(2)*x - 2**3*y**2", lambda x, y: 0.6931471805599453 * x - 8 * y**2)],
)  # fmt: skip
def test_formulas_are_what_they_say(text: str, written: Any) -> None:
    one, shown = both(text)
    assert torch.equal(one, shown)
    torch.testing.assert_close(one, written(*POINTS.T), rtol=1e-12, atol=1e-12)


def test_a_formula_runs_for_all_chains_at_once() -> None:
    log_density = Formula("-x**2 - maximum(y, 2)**2").compile()
    stacked = torch.func.vmap(lambda p: log_density({"x": p}))(POINTS)
    assert torch.equal(stacked, torch.stack([log_density({"x": p}) for p in POINTS]))


REFUSED = [
    ("", "type a log density"), ("  ", "type a log density"), (None, "type"), (3, "type"),
    ("x" * (LONGEST + 1), "characters"), ("x +", "not a formula"), ("x\0", "not a formula"),
    ("-" * 200 + "x", "levels"),
    ("+".join("x" * 100), "levels"), ("x^2 + y^2", r"x\*\*2"), ("3", "depend on x or y"),
    ("pi * e", "depend on x or y"), ("z", "not known"), ("sin", "in brackets"), ("sin()", "1 arg"),
    ("sin(x, y)", "1 argument"), ("maximum(x)", "2 arguments"), ("sin(x=1)", "grammar"),
    ("eval('x')", "no function"), ("x.real", "Attribute"), ("x[0]", "Subscript"), ("[x]", "List"),
    ("x if y else x", "IfExp"), ("x < y", "Compare"), ("x and y", "BoolOp"), ("not x", "grammar"),
    ("lambda: x", "Lambda"), ("(x := 2)", "formula"), ("x := 2", "not a formula"), ("'a'", "'a'"),
    ("x + 'a'", "'a'"), ("x + 1j", "1j"), ("x + True", "True"), ("x + None", "None"),
    ("x @ y", "grammar"), ("x // y", "grammar"), ("x % y", "grammar"), ("x; y", "not a formula"),
    ("import os", "not a formula"), ("x\nimport os", "not a formula"), ("f'{x}'", "grammar"),
    ("9**9**9 + x", "no number"), ("10.0**400 + x", "no number"), ("1/0 + x", "no number"),
    ("1e400 * x", "at most"), ("9" * 290 + "*x", "at most"), ("(-8)**0.5 + x", "no real number"),
    ("log(-1) + x", "no number"), ("exp(9999) + x", "no number"), ("(lambda: x)()", "grammar"),
    ("sin(*x)", "Starred"), ("x.__class__", "Attribute"), ("__import__('os')", "no function"),
    ("x ** (y for y in x)", "grammar"), ("...", "Ellipsis"), ("x << y", "grammar"), ("~x", "gram"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_formula_is_refused(text: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        Formula(text)
    assert len(str(caught.value)) < 400


def test_the_limits_are_those_of_the_page() -> None:
    assert MOST_PARTS == 120
    assert MOST_LEVELS == 25
    assert float(Formula("-" * (MOST_LEVELS - 1) + "x")({"x": POINTS[0]})) == 0.3
    wide = "+".join(["x*y"] * 20)
    torch.testing.assert_close(Formula(wide)({"x": POINTS[0]}), 20 * POINTS[0].prod())


def test_no_code_is_executed() -> None:
    """The module has no call of eval, exec, compile (of the built-in) or getattr."""
    called = {
        node.func.id
        for node in ast.walk(ast.parse(inspect.getsource(targets)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"eval", "exec", "compile", "getattr", "__import__", "open"} == set()


WORDS = [
    *"xy0123456789+-*/()., ", "**", "x", "y", "(", ")", "e", "pi", "1e", "\n", "#", "'", '"', "\\",
    "lambda", " if ", " for ", "__", ".", "[", "]", "{", "}", ":", "=", "^", "é", "∞", "\0",
    *FUNCTIONS, *(f"{name}(" for name in FUNCTIONS), "eval(", "import ", "await ", "f'",
    "0x", "1_0",
]  # fmt: skip


def grown(draw: random.Random, level: int) -> str:
    """A formula by the grammar, now and then with a piece of something else."""
    if draw.random() < 0.02:
        return draw.choice(WORDS)
    if level <= 0 or draw.random() < 0.25:
        number = round(draw.uniform(0, 10) ** draw.choice([1, 5, -3]), 3)
        return draw.choice(["x", "y", str(draw.randrange(20)), repr(number), "pi"])
    kind = draw.random()
    if kind < 0.55:
        sign = draw.choice(["+", "-", "*", "/", "**"])
        return f"({grown(draw, level - 1)}{sign}{grown(draw, level - 1)})"
    if kind < 0.7:
        return f"-{grown(draw, level - 1)}"
    name = draw.choice(list(FUNCTIONS))
    inner = [grown(draw, level - 1) for _ in range(FUNCTIONS[name][0])]
    return f"{name}({', '.join(inner)})"


def fuzz(count: int, seed: int) -> int:
    """Random strings are formulas with two equal forms, or errors of doxa. How many are."""
    draw, taken = random.Random(seed), 0
    for i in range(count):
        if i % 2:
            text = "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 60)))
        else:
            text = grown(draw, draw.randrange(1, 6))
        try:
            one, shown = both(text)
        except DataError as error:
            assert len(str(error)) < 400
            continue
        assert torch.equal(one.nan_to_num(7.5), shown.nan_to_num(7.5)), text
        taken += 1
    return taken


def test_random_formulas() -> None:
    assert fuzz(500, 0) > 80


@pytest.mark.slow
@pytest.mark.matrix
def test_ten_thousand_random_formulas() -> None:
    assert fuzz(10_000, 1) > 1600
