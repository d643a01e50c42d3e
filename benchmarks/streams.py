"""A folder of Parquet files that is not read into memory: time, memory and bytes read.

    python -m benchmarks.streams [--gib 0.4] [--columns 10] [--members 1 5] [--folder PLACE]

The folder is written first, in a temporary folder, and removed at the end. Then each task runs in a
process of its own, which measures

    anonymous   the largest anonymous memory (RssAnon), every 10 ms, and that before the task
    read        bytes that it has read (rchar of /proc/self/io), as a multiple of the folder's size
    CPU         seconds of the processor, with one thread
    rows/s      rows per second of the processor

of: a fit of one epoch (a network 10-64-64-1, batches of 1,024 rows; one first pass and one epoch),
predictions of all rows, the 100 best rows of a pool, and, for comparison, a plain training loop in
torch over `pyarrow`, which shuffles nothing, standardises nothing and holds nothing out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 1024
GROUP = 100_000  # rows of a row group
LIMIT = 1 << 30  # bytes of anonymous memory


def anonymous() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


def bytes_read() -> int:
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.partition("rchar:")[2].split()[0])


def write(folder: Path, size: int, columns: int) -> int:
    """Files of at most 2,000,000 rows, until there are this many bytes. The number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    weight = rng.normal(size=columns).astype(np.float32)
    rows = number = written = 0
    while written < size:
        path = folder / f"part-{number:04d}.parquet"
        writer = None
        for _ in range(20):
            x = rng.standard_normal((GROUP, columns), dtype=np.float32)
            y = np.sin(x @ weight) + 0.1 * rng.standard_normal(GROUP, dtype=np.float32)
            table = pa.table({**{f"c{j}": x[:, j] for j in range(columns)}, "y": y})
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table, row_group_size=GROUP)
            rows += GROUP
            if written + (rows % 2_000_000 or 2_000_000) * 4 * (columns + 1) >= size:
                break
        assert writer is not None
        writer.close()
        written += path.stat().st_size
        number += 1
    return rows


def plain(folder: Path, columns: int) -> int:
    """One epoch of a plain loop: the number of rows."""
    import pyarrow.parquet as pq

    net = torch.nn.Sequential(
        torch.nn.Linear(columns, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    rows = 0
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH, use_threads=False):
                values = [torch.from_numpy(batch.column(j).to_numpy()) for j in range(columns + 1)]
                x, y = torch.stack(values[:-1], 1), values[-1]
                loss = (net(x)[:, 0] - y).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                rows += len(y)
    return rows


def task(name: str, folder: Path, columns: int) -> dict[str, Any]:
    """One task, and what it took."""
    import doxa

    torch.set_num_threads(1)
    run = folder.with_name(f"{folder.name}-run")
    net = doxa.nets.mlp(columns, 1, hidden=(64, 64))
    few = doxa.data.stream((torch.randn(columns), torch.randn(())) for _ in range(500))
    doxa.fit(net, few, steps=300)  # imports, and whatever is allocated once
    start, peak, ended = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, anonymous())

    looking = threading.Thread(target=watch)
    looking.start()
    before, began, used = bytes_read(), time.monotonic(), time.process_time()
    extra: dict[str, Any] = {}
    if name == "plain loop":
        rows = plain(folder, columns)
    elif name.startswith("fit"):
        stream = doxa.data.read_parquet(folder, target="y")
        rows = len(stream)
        posterior = doxa.fit(
            net, stream, "deep-ensemble", members=int(name.split()[1]), epochs=1,
            batch_size=BATCH, standardize=True, seed=0,
        )  # fmt: skip
        extra["status"] = str(posterior.status)
        posterior.save(run)
    else:
        posterior = doxa.load(run)
        inputs = [f"c{j}" for j in range(columns)]
        pool = doxa.data.read_parquet(folder, columns=inputs)
        rows = len(pool)
        if name == "predict":
            total = 0.0
            for _, p in posterior.predict_blocks(pool, rows=16384):
                total += float(p.mean.sum())
            extra["mean"] = total / rows
        else:
            best = doxa.decide.top_rows(posterior, pool, 100, by="predictive_variance")
            extra["best"] = float(best.scores[0])
    seconds, read = time.monotonic() - began, bytes_read() - before
    processor = time.process_time() - used
    ended.set()
    looking.join()
    return {
        "task": name, "rows": rows, "seconds": seconds, "cpu": processor, "read": read,
        "start": start,
        "peak": max(peak, anonymous()), **extra,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=0.4, help="size of the folder")
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.task:
        print(json.dumps(task(asked.task, asked.folder, asked.columns)))
        return 0
    with tempfile.TemporaryDirectory(prefix="doxa-streams-", dir=asked.folder) as place:
        folder = Path(place) / "rows"
        folder.mkdir()
        rows = write(folder, int(asked.gib * 2**30), asked.columns)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{rows:,} rows of {asked.columns} columns, {size / 2**20:,.0f} MiB in "
              f"{len(list(folder.iterdir()))} files")  # fmt: skip
        print(f"{'task':12s} {'seconds':>8s} {'CPU':>6s} {'rows/s':>10s} {'10⁹ rows':>9s} "
              f"{'read/size':>9s} {'anonymous MiB':>14s}")  # fmt: skip
        names = ["plain loop", *(f"fit {m}" for m in asked.members), "predict", "pool"]
        worst = 0
        for name in names:
            command = [sys.executable, "-m", "benchmarks.streams", "--task", name]
            command += ["--folder", str(folder), "--columns", str(asked.columns)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr)
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
            rate = found["rows"] / found["cpu"]
            worst = max(worst, found["peak"])
            print(
                f"{name:12s} {found['seconds']:8.1f} {found['cpu']:6.1f} {rate:10,.0f} "
                f"{1e9 / rate / 3600:7.1f} h "
                f"{found['read'] / size:9.2f} {found['peak'] >> 20:6d} ({found['start'] >> 20} "
                f"before) {found.get('status', '')}", flush=True,
            )  # fmt: skip
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
