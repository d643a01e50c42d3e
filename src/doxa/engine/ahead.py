"""Random numbers of a stage's steps on the CPU, drawn some steps ahead by the machine's generator.

The counter hash of `doxa.noise` can be captured in a graph, which a GPU needs, but is some forty
small operations: beside the step of a small network that is as much as the gradient itself. Here
each member fills a block of the next steps' numbers with a generator seeded by (seed, stage,
member, call, block): still a pure function of the step, so that nothing random is checkpointed and
no member depends on which others run. (The generator takes 32 bits of the seed: two of many
thousand blocks may hold the same numbers.)

Very long runs of small networks use the hash after all (`worthwhile`): they are compiled, and a
compiler makes one loop of it.

A recorded step cannot draw for itself: `listening` notes what a step asks for, and `giving` hands
those numbers in as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.noise import Noise, digest

_STEPS = 64  # in a block at most
_NUMBERS = 1 << 14  # in a member's block, where one step needs fewer
_LONG = 10_000  # steps from which a small network's step is likely to be compiled
_LARGE = 1 << 17  # weights of all members from which drawing is faster all the same
_MANY = 1 << 14  # alternating numbers from which a draw serves eight steps, not two
_WINDOWS = 4  # places in a row where these steps begin to read it


def worthwhile(weights: int, steps: int) -> bool:
    """Whether a stage's numbers are drawn ahead: a rule about the work, so that the same run sees
    the same numbers however its steps are executed."""
    return steps < _LONG or weights >= _LARGE


class Request(NamedTuple):
    """What a step asks for: which members' source, the distribution, the shape, which call."""

    source: tuple[object, ...]
    kind: str
    shape: tuple[int, ...]
    call: int


class Ahead:
    """The numbers of a stage's steps, with the interface of `Noise`."""

    def __init__(
        self, noise: Noise, path: tuple[object, ...] = (), root: Ahead | None = None
    ) -> None:
        self.noise, self.path = noise, path
        self.device, self.dtype = noise.device, noise.dtype
        self._root = self if root is None else root
        self._sources: dict[tuple[object, ...], Ahead] = {}
        self._readers: dict[Request, Callable[[int], Tensor]] = {}
        self._generator = torch.Generator()
        self._asked: dict[Request, None] | None = None
        self._given: Mapping[Request, Tensor] | None = None
        self._root._sources[path] = self

    def normal(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals."""
        return self._number("normal", shape, step, call)

    def alternating(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] standard normals; at an odd step minus those of the step before. Drawing many
        of them takes longer than all that is done with them, so that three more pairs of steps have
        the same numbers, each a quarter of a row further on: a place's are still normal, and
        uncorrelated over pairs of steps."""
        return self._number("alternating", shape, step, call)

    def uniform(self, shape: Sequence[int], step: Tensor, call: int = 0) -> Tensor:
        """[M, *shape] in (0, 1]."""
        return self._number("uniform", shape, step, call)

    def rowwise(self, kind: str, shape: Sequence[int], step: Tensor, call: int) -> Tensor:
        """Noise a row is hashed: a row's numbers do not depend on how many rows come after it. What
        it is hashed with is found ahead: half of the hash's operations, however few the rows."""
        return self.noise.rows(kind, shape, *self._number("keys", (2,), step, call).unbind(-1))

    def part(self, members: slice) -> Ahead:
        path = (*self.path, (members.start, members.stop))
        known = self._root._sources.get(path)
        return known or Ahead(self.noise.part(members), path, self._root)

    def times(self, k: int) -> Ahead:
        path = (*self.path, k)
        known = self._root._sources.get(path)
        return known or Ahead(self.noise.times(k), path, self._root)

    def _number(self, kind: str, shape: Sequence[int], step: Tensor, call: int) -> Tensor:
        request, root = Request(self.path, kind, tuple(shape), call), self._root
        if root._given is not None:
            return root._given[request]
        if root._asked is not None:
            root._asked[request] = None
        if request not in self._readers:
            self._readers[request] = self.reader(request)
        return self._readers[request](int(step))

    def reader(self, request: Request) -> Callable[[int], Tensor]:
        """What a request gets at a step, as a function of the step."""
        source, size = self._root._sources[request.source], math.prod(request.shape)
        length = max(1, min(_STEPS, _NUMBERS // max(1, size)))
        if request.kind == "alternating":
            return source._alternating(request, length)
        held: tuple[int, tuple[Tensor, ...]] = (-1, ())

        def read(step: int) -> Tensor:
            nonlocal held
            block, place = divmod(step, length)
            if held[0] != block:
                held = block, source._filled(request, block, length).unbind(0)
            return held[1][place]

        return read

    def _alternating(self, request: Request, length: int) -> Callable[[int], Tensor]:
        """Both signs are held, and a row goes on where it began: a step copies nothing."""
        row = request.shape[-1]
        many = row >= _MANY
        windows = _WINDOWS if many else 1
        stride = row // _WINDOWS // 16 * 16  # what is read begins where a vector does
        held: tuple[int, tuple[tuple[Tensor, ...], ...]] = (-1, ())

        def read(step: int) -> Tensor:
            nonlocal held
            turn, phase = divmod(step, 2 * windows)
            block, place = divmod(turn, length)
            if held[0] != block:
                numbers = self._filled(request, block, length)
                if many:
                    again = numbers[..., : (windows - 1) * stride]
                    numbers = torch.cat([numbers, again], -1)
                held = block, (numbers.unbind(0), (-numbers).unbind(0))
            numbers = held[1][phase % 2][place]
            return numbers.narrow(-1, phase // 2 * stride, row) if many else numbers

        return read

    def _filled(self, request: Request, block: int, length: int) -> Tensor:
        """[length, M, *shape]."""
        members, noise = self.noise.members, self.noise
        if request.kind == "keys":
            steps = torch.arange(block * length, (block + 1) * length, device=self.device)
            return torch.stack(noise.keys(steps, request.call), -1)
        size = (len(members), length, *request.shape)
        numbers = torch.empty(size, device=self.device, dtype=self.dtype)
        for m, member in enumerate(members):
            name = ("ahead", noise.seed, noise.purpose, member, request.call, block)
            self._generator.manual_seed(digest(*name) & 0xFFFFFFFF)
            if request.kind != "uniform":
                numbers[m].normal_(generator=self._generator)
            else:
                numbers[m].uniform_(generator=self._generator)
        if request.kind == "uniform":
            numbers = numbers.neg_().add_(1.0)  # (0, 1] in place of [0, 1)
        return numbers.transpose(0, 1).contiguous()

    @contextmanager
    def listening(self) -> Iterator[dict[Request, None]]:
        """Note what is asked for."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def giving(self, numbers: Mapping[Request, Tensor]) -> Iterator[None]:
        """Answer from these, and from nothing else."""
        self._given = numbers
        try:
            yield
        finally:
            self._given = None
