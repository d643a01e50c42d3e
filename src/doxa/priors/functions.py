"""Priors over functions: what is believed of f itself, as draws at any inputs.

    Gaussian process   f ~ GP(0, k): draws, log density and score in closed form
    implicit process   f = g(·, z), z ~ N(0, I): whatever a function g makes of noise
                       (Ma, Li & Hernández-Lobato, 2019)

`sample(x, n)` is what both answer. Kernels are those of `kernels.py`, times a variance v; "linear"
is v Σ_d x_d x'_d / ℓ_d², with lengthscales, and the period p is the same in every column.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from doxa import store
from doxa.errors import DataError, ModelError, ShapeError, did_you_mean
from doxa.noise import Noise
from doxa.priors.kernels import KINDS, Place

KERNELS = ("rbf", "matern", "periodic", "linear")
_JITTER = 1e-6  # of the variance: below what a draw in single precision could show


class FunctionPrior(ABC):
    """What is believed of functions before the data."""

    @abstractmethod
    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        """The shape of the standard normals that one draw is made of."""

    @abstractmethod
    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        """Draws [M, n, N, outputs] at x [M, N, ...] from normals eps [M, n, *noise_shape]: pure
        tensor code, which may be differentiated, recorded and captured."""

    def score(self, x: Tensor, f: Tensor, noise: float) -> Tensor | None:
        """∇ log p of f [M, n, N, O] at x [M, N, ...], where independent noise of this standard
        deviation was added to the functions; None where the density is not known."""
        return None

    def sample(self, x: Any, n: int, seed: int = 0, outputs: int = 1) -> Tensor:
        """n functions at the rows of x, [N, ...] (or [N], a column): [n, N, outputs]. The j-th is
        the same function of the seed whatever n is."""
        x = torch.as_tensor(x)
        if x.ndim == 0 or len(x) == 0:
            raise DataError("a prior over functions is drawn at the rows of x: there are none")
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        x = x.unsqueeze(1) if x.ndim == 1 else x
        noise = Noise(seed, "functions", range(n), x.device, x.dtype)
        eps = noise.normal(self.noise_shape(len(x), outputs))
        return self.functions(x.unsqueeze(0), eps.unsqueeze(0), outputs)[0]


@store.register("gp-prior")
@dataclass(frozen=True)
class GPPrior(FunctionPrior):
    """A Gaussian process with mean 0; outputs are independent.

    Parameters
    ----------
    kernel: "rbf", "matern", "periodic" or "linear".
    lengthscale: ℓ, one number or one for each column of x. variance: v. period: p. In the units
        that x and y are fitted in (standardised ones under `standardize=True`).

    Examples
    --------
    >>> import torch
    >>> prior = GPPrior("rbf", lengthscale=0.5)
    >>> prior.sample(torch.linspace(0, 1, 20), n=3).shape
    torch.Size([3, 20, 1])
    """

    kernel: str = "rbf"
    lengthscale: float | tuple[float, ...] = 1.0
    variance: float = 1.0
    period: float = 1.0

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            hint = did_you_mean(str(self.kernel), KERNELS)
            raise ModelError(
                f"kernel must be one of {', '.join(KERNELS)}, not {self.kernel!r}{hint}"
            )
        if isinstance(self.lengthscale, Sequence):
            object.__setattr__(self, "lengthscale", tuple(self.lengthscale))
        for name in ("lengthscale", "variance", "period"):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, Real) or not 0 < float(number) < math.inf:
                    raise ModelError(f"{name} must be positive and finite, got {value!r}")

    def hyper(self, columns: int) -> Tensor:
        """log (ℓ of each column, v, p), [columns + 2], float64."""
        scales = self.lengthscale if isinstance(self.lengthscale, tuple) else (self.lengthscale,)
        if len(scales) not in (1, columns):
            raise ShapeError(
                f"the prior has {len(scales)} lengthscales, and x {columns} columns: give one, or "
                "one for each column"
            )
        scales = scales * columns if len(scales) == 1 else scales
        return torch.tensor([*scales, self.variance, self.period], dtype=torch.float64).log()

    def covariance(self, a: Tensor, b: Tensor, hyper: Tensor | None = None) -> Tensor:
        """k(a, b) [..., N, N'] of a [..., N, D] and b [..., N', D]; with `hyper` [..., D + 2] in
        place of the prior's own numbers."""
        if hyper is None:
            hyper = self.hyper(a.shape[-1]).to(a)
        own = hyper.exp()
        scale, variance = own[..., None, :-2], own[..., -2, None, None]
        place = Place(a, b, False)
        if self.kernel == "linear":
            place = Place(a / scale, b / scale, False)
        values = {"lengthscale": scale, "period": own[..., None, -1:]}
        return variance * KINDS[self.kernel].of(place, values)

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return rows, outputs

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        return self.root(flat_inputs(x)).unsqueeze(1) @ eps

    def root(self, x: Tensor, noise: float = 0.0, hyper: Tensor | None = None) -> Tensor:
        """The Cholesky factor of k(x, x) + noise² I, [..., N, N]."""
        k = self.covariance(x, x, hyper)
        size = k.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].detach()
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        least = _JITTER if k.dtype == torch.float64 else 10 * _JITTER
        return torch.linalg.cholesky_ex(k + (least * size + noise**2) * eye).L

    def score(
        self, x: Tensor, f: Tensor, noise: float, hyper: Tensor | None = None
    ) -> Tensor | None:
        root = self.root(flat_inputs(x), noise, hyper)  # [M, N, N]
        flat = f.transpose(1, 2).flatten(2)  # [M, N, n·O]
        solved = torch.cholesky_solve(flat, root)
        return -solved.unflatten(2, (f.shape[1], f.shape[3])).transpose(1, 2)


