"""A report on a fit: one self-contained HTML file, and an image of its first screens.

    python examples/report.py [report.html] [picture.png]

The data are simulated strengths of concrete, whose noise grows with one of the inputs. The model is
an ensemble of networks with a heteroscedastic likelihood. The image needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import doxa
from doxa.app import report

NAMES = ("cement", "water", "age", "ash")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def samples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    share = torch.rand(n, 4, generator=source)
    cement, water = 100 + 400 * share[:, 0], 120 + 120 * share[:, 1]
    age, ash = 1 + 364 * share[:, 2], 200 * share[:, 3]
    strength = 20 + 0.09 * cement - 0.12 * water + 4.5 * torch.log1p(age)
    strength += 0.03 * ash * torch.sin(cement / 60)
    noise = (2 + 0.01 * cement) * torch.randn(n, generator=source)
    return torch.stack([cement, water, age, ash], 1), strength + noise


def main(page: Path, picture: Path | None) -> None:
    train, test = samples(1200, 0), samples(400, 1)
    net = doxa.nets.mlp(4, 2, (50,))
    posterior = doxa.fit(
        net, train, "deep-ensemble", likelihood="heteroscedastic", standardize=True, steps=2000
    )
    report.write(posterior, page, test, train, names=NAMES, target="strength",
                 title="Strength of concrete")  # fmt: skip
    if picture is not None:
        photograph(page, picture)


def photograph(page: Path, picture: Path) -> None:
    program = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if program is None:
        raise SystemExit("no Chromium to take the picture with")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--hide-scrollbars", "--window-size=1240,1560",
             f"--user-data-dir={folder}", f"--screenshot={picture.resolve()}",
             page.resolve().as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    main(given[0] if given else Path("report.html"), given[1] if len(given) > 1 else None)
