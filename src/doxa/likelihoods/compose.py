"""Likelihoods that wrap others: in other units (`Affine`), or for several outputs (`Heads`).

If z = (y - loc) / scale has density p(z | f), then log p(y | f) = log p(z | f) - sum log scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import DataError, ModelError, ShapeError
from doxa.likelihoods.base import Likelihood, Shape, Theta, per_row, sum_event


@dataclass(frozen=True, eq=False)
class Affine(Likelihood):
    """The likelihood of y in its original units, when `base` was fitted to (y - loc) / scale.

    f and theta stay in fitted units; everything about y is in units of y. loc and scale are
    numbers, one per output [*event], or one set per run [runs, *event] (lead = 1).
    """

    name: ClassVar[str] = "affine"

    base: Likelihood
    loc: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if not self.base.scales_targets:
            raise ModelError(f"targets of a {self.base.name} likelihood cannot be standardised")
        for field in ("loc", "scale"):
            value = getattr(self, field)
            if not isinstance(value, Tensor):
                object.__setattr__(self, field, torch.as_tensor(value, dtype=torch.float64))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Affine)
            and self.base == other.base
            and torch.equal(self.loc, other.loc)
            and torch.equal(self.scale, other.scale)
        )

    def __hash__(self) -> int:
        return hash((self.base, *self.loc.flatten().tolist(), *self.scale.flatten().tolist()))

    @property
    def is_normal(self) -> bool:
        return self.base.is_normal

    @property
    def integrates_normal(self) -> bool:
        return self.base.integrates_normal

    @property
    def tempered(self) -> bool:
        return self.base.tempered

    def untempered(self) -> Likelihood:
        return Affine(self.base.untempered(), self.loc, self.scale) if self.tempered else self

    def event(self, output: Shape) -> Shape:
        return self.base.event(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return self.base._check(y, output)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        return self.base.parameters(output)

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Constants that the user gives are in units of y, so they are divided by `self.scale`."""
        return self.base.constants(output, self.scale if scale is None else self.scale * scale)

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        event = self.base.location(f, lead).shape[lead + 1 :]
        log_scale = self._loc_scale(f, lead)[1].log().expand((*f.shape[:lead], 1, *event))
        return self.base.log_prob(f, self._fitted(y, f, lead), theta, lead) - sum_event(
            log_scale, lead
        )

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.location(f, lead)

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        scale = self._loc_scale(variance, lead)[1]
        return scale.square() * self.base.location_variance(variance, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.mean(f, theta, lead)

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        scale = self._loc_scale(f, lead)[1]
        return scale.square() * self.base.variance(f, theta, lead)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        scale = self._loc_scale(f, lead)[1]
        return self.base.entropy(f, theta, lead) + scale.log()

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.base.cdf(self._fitted(y, f, lead), f, theta, lead)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        loc, scale = self._loc_scale(f, lead)
        return loc + scale * self.base.sample(f, theta, generator, lead)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        """The curvature of the base, because f is in fitted units."""
        return self.base.curvature(f, theta, lead)

    def _fitted(self, y: Tensor, f: Tensor, lead: int) -> Tensor:
        """y in fitted units, computed in the precision of loc: float32 would lose the digits of a
        large offset."""
        loc, scale = self._loc_scale(f, lead, self.loc.dtype)
        return ((y - loc) / scale).to(f.dtype)

    def _loc_scale(
        self, f: Tensor, lead: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        event = f.ndim - lead - 1
        loc, scale = self.loc.to(f.device), self.scale.to(f.device)
        return per_row(loc, event, f, lead, dtype), per_row(scale, event, f, lead, dtype)


@dataclass(frozen=True)
class Heads(Likelihood):
    """Several outputs at once, independent given the network.

    f, y and results are tuples with one entry per head; log-probabilities are summed. Names in
    theta begin with the number of the head: "0.log_noise". To standardise the targets of a head,
    wrap that head in `Affine`.
    """

    name: ClassVar[str] = "heads"

    likelihoods: tuple[Likelihood, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "likelihoods", tuple(self.likelihoods))
        if not self.likelihoods:
            raise ModelError("a model with several heads needs one likelihood for each")

    @property
    def heads(self) -> tuple[Likelihood, ...]:
        return self.likelihoods

    @property
    def tempered(self) -> bool:
        return any(head.tempered for head in self.likelihoods)

    def untempered(self) -> Likelihood:
        return Heads(tuple(head.untempered() for head in self.likelihoods))

    def event(self, output: Any) -> Any:
        return tuple(head.event(shape) for head, shape in self._zip(output))

    def prepare_targets(self, y: Any, output: Any) -> Any:
        if not isinstance(y, tuple | list) or len(y) != len(self.likelihoods):
            raise DataError(
                f"targets must be a tuple of {len(self.likelihoods)}, one for each head"
            )
        ready = []
        for i, (head, target, shape) in enumerate(zip(self.likelihoods, y, output, strict=True)):
            try:
                ready.append(head.prepare_targets(target, shape))
            except DataError as error:
                raise type(error)(f"head {i}: {error}") from error
        return tuple(ready)

    def scalar_targets(self, y: Any, output: Any) -> Any:
        each = zip(self.likelihoods, y, output, strict=True)
        return tuple(head.scalar_targets(target, shape) for head, target, shape in each)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        raise NotImplementedError("every head checks its own targets")

    def parameters(self, output: Any) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": value
            for i, (head, shape) in enumerate(self._zip(output))
            for name, value in head.parameters(shape).items()
        }

    def constants(self, output: Any, scale: Any = None) -> dict[str, Tensor]:
        scales = [None] * len(self.likelihoods) if scale is None else scale
        return {
            f"{i}.{name}": value
            for i, (head, shape) in enumerate(self._zip(output))
            for name, value in head.constants(shape, scales[i]).items()
        }

    def theta_of(self, head: int, theta: Theta) -> dict[str, Tensor]:
        """The parameters of one head, without the number in their names."""
        prefix = f"{head}."
        return {n.removeprefix(prefix): v for n, v in theta.items() if n.startswith(prefix)}

    def log_prob(self, f: Any, y: Any, theta: Theta, lead: int = 0) -> Tensor:
        total: Tensor | None = None
        for i, (head, output) in enumerate(self._zip(f)):
            part = head.log_prob(output, y[i], self.theta_of(i, theta), lead)
            total = part if total is None else total + part
        assert total is not None
        return total

    def location(self, f: Any, lead: int = 0) -> Any:
        return tuple(head.location(output, lead) for head, output in self._zip(f))

    def mean(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.mean(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def variance(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.variance(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def entropy(self, f: Any, theta: Theta, lead: int = 0) -> Any:
        return tuple(h.entropy(o, self.theta_of(i, theta), lead) for i, (h, o) in self._each(f))

    def sample(self, f: Any, theta: Theta, generator: Generator, lead: int = 0) -> Any:
        return tuple(
            h.sample(o, self.theta_of(i, theta), generator, lead) for i, (h, o) in self._each(f)
        )

    def curvature(self, f: Any, theta: Theta, lead: int = 0, y: Any = None) -> Tensor:
        """Block diagonal, with one block per head."""
        blocks = [
            h.curvature(o, self.theta_of(i, theta), lead, None if y is None else y[i])
            for i, (h, o) in self._each(f)
        ]
        sizes = [block.shape[-1] for block in blocks]
        rows, before = [], 0
        for block, size in zip(blocks, sizes, strict=True):
            after = sum(sizes) - before - size
            rows.append(torch.nn.functional.pad(block, (before, after)))
            before += size
        return torch.cat(rows, dim=-2)

    def _zip(self, values: Sequence[Any]) -> list[tuple[Likelihood, Any]]:
        if len(values) != len(self.likelihoods):
            raise ShapeError(
                f"{len(self.likelihoods)} heads have likelihoods, but {len(values)} were given"
            )
        return list(zip(self.likelihoods, values, strict=True))

    def _each(self, f: Sequence[Any]) -> list[tuple[int, tuple[Likelihood, Any]]]:
        return list(enumerate(self._zip(f)))
