"""Cost of a step of a batch ensemble, relative to a step of one network on as many rows.

    python -m benchmarks.batch_ensemble [--nets mlp,lenet5,resnet20] [--device cuda] [--out FILE]

Four components, 128 rows in total, 32 per component (Wen, Tran & Ba 2020 report "little more than
one"). The time is that of a step in the last three quarters of a fit, the shortest of several
alternating repetitions; on the CPU it is process time on one thread, which other work on the
machine does not change.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import doxa
from doxa.app.bench.cells import circumstances

ROWS, BATCH = 512, 128
# net: how it is built, what a row of x is, steps of a fit on the CPU
NETS: dict[str, tuple[Any, tuple[int, ...], int]] = {
    "mlp": (lambda: doxa.nets.mlp(784, 10, hidden=(400, 400)), (784,), 600),
    "lenet5": (doxa.nets.lenet5, (1, 28, 28), 60),
    "resnet20": (doxa.nets.resnet20, (3, 32, 32), 8),
    "resnet20-frn": (lambda: doxa.nets.resnet20(norm="frn"), (3, 32, 32), 8),
}
METHODS: dict[str, Any] = {"map": "map", "batch-ensemble": doxa.BatchEnsemble(components=4)}


def step_seconds(
    net: nn.Module, data: Any, method: Any, steps: int, device: str, **options: Any
) -> float:
    """Of a step of the last three quarters of a fit."""
    gpu, marks = device.startswith("cuda"), []

    def look(step: int, _info: Any) -> None:  # `_info` came from the device, which is done then
        marks.append((step, time.perf_counter() if gpu else time.process_time()))

    doxa.fit(
        net, data, method, likelihood="categorical", steps=steps, batch_size=BATCH, device=device,
        validation=None, progress=False, callbacks=[look], **options,
    )  # fmt: skip
    later = [mark for mark in marks[:-1] if mark[0] >= steps // 4]
    (first, begun), (last, ended) = (later or marks)[0], marks[-1]
    return (ended - begun) / (last - first)


def measured(name: str, device: str, repeats: int) -> dict[str, float]:
    """Milliseconds per step of each method, and their ratio."""
    build, shape, steps = NETS[name]
    steps = 300 if device.startswith("cuda") else steps
    g = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, *shape, generator=g), torch.randint(0, 10, (ROWS,), generator=g)
    data = data[0].to(device), data[1].to(device)
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method, what in METHODS.items():
            found[method].append(step_seconds(build().to(device), data, what, steps, device))
    least = {method: 1000 * min(each) for method, each in found.items()}
    return {**least, "ratio": least["batch-ensemble"] / least["map"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nets", default="mlp,lenet5,resnet20")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"device": asked.device, **circumstances()}
    for name in asked.nets.split(","):
        results[name] = measured(name, asked.device, asked.repeats)
        print(name, {k: round(v, 3) for k, v in results[name].items()}, flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
