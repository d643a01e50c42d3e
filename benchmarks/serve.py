"""`doxa serve` on the loopback address: requests per second, their times, and the memory.

    python -m benchmarks.serve
    python -m benchmarks.serve --requests 100000 --exact

A deep ensemble of five members, two layers of 50 units, is fitted to a table of 4 columns and
served by a process of its own. Clients are connections that stay open, each of which sends a
request of one row when the last one is answered: 1, 8 and 64 of them, for some seconds each. Then
64 clients send `--requests` more, and the resident memory of the server is read after each tenth.

Clients and server share the cores of the machine, so with two cores the clients cost about as much
as the server. The processor time of the server per request does not depend on who else computes
there. Results: `benchmarks/results/serve.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

RESULTS = Path(__file__).parent / "results" / "serve.json"
CLIENTS = (1, 8, 64)


def fitted(folder: Path) -> Path:
    """A run of five networks."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=1000) for name in "abcd"})
    frame["y"] = frame["a"] * frame["b"] + np.sin(frame["c"]) + 0.1 * rng.normal(size=1000)
    frame.to_csv(folder / "train.csv", index=False)
    command = [
        sys.executable, "-m", "doxa", "fit", folder / "train.csv", "-t", "y", "-m", "deep-ensemble",
        "--members", "5", "--hidden", "50,50", "--epochs", "20", "--lr", "0.01", "-o",
        folder / "run", "--allow-status",
    ]  # fmt: skip
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return folder / "run"


def started(run: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """The server, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "doxa", "serve", str(run), "--port", "0", *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
    assert found is not None
    return process, int(found[1])


class Load:
    """Clients that ask as fast as they are answered."""

    def __init__(self, port: int, rows: int, server: int) -> None:
        self.port, self.server = port, server
        rng = np.random.default_rng(1)
        row = {name: float(rng.normal()) for name in "abcd"}
        body = json.dumps([row] * rows).encode()
        head = (
            f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json"
            f"\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.request = head.encode() + body
        self.times: list[float] = []
        self.statuses: dict[int, int] = {}
        self.left = 0

    async def client(self, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while self.left > 0 and time.perf_counter() < until:
            self.left -= 1
            began = time.perf_counter()
            writer.write(self.request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
            self.times.append(time.perf_counter() - began)
            status = int(head.split()[1])
            self.statuses[status] = self.statuses.get(status, 0) + 1
        writer.close()

    async def _all(self, clients: int, until: float) -> None:
        await asyncio.gather(*(self.client(until) for _ in range(clients)))

    def run(self, clients: int, seconds: float = 1e9, requests: int = 1 << 60) -> dict[str, Any]:
        self.times, self.statuses, self.left = [], {}, requests
        began, used = time.perf_counter(), processor(self.server)
        asyncio.run(self._all(clients, began + seconds))
        spent = time.perf_counter() - began
        used = processor(self.server) - used
        p50, p99 = np.quantile(self.times, [0.5, 0.99]) * 1000
        return {
            "clients": clients, "requests": len(self.times), "per_second": len(self.times) / spent,
            "p50_ms": float(p50), "p99_ms": float(p99),
            "server_cpu_ms": used / len(self.times) * 1000, "load": os.getloadavg()[0],
            "statuses": self.statuses,
        }  # fmt: skip


def processor(process: int) -> float:
    """Seconds that a process has computed, in all its threads."""
    cells = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> float:
    """Resident memory in MiB."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of clients")
    parser.add_argument("--requests", type=int, default=100_000, help="for the memory")
    parser.add_argument("--rows", type=int, default=1, help="of a request")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    words = ["--exact"] * options.exact
    with tempfile.TemporaryDirectory() as name:
        process, port = started(fitted(Path(name)), *words)
        try:
            load = Load(port, options.rows, process.pid)
            load.run(8, requests=500)  # warm
            table = [load.run(clients, options.seconds) for clients in CLIENTS]
            for row in table:
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
            held = [memory(process.pid)]
            for _ in range(10):
                last = load.run(64, requests=options.requests // 10)
                held.append(memory(process.pid))
                sys.stdout.write(f"{held[-1]:.1f} MiB, {last['per_second']:.0f} per second\n")
                sys.stdout.flush()
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(60)
    found = {
        "rows": options.rows, "exact": options.exact, "clients": table,
        "memory": {"requests": options.requests, "mib": held}, "exit": ended,
    }  # fmt: skip
    key = f"{options.rows} rows{', exact' * options.exact}"
    every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(every | {key: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
