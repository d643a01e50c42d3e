"""Draws from a torch distribution by a given generator, and `EIG`, the result of an estimator.

Torch's own `sample` advances the global random state. Here a draw is a function of uniforms,

    y = F⁻¹(u)   (inverse of the distribution function; a table of outcomes by its cumulative sums)

so that it is reproducible, can be differentiated where the distribution is reparametrisable, and
can be replayed in a recorded step. Gamma, Beta, Dirichlet, Student's t and Poisson, which have no
such form in torch, take the generator itself.

`EIG` holds the values of the expected information gain, their errors and their kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from doxa.errors import MethodError
from doxa.noise import digest

MOST_OUTCOMES = 4096


def source(device: torch.device | str, *parts: object) -> torch.Generator:
    """A generator on a device, whose numbers are a function of `parts`."""
    return torch.Generator(device).manual_seed(digest("design", *parts) & 0xFFFFFFFF)


def uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniforms in (0, 1), of the type and on the device of `like`; never an end of the interval."""
    edge = torch.finfo(like.dtype).eps / 2
    u = torch.rand(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)
    return u.clamp_(edge, 1 - edge)


def from_uniform(distribution: D.Distribution, u: Tensor) -> Tensor | None:
    """The draw for uniforms [..., *batch, *event]; None if there is no such form."""
    if isinstance(distribution, D.Independent):
        return from_uniform(distribution.base_dist, u)
    if isinstance(distribution, D.MultivariateNormal):
        z = torch.special.ndtri(u).to(distribution.loc)
        return distribution.loc + (distribution.scale_tril @ z.unsqueeze(-1)).squeeze(-1)
    if isinstance(distribution, D.Bernoulli):
        return (u < distribution.probs).to(u.dtype)
    if isinstance(distribution, D.Normal):
        return distribution.loc + distribution.scale * torch.special.ndtri(u)
    if isinstance(distribution, D.TransformedDistribution):
        value = from_uniform(distribution.base_dist, u)
        if value is not None:
            for transform in distribution.transforms:
                value = transform(value)
        return value
    table = outcomes_of(distribution)
    if table is not None and not distribution.event_shape:
        batch = distribution.batch_shape
        log_p = distribution.log_prob(table.reshape(-1, *(1,) * len(batch)))
        seen = log_p.exp().cumsum(0)[:-1]  # [Y − 1, *batch]
        seen = seen.reshape(len(seen), *(1,) * (u.ndim - len(batch)), *seen.shape[1:])
        numbers = torch.arange(len(table), device=table.device).reshape(-1, *(1,) * len(batch))
        last = torch.where(log_p > -torch.inf, numbers, 0).amax(0)  # [*batch]
        return table[torch.minimum((u > seen).sum(0), last)]  # also where a sum rounds below 1
    try:
        return distribution.icdf(u)
    except NotImplementedError:
        return None


def draw(
    distribution: D.Distribution, shape: Sequence[int], generator: torch.Generator, like: Tensor
) -> Tensor:
    """[*shape, *batch, *event]"""
    whole = (*shape, *distribution.batch_shape, *distribution.event_shape)
    value = from_uniform(distribution, uniform(whole, like, generator))
    return value if value is not None else _rejection(distribution, tuple(shape), generator)


