"""Kernels composed from their names: "rbf", "rbf + linear", "(rbf + linear) * periodic".

Every term of a sum has a variance in front. The kernels themselves: `doxa/priors/kernels.py`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from doxa.function.grammar import Leaf, Node, Product, Sum, leaves, parse
from doxa.function.kernels import KernelFunction, KernelSpec, build
from doxa.linalg.layout import Entry, Layout, Params
from doxa.priors.kernels import KINDS, Place, scalar

PER_COLUMN = ("lengthscale", "period")
MOST_COLUMNS = (
    50  # that have a lengthscale each unless asked for: more are not told by the evidence
)


class Composed(KernelFunction):
    """k(a, b) of a text, as a function of a flat vector of logarithms, in float64.

    `columns` is the number of lengthscales and periods of each kernel: 1, or one a column.
    """

    def __init__(self, text: str, columns: int = 1) -> None:
        self.text, self.tree = text, parse(text, KINDS)
        entries = [Entry(f"{label_of(term)}.variance", (1, 1)) for term in _terms(self.tree)]
        for leaf in leaves(self.tree):
            for name in KINDS[leaf.name].parameters:
                entries.append(
                    Entry(f"{leaf.label}.{name}", (1, columns if name in PER_COLUMN else 1))
                )
        self.layout = Layout(tuple(entries))

    def start(self) -> Tensor:
        """Every parameter 1."""
        return torch.zeros(self.layout.size, dtype=torch.float64)

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """flat [..., H], a [..., N, D], b [..., N', D] to [..., N, N'], or [..., N]."""
        return self._value(self.tree, self.layout.unflatten(flat.exp()), Place(a, b, diag))

    def _value(self, node: Node, values: Params, place: Place, inside: bool = False) -> Tensor:
        """`inside` a product a single kernel has no variance."""
        if isinstance(node, Sum):
            return functools.reduce(
                operator.add, (self._value(p, values, place) for p in node.parts)
            )
        if isinstance(node, Leaf):
            own = {name: values[f"{node.label}.{name}"] for name in KINDS[node.name].parameters}
            value = KINDS[node.name].of(place, own)
        else:
            parts = (self._value(part, values, place, True) for part in node.parts)
            value = functools.reduce(operator.mul, parts)
        variance = None if inside else values.get(f"{label_of(node)}.variance")
        return value if variance is None else scalar(variance, place) * value

    def to(self, device: torch.device) -> Composed:
        return self

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name, in their own units, for people: flat [..., H]."""
        values = self.layout.unflatten(flat.exp())
        return {name: value.squeeze(-2).tolist() for name, value in values.items()}


def label_of(node: Node) -> str:
    """A term as a name."""
    if isinstance(node, Leaf):
        return node.label
    sign = "+" if isinstance(node, Sum) else "*"
    return sign.join(label_of(p) if isinstance(p, Leaf) else f"({label_of(p)})" for p in node.parts)


def _terms(node: Node) -> list[Node]:
    """What has a variance: the terms of every sum; a product with a sum in it has that sum's."""
    if isinstance(node, Leaf):
        return [node]
    if isinstance(node, Product):
        inner = [part for part in node.parts if not isinstance(part, Leaf)]
        return [term for part in inner for term in _terms(part)] or [node]
    return [term for part in node.parts for term in _terms(part)]


def function_of(
    spec: str | KernelSpec | nn.Module, inputs: int, ard: bool | None
) -> KernelFunction:
    """A text or a gpytorch kernel as a function of rows with so many columns."""
    if not isinstance(spec, str):
        return KernelFunction(build(spec))
    own = inputs <= MOST_COLUMNS if ard is None else ard
    return Composed(spec, inputs if own else 1)
