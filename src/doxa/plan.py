"""`plan`: the memory and the time that a fit will take, before it runs; `blocks`: its blocks.

`plan` has the arguments of `fit`, and reads and checks them in the same way. It estimates the peak
memory from the sizes alone, and times one gradient. No member is initialised or trained. `fit`
uses the same estimate to decide whether it starts (`method/method.py`), so an error that refuses a
fit shows the same numbers.

The time is that of the gradients of all steps. It follows from a short measurement on this machine,
and differs between calls. Nothing in a fit depends on it.

`blocks` lists the parts of a fit that can be trained apart (`driver/blocks.py`), for a scheduler
that starts one process per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Unpack

import torch
from torch.utils._pytree import tree_map

from doxa.data import Data, free_memory
from doxa.driver.blocks import Block, cut, size_by_rule
from doxa.driver.fits import Fits, Variant
from doxa.driver.processes import alone
from doxa.driver.runs import Runs
from doxa.driver.setup import Splits, expected_kind, pooled_rows
from doxa.engine import Engine
from doxa.errors import MethodError
from doxa.fit import Call, FitOptions, read_call, with_options
from doxa.method import FitSettings, Method
from doxa.method.method import Workload, in_units, planned_parts, smaller_plans
from doxa.method.row_sums import rows_of_block
from doxa.model import Model

__all__ = ["FitPlan", "blocks", "plan"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


@dataclass(frozen=True)
class FitPlan:
    """The memory and the time that a fit will take.

    Parameters
    ----------
    method : str
        The name of the method.
    members : int
        The number of networks that are computed together: runs × members. In a cross-fit, the
        number of networks that are each trained without a part of the rows.
    weights : int
        The number of trained weights of one network, including learned noise.
    rows : int
        The largest number of rows that a member is trained on.
    steps : int
        The number of training steps.
    batch_size : int
        The number of rows per step.
    memory : dict of str to int
        The peak memory in bytes, by purpose. `bytes` is the sum.
    available : int
        The bytes that are available on the device.
    device : str
        The device.
    smaller : dict of str to int
        Changes of arguments that take less memory, with the bytes that the fit then takes. The
        smallest comes first.
    advice : str
        What else can be changed for this method.
    parts : bool
        Whether each of these networks is trained without a part of the rows. Afterwards one network
        is fitted to all rows.
    gradients : tuple of int, optional
        The fewest and the most gradients over all rows that a chain computes. None if they follow
        from `steps`.
    processes : int
        The largest number of processes that the fit can use: the number of its blocks of members,
        or of rows if all members are one block (`docs/many_processes.md`).
    seconds : tuple of float, optional
        The shortest and the longest time of all gradients. None if there is no network, or if the
        fit exceeds the available memory.

    Examples
    --------
    >>> import torch, doxa
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> p = doxa.plan(net, (torch.randn(400, 3), torch.randn(400)), "deep-ensemble")
    >>> p.members, p.weights, p.bytes == sum(p.memory.values()), p.fits
    (5, 42, True, True)
    """

    method: str
    members: int
    weights: int
    rows: int
    steps: int
    batch_size: int
    memory: Mapping[str, int]
    available: int
    device: str
    smaller: Mapping[str, int] = field(default_factory=dict)
    advice: str = ""
    parts: bool = False
    gradients: tuple[int, int] | None = None
    processes: int = 1
    seconds: tuple[float, float] | None = None

    @property
    def bytes(self) -> int:
        """The peak memory of the fit, in bytes."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether this memory is available. If it is not, `fit` raises `MemoryBudgetError`."""
        return self.bytes <= self.available

    def __repr__(self) -> str:
        networks = f"{self.members} networks" if self.members > 1 else "one network"
        if self.parts:
            networks += ", each without a part of the rows, before one with all rows,"
        work = f"{self.steps:,} steps of {self.batch_size:,} of {self.rows:,} rows"
        if self.gradients is not None:
            least, most = (f"{n:,}" for n in self.gradients)
            number = least if least == most else f"{least} to {most}"
            work = f"{number} gradients of all {self.rows:,} rows"
        lines = [
            f"{self.method}: {networks} of {self.weights:,} weights, {work}",
            f"memory   {in_units(self.bytes)} at the peak, of {in_units(self.available)} available "
            f"on {self.device}" + ("" if self.fits else ": the fit would be refused"),
        ]
        parts = sorted(self.memory.items(), key=lambda item: -item[1])
        lines += [f"  {in_units(size):>10}  {name}" for name, size in parts]
        if self.seconds is not None:
            short, long = map(_span, self.seconds)
            time = short if short == long else f"{short} to {long}"
            lines.append(f"time     about {time} of gradients, as timed here; other work is added")
        if self.processes > 1:
            lines.append(f"blocks   {self.processes}, which as many processes can divide")
        elif self.members > 1:
            lines.append("blocks   one: more than one process does not help")
        if self.smaller:
            lines.append("smaller")
            lines += [f"  {in_units(size):>10}  {text}" for text, size in self.smaller.items()]
        if not self.fits and self.advice:
            lines.append(f"  or {self.advice}")
        return "\n".join(lines)


