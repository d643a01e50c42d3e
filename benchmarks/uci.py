"""The gain of stacking on UCI: deep ensembles, 20 splits × 5 members as one fit, against a loop.

    DOXA_DATA=… python -m benchmarks.uci [--sets boston_housing,concrete,energy,yacht]

The scores themselves are `doxa bench uci`; here one of its stacked fits is timed beside one net of
one split, written by hand with fused Adam and scaled to the same work.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from doxa.app.bench import uci
from doxa.app.bench.cells import circumstances


def compare(name: str) -> dict[str, Any]:
    data = uci.load(uci.data_folder(None), name)
    hidden = 100 if name == "protein" else 50
    problem = uci.Problem(data.x, data.y, data.train, hidden, seed=0)
    start = time.perf_counter()
    problem.fit(
        "deep-ensemble", 2, likelihood="heteroscedastic", members=5, epochs=40, batch_size=32,
        lr=0.005,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    loop = plain_loop(data, hidden) * len(data.train) * 5
    return {"set": name, "seconds": seconds, "loop_seconds": loop, "ratio": loop / seconds}


def plain_loop(data: uci.DataSet, hidden: int) -> float:
    """Seconds of one net on one split."""
    index = data.train[0]
    x, y = data.x[index].float(), data.y[index].float()
    x, y = (x - x.mean(0)) / x.std(0).clamp(min=1e-9), ((y - y.mean()) / y.std()).unsqueeze(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)
    )
    adam = torch.optim.Adam(net.parameters(), lr=0.005, fused=True)
    epochs = 4
    start = time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            mean, s = net(x[rows]).chunk(2, 1)
            std = torch.nn.functional.softplus(s) + 1e-3
            decay = sum(p.square().sum() for p in net.parameters()) / (2 * len(x))
            loss = (0.5 * ((y[rows] - mean) / std).square() + std.log()).mean() + decay
            adam.zero_grad()
            loss.backward()
            adam.step()
    return (time.perf_counter() - start) * 40 / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default="boston_housing,concrete,energy,yacht")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "uci_speed.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(name) for name in arguments.sets.split(",")]
    for row in rows:
        print(
            f"{row['set']:18s} {row['seconds']:5.1f} s   loop {row['loop_seconds']:5.0f}"
            f" s: {row['ratio']:.0f}×",
            flush=True,
        )
    Path(arguments.out).write_text(json.dumps({"rows": rows, **circumstances()}, indent=1))


if __name__ == "__main__":
    main()
