"""Random numbers of some transitions at once.

The counter hash of `doxa.noise` is some forty small operations, which on a CPU take as long as the
gradients of a small transition. Numbers are a function of the step, so that those of the next steps
can be had in the same operations. Blocks begin at multiples of their length: a run that is resumed
draws the same block, and so the same numbers to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from doxa.method import Clock
from doxa.noise import Noise

_STEPS = 64  # in a block at most
_NUMBERS = 1 << 17  # in a block, where one step needs fewer


class Ahead(Noise):
    """The numbers of a source, drawn in blocks of steps."""

    def __init__(self, source: Noise) -> None:
        self.__dict__.update(source.__dict__)
        self.source = source
        self._blocks: dict[tuple[str, tuple[int, ...], int], tuple[int, Tensor]] = {}

    def uniform(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        return self._block("uniform", self.source.uniform, shape, step, call)

    def normal(self, shape: Sequence[int], step: Tensor | int = 0, call: int = 0) -> Tensor:
        return self._block("normal", self.source.normal, shape, step, call)

    def _block(
        self, kind: str, draw: Callable[..., Tensor], shape: Sequence[int], step: Tensor | int,
        call: int,
    ) -> Tensor:  # fmt: skip
        key, t = (kind, tuple(shape), call), int(step)
        numbers = max(1, math.prod(shape) * len(self._keys))
        length = max(1, min(_STEPS, _NUMBERS // numbers))
        first = t // length * length
        held = self._blocks.get(key)
        if held is None or held[0] != first:
            steps = torch.arange(first, first + length, dtype=torch.int32, device=self.device)
            held = self._blocks[key] = first, draw(shape, steps, call)
        return held[1][t - first]


class Forethought:
    """Clocks whose noise is drawn ahead, one source after the other."""

    def __init__(self) -> None:
        self._ahead: Ahead | None = None

    def __call__(self, clock: Clock) -> Clock:
        if self._ahead is None or self._ahead.source is not clock.source:
            self._ahead = Ahead(clock.source)
        return replace(clock, source=self._ahead)