def plan(
    model: Model | torch.nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    runs: Runs | None = None,
    **options: Unpack[FitOptions],
) -> FitPlan:
    """Estimate the memory and the time of a fit, and find changes that take less memory.

    Nothing is fitted. The data are read and moved to the device, as at the start of `fit`.

    Parameters
    ----------
    model, data, method, runs
        As in `doxa.fit`.
    **options
        The other arguments of `doxa.fit`.

    Returns
    -------
    FitPlan
        The bytes by purpose, the seconds, and changes that take less memory. It prints as a table.

    Examples
    --------
    >>> import torch, doxa
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> data = torch.randn(400, 3), torch.randn(400)
    >>> doxa.plan(net, data, "map", validation=0.1, batch_size=64).memory["weights"]
    168
    """
    made: FitPlan = _plan(model, data, method, runs=runs, **options)
    return made


def _planned(arguments: Mapping[str, Any]) -> FitPlan:
    call = read_call(arguments)
    method, settings = call.method, call.settings
    variant = Variant(call.problem, settings, call.specs)
    every = [(call.ids, call.validation)]
    if parts := call.parts:  # networks that are each trained without a part, then a fit to all rows
        every = [(list(range(parts)), "auto"), (call.ids, None)]
    sizes = [call.sized(variant, ids, validation) for ids, validation in every]
    works = [work for _, _, work in sizes]
    largest = max(works, key=lambda work: sum(planned_parts(method, work).values()))
    memory = planned_parts(method, largest)
    available = free_memory(call.device)
    held, steps = sizes[0][0][0], sizes[0][1].steps
    seconds = None
    if call.problem.model is not None and sum(memory.values()) <= available:
        seconds = _seconds(call, held, works, steps)
    return FitPlan(
        method.name, largest.members, largest.weights, largest.rows, steps, largest.batch, memory,
        available, str(call.device), smaller_plans(method, largest), method.smaller,
        largest.parts, method.gradients, _blocks_of(call, *sizes[0], bool(parts)), seconds,
    )  # fmt: skip


