"""Factors τ on the precision of a Gaussian prior: one for all uncertain weights, or each tensor's.

A state's "tau" is [M, K], with K = 1 for one that all share. Prior and posterior are of the chosen
weights where only some of the uncertain ones have a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.method import Run, State
from doxa.method.scaled_priors import scaled_priors
from doxa.priors import Prior

CHOSEN = "subnetwork"  # which of the uncertain weights have a matrix, [M, s], in the state


@dataclass(frozen=True, eq=False)
class Scales:
    """Which of the factors each of p weights has.

    sizes: of the tensors, in the order of the weights; None: one factor for all. chosen: which of
    these weights there are, [M, s]; None: all.
    """

    sizes: tuple[int, ...] | None = None
    chosen: Tensor | None = None

    @classmethod
    def of(cls, run: Run, state: State) -> Scales:
        """Those that a state has."""
        kind = "shared" if state["tau"].shape[1] == 1 else "layer"
        return cls(_sizes(run, kind), state.get(CHOSEN))

    def each(self, tau: Tensor) -> Tensor:
        """τ of every weight, [M, p], or [M, 1] where they share it."""
        if self.sizes is None:
            return tau
        wide = self._wide(tau)
        return wide if self.chosen is None else wide.gather(1, self.chosen)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of [M, p] over the weights of each factor, [M, K]."""
        if self.sizes is None:
            return values.sum(1, keepdim=True)
        if self.chosen is None:
            return torch.stack([part.sum(1) for part in values.split(self.sizes, 1)], 1)
        count = len(self.sizes)
        own = self._wide(torch.arange(count, device=values.device)[None])
        own = own.expand(len(values), -1).gather(1, self.chosen)
        return torch.stack([torch.where(own == k, values, 0.0).sum(1) for k in range(count)], 1)

    def _wide(self, tau: Tensor) -> Tensor:
        assert self.sizes is not None
        return torch.cat(
            [own.expand(-1, n) for own, n in zip(tau.split(1, 1), self.sizes, strict=True)], 1
        )


def started(run: Run, kind: str) -> Tensor:
    """τ = 1, [M, K]; kind: "shared" or "layer"."""
    sizes = _sizes(run, kind)
    count = 1 if sizes is None else len(sizes)
    return torch.ones(run.size, count, device=run.device, dtype=torch.float64)


def _sizes(run: Run, kind: str) -> tuple[int, ...] | None:
    return None if kind == "shared" else tuple(run.layout.select(run.net.subset_names).sizes)


def names(run: Run) -> list[str]:
    """The tensors of the subset, in the order of their factors."""
    return [name for name in run.layout.names if name in set(run.net.subset_names)]


def prior_curvature(run: Run, state: State) -> tuple[Tensor, Tensor]:
    """The curvature Λ of the subset's prior as it was given, [M, p], and (θ − m)ᵀ Λ (θ − m) over
    the weights of each factor, [M, K]."""
    index, theta, scales = run.subset_index, state["theta"], Scales.of(run, state)
    prior = run.prior.curvature(theta).expand_as(theta)[:, index].double()
    away = (theta - run.prior.mean).double()[:, index]
    if scales.chosen is not None:
        prior, away = prior.gather(1, scales.chosen), away.gather(1, scales.chosen)
    return prior, scales.sums(prior * away.square())


def priors_used(run: Run, tau: Tensor) -> list[Prior | dict[str, Prior]]:
    """Each member's Gaussian prior with its precision times τ [M, K] on the subset; weights outside
    it are points under the prior as it was."""
    each = tau.rsqrt().expand(-1, len(names(run)))
    return scaled_priors(run, {name: each[:, k] for k, name in enumerate(names(run))})


def told(run: Run, tau: Tensor) -> list[float] | list[dict[str, float]]:
    """Each member's prior scale over the given one's, by tensor where they differ."""
    if tau.shape[1] == 1:
        return [float(own) for own in tau[:, 0].rsqrt()]
    return [dict(zip(names(run), own, strict=True)) for own in tau.rsqrt().tolist()]


def precision(run: Run, state: State) -> Tensor:
    """τΛ, [M, p]."""
    prior, _ = prior_curvature(run, state)
    return Scales.of(run, state).each(state["tau"]) * prior
