"""gpytorch kernels as pure functions of a flat vector of logarithms.

Positive hyper-parameters (lengthscales, variances) enter as their logarithms, whatever gpytorch's
own parametrisation, so that a gradient step means the same at any scale of the data. A kernel that
shall be saved comes from a registered builder:

    @register_kernel("rbf-plus-linear")
    def rbf_plus_linear() -> gpytorch.kernels.Kernel: ...
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doxa import store
from doxa.errors import MethodError, did_you_mean
from doxa.linalg.layout import Entry, Layout, Params

P = ParamSpec("P")
Kernel = Any  # gpytorch's, which is imported by whoever brings one

_BUILDERS: dict[str, Callable[..., Kernel]] = {}


def register_kernel(name: str) -> Callable[[Callable[P, Kernel]], Callable[P, Kernel]]:
    """Make a builder's kernels storable under `name`; its arguments must be JSON-able."""

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
        """None where no registered builder made the kernel."""
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
        """k(a, b) [N, N'], or k(a_i, b_i) [N]: evaluated here, while the parameters are ours."""
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
        """The kernel's own values: [H]."""
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
        row a member, with a and b of all members or [M, N, D]. gpytorch looks into its inputs, so
        that its kernels are evaluated member by member."""
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
        """Hyper-parameters by name, in their own units, for people: flat [..., H]."""
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
