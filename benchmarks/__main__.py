"""Speed, and the gain of stacking on UCI, with one command: `make bench` or `python -m benchmarks`.

UCI needs DOXA_DATA; GPU rows need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    command = [sys.executable, "-m"]
    subprocess.run([*command, "benchmarks.speed", *sys.argv[1:]], check=True, cwd=ROOT)
    if os.environ.get("DOXA_DATA"):
        subprocess.run([*command, "benchmarks.uci"], check=True, cwd=ROOT)
    else:
        print("uci: skipped, DOXA_DATA is not set")


if __name__ == "__main__":
    main()
