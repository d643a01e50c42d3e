"""Where a run keeps its draws: in memory, or in a file past a budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from doxa.data import free_memory
from doxa.errors import CorruptedArtefact, StoreError
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