@store.register("implicit-prior")
@dataclass(frozen=True)
class ImplicitPrior(FunctionPrior):
    """Whatever a function makes of noise: f = g(·, z), z ~ N(0, I).

    Parameters
    ----------
    function: g(x, z), from the rows x [N, ...] and `numbers` standard normals z to one function's
        values, [N] or [N, outputs], in fitted units. It is torch code without decisions on values
        (`torch.where` in place of `if`), since it runs under `vmap`. To save a posterior that has
        it, let it be a frozen dataclass with `__call__`, known by `doxa.store.register(name)`.
    numbers: how many normals z has.

    Examples
    --------
    >>> import torch
    >>> lines = ImplicitPrior(lambda x, z: z[0] + z[1] * x[:, 0], numbers=2)
    >>> lines.sample(torch.linspace(0, 1, 20), n=3).shape
    torch.Size([3, 20, 1])
    """

    function: Callable[[Tensor, Tensor], Tensor]
    numbers: int

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ModelError(f"function must be g(x, z), not {self.function!r}")
        if not isinstance(self.numbers, int) or isinstance(self.numbers, bool) or self.numbers < 1:
            raise ModelError(f"numbers must be a whole number above 0, not {self.numbers!r}")

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return (self.numbers,)

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        each = vmap(vmap(self.function, (None, 0)), (0, 0))(x, eps)  # [M, n, N] or [M, n, N, O]
        each = each.unsqueeze(-1) if each.ndim == 3 else each
        wanted = (*eps.shape[:2], x.shape[1], outputs)
        if tuple(each.shape) != wanted:
            raise ShapeError(
                f"the prior's function gave values of shape {list(each.shape[2:])} for "
                f"{x.shape[1]} rows; {list(wanted[2:])} are needed"
            )
        return each


def flat_inputs(x: Any) -> Tensor:
    """Inputs [M, N, ...] as the rows of a kernel, [M, N, D]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError("a Gaussian-process prior needs x as one array of real numbers")
    return x.unsqueeze(-1) if x.ndim == 2 else x.flatten(2)
