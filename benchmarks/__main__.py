"""All benchmarks with one command: `make bench`. UCI needs DOXA_DATA; GPU rows need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    subprocess.run([sys.executable, str(HERE / "speed.py"), *sys.argv[1:]], check=True)
    if os.environ.get("DOXA_DATA"):
        subprocess.run([sys.executable, str(HERE / "uci.py")], check=True)
    else:
        print("uci: skipped, DOXA_DATA is not set")


if __name__ == "__main__":
    main()
