"""Seconds a step of SGLD and SGHMC, beside momentum SGD and posteriors' samplers: one chain.

A row of `samplers.py`. Momentum SGD is timed twice: as a loop written by hand with torch.optim, and
as doxa's own fit, with which the samplers share everything but their update. By itself, on any
device and without peers:

    python benchmarks/sg_steps.py [--device cuda]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doxa

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from problem import clock

SIZES = {"8-50-50-1": 32, "8-96-96-1": 32, "784-400-400-10": 128}  # the net, and its batch
STEPS = {"8-50-50-1": 3000, "8-96-96-1": 3000, "784-400-400-10": 2000}


def network(name: str) -> nn.Module:
    inputs, *hidden, outputs = map(int, name.split("-"))
    return doxa.nets.mlp(inputs, outputs, hidden=tuple(hidden))


def rows(name: str) -> tuple[Tensor, Tensor]:
    inputs, *_, outputs = map(int, name.split("-"))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2048, inputs, generator=g)
    return x, x[:, :outputs].clone() if outputs > 1 else x.sum(1, keepdim=True)


def by_hand(name: str, device: str = "cpu") -> float:
    """u ← μu + ∇loss, θ ← θ − η u, as one would write it."""
    net, (x, y), size = network(name), rows(name), SIZES[name]
    net, x, y = net.to(device), x.to(device), y.to(device)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-5, momentum=0.9)
    order = torch.randint(len(x), (STEPS[name], size), device=device)
    marks = []
    for t, index in enumerate(order):
        if t % (len(order) // 10) == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(clock())
        loss = 0.5 * (net(x[index]) - y[index]).square().sum(1).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    return statistics.median(b - a for a, b in itertools.pairwise(marks)) / (len(order) // 10)


def fitted(name: str, method: Any, device: str = "cpu", **options: Any) -> float:
    """Seconds a step of a fit: the median between its progress ticks, without the first ones."""
    net, (x, y) = network(name), rows(name)
    marks: list[tuple[int, float]] = []
    doxa.fit(
        net, (x, y), method, members=1, steps=STEPS[name], batch_size=SIZES[name], lr=1e-5,
        likelihood=doxa.Gaussian(1.0), progress=False, schedule="constant", device=device,
        callbacks=[lambda t, _: marks.append((t, clock())) or None], **options,
    )  # fmt: skip
    pairs = list(itertools.pairwise(marks))[2:]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, where = [], getattr(args, "device", "cpu")
    for name in SIZES:
        lengths = {"burn_in": STEPS[name] - 100, "draws": 10, "thin": 10}
        tries: list[dict[str, float]] = []
        for _ in range(3):  # in turns, so that a slow moment hits them all
            tries.append({
                "by hand": by_hand(name, where),
                "sgd": fitted(name, "map", where, optimizer="sgd"),
                "sgld": fitted(name, doxa.SGLD(**lengths), where),
                "sghmc": fitted(name, doxa.SGHMC(**lengths), where),
            } | (peers(name, args.pyro) if args.pyro else {}))  # fmt: skip
        times = {key: statistics.median(each[key] for each in tries) for key in tries[0]}
        size = sum(p.numel() for p in network(name).parameters())
        row = {"net": name, "weights": size, "batch": SIZES[name], "seconds": times}
        print(line(row), flush=True)
        found.append(row)
    return found


def peers(name: str, python: str) -> dict[str, float]:
    script = Path(__file__).parent / "peers" / "posteriors_steps.py"
    out = subprocess.run(
        [python, str(script), name, str(SIZES[name]), str(STEPS[name])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(out.stdout.splitlines()[-1])


def line(row: dict[str, Any]) -> str:
    base = row["seconds"]["by hand"]
    cells = [f"{k} {v * 1e6:.0f} µs ({v / base:.2f})" for k, v in row["seconds"].items()]
    return f"{row['net']}, {row['weights']} weights: " + ", ".join(cells)


def table(found: list[dict[str, Any]]) -> str:
    names = list(found[0]["seconds"])
    lines = [
        "µs a step of one chain, and how many times that of momentum SGD written by hand.\n",
        "| net | weights | batch | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|",
    ]  # fmt: skip
    for row in found:
        base = row["seconds"]["by hand"]
        cells = [f"{v * 1e6:.0f} ({v / base:.2f})" for v in row["seconds"].values()]
        lines.append(f"| {row['net']} | {row['weights']} | {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--pyro", help="an interpreter that has posteriors; on the CPU only")
    torch.set_num_threads(1)
    print(table(measure(parser.parse_args())))
