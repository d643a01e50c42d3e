"""Kronecker Laplace of LeNet-5 beside laplace-torch, on one thread of a CPU.

    python benchmarks/laplace_speed.py [--peer PYTHON]

`--peer` is an interpreter with laplace-torch; without it only doxa runs. Every row runs in a
process of its own (`peers/laplace_run.py`), one after the other, in single precision, at the same
weights, on the same images. Processor seconds count: they depend little on who else is on the
machine.
Results go to benchmarks/results/laplace_speed.json and .md.
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
    ("doxa", "fit", 1000, 20), ("doxa", "predict", 1000, 10), ("doxa", "variance", 1000, 10),
)  # fmt: skip
WORDS = {"fit": "fit", "predict": "mean and covariance of f", "variance": "mean and variance of f"}


def run(package: str, task: str, outputs: int, images: int, peer: str | None) -> dict[str, Any]:
    python = sys.executable if package == "doxa" else peer
    out = subprocess.run(
        [str(python), "-W", "ignore", str(HERE / "peers" / "laplace_run.py"), package, task,
         str(outputs), str(images)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if out.returncode:
        raise RuntimeError(f"{package} {task} failed:\n{out.stderr[-3000:]}")
    found = json.loads(out.stdout.splitlines()[-1])
    return {"package": package, "task": task, "outputs": outputs, "images": images, **found}


def table(rows: list[dict[str, Any]]) -> str:
    each = {(r["package"], r["task"], r["outputs"], r["images"]): r["cpu"] for r in rows}
    lines = [
        f"# Kronecker Laplace of LeNet-5, {datetime.date.today()}", "",
        f"torch {torch.__version__}, one thread, {platform.machine()}; processor seconds. "
        "`python benchmarks/laplace_speed.py --peer PYTHON`.", "",
        "| task | outputs | images | package | s | ms an image | peak memory, MiB | peer / doxa |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        peer = each.get(("laplace-torch", r["task"], r["outputs"], r["images"]))
        times = f"{peer / r['cpu']:.1f}×" if peer and r["package"] == "doxa" else ""
        lines.append(
            f"| {WORDS[r['task']]} | {r['outputs']} | {r['images']} | {r['package']} | "
            f"{r['cpu']:.3g} | {1000 * r['cpu'] / r['images']:.3g} | {r['mib']:.0f} | {times} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="an interpreter with laplace-torch")
    args = parser.parse_args()
    rows = [run(*row, args.peer) for row in ROWS if row[0] == "doxa" or args.peer]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "laplace_speed.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "laplace_speed.md").write_text(table(rows))
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
