"""Where designs lie: a list of choices, a box, or a sequence of these."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.draws import uniform
from doxa.errors import DataError, MethodError, ShapeError

log = logging.getLogger("doxa")
MOST_LISTED = 20_000  # designs of a sequence that are all compared
_BLOCK = 1 << 22  # distances held at a time
_SWEEPS = 10


def compared(space: Space, points: int) -> tuple[Tensor, bool]:
    """The designs of a space that are compared, and whether they are a part of a finite list: then
    a message says so, and the best of them is to be improved by `exchanged`."""
    found = space.grid(points)
    thinned = isinstance(space, Sequence) and len(found) < (space.count or 0)
    if thinned:
        log.warning(
            "a sequence has %d designs: %d of them are compared, and the best is improved by "
            "exchanging its parts one at a time", space.count, len(found),
        )  # fmt: skip
    return found, thinned


def as_numbers(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """A floating tensor; what is no number, or not finite, is an error that names it. Where `dtype`
    is given, the tensor has at least that precision: numbers of Python, which have no type, are not
    rounded to another one first."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if dtype == torch.float64 and not isinstance(value, Tensor | np.ndarray | np.generic):
            tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers, not {value!r}") from error
    tensor = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    tensor = tensor if dtype is None else tensor.to(torch.promote_types(tensor.dtype, dtype))
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{what} must be finite; there is {_first_bad(tensor)}")
    return tensor


def _first_bad(tensor: Tensor) -> str:
    place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    return f"{float(tensor[tuple(place)])} at {place}"


class Space(ABC):
    """Of designs of one shape. dtype: of its numbers, None where it has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def to(self, dtype: torch.dtype) -> Space:
        """With numbers of at least this precision, as they were given."""
        return self

    @abstractmethod
    def inside(self, designs: Tensor) -> Tensor:
        """Whether each of [D, *shape] is in it: [D]."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """[n, *shape], uniformly."""

    @property
    def count(self) -> int | None:
        """How many designs there are; None where they are not finitely many."""
        return None

    @abstractmethod
    def grid(self, most: int) -> Tensor:
        """Designs [D, *shape] to compare: all of a list, else about `most`, spread evenly."""

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

    def __init__(self, values: Any, dtype: torch.dtype | None = None) -> None:
        self.given = values
        self.values = as_numbers(values, "choices", dtype)
        self.dtype = self.values.dtype
        if not self.values.ndim or not len(self.values):
            raise DataError("choices must be a list with at least one design")
        self.shape = tuple(self.values.shape[1:])

    def to(self, dtype: torch.dtype) -> Space:
        return self if dtype == self.dtype else Choices(self.given, dtype)

    def __repr__(self) -> str:
        some = ", ".join(str(v) for v in self.values[:6].tolist())
        return f"Choices({some}{', …' if len(self.values) > 6 else ''})"

    @property
    def count(self) -> int | None:
        return len(self.values)

    def _distance(self, designs: Tensor) -> Tensor:
        flat = designs.reshape(len(designs), 1, -1) - self._like(designs).reshape(
            1, len(self.values), -1
        )
        return flat.abs().sum(-1)  # [D, C]

    def _like(self, designs: Tensor) -> Tensor:
        return self.values.to(designs)

    def inside(self, designs: Tensor) -> Tensor:
        size = 1 + self._like(designs).abs().max()
        few = designs.split(max(1, _BLOCK // self.values.numel()))
        return torch.cat([self._distance(some).amin(1) for some in few]) <= 1e-6 * size

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        index = (uniform((n,), like, generator) * len(self.values)).long()
        return self.values.to(like)[index.clamp_max(len(self.values) - 1)]

    def grid(self, most: int) -> Tensor:
        return self.values

    def nearest(self, designs: Tensor) -> Tensor:
        return self._like(designs)[self._distance(designs).argmin(1)]


class Box(Space):
    """low ≤ d ≤ high in every coordinate; `low` and `high` have the shape of a design."""

    def __init__(self, low: Any, high: Any, dtype: torch.dtype | None = None) -> None:
        self.given = low, high
        ends = as_numbers(low, "low", dtype), as_numbers(high, "high", dtype)
        self.dtype = torch.promote_types(ends[0].dtype, ends[1].dtype)
        ends = as_numbers(low, "low", self.dtype), as_numbers(high, "high", self.dtype)
        self.low, self.high = torch.broadcast_tensors(*ends)
        if bool((self.low >= self.high).any()):
            raise DataError(
                f"low must lie below high, not {self.low.tolist()}, {self.high.tolist()}"
            )
        self.shape = tuple(self.low.shape)

    def to(self, dtype: torch.dtype) -> Space:
        return self if dtype == self.dtype else Box(*self.given, dtype)

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
        for space in self.spaces:
            own = space.dtype or self.dtype
            self.dtype = own if self.dtype is None or own is None else (
                torch.promote_types(own, self.dtype)
            )  # fmt: skip

    def to(self, dtype: torch.dtype) -> Space:
        return Sequence([space.to(dtype) for space in self.spaces])

    def __repr__(self) -> str:
        return f"Sequence({', '.join(map(repr, self.spaces))})"

    @property
    def count(self) -> int | None:
        counts = [space.count for space in self.spaces]
        return None if None in counts else math.prod(n for n in counts if n is not None)

    def inside(self, designs: Tensor) -> Tensor:
        each = [space.inside(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each).all(0)

    def draw(self, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.stack([space.draw(n, generator, like) for space in self.spaces], 1)

    def grid(self, most: int) -> Tensor:
        each = int(most ** (1 / len(self.spaces)) + 1e-9)
        parts = [space.grid(each) for space in self.spaces]
        if math.prod(len(part) for part in parts) > max(most, MOST_LISTED):
            spread = lambda n: torch.linspace(0, n - 1, min(n, max(1, each))).long()  # noqa: E731
            parts = [part[spread(len(part))] for part in parts]
        index = torch.cartesian_prod(*[torch.arange(len(part)) for part in parts])
        index = index.reshape(-1, len(parts))
        return torch.stack([part[index[:, i]] for i, part in enumerate(parts)], 1)

    def exchanged(self, design: Tensor, values: Callable[[Tensor], Tensor], most: int) -> Tensor:
        """A design [*shape] whose parts are replaced, one at a time, by the best of their own
        space's grid, until no replacement has a larger value."""
        best = float(values(design.unsqueeze(0))[0])
        for _ in range(_SWEEPS):
            before = best
            for i, space in enumerate(self.spaces):
                part = space.grid(most).to(design)
                others = design.expand(len(part), *design.shape).clone()
                others[:, i] = part
                found = values(others)
                if float(found.max()) > best:
                    best, design = float(found.max()), others[int(found.argmax())]
            if best == before:
                break
        return design

    def nearest(self, designs: Tensor) -> Tensor:
        each = [space.nearest(designs[:, i]) for i, space in enumerate(self.spaces)]
        return torch.stack(each, 1)
