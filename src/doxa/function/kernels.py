"""Kernels: composed from names, or from gpytorch, as pure functions of a vector of logarithms.

Positive hyper-parameters (lengthscales, variances) enter as their logarithms, for any
parametrisation of gpytorch, so that a gradient step has the same relative size at any scale of the
data. A gpytorch kernel can be saved if it comes from a registered builder:

    @register_kernel("rbf-plus-linear")
    def rbf_plus_linear() -> gpytorch.kernels.Kernel: ...

Kernels are composed from names: "rbf", "rbf + linear", "(rbf + linear) * periodic". The text is
parsed (never evaluated) as a Python expression of names, "+", "*" and brackets, and every term of a
sum has its own variance. The named kernels are in `doxa/priors/functions.py`.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doxa import store
from doxa.errors import MethodError, did_you_mean
from doxa.linalg.layout import Entry, Layout, Params
from doxa.priors.functions import KINDS, Place, scalar

_NAME = re.compile(r"[^\W\d][\w-]*")
# Other characters, a power, and a missing sign: Python has a meaning for them, or another place.
_FAULT = re.compile(r"[^A-Za-z0-9_ +*()]|(?<=\*)\*|(?<=\w)(?: \w| ?\()|(?<=\)) ?[\w(]")
_MOST_SIGNS = 200  # deeper trees could exceed the limits of Python's parser


@dataclass(frozen=True)
class Leaf:
    """A kernel by its name; `label` distinguishes kernels of the same name."""

    name: str
    label: str


@dataclass(frozen=True)
class Product:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Sum:
    parts: tuple[Node, ...]


Node = Leaf | Product | Sum


def leaves(node: Node) -> Iterator[Leaf]:
    if isinstance(node, Leaf):
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


def parse(text: str, known: Collection[str]) -> Node:
    """Parse a text into a tree; a MethodError names the place that cannot be parsed."""
    names = _NAME.findall(text)
    for name in names:
        if name not in known:
            raise MethodError(f"there is no kernel {name!r}{did_you_mean(name, known)}")
    if sum(map(text.count, "+*(")) > _MOST_SIGNS:
        raise MethodError(f"a kernel has at most {_MOST_SIGNS} signs and brackets")
    line = " ".join(text.split())
    seen: Counter[str] = Counter()

    def wrong(at: int) -> MethodError:
        before, wanted = line[:at].rstrip(), "a kernel's name"
        if before and before[-1] not in "+*(":
            inside = before.count("(") > before.count(")")
            wanted = "a closing bracket, + or *" if inside else "an end, + or *"
        found = repr(line[at : at + 20]) if at < len(line) else "its end"
        return MethodError(f"{text!r} cannot be read: {wanted} is expected at {found}")

    def read(node: ast.expr) -> Node:
        if isinstance(node, ast.Name):
            seen[node.id] += 1
            label = f"{node.id}-{seen[node.id]}" if names.count(node.id) > 1 else node.id
            return Leaf(node.id, label)
        if isinstance(node, ast.BinOp):
            kind = Sum if isinstance(node.op, ast.Add) else Product
            parts = [read(node.left), read(node.right)]
            # Brackets that change nothing go: a + (b + c) is a + b + c.
            return kind(tuple(p for q in parts for p in (q.parts if isinstance(q, kind) else (q,))))
        raise wrong(node.col_offset)  # a number, a sign before a name, empty brackets

    if (fault := _FAULT.search(line)) is not None:
        raise wrong(fault.end() - 1)
    try:
        return read(ast.parse(line, mode="eval").body)
    except SyntaxError as error:
        at = (error.offset or 0) - 1
        ends = at < 0 or line[at : at + 1] == "("  # a bracket that is not closed
        raise wrong(len(line) if ends else at) from None


P = ParamSpec("P")
Kernel = Any  # a gpytorch kernel; gpytorch is imported by its users

_BUILDERS: dict[str, Callable[..., Kernel]] = {}


def register_kernel(name: str) -> Callable[[Callable[P, Kernel]], Callable[P, Kernel]]:
    """Decorator: kernels from this builder can be stored under `name`. Its arguments must be JSON
    values."""

    def decorate(builder: Callable[P, Kernel]) -> Callable[P, Kernel]:
        known = _BUILDERS.get(name)
        if known is not None and inspect.unwrap(known).__qualname__ != builder.__qualname__:
            raise MethodError(f"a kernel named {name!r} is registered already")
        signature = inspect.signature(builder)

        @functools.wraps(builder)
        def build_and_remember(*args: P.args, **kwargs: P.kwargs) -> Kernel:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            kernel = builder(*args, **kwargs)
            kernel.doxa_builder = (name, json.dumps(dict(bound.arguments)))
            return kernel

        _BUILDERS[name] = build_and_remember
        return build_and_remember

    return decorate


@store.register("kernel")
@dataclass(frozen=True)
class KernelSpec:
    """A kernel from a registered builder: its name, settings as JSON, and parameter values."""

    builder: str
    settings: str
    values: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...] = ()

    @classmethod
    def of(cls, kernel: Kernel) -> KernelSpec | None:
        """The specification of a kernel; None if no registered builder made it."""
        made = getattr(kernel, "doxa_builder", None)
        if made is None:
            return None
        values = tuple(
            (name, tuple(p.shape), tuple(p.detach().double().flatten().tolist()))
            for name, p in kernel.named_parameters()
        )
        builder, settings = made
        return cls(builder, settings, values)

    def build(self) -> Kernel:
        if self.builder not in _BUILDERS:
            raise MethodError(
                f"no kernel builder is registered as {self.builder!r}"
                f"{did_you_mean(self.builder, sorted(_BUILDERS))}; import the module that does"
            )
        kernel = _BUILDERS[self.builder](**json.loads(self.settings)).double()
        named = dict(kernel.named_parameters())
        with torch.no_grad():
            for name, shape, numbers in self.values:
                named[name].copy_(torch.tensor(numbers, dtype=torch.float64).reshape(shape))
        return kernel


def build(spec: KernelSpec | nn.Module) -> Kernel:
    """A copy of the kernel, in float64."""
    return spec.build() if isinstance(spec, KernelSpec) else copy.deepcopy(spec).double()


class _Covariance(nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        from gpytorch.kernels import AdditiveKernel

        super().__init__()
        self.kernel = kernel
        self.sums = any(isinstance(part, AdditiveKernel) for part in kernel.modules())

    def forward(self, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """k(a, b) [N, N'], or k(a_i, b_i) [N], evaluated while the parameters are the given
        ones."""
        if diag:
            value = self.kernel(a, b, diag=True)
            return value if isinstance(value, Tensor) else value.to_dense()
        if self.sums:
            # A sum with a linear kernel at equal inputs is stored as roots, from a Cholesky
            # decomposition with jitter; a column more makes the inputs differ.
            return self.kernel(a, torch.cat([b, b[:1]])).to_dense()[:, :-1]
        return self.kernel(a, b).to_dense()


class KernelFunction:
    """k(a, b) as a function of a flat vector of hyper-parameters, in float64."""

    def __init__(self, kernel: Kernel) -> None:
        self._module = _Covariance(kernel)
        self._constraints: dict[str, Any] = {}
        entries = []
        for name, p, constraint in kernel.named_parameters_and_constraints():
            if p.requires_grad:
                entries.append(Entry(name, tuple(p.shape)))
                if _is_positive(constraint):
                    self._constraints[name] = constraint
        self.layout = Layout(tuple(entries))
        self._named = dict(kernel.named_parameters())

    def start(self) -> Tensor:
        """The current values of the kernel: [H]."""
        values = {}
        for name in self.layout.names:
            raw, constraint = self._named[name].detach(), self._constraints.get(name)
            if constraint is not None:
                raw = (constraint.transform(raw) - constraint.lower_bound.double()).log()
            values[name] = raw
        return self.layout.flatten(values) if values else torch.empty(0, dtype=torch.float64)

    def _raw(self, flat: Tensor) -> Params:
        params = {}
        for name, value in self.layout.unflatten(flat).items():
            constraint = self._constraints.get(name)
            if constraint is not None:
                value = constraint.inverse_transform(value.exp() + constraint.lower_bound.double())
            params[f"kernel.{name}"] = value
        return params

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """flat [H], a [N, D], b [N', D] to [N, N'], or [N] for the diagonal; or flat [M, H], one
        row per member, with a and b shared by all members or [M, N, D]. gpytorch inspects its
        inputs, so its kernels are evaluated member by member."""
        if flat.ndim > 1:
            sides = ([side] * len(flat) if side.ndim == 2 else side for side in (a, b))
            rows = zip(flat, *sides, strict=True)
            return torch.stack([self(row, own, other, diag) for row, own, other in rows])
        params = self._raw(flat) if self.layout.entries else {}
        return functional_call(self._module, params, (a, b, diag))

    def to(self, device: torch.device) -> KernelFunction:
        self._module.to(device)
        self._named = dict(self._module.kernel.named_parameters())
        return self

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name, in their own units: flat [..., H]."""
        values = self.layout.unflatten(flat) if self.layout.entries else {}
        return {
            name.replace("raw_", ""): (v.exp() if name in self._constraints else v).tolist()
            for name, v in values.items()
        }


def _is_positive(constraint: Any) -> bool:
    from gpytorch.constraints import GreaterThan, Positive

    return isinstance(constraint, Positive | GreaterThan) and bool(
        torch.isinf(constraint.upper_bound).all()
    )


PER_COLUMN = ("lengthscale", "period")
MOST_COLUMNS = (
    50  # most columns with one lengthscale each by default: the evidence does not determine more
)


class Composed(KernelFunction):
    """k(a, b) of a text, as a function of a flat vector of logarithms, in float64.

    `columns` is the number of lengthscales and periods of each kernel: 1, or one per column.
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
        """The logarithms for parameters of 1."""
        return torch.zeros(self.layout.size, dtype=torch.float64)

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """flat [..., H], a [..., N, D], b [..., N', D] to [..., N, N'], or [..., N]."""
        return self._value(self.tree, self.layout.unflatten(flat.exp()), Place(a, b, diag))

    def _value(self, node: Node, values: Params, place: Place, inside: bool = False) -> Tensor:
        """The value of a node; a single kernel `inside` a product has no variance."""
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
        """Hyper-parameters by name, in their own units: flat [..., H]."""
        values = self.layout.unflatten(flat.exp())
        return {name: value.squeeze(-2).tolist() for name, value in values.items()}


def label_of(node: Node) -> str:
    """The name of a term."""
    if isinstance(node, Leaf):
        return node.label
    sign = "+" if isinstance(node, Sum) else "*"
    return sign.join(label_of(p) if isinstance(p, Leaf) else f"({label_of(p)})" for p in node.parts)


def _terms(node: Node) -> list[Node]:
    """The nodes that have a variance: the terms of every sum. A product that contains a sum has the
    variances of that sum."""
    if isinstance(node, Leaf):
        return [node]
    if isinstance(node, Product):
        inner = [part for part in node.parts if not isinstance(part, Leaf)]
        return [term for part in inner for term in _terms(part)] or [node]
    return [term for part in node.parts for term in _terms(part)]


def function_of(
    spec: str | KernelSpec | nn.Module, inputs: int, ard: bool | None
) -> KernelFunction:
    """A text or a gpytorch kernel as a function of rows with this number of columns."""
    if not isinstance(spec, str):
        return KernelFunction(build(spec))
    own = inputs <= MOST_COLUMNS if ard is None else ard
    return Composed(spec, inputs if own else 1)