def _rejection(distribution: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Families that torch draws by rejection, with the given generator."""
    if isinstance(distribution, D.Independent):
        return _rejection(distribution.base_dist, shape, generator)
    batch = (*shape, *distribution.batch_shape)

    def gamma(concentration: Tensor) -> Tensor:
        return torch._standard_gamma(concentration.expand(batch).contiguous(), generator)

    if isinstance(distribution, D.Gamma):
        return gamma(distribution.concentration) / distribution.rate
    if isinstance(distribution, D.Beta):
        a, b = gamma(distribution.concentration1), gamma(distribution.concentration0)
        return a / (a + b)
    if isinstance(distribution, D.Dirichlet):
        g = torch._standard_gamma(
            distribution.concentration.expand(*batch, -1).contiguous(), generator
        )
        return g / g.sum(-1, keepdim=True)
    if isinstance(distribution, D.StudentT):
        half = gamma(distribution.df / 2) / (distribution.df / 2)
        z = torch.special.ndtri(uniform(batch, half, generator))
        return distribution.loc + distribution.scale * z / half.sqrt()
    if isinstance(distribution, D.Poisson):
        return torch.poisson(distribution.rate.expand(batch).contiguous(), generator)
    raise MethodError(
        f"{type(distribution).__name__} cannot be drawn from reproducibly; write a function "
        "(n, generator) -> [n, ...] for a prior, or a simulator (theta, design, generator) -> y"
    )


def outcomes_of(distribution: Any) -> Tensor | None:
    """All outcomes of a discrete distribution [Y, *event]; None if there are too many."""
    if isinstance(distribution, D.Independent):
        base = outcomes_of(distribution.base_dist)
        event = distribution.event_shape
        if base is None or distribution.base_dist.event_shape or not event.numel():
            return None
        if len(base) ** event.numel() > MOST_OUTCOMES:
            return None
        each = itertools.product(range(len(base)), repeat=event.numel())
        index = torch.tensor(list(each), device=base.device)
        return base[index].reshape(-1, *event)
    if not getattr(distribution, "has_enumerate_support", False) or distribution.event_shape:
        return None
    if isinstance(distribution, D.Binomial):
        total = int(distribution.total_count.max())
        if total >= MOST_OUTCOMES or bool((distribution.total_count != total).any()):
            return None
    table = distribution.enumerate_support(expand=False).flatten()
    return table if len(table) <= MOST_OUTCOMES else None


def unchecked(distribution: D.Distribution) -> D.Distribution:
    """The distribution without checks of its arguments, which read every number and wait for a
    GPU."""
    distribution._validate_args = False
    base = getattr(distribution, "base_dist", None)
    if base is not None:
        unchecked(base)
    return distribution


EXACT, ESTIMATE, LOWER, UPPER = "exact", "estimate", "lower bound", "upper bound"


@dataclass(frozen=True)
class EIG:
    """Expected information gain of each design, in nats.

    Attributes
    ----------
    designs : Tensor [D, *shape]
        The designs.
    values : Tensor [D]
        Expected information gain.
    errors : Tensor [D]
        Standard errors over draws; for "exact" the error of the quadrature, 0 if θ is discrete.
    kind : str
        "exact", "estimate", or what the values are in expectation: "lower bound", "upper bound".
    estimator : str
        Name of the estimator.
    note : str
        A description of the bias.
    settings : dict
        The numbers of draws.
    bias : Tensor [D], optional
        How far an upper bound is expected to be above the truth, if it can be estimated: to first
        order, or, if there are too few contrasts for that, the distance to the lower bound on the
        same draws.
    """

    designs: Tensor
    values: Tensor
    errors: Tensor
    kind: str
    estimator: str
    note: str
    settings: dict[str, Any]
    bias: Tensor | None = None

    @property
    def best(self) -> int:
        """The row of the design with the largest value."""
        return int(self.values.argmax())

    @property
    def best_design(self) -> Tensor:
        return self.designs[self.best].detach()

    def __str__(self) -> str:
        rows = zip(self.designs.tolist(), self.values.tolist(), self.errors.tolist(), strict=True)
        lines = [f"{design!s:>16}  {value:9.4f} ± {error:.4f}" for design, value, error in rows]
        return "\n".join([f"EIG in nats, {self.estimator} ({self.kind}); {self.note}", *lines])


def from_groups(
    terms: Tensor, designs: Tensor, kind: str, estimator: str, note: str,
    settings: dict[str, Any], bias: Tensor | None = None,
) -> EIG:  # fmt: skip
    """The EIG from terms [G, n, D] of independent groups. The error is that of the means of the
    groups, so that it includes draws that are shared within a group."""
    means = terms.mean(1)  # [G, D]
    spread = means.detach().std(0) if len(means) > 1 else torch.full_like(means[0], torch.nan)
    errors = spread / len(means) ** 0.5
    return EIG(designs, means.mean(0), errors, kind, estimator, note, settings, bias)
