"""The memory of SparseGP against the number of rows: a stream that generates rows when read.

    python -m benchmarks.sparse_stream [--rows 10000,1000000] [--steps 300]

Each fit is a process of its own; the peak is that of the whole process, less what it had before the
fit. 300 columns make a million rows 2.4 GB, too much to be kept.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import doxa

COLUMNS = 300


class Stream(Dataset[Any]):
    """y = sin(3 x₁) + x₂ + noise, of rows that are not stored."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.waves = torch.arange(1, COLUMNS + 1, dtype=torch.float64).sqrt()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(self.waves * (i + 1))
        return x, torch.sin(3 * x[:1]) + x[1:2] + 0.1 * torch.sin(1000 * x[2:3])


def peak() -> float:
    """MB of this process, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(rows: int, steps: int) -> None:
    few = torch.randn(64, COLUMNS, dtype=torch.float64)
    doxa.fit(None, (few, few[:, :1]), doxa.SparseGP(inducing=50), steps=2)  # what is loaded once
    before, start = peak(), time.perf_counter()
    posterior = doxa.fit(
        None, Stream(rows), doxa.SparseGP(inducing=50), likelihood="gaussian", steps=steps
    )
    print(
        f"{rows} rows: {peak() - before:.0f} MB more at the peak, {time.perf_counter() - start:.0f}"
        f" s, bound a row {posterior.elbo / rows:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,1000000")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--alone", action="store_true")
    asked = parser.parse_args()
    for rows in asked.rows.split(","):
        if asked.alone:
            one(int(rows), asked.steps)
        else:
            own = ["--rows", rows, "--steps", str(asked.steps), "--alone"]
            subprocess.run([sys.executable, __file__, *own], check=True)


if __name__ == "__main__":
    main()
