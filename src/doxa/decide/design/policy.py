"""Policies: the next design as a function of what has been seen, decided beforehand.

    d_t = π(h_{t−1}),   h_t = {(d_1, y_1), …, (d_t, y_t)}

Deep adaptive design (Foster et al., 2021) is a network over the set of outcomes,
π(h) = emit(Σ_s encode(d_s, y_s)): the order of outcomes does not matter, and choosing a design
costs one forward pass. `Fixed` designs are the same for everyone, `Random` ones are drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from doxa import checks
from doxa.decide.design.draws import source
from doxa.decide.design.space import Box, Reals, Space, as_numbers
from doxa.errors import MethodError

_EDGE = 0.01  # of a box's width: where the sigmoid of a fixed design goes on as a line, to the end
_BEND, _SLOPE = math.log((1 - _EDGE) / _EDGE), _EDGE * (1 - _EDGE)


class Policy(nn.Module, ABC):
    """`start` a history of n experiments, ask for a `design`, `observe` what came of it."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space

    @abstractmethod
    def start(self, n: int, like: Tensor) -> Any:
        """A history of n experiments without outcomes."""

    @abstractmethod
    def design(self, history: Any, t: int) -> Tensor:
        """[n, *shape]"""

    def observe(self, history: Any, design: Tensor, y: Tensor) -> Any:
        return history


def _bounds(policy: nn.Module, space: Space) -> bool:
    """Whether a space has ends; they become buffers of the policy."""
    if isinstance(space, Reals):
        return False
    if not isinstance(space, Box):
        raise MethodError(
            f"a policy is learned by gradients: it needs a Box or Reals, and {space} is neither"
        )
    policy.register_buffer("low", space.low.clone())
    policy.register_buffer("high", space.high.clone())
    return True


def _squashed(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return low + (high - low) * raw.sigmoid()


class Adaptive(Policy):
    """A network over the set of what has been seen.

    Parameters
    ----------
    space: a `Box`, which designs never leave, or `Reals`.
    outcome: the shape of one outcome.
    hidden: widths of the encoder's hidden layers. encoding: the size of the sum.
    emitter: widths of the emitter's hidden layers.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        space: Space,
        outcome: Sequence[int] = (),
        hidden: Sequence[int] = (128,),
        encoding: int = 16,
        emitter: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(space)
        self.bounded = _bounds(self, space)
        size = max(1, math.prod(space.shape))
        self.encoding = checks.whole("encoding", encoding)
        self.encode = _layers([size + max(1, math.prod(outcome)), *hidden, encoding])
        self.emit = _layers([encoding, *emitter, size])
        generator = source("cpu", "policy", seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def start(self, n: int, like: Tensor) -> Tensor:
        return like.new_zeros(n, self.encoding)

    def design(self, history: Tensor, t: int) -> Tensor:
        raw = self.emit(history).reshape(len(history), *self.space.shape)
        return _squashed(raw, self.low, self.high) if self.bounded else raw

    def observe(self, history: Tensor, design: Tensor, y: Tensor) -> Tensor:
        flat = [design.reshape(len(design), -1), y.reshape(len(y), -1).to(design)]
        return history + self.encode(torch.cat(flat, 1))


def _layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


class Fixed(Policy):
    """T designs for everyone, optimised together from `designs`, or from a random start. The ends
    of a box are designs like others: they can be given, reached and left."""

    low: Tensor
    high: Tensor

    def __init__(
        self, space: Space, steps: int, designs: Tensor | None = None, seed: int = 0
    ) -> None:
        super().__init__(space)
        self.bounded = _bounds(self, space)
        if designs is None:
            like = torch.zeros((), dtype=space.dtype)
            designs = space.draw(checks.whole("steps", steps), source("cpu", "fixed", seed), like)
        designs = space.check(as_numbers(designs, "designs", space.dtype))
        if self.bounded:
            share = (designs - self.low) / (self.high - self.low)
            inner = share.clamp(_EDGE, 1 - _EDGE)
            outer = (share - inner) / _SLOPE
            outer = outer + 0.1 * ((share >= 1).to(outer) - (share <= 0).to(outer))  # ends for sure
            designs = inner.logit() + outer
        self.raw = nn.Parameter(designs.clone())

    def start(self, n: int, like: Tensor) -> int:
        return n

    def design(self, history: int, t: int) -> Tensor:
        found = self.raw[t]
        if (
            self.bounded
        ):  # a sigmoid with straight ends, cut at those of the box; its gradient is not
            inner = found.clamp(-_BEND, _BEND)
            beyond = (found - inner.detach()) * _SLOPE * (self.high - self.low)
            inner = _squashed(inner, self.low, self.high)
            found = torch.where(found.abs() > _BEND, inner.detach() + beyond, inner)
            found = found + (found.maximum(self.low).minimum(self.high) - found).detach()
        return found.expand(history, *found.shape)


class Random(Policy):
    """Designs drawn from the space, new for each experiment."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space)
        self.seed = seed
        self.register_buffer(
            "like", torch.zeros((), dtype=space.dtype)
        )  # the type and device of its draws

    def start(self, n: int, like: Tensor) -> tuple[int, torch.Generator, Tensor]:
        return n, source(like.device, "random policy", self.seed), like

    def design(self, history: tuple[int, torch.Generator, Tensor], t: int) -> Tensor:
        n, generator, like = history
        return self.space.draw(n, generator, like)
