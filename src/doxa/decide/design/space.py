"""Where designs lie: a list of choices, a box, or a sequence of these."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.draws import uniform
from doxa.errors import DataError, MethodError, ShapeError


def as_numbers(value: Any, what: str) -> Tensor:
    """A floating tensor; what is no number, or not finite, is an error that names it."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers, not {value!r}") from error
    tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{what} must be finite; there is {_first_bad(tensor)}")
    return tensor


def _first_bad(tensor: Tensor) -> str:
    place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    return f"{float(tensor[tuple(place)])} at {place}"


class Space(ABC):
    """Of designs of one shape."""

    shape: tuple[int, ...]

    @abstractmethod
    def inside(self, designs: Tensor) -> Tensor:
        """Whether each of [D, *shape] is in it: [D]."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """[n, *shape], uniformly."""

    @abstractmethod
    def grid(self, most: int) -> Tensor:
        """At most so many designs [D, *shape], spread evenly: all of them where there are few."""

    @abstractmethod
    def nearest(self, designs: Tensor) -> Tensor:
        """Designs moved into the space."""

    def check(self, designs: Any) -> Tensor:
        """[D, *shape], each inside, or an error that names the first that is not."""
        found = as_numbers(designs, "designs")
        if found.shape[1:] != self.shape or found.ndim != len(self.shape) + 1:
            raise ShapeError(
                f"designs have shape {list(found.shape)}, not [D, {', '.join(map(str, self.shape))}"
                f"]: one row for each design of shape {list(self.shape)}"
            )
        if not len(found):
            raise DataError("there are no designs to choose from")
        outside = (~self.inside(found.detach())).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(f"design {row} is {found[row].tolist()}, outside {self}")
        return found


class Choices(Space):
    """A list of designs [C, *shape]."""

    def __init__(self, values: Any) -> None:
        self.values = as_numbers(values, "choices")
        if not self.values.ndim or not len(self.values):
            raise DataError("choices must be a list with at least one design")
        self.shape = tuple(self.values.shape[1:])

    def __repr__(self) -> str:
        some = ", ".join(str(v) for v in self.values[:6].tolist())
        return f"Choices({some}{', …' if len(self.values) > 6 else ''})"

    def _distance(self, designs: Tensor) -> Tensor:
        flat = designs.reshape(len(designs), 1, -1) - self._like(designs).reshape(
            1, len(self.values), -1
        )
        return flat.abs().sum(-1)  # [D, C]

    def _like(self, designs: Tensor) -> Tensor:
        return self.values.to(designs)

    def inside(self, designs: Tensor) -> Tensor:
        size = 1 + self._like(designs).abs().max()
        return self._distance(designs).amin(1) <= 1e-6 * size

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        index = (uniform((n,), like, generator) * len(self.values)).long()
        return self.values.to(like)[index.clamp_max(len(self.values) - 1)]

    def grid(self, most: int) -> Tensor:
        if len(self.values) <= most:
            return self.values
        return self.values[torch.linspace(0, len(self.values) - 1, most).long()]

    def nearest(self, designs: Tensor) -> Tensor:
        return self._like(designs)[self._distance(designs).argmin(1)]


class Box(Space):
    """low ≤ d ≤ high in every coordinate; `low` and `high` have the shape of a design."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = torch.broadcast_tensors(
            as_numbers(low, "low"), as_numbers(high, "high")
        )
        if bool((self.low >= self.high).any()):
            raise DataError(
                f"low must lie below high, not {self.low.tolist()}, {self.high.tolist()}"
            )
        self.shape = tuple(self.low.shape)

    def __repr__(self) -> str:
        return f"Box({self.low.tolist()}, {self.high.tolist()})"

    def inside(self, designs: Tensor) -> Tensor:
        slack = 1e-6 * (self.high - self.low).to(designs)
        ok = (designs >= self.low.to(designs) - slack) & (designs <= self.high.to(designs) + slack)
        return ok.reshape(len(designs), -1).all(1)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        u = uniform((n, *self.shape), like, generator)
        return self.low.to(like) + u * (self.high - self.low).to(like)

    def grid(self, most: int) -> Tensor:
        axes = max(1, math.prod(self.shape))
        each = int(most ** (1 / axes) + 1e-9)
        if each < 2:
            raise MethodError(
                f"a grid over {axes} coordinates needs 2**{axes} designs at least, and {most} are "
                "asked for: raise them, or optimise by 'gradient' or 'bayes'"
            )
        ticks = torch.linspace(0, 1, each, dtype=self.low.dtype)
        u = torch.cartesian_prod(*[ticks] * axes).reshape(-1, *self.shape)
        return self.low + u * (self.high - self.low)

    def nearest(self, designs: Tensor) -> Tensor:
        return designs.maximum(self.low.to(designs)).minimum(self.high.to(designs))


class Reals(Space):
    """All real vectors of a shape, without ends; draws are standard normal."""

    def __init__(self, *shape: int) -> None:
        self.shape = tuple(checks.whole("shape", size) for size in shape)

    def __repr__(self) -> str:
        return f"Reals({', '.join(map(str, self.shape))})"

    def inside(self, designs: Tensor) -> Tensor:
        return torch.isfinite(designs).reshape(len(designs), -1).all(1)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.special.ndtri(uniform((n, *self.shape), like, generator))

    def grid(self, most: int) -> Tensor:
        raise MethodError("all real numbers have no grid: give a Box")

    def nearest(self, designs: Tensor) -> Tensor:
        return designs


class Sequence(Space):
    """Several designs made together: [k, *shape], each in a space of its own.

    Parameters
    ----------
    spaces: a list of spaces of one shape, or one space for all.
    length: how many, where one space is given.
    """

    def __init__(self, spaces: Space | Several[Space], length: int | None = None) -> None:
        if isinstance(spaces, Space):
            if length is None:
                raise MethodError("a sequence of one space needs its length")
            spaces = [spaces] * checks.whole("length", length)
        self.spaces = tuple(spaces)
        shapes = {space.shape for space in self.spaces}
        if len(shapes) != 1:
            raise ShapeError(f"the spaces of a sequence must have one shape, not {sorted(shapes)}")
        self.shape = (len(self.spaces), *self.spaces[0].shape)

    def __repr__(self) -> str:
        return f"Sequence({', '.join(map(repr, self.spaces))})"

    def inside(self, designs: Tensor) -> Tensor:
        each = [space.inside(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each).all(0)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.stack([space.draw(n, generator, like) for space in self.spaces], 1)

    def grid(self, most: int) -> Tensor:
        each = int(most ** (1 / len(self.spaces)) + 1e-9)
        parts = [space.grid(each) for space in self.spaces]
        index = torch.cartesian_prod(*[torch.arange(len(part)) for part in parts])
        index = index.reshape(-1, len(parts))
        return torch.stack([part[index[:, i]] for i, part in enumerate(parts)], 1)

    def nearest(self, designs: Tensor) -> Tensor:
        each = [space.nearest(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each, 1)
