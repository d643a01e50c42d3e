"""Sums over rows, in fixed blocks of rows that are added in a fixed order.

    Σ_i v_i = ((s_0 + s_1) + (s_2 + s_3)) + …,    s_b = Σ_{i in block b} v_i

A likelihood of all rows, its gradient, and the sums of a pass over the data (curvature, statistics)
are computed block by block. Several processes divide the blocks, and each has the sum in the end.
The blocks depend on the work alone (`number_of_blocks`), and they are added as a balanced binary
tree over their numbers. So the bits of a sum do not depend on the number of processes.

    number_of_blocks    the blocks of so many rows, by a rule
    rows_of_block       the rows of each, by the rule or as the user has set it
    summed              a sum over the rows of a batch, by this process or all of them
    added               a step that adds such sums to entries of a state
    Together            the processes that divide the blocks, and how they exchange sums
    together            those of the current fit; None for one process
    divided_by          a context that sets them

**Order.** A process has consecutive blocks. It adds those whose sum is a node of the tree, and
sends these nodes only: with 16 blocks, two processes send one vector each, and three send at most
three. All of them then add the same nodes.

**Exchange.** Gradients have as many numbers as weights, and are exchanged after each leapfrog step.
So a sum is one `all_gather` of gloo, a process group of its own, and not a value of the key-value
store. It gathers, and does not reduce: a reduction would add in an order that depends on the number
of processes. Tensors on a GPU go through the memory of the host. A process that waits looks for
failures of the others, and stops waiting after the time limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch, batch_rows
from doxa.errors import ProcessError

if TYPE_CHECKING:
    from doxa.method.run import FitSettings, Run

Sums = dict[str, Tensor]
Part = Callable[[slice, float, Batch], Sums]  # (place, share of the rows, rows) to their sums
Node = tuple[int, int]  # the first block, and the number of blocks if there were no end

MOST = 16  # blocks, by the rule: as many processes can have a part
LEAST_ROWS = 2048  # in a block, by the rule
# Weights × rows × members of all blocks, by the rule. Below it, a compiled step over all rows is
# faster than its blocks, which are not compiled: a gradient of four chains of a network 8-50-1 on
# 20,000 rows takes 10 ms of processor time, and 16 in blocks. On other devices, where a captured
# step has no overhead, an estimate.
WORK, WORK_ON_DEVICE = 1e8, 1e12

_POLL = 0.2  # seconds of waiting between looks for failures
_LAST = 5.0  # seconds in which a process that lost the others looks for the reason


def number_of_blocks(rows: int, each: int, device: torch.device) -> int:
    """The number of blocks of so many rows, where a row is multiplied with `each` weights of all
    members. Small data are one block."""
    least = WORK if device.type == "cpu" else WORK_ON_DEVICE
    return 1 if rows * each < least else max(1, min(MOST, rows // LEAST_ROWS))


def rows_of_block(
    settings: FitSettings, rows: int, members: int, weights: int, mode: str | None,
    device: torch.device,
) -> int:  # fmt: skip
    """The rows of a block of so many: all of them if a sum over them is not divided. `mode` is how
    the engine executes steps."""
    if settings.microbatches is not None:
        count = min(settings.microbatches, rows)
    elif settings.divides_rows and mode in (None, "eager"):
        count = number_of_blocks(rows, members * (settings.row_work or max(1, weights)), device)
    else:
        return rows
    multiple = settings.row_multiple
    return min(rows, -(-rows // (count * multiple)) * multiple)


def summed(run: Run, batch: Batch, part: Part) -> Sums:
    """The sum of `part` over the blocks of a batch. `part` returns the same names, shapes and types
    for each block, as tensors that nothing else refers to."""
    pieces = batch.pieces(run.row_block(batch_rows(batch)))
    group = together.get()
    if group is None:
        found = _node(0, len(pieces), lambda b: part(*pieces[b]), {})
        assert found is not None
        return found
    return group.summed(len(pieces), lambda b: part(*pieces[b]))


def added(
    run: Run, batch: Batch, state: Sums, names: Sequence[str],
    step: Callable[[Sums, slice, Batch], Sums],
) -> Sums:  # fmt: skip
    """The state after a step that adds sums over the rows of a batch to the entries `names`.

    Parameters
    ----------
    run : Run
    batch : Batch
    state : dict of str to Tensor
    names : sequence of str
        The entries that are sums. They are zero before any row, and the step does not read them
        otherwise.
    step : callable
        (state, place of the rows, rows) -> the state after them.

    Returns
    -------
    dict of str to Tensor
        The state with these entries.
    """
    rows = batch_rows(batch)
    if run.row_block(rows) >= rows:
        return step(state, slice(0, rows), batch)
    empty = {name: torch.zeros_like(state[name]) for name in names}

    def part(where: slice, share: float, piece: Batch) -> Sums:
        made = step({**state, **empty}, where, replace(piece, scale=batch.scale))
        return {name: made[name] for name in names}

    found = summed(run, batch, part)
    return {**state, **{name: state[name] + found[name] for name in names}}


def _node(
    first: int, count: int, block: Callable[[int], Sums], known: dict[Node, Sums], width: int = 0
) -> Sums | None:
    """The sum of the blocks from `first` on, of `count` in all, by the tree. Nodes that are known
    are not computed. None beyond the last block."""
    if first >= count:
        return None
    width = width or _power(count)
    if (first, width) in known:
        return known[first, width]
    if width == 1:
        return block(first)
    half = width // 2
    left = _node(first, count, block, known, half)
    right = _node(first + half, count, block, known, half)
    assert left is not None
    if right is None:
        return left
    return {name: value + right[name] for name, value in left.items()}


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def nodes_of(start: int, stop: int, count: int) -> list[Node]:
    """The fewest nodes of the tree over `count` blocks that together are the blocks from `start` to
    `stop`."""
    found: list[Node] = []

    def look(first: int, width: int) -> None:
        last = min(first + width, count)
        if first >= stop or last <= start or first >= count:
            return
        if start <= first and last <= stop:
            found.append((first, width))
            return
        look(first, width // 2)
        look(first + width // 2, width // 2)

    look(0, _power(count))
    return found


class Together:
    """The processes that compute the sums of one fit together.

    Parameters
    ----------
    rank, size : int
        The number of this process, and of all.
    store : torch.distributed.Store
        A key-value store that is used for nothing else.
    check : callable
        Raises the error of another process, if one has failed.
    timeout : float
        Seconds without an answer after which a process stops waiting.
    """

    def __init__(
        self, rank: int, size: int, store: Any, check: Callable[[], None], timeout: float
    ) -> None:
        from torch.distributed import ProcessGroupGloo  # loads what one process does not need

        self.rank, self.size, self.check, self.timeout = rank, size, check, timeout
        self.sums = self.blocks = 0  # that were computed: in all, and by this process
        self._waits = False  # for an operation
        self._group: Any = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))

    def close(self) -> None:
        """Leave the others. What they still wait for from this process fails."""
        held, self._group = [self._group], None
        if self._waits:  # its end waits for the operation, up to the time limit
            threading.Thread(target=held.clear, daemon=True).start()

    def summed(self, count: int, block: Callable[[int], Sums]) -> Sums:
        """The sum of `count` blocks, of which this process computes its part."""
        ends = [count * rank // self.size for rank in range(self.size + 1)]
        each = [nodes_of(ends[r], ends[r + 1], count) for r in range(self.size)]
        first, last = ends[self.rank], ends[self.rank + 1]

        def own(number: int) -> Sums:
            assert first <= number < last or first == last
            return block(number)

        mine = [_node(start, last, own, {}, width) for start, width in each[self.rank]]
        like = mine[0] if mine else block(0)  # more processes than blocks: its shapes alone
        assert like is not None
        self.sums, self.blocks = self.sums + 1, self.blocks + last - first
        gathered = self._exchange([one for one in mine if one is not None], like, each)
        known = {
            node: one for nodes, sums in zip(each, gathered, strict=True)
            for node, one in zip(nodes, sums, strict=True)
        }  # fmt: skip

        def missing(number: int) -> Sums:
            raise AssertionError(f"no process has block {number} of {count}")

        found = _node(0, count, missing, known)
        assert found is not None
        return found

    def _exchange(
        self, mine: Sequence[Sums], like: Sums, each: Sequence[Sequence[Node]]
    ) -> list[list[Sums]]:
        """The sums of all processes, in order of their numbers."""
        size, most = sum(value.nbytes for value in like.values()), max(map(len, each))
        sent = torch.zeros(_HEAD + most * size, dtype=torch.uint8)
        sent[:_HEAD].view(torch.int64)[:] = torch.tensor([self.sums, most, size])
        at = _HEAD
        for one in mine:
            for value in one.values():
                sent[at : at + value.nbytes] = _as_bytes(value)
                at += value.nbytes
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(self._group.allgather([received], [sent]))
        for rank, buffer in enumerate(received):
            if not torch.equal(buffer[:_HEAD], sent[:_HEAD]):
                raise ProcessError(
                    f"process {rank} computes another sum over rows than process {self.rank}: all "
                    "of them have to make the same steps, with callbacks that stop at the same one"
                )
        return [
            [_read(buffer, _HEAD + k * size, like) for k in range(len(nodes))]
            for buffer, nodes in zip(received, each, strict=True)
        ]

    def _wait(self, work: Any) -> None:
        began, self._waits = time.monotonic(), True
        while True:
            try:
                work.wait(timedelta(seconds=_POLL))
                self._waits = False
                return
            except RuntimeError as error:
                waited = time.monotonic() - began
                if not work.is_completed() and waited < self.timeout:
                    self.check()
                    continue
                self._lost(error, waited)

    def _lost(self, error: RuntimeError, waited: float) -> None:
        """Raise the reason why another process is gone, or that it does not answer."""
        if waited >= self.timeout:
            raise ProcessError(
                f"no answer from the other processes in {self.timeout:g} seconds (a sum over "
                f"rows): all of them have to make the same steps. This is process {self.rank}"
            ) from error
        end = time.monotonic() + _LAST
        while time.monotonic() < end:
            self.check()
            time.sleep(_POLL / 4)
        raise ProcessError(
            f"process {self.rank} of {self.size} has lost the others: {error}"
        ) from error


_HEAD = 24  # bytes: the number of the sum, and of nodes and bytes that each process sends

together: ContextVar[Together | None] = ContextVar("doxa_rows_together", default=None)


@contextmanager
def divided_by(group: Together | None) -> Iterator[None]:
    """A context in which these processes divide the blocks of sums; None: this one has all."""
    token = together.set(group)
    try:
        yield
    finally:
        together.reset(token)
        if group is not None:
            group.close()


def _as_bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _read(buffer: Tensor, at: int, like: Sums) -> Sums:
    """Tensors of the same shapes, types and device, from their bytes. They are copied, because a
    view of bytes may not be aligned."""
    found: Sums = {}
    for name, value in like.items():
        own = buffer[at : at + value.nbytes].clone().view(value.dtype)
        found[name] = own.reshape(value.shape).to(value.device)
        at += value.nbytes
    return found
