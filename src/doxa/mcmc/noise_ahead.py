"""Gaussian noise for long chains on the CPU, drawn some steps ahead by the machine's own generator.

The counter hash of `doxa.noise` can be captured in a graph, which a GPU needs, but is some forty
small operations: beside the step of a small network that is as much as the gradient itself. Here
each chain has a generator of its own, seeded by (seed, stage, member) once, whose stream fills a
block of the next steps' normals outside the recorded step. Block and generator lie in the state,
so that a chain that is stopped and resumed goes on with the same numbers, and no chain depends on
which others run. On other devices the hash is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from doxa.mcmc.stochastic import Number, plus
from doxa.method import Clock, Run, Stage, State
from doxa.noise import generator

_BLOCK = 1 << 14  # normals a chain draws at once, where its step needs fewer
_LARGE = 1 << 17  # weights from which a block is a step's, and memory is reused


def normals(state: State, clock: Clock) -> Tensor:
    """Standard normals for every weight, [M, P], once a step."""
    return state["noise"] if "noise" in state else clock.noise(state["theta"].shape[1])


def noisy(
    state: State, clock: Clock, heat: Number, step: Number, grad: Tensor, base: Tensor,
    kept: Number = 1.0,
) -> Tensor:  # fmt: skip
    """kept · base + step · grad + heat · normals, [M, P], once a step. Large ones are added up in
    the memory of the normals, which nobody reads again: fresh pages cost more than the sum."""
    noise = normals(state, clock)
    if "noise" in state and noise.shape[1] >= _LARGE:
        return _onto(_onto(noise.mul_(heat), kept, base), step, grad)
    if isinstance(kept, Tensor) or kept != 1.0:
        base = base * kept
    return plus(plus(base, step, grad), heat, noise)


def _onto(total: Tensor, factor: Number, value: Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return total.addcmul_(value, factor)
    return total.add_(value, alpha=factor)


def with_noise(run: Run, stage: Stage) -> Stage:
    """The stage with `normals` filled before each of its steps."""
    if run.device.type != "cpu":
        return stage
    keys = [f"{seed}/{member}" for seed, member in zip(run.seeds, run.members, strict=True)]

    def enter(run: Run, state: State) -> State:
        state = state if stage.enter is None else stage.enter(run, state)
        streams = [generator("noise ahead", key, stage.name).get_state() for key in keys]
        theta = state["theta"]
        ahead = theta.new_zeros(theta.shape[0], _ahead(theta), theta.shape[1])
        fresh = {"noise": torch.zeros_like(theta), "noise.ahead": ahead}
        return {**state, **fresh, "noise.stream": torch.stack(streams)}

    return replace(stage, enter=enter, marks=_EachStep(stage.steps))


def _ahead(theta: Tensor) -> int:
    """Steps in a block."""
    return max(1, min(64, _BLOCK // max(1, theta.shape[1])))


class _EachStep(Mapping[int, Callable[[Run, State], State]]):
    """Before step t: its normals, from the block, which is drawn anew when it is used up."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._generator = torch.Generator()

    def __getitem__(self, t: int) -> Callable[[Run, State], State]:
        if not 0 <= t < self.steps:
            raise KeyError(t)
        return partial(self._fill, t)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps))

    def __len__(self) -> int:
        return self.steps

    def _fill(self, t: int, run: Run, state: State) -> State:
        ahead = state["noise.ahead"]  # [M, K, P]
        place = t % ahead.shape[1]
        if place:
            return {**state, "noise": ahead[:, place].clone()}
        fresh, streams = torch.empty_like(ahead), torch.empty_like(state["noise.stream"])
        for m, stream in enumerate(state["noise.stream"]):
            self._generator.set_state(stream.clone())  # a row may lie unaligned, which crashes
            fresh[m].normal_(generator=self._generator)
            streams[m] = self._generator.get_state()
        noise = fresh[:, 0] if ahead.shape[1] == 1 else fresh[:, 0].clone()
        return {**state, "noise": noise, "noise.ahead": fresh, "noise.stream": streams}
