"""What a fit has come to: everything that changes while it runs, all of it checkpointed, and where
its draws are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.data import free_memory
from doxa.errors import CorruptedArtefact, StoreError
from doxa.method import Info, State
from doxa.store import DrawsFile

log = logging.getLogger("doxa")


class DrawsInMemory:
    """Draws in memory, as posteriors keep them: [members, capacity, size], filled as they come."""

    def __init__(self, capacity: int, theta: Tensor) -> None:
        self.values = theta.new_empty(theta.shape[0], capacity, theta.shape[1])
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, theta: Tensor) -> None:
        self.values[:, self.count] = theta
        self.count += 1

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """Some members' draws so far, [K, count, size]; of a part a copy, which does not hold the
        others'."""
        part = self.values[rows, : self.count]
        return part if len(part) == len(self.values) else part.clone()


def storage(
    theta: Tensor, draws: int, budget: int | None, folder: Path | None, saved: Sequence[int] | None
) -> DrawsInMemory | DrawsFile:
    """For so many draws of theta [M, P]: in memory, in a file past the budget (None: a quarter of
    what is free), and in the checkpoints' folder where there is one, so that no checkpoint writes
    them again. `saved`: where the file of the checkpoint stood."""
    size = draws * theta.nbytes
    if budget is None:
        budget = free_memory(theta.device) // 4
    if size <= budget and folder is None:
        return DrawsInMemory(draws, theta)
    shape = (len(theta), draws, theta.shape[1])
    try:
        file = DrawsFile(shape, theta.dtype, folder, budget, saved, theta.device)
    except CorruptedArtefact:
        raise
    except StoreError as error:
        raised = StoreError(
            f"{draws} draws of {len(theta)} chains take {size / 2**30:.3g} GiB on disk: {error}"
            "; keep fewer (draws, thin, members), or use a larger disk: that of checkpoint=, "
            "else of the environment's TMPDIR"
        )
        raised.errno = error.errno
        raise raised from error
    if size > budget:
        log.info("%.3g GiB of draws are kept on disk, in %s", size / 2**30, file.path)
    return file


@dataclass
class Progress:
    """What a fit has come to: all of it is checkpointed."""

    state: State
    kept: DrawsInMemory | DrawsFile | None = None  # None where no stage keeps any
    shape: tuple[int, ...] = ()  # of a draw of particles, (K, P)
    stats: dict[str, list[Tensor]] = field(default_factory=dict)  # Info beside each kept draw, [M]
    stage: int = 0
    t: int = 0
    done: int = 0
    mode: str | None = None  # how the current stage is executed
    modes: dict[str, list[Any]] = field(default_factory=dict)  # {stage: [steps, mode]}
    history: dict[str, list[Any]] = field(default_factory=dict)
    good: State = field(default_factory=dict)  # the last state known to be finite
    best: State = field(default_factory=dict)  # the best state on validation, of this stage
    best_score: list[float] = field(default_factory=list)
    best_step: list[int] = field(default_factory=list)  # when each member was best
    waited: list[int] = field(default_factory=list)  # validations since then
    diverged: dict[int, int] = field(default_factory=dict)  # member row: step
    stopped: str = ""
    saved: list[int] | None = None  # of a checkpoint: where its file of draws stood
    recorded: dict[str, Any] | None = None  # of a checkpoint: how parts of a step are executed

    def keep(self, theta: Tensor, info: Info) -> None:
        """Store a draw and what the step that made it said of it."""
        assert self.kept is not None
        self.kept.append(theta.flatten(1))
        for name, value in info.items():
            if value.shape == theta.shape[:1]:
                self.stats.setdefault(name, []).append(value.detach().clone())

    def draws(self, rows: slice) -> Tensor | None:
        """What some members kept, [T, K, P], a view of [K, T, P] as posteriors keep it, or
        [T, K, particles, P]; on disk where it exceeds the budget of memory."""
        if not self.kept:
            return None
        drawn = self.kept.tensor(rows)
        return (
            drawn.unflatten(2, self.shape).transpose(0, 1) if self.shape else drawn.transpose(0, 1)
        )

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name in ("state", "good", "best"):
            tensors |= {f"{name}.{k}": v for k, v in getattr(self, name).items()}
        tensors |= {f"stats.{k}": torch.stack(v) for k, v in self.stats.items()}
        plain = (
            "stage",
            "t",
            "done",
            "mode",
            "modes",
            "history",
            "best_score",
            "best_step",
            "waited",
            "diverged",
            "stopped",
            "recorded",
        )
        saved = self.kept.at if isinstance(self.kept, DrawsFile) else None
        return tensors, {name: getattr(self, name) for name in plain} | {"saved": saved}

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Progress:
        def under(name: str) -> State:
            prefix = f"{name}."
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        stats = {k: list(v.unbind()) for k, v in under("stats").items()}
        return cls(under("state"), stats=stats, good=under("good"), best=under("best"), **meta)


def copied(state: State) -> State:
    return {k: v.clone() for k, v in state.items()}


def chosen(mask: Tensor, yes: State, no: State) -> State:
    """Rows of `yes` where the mask holds, of `no` elsewhere."""
    return {
        k: torch.where(mask.reshape(-1, *(1,) * (v.ndim - 1)), v, no[k]) for k, v in yes.items()
    }


def finite_members(state: State, names: Sequence[str]) -> Tensor:
    """Which members' tensors of these names are finite: [M]."""
    fine = [torch.isfinite(state[k]).reshape(len(state[k]), -1).all(1) for k in names if k in state]
    if fine:
        return torch.stack(fine).all(0)
    some = next(iter(state.values()))
    return torch.ones(len(some), dtype=torch.bool, device=some.device)
