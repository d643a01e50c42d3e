"""What several processes gain: the blocks of a fit on two processes, on one, and as one stack.

    python -m benchmarks.processes [--pairs 3] [--steps 1500] [--processes 2]
        [--rule | --model | --rows]

A deep ensemble of four networks 8-256-256-1 is fitted to 4,000 rows, in blocks of one member. Each
pair has three fits, one after the other: by one process, by several (`torchrun`), and as one stack
of all members. The times are those of the fits, without the start of Python, the longest of all
processes. The efficiency is the time of one process over processes × the time of several. It
needs a machine with as many free cores: the load of the machine is printed beside it.

`--rule` measures what the rule of `driver/blocks.py` rests on: the processor time of a fit in
blocks over that of one stack, by the work of a step of a block (weights × rows × members), in
pairs. From `WORK` on, it should be at most 1.05.

`--model` fits a cost model to measured runs, and prints what it says of 64 and 512 processes. The
time of a fit of B blocks by P processes, without the start of Python, is

    T(P) = fixed + ceil(B / P) block + B read + EXCHANGES (wait + P each)

`block` is the time of a block, `read` what each process does for every block (its result is read
and joined; noise, scores and status are computed from all members). They are the slopes of a line
through fits of 2 to 16 blocks by one process, which trains them or finds their results there. An
exchange of values by P processes is measured with P threads on one store, P from 2 to 64. The
model is compared with a measured fit by two processes. What it says of more processes than were
measured is an extrapolation: it knows of no slow network, no shared disk that many write to, and
no process that is slower than the others. Results: `benchmarks/results/processes.json`.

`--rows` measures sums over rows (`method/row_sums.py`): HMC with four chains of a network 8-50-1 on
10⁵ rows, and the curvature of a trained network 8-64-64-1 on as many, which are 16 blocks each. The
pairs are the same; the third fit is that of one process with all rows in one block.

Nothing depends on these numbers but the constants `WORK`, which were chosen by them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, distributed

import doxa
from doxa.driver import processes as several
from doxa.driver.blocks import WORK

RESULTS = Path(__file__).parent / "results" / "processes.json"


def rows(n: int, columns: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, columns, generator=g)
    return x, x.sum(1).sin() + 0.1 * torch.randn(n, generator=g)


def seconds(hidden: tuple[int, ...], members: int, steps: int, block_size: int | None) -> Any:
    """The fit's diagnostics. Nothing is held out, so that all of the time is that of training."""
    posterior = doxa.fit(
        doxa.nets.mlp(8, 1, hidden), rows(4000), "deep-ensemble", members=members, steps=steps,
        block_size=block_size, validation=None, progress=False, engine="stack:eager",
        batch_size=128,
    )  # fmt: skip
    return posterior.diagnostics


def one_process(out: str, steps: int, block_size: int) -> None:
    found = seconds((256, 256), 4, steps, block_size)
    facts = {"seconds": found["seconds"], "blocks": found["blocks"]}
    by = (found.processes or {}).get("blocks_by")
    Path(out, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps({**facts, "by": by}))


def of_rows(out: str, case: str, blocks: int | None) -> None:
    """A fit whose processes divide rows, by the rule or in a number of blocks."""
    method, hidden, members = ROWS[case]
    torch.manual_seed(0)  # the same network in all processes
    posterior = doxa.fit(
        doxa.nets.mlp(8, 1, hidden), rows(100_000), method, members=members, validation=None,
        init="given", progress=False, engine="stack:eager", microbatches=blocks,
    )  # fmt: skip
    found = posterior.diagnostics
    by = (found.processes or {}).get("row_blocks_by")
    facts = {"seconds": found["seconds"], "by": by, "blocks": found.row_blocks}
    Path(out, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))


ROWS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "hmc": (doxa.HMC(draws=4, burn_in=0, leapfrog=10), (50,), 4),
    "laplace": (doxa.Laplace(structure="kronecker", train=False), (64, 64), 1),
}