def _blocks_of(
    call: Call, found: tuple[Data, Splits, Any, Any], settings: FitSettings, work: Workload,
    parts: bool,
) -> int:  # fmt: skip
    """The number of blocks of the fit, or of its first phase: of members, or if they are one block,
    of the rows of a sum."""
    held, splits = found[:2]
    run_of = [r for r in range(len(call.specs)) for _ in range(work.members // len(call.specs))]
    pooled = pooled_rows(held, run_of, list(splits.of or run_of), parts) is not None
    kind = expected_kind(
        call.problem, call.method, call.options.engine, work.members, call.device
    )  # fmt: skip
    rows = max(map(len, held.rows))
    size = size_by_rule(
        call.method, call.problem, settings, work.members, kind, rows, call.device, pooled
    )
    blocks = len(cut(work.members, size))
    if blocks > 1:
        return blocks
    if settings.microbatches is not None and not settings.divides_rows:
        rows = min(rows, settings.batch_size)
    engine = call.options.engine
    mode = None if engine == "auto" else Engine.parse(engine).mode
    each = rows_of_block(settings, rows, work.members, work.weights, mode, call.device)
    return -(-rows // each)


def _seconds(
    call: Call, held: Data, works: list[Workload], steps: int
) -> tuple[float, float] | None:
    """The shortest and the longest time of all gradients of all members, from the faster of two
    measured gradients of one member."""
    net, work = call.problem.net, works[0]
    rows = held.rows[0][: work.step_rows]
    try:
        x, y = held.take(rows, torch.tensor(0))
        weights = net.layout.unflatten(net.given())
        leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        times = []
        for _ in range(3):  # the first also allocates memory, and is not counted
            began = perf_counter()
            value = net.log_likelihood(leaves, tree_map(_own, x), y).sum()
            torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            if call.device.type == "cuda":
                torch.cuda.synchronize(call.device)
            times.append(perf_counter() - began)
    except Exception:  # the network cannot run like this; if `fit` cannot either, it says why
        return None
    per_row = min(times[1:]) / len(rows)
    members = sum(one.members for one in works) * call.method.width
    if call.method.gradients is not None:
        least, most = (n * per_row * work.rows * members for n in call.method.gradients)
        return least, most
    total = per_row * work.batch * members * steps
    return total, total


def _own(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _span(seconds: float) -> str:
    """A duration as text, in a readable unit."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


_plan = with_options("plan", _planned)


def blocks(
    model: Model | torch.nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    runs: Runs | None = None,
    **options: Unpack[FitOptions],
) -> list[Block]:
    """List the blocks of a fit: members that are trained together, apart from all others.

    Each block can be trained by a process of its own, such as a task of a job array. When all are
    done, the same call of `doxa.fit` reads the results. If the processes had different folders,
    `doxa.join` joins these first.

    Parameters
    ----------
    model, data, method, runs
        As in `doxa.fit`.
    **options
        The other arguments of `doxa.fit`. `checkpoint` is needed: the folder of the results.

    Returns
    -------
    list of Block
        The blocks, in order of their members. `block.run()` trains one of them. If the fit needs
        two phases (cross-fitting of one network, rows in order of time), these are the blocks of
        the first; `doxa.fit` trains the rest.

    Examples
    --------
    >>> import tempfile, torch, doxa
    >>> folder = tempfile.mkdtemp()
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> options = dict(members=4, block_size=2, steps=50, checkpoint=folder)
    >>> each = doxa.blocks(net, (x, torch.sin(3 * x)), "deep-ensemble", **options)
    >>> [(block.name, block.run()) for block in each]
    [('00000-00002', True), ('00002-00004', True)]
    >>> posterior = doxa.fit(net, (x, torch.sin(3 * x)), "deep-ensemble", **options)  # reads them
    """
    found: list[Block] = _blocks(model, data, method, runs=runs, **options)
    return found


def _listed(arguments: Mapping[str, Any]) -> list[Block]:
    folder = arguments["checkpoint"]
    if folder is None:
        raise MethodError("blocks need a folder for their results: pass checkpoint=")
    call = read_call(arguments)
    fits = Fits(
        call.prepared, lambda run: None, call.method, call.ids, call.validation, call.parts,
        call.in_order, str(folder), monotonic(),
    )  # fmt: skip
    with alone():  # each process trains its own
        return fits.blocks(Variant(call.problem, call.settings, call.specs))


_blocks = with_options("blocks", _listed)
