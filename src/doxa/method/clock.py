"""Time, rate and noise of a stage, and the state it advances."""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.engine.ahead import Ahead
from doxa.noise import Noise

State = dict[str, Tensor]  # named tensors with leading axis M
Info = dict[str, Tensor]  # what a step says of itself, for people: [M] each


class Clock:
    """Where a stage stands. Everything that changes from step to step is a tensor, so that a step
    can be recorded, compiled or captured.

    Attributes
    ----------
    t: [], the step within the stage; steps: how many there are. rate: [] or [M, 1], the learning
        rate now. owned: the state's tensors may be overwritten: nobody else holds them.
    """

    def __init__(
        self,
        t: Tensor,
        rate: Tensor,
        steps: int,
        source: Noise | Ahead,
        owned: bool = False,
        calls: list[int] | None = None,
    ) -> None:
        self.t, self.rate, self.steps, self.source, self.owned = t, rate, steps, source, owned
        self._calls = [0] if calls is None else calls  # within this step

    def noise(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape]; each call within a step gets its own."""
        self._calls[0] += 1
        return self.source.normal(shape, self.t, self._calls[0])

    def alternating(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape], at every second step minus those of the step before: half
        the drawing, and what is odd in them cancels over two steps."""
        self._calls[0] += 1
        return self.source.alternating(shape, self.t, self._calls[0])

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in (0, 1], [M, *shape]."""
        self._calls[0] += 1
        return self.source.uniform(shape, self.t, self._calls[0])

    def rows(self, kind: str, *shape: int) -> Tensor:
        """Noise a row, "normal" or "uniform", [M, rows, ...]: rows that only pad change nothing."""
        self._calls[0] += 1
        return self.source.rowwise(kind, shape, self.t, self._calls[0])

    def part(self, members: slice) -> Clock:
        """Of some members, whose numbers do not depend on how members are cut."""
        rate = self.rate[members] if self.rate.ndim else self.rate
        calls = list(self._calls)
        return Clock(self.t, rate, self.steps, self.source.part(members), self.owned, calls)

    def times(self, k: int) -> Clock:
        """Of k particles a member, each with numbers of its own."""
        rate = self.rate.repeat_interleave(k, 0) if self.rate.ndim else self.rate
        return Clock(self.t, rate, self.steps, self.source.times(k), self.owned, self._calls)


class NoClock(Clock):
    """For objectives that ask for no noise."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(0), torch.tensor(0.0), 1, Noise(0, "none", []))

    def part(self, members: slice) -> Clock:
        return self


def slice_state(state: State, part: slice) -> State:
    return {k: v[part] for k, v in state.items()}


def folded(state: State, k: int) -> State:
    """[M, k, ...] to [M·k, ...]: particles as the rows of `run.times(k)`."""
    return {name: v.flatten(0, 1) for name, v in state.items()}


def unfolded(state: State, k: int) -> State:
    """[M·k, ...] back to [M, k, ...]."""
    return {name: v.unflatten(0, (-1, k)) for name, v in state.items()}


def network_part(state: State) -> State:
    """What a network needs of a state besides its weights."""
    return {k: v for k, v in state.items() if k == "layers" or k.startswith("buffer.")}
