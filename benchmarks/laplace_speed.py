"""Kronecker Laplace of LeNet-5 beside laplace-torch, on one thread of a CPU, or on a GPU.

    python -m benchmarks.laplace_speed [--peer PYTHON] [--device cuda]

`--peer` is an interpreter with laplace-torch; without it only doxa runs. Every row runs in a
process of its own (`peers/laplace_run.py`), one after the other, in single precision, at the same
weights, on the same images. On the CPU processor seconds count, which depend little on who else is
on the machine; on a GPU those of a clock.
Results go to OUT/laplace_speed.json and .md, or laplace_speed_cuda; OUT is benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# package, task, outputs, images
ROWS = (
    ("doxa", "fit", 10, 5000), ("laplace-torch", "fit", 10, 5000),
    ("doxa", "predict", 10, 1000), ("doxa", "predict", 10, 50),
    ("laplace-torch", "predict", 10, 50),
    ("laplace-torch", "predict", 10, 1000),
    ("doxa", "fit", 1000, 20), ("doxa", "predict", 1000, 10), ("doxa", "variance", 1000, 10),
)  # fmt: skip
WORDS = {"fit": "fit", "predict": "mean and covariance of f", "variance": "mean and variance of f"}


def run(
    package: str, task: str, outputs: int, images: int, peer: str | None, device: str
) -> dict[str, Any]:
    python = sys.executable if package == "doxa" else peer
    out = subprocess.run(
        [str(python), "-W", "ignore", str(HERE / "peers" / "laplace_run.py"), package, task,
         str(outputs), str(images), device],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if out.returncode:
        raise RuntimeError(f"{package} {task} failed:\n{out.stderr[-3000:]}")
    found = json.loads(out.stdout.splitlines()[-1])
    return {"package": package, "task": task, "outputs": outputs, "images": images, **found}


def table(rows: list[dict[str, Any]], device: str) -> str:
    unit = "cpu" if device == "cpu" else "wall"
    each = {(r["package"], r["task"], r["outputs"], r["images"]): r[unit] for r in rows}
    where = f"one thread, {platform.machine()}; processor seconds"
    if device != "cpu":
        where = f"{torch.cuda.get_device_name()}; seconds of a clock, the least of three runs"
    lines = [
        f"# Kronecker Laplace of LeNet-5, {datetime.date.today()}", "",
        f"torch {torch.__version__}, {where}. "
        f"`python -m benchmarks.laplace_speed --peer PYTHON --device {device}`.", "",
        "| task | outputs | images | package | s | ms an image | peak memory, MiB | peer / doxa |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        peer = each.get(("laplace-torch", r["task"], r["outputs"], r["images"]))
        times = f"{peer / r[unit]:.1f}×" if peer and r["package"] == "doxa" else ""
        lines.append(
            f"| {WORDS[r['task']]} | {r['outputs']} | {r['images']} | {r['package']} | "
            f"{r[unit]:.3g} | {1000 * r[unit] / r['images']:.3g} | {r['mib']:.0f} | {times} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="an interpreter with laplace-torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name = "laplace_speed" if args.device == "cpu" else f"laplace_speed_{args.device}"
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if row[0] != "doxa" and not args.peer:
            continue
        if args.device == "cpu" and row == ("laplace-torch", "predict", 10, 1000):
            continue  # it takes minutes
        rows.append(run(*row, args.peer, args.device))
        (args.out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(table(rows, args.device))
    sys.stdout.write(table(rows, args.device))


if __name__ == "__main__":
    main()
