"""A Gaussian process whose numbers are not known: each function has its own.

    log ℓ_d ~ N(log lengthscale_d, spread²),   log v ~ N(log variance, spread²),   f ~ GP(0, k_ℓ,v)

The target of Tran, Rossi, Milios & Filippone (2022) on tables, with spread 1. A function may then
be flat in some columns and steep in others, and its size is known up to a factor of some e: much
less is claimed than by a process with fixed numbers. Its density is not known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa import store
from doxa.errors import ModelError
from doxa.priors.functions import GPPrior, flat_inputs


@store.register("hierarchical-gp-prior")
@dataclass(frozen=True)
class HierarchicalGP(GPPrior):
    """Gaussian processes with mean 0, of a lengthscale for each column and a variance that every
    function draws anew.

    Parameters
    ----------
    kernel, period: as in `GPPrior`.
    lengthscale, variance: their medians. One lengthscale is one for all columns of x; a sequence
        has one for each column, drawn apart from the others.
    spread: the standard deviation of their logarithms.

    Examples
    --------
    >>> import torch
    >>> prior = HierarchicalGP("rbf", lengthscale=(0.5, 2.0))
    >>> prior.sample(torch.rand(20, 2), n=3).shape
    torch.Size([3, 20, 1])
    """

    spread: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.spread < 10:
            raise ModelError(f"spread must be above 0 and below 10, got {self.spread!r}")

    @property
    def _lengths(self) -> int:
        return len(self.lengthscale) if isinstance(self.lengthscale, tuple) else 1

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return (self._lengths + 1 + rows * outputs,)

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        x = flat_inputs(x)  # [M, N, D]
        lengths, power, rest = eps.split([self._lengths, 1, x.shape[1] * outputs], -1)
        lengths = lengths.expand(*lengths.shape[:-1], x.shape[-1])
        moved = torch.cat([lengths, power, torch.zeros_like(power)], -1)  # [M, n, D + 2]
        hyper = self.hyper(x.shape[-1]).to(x) + self.spread * moved
        root = self.root(x.unsqueeze(1), hyper=hyper)  # [M, n, N, N]
        return root @ rest.unflatten(-1, (x.shape[1], outputs))

    def score(
        self, x: Tensor, f: Tensor, noise: float, hyper: Tensor | None = None
    ) -> Tensor | None:
        return None