def efficiency_of_rows(pairs: int, processes: int) -> None:
    for case in ROWS:
        ratios, wholes = [], []
        for _ in range(pairs):
            load = os.getloadavg()[0]
            alone, _ = launched(1, ["--case", case])
            several, by = launched(processes, ["--case", case])
            whole, _ = launched(1, ["--case", case, "--row-blocks", "1"])
            ratios.append(alone / (processes * several))
            wholes.append(whole / alone)
            print(
                f"{case}: {alone:.1f} s by one process, {several:.1f} s by {processes}, whose "
                f"blocks are {by}; {whole:.1f} s with all rows in one block; efficiency "
                f"{ratios[-1]:.2f}; load before {load:.1f}", flush=True,
            )  # fmt: skip
        print(f"{case}: efficiency {statistics.median(ratios):.2f} (median of {pairs}); one block "
              f"takes {statistics.median(wholes):.2f} times the blocks", flush=True)  # fmt: skip


def started(processes: int, steps: int, block_size: int) -> tuple[float, Any]:
    """As `launched`, of an ensemble in blocks of members."""
    return launched(processes, ["--steps", str(steps), "--block-size", str(block_size)])


def launched(processes: int, words: list[str]) -> tuple[float, Any]:
    """The longest time of all processes, and the process of each block."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone",
                        "--nproc-per-node", str(processes)]  # fmt: skip
        command += ["-m", "benchmarks.processes", "--one", out, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True)
        found = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
        return max(one["seconds"] for one in found), found[0]["by"]


def efficiency(pairs: int, steps: int, processes: int) -> None:
    ratios, stacks = [], []
    for _ in range(pairs):
        load = os.getloadavg()[0]
        alone, _ = started(1, steps, 1)
        several, by = started(processes, steps, 1)
        stack, _ = started(1, steps, 4)
        ratios.append(alone / (processes * several))
        stacks.append(stack / several)
        print(
            f"4 blocks: {alone:.1f} s by one process ({alone / 4:.1f} s each), {several:.1f} s by "
            f"{processes} {by}; {stack:.1f} s as one stack; efficiency {ratios[-1]:.2f}; load "
            f"before {load:.1f}", flush=True,
        )  # fmt: skip
    print(f"efficiency {statistics.median(ratios):.2f} (median of {pairs})")
    print(f"speed-up over one stack {statistics.median(stacks):.2f}")


def rule(pairs: int, steps: int) -> None:
    for hidden, members in [((64,), 16), ((64, 64), 16), ((128, 128), 16), ((256, 256), 16),
                            ((512, 512), 12), ((512, 512), 16)]:  # fmt: skip
        weights = sum(p.numel() for p in doxa.nets.mlp(8, 1, hidden).parameters())
        for size in (members // 4, members // 2):
            ratios = []
            for _ in range(pairs):
                times = []
                for own in (size, members):
                    began = process_time()
                    seconds(hidden, members, steps, own)
                    times.append(process_time() - began)
                ratios.append(times[0] / times[1])
            work = weights * 128 * size
            print(
                f"{hidden!s:>12} {weights:>7,} weights, {members} members in blocks of {size}: "
                f"work {work:.1e} ({'at least' if work >= WORK else 'below'} WORK), "
                f"{statistics.median(ratios):.2f} times one stack", flush=True,
            )  # fmt: skip


EXCHANGES = 5  # of a fit: its facts, two for the folder, the posteriors, and its end
BLOCKS = (2, 4, 8, 16)
THREADS = (2, 4, 8, 16, 32, 64)


def line(points: dict[int, float]) -> tuple[float, float]:
    """The intercept and the slope of the least-squares line, neither of them below 0."""
    n, x, y = len(points), list(points), list(points.values())
    mx, my = sum(x) / n, sum(y) / n
    sxx = sum((a - mx) ** 2 for a in x)
    slope = max(0.0, sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sxx)
    return max(0.0, my - slope * mx), slope


def timed_fit(blocks: int, steps: int, folder: Path) -> float:
    """Seconds of a fit of so many blocks of one member."""
    began = perf_counter()
    doxa.fit(
        doxa.nets.mlp(8, 1, (256, 256)), rows(4000), "deep-ensemble", members=blocks, steps=steps,
        block_size=1, validation=None, progress=False, engine="stack:eager", batch_size=128,
        checkpoint=folder, checkpoint_every=1e9,
    )  # fmt: skip
    return perf_counter() - began


def exchange_seconds(processes: int, repeats: int = 10) -> float:
    """Seconds of one exchange, by threads with a connection each to one store."""
    wait = timedelta(seconds=60)
    kept = distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait)
    worlds = [several.World(rank, processes, "model") for rank in range(processes)]
    for world in worlds:
        own = distributed.TCPStore("127.0.0.1", kept.port, is_master=False, timeout=wait)
        world._store = distributed.PrefixStore("doxa", own)

    def call(world: several.World) -> None:
        for _ in range(repeats):
            world.exchange("facts", "0" * 64)

    threads = [threading.Thread(target=call, args=(world,)) for world in worlds]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (perf_counter() - began) / repeats


@dataclass(frozen=True)
class Model:
    """The coefficients of the cost model, in seconds."""

    fixed: float
    block: float
    read: float
    wait: float
    each: float

    def seconds(self, blocks: int, processes: int, block: float | None = None) -> float:
        trained = -(-blocks // processes) * (self.block if block is None else block)
        told = EXCHANGES * (self.wait + processes * self.each) if processes > 1 else 0.0
        return self.fixed + trained + blocks * self.read + told

    def efficiency(self, blocks: int, processes: int, block: float) -> float:
        alone = self.seconds(blocks, 1, block)
        return alone / (processes * self.seconds(blocks, processes, block))


def model(steps: int) -> None:
    train, there = {}, {}
    with tempfile.TemporaryDirectory() as place:
        timed_fit(2, 10, Path(place, "warm"))
        for blocks in BLOCKS:
            folder = Path(place, str(blocks))
            train[blocks] = timed_fit(blocks, steps, folder)
            there[blocks] = timed_fit(blocks, steps, folder)
            sys.stdout.write(
                f"{blocks} blocks: {train[blocks]:.2f} s to train, {there[blocks]:.3f} s to read\n"
            )
    told = {count: exchange_seconds(count) for count in THREADS}
    fixed, read = line(there)
    _, both = line(train)
    found = Model(fixed, both - read, read, *line(told))
    measured, _ = started(2, steps, 1)
    expected = found.seconds(4, 2)
    sys.stdout.write(
        f"{found}\nan exchange: {told}\n4 blocks by 2 processes: {measured:.2f} s measured, "
        f"{expected:.2f} s by the model\n"
    )
    table = []
    for block in (5.0, 60.0, 600.0):
        for processes in (2, 64, 512):
            share = found.efficiency(512, processes, block)
            table.append({"block_seconds": block, "processes": processes, "efficiency": share})
            sys.stdout.write(
                f"512 blocks of {block:.0f} s by {processes} processes: "
                f"{found.seconds(512, processes, block):,.0f} s, efficiency {share:.2f}\n"
            )
    facts = {
        "coefficients": asdict(found), "exchange_seconds": told, "train_seconds": train,
        "read_seconds": there, "load": os.getloadavg()[0],
        "two_processes": {"measured": measured, "model": expected}, "extrapolated": table,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--rule", action="store_true", help="what the cut of a stack costs")
    parser.add_argument("--model", action="store_true", help="for 64 and 512 processes, on paper")
    parser.add_argument("--rows", action="store_true", help="sums over rows")
    parser.add_argument("--row-blocks", type=int, help=argparse.SUPPRESS)
    for name in ("--case", "--one"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case:
        of_rows(given.one, given.case, given.row_blocks)
    elif given.rows:
        efficiency_of_rows(given.pairs, given.processes)
    elif given.one:
        one_process(given.one, given.steps, given.block_size)
    elif given.model:
        model(given.steps)
    elif given.rule:
        rule(given.pairs, given.steps)
    else:
        efficiency(given.pairs, given.steps, given.processes)


if __name__ == "__main__":
    main()
