"""Speed of half precision: a step of eight ResNet-20 in float32 and in bfloat16.

    python -m benchmarks.precision --device cuda [--widths 16,64] [--members 8] [--out FILE]

On the CPU it is only a test that it runs: bfloat16 is slower there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import doxa
from benchmarks.batch_ensemble import step_seconds
from doxa.app.bench.cells import circumstances


def measured(width: int, norm: str, asked: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per step, and the speed-up of bfloat16."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 3, 32, 32, generator=g).to(asked.device)
    y = torch.randint(0, 10, (512,), generator=g).to(asked.device)
    found: dict[str, float] = {}
    for precision in ("full", "bfloat16"):
        net = doxa.nets.resnet20(width=width, norm=norm).to(asked.device)
        options = {"members": asked.members, "precision": precision}
        each = [
            step_seconds(net, (x, y), "deep-ensemble", asked.steps, asked.device, **options)
            for _ in range(asked.repeats)
        ]
        found[precision] = 1000 * min(each)
    return {**found, "speedup": found["full"] / found["bfloat16"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--widths", default="16,64")
    parser.add_argument("--norms", default="group,frn")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"members": asked.members, "batch": 128, **circumstances()}
    for width in asked.widths.split(","):
        for norm in asked.norms.split(","):
            name = f"width {width}, {norm}"
            results[name] = measured(int(width), norm, asked)
            print(name, {k: round(v, 3) for k, v in results[name].items()}, flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
