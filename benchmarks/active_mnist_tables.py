"""Tables and figures of `active_mnist.py`, from the PART*.json files in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PARTS = {
    "gal": "six ways to ask, MC dropout", "repeated": "every image three times, MC dropout",
    "equal": "BALD, by gradients a round",
}  # fmt: skip
PUBLISHED = {  # labels to 10 % and 5 % error: Gal et al. (2017); BatchBALD: Kirsch et al. (2019)
    "variation_ratio_of_mean": (120, 295), "bald": (145, 335), "max_entropy": (165, 355),
    "mean_std": (230, 695), "random": (255, 835), "batch_bald": (105, 225),
}  # fmt: skip

Curve = list[dict[str, Any]]


def curves(out: Path, part: str) -> dict[str, list[Curve]]:
    """{acquisition, or campaign and acquisition: the curve of each seed}, of all processes."""
    found: dict[str, list[Curve]] = {}
    for path in sorted(out.glob(f"{part}-*.json")):
        for name, campaign in json.loads(path.read_text()).items():
            for run in campaign["runs"]:
                found.setdefault(name or run["by"], []).append(run["curve"])
    return found


def first(curve: Curve, accuracy: float) -> float:
    return next((r["labels"] for r in curve if r["accuracy"] >= accuracy), float("inf"))


def wrong_at(curve: Curve, labels: int) -> float:
    """% wrong; a run that has reached its aim stays where it was."""
    return 100 * (1 - [r for r in curve if r["labels"] <= labels][-1]["accuracy"])


def table(part: str, found: dict[str, list[Curve]]) -> str:
    """Labels to 90 % and 95 %, the median over seeds and each; inf where a run never got there."""
    lines = ["| chosen by | to 10 % | to 5 % | published | at the end: labels, % wrong |"]
    lines += ["|---|---|---|---|---|"]
    for name, own in found.items():
        reach = [[first(curve, a) for curve in own] for a in (0.90, 0.95)]
        words = [f"{np.median(r):g} ({', '.join(f'{v:g}' for v in r)})" for r in reach]
        known = PUBLISHED.get(name) if part == "gal" else None
        most = max(curve[-1]["labels"] for curve in own)
        end = np.array([wrong_at(curve, most) for curve in own])
        spread = end.std(ddof=1) if len(end) > 1 else 0.0
        said = "/".join(map(str, known or ()))
        last = f"{most}, {end.mean():.1f} ± {spread:.1f}"
        lines.append(f"| {name} | {words[0]} | {words[1]} | {said} | {last} |")
    return "\n".join(lines)


def figure(out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no figure")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    there = {part: found for part in PARTS if (found := curves(out, part))}
    if not there:
        return
    drawn, axes = plt.subplots(1, len(there), figsize=(5 * len(there), 4), squeeze=False)
    for axis, (part, found) in zip(axes[0], there.items(), strict=True):
        for name, own in found.items():
            labels = sorted({r["labels"] for curve in own for r in curve})
            mean = [np.mean([wrong_at(curve, k) for curve in own]) for k in labels]
            axis.plot(labels, mean, label=name)
        axis.set(yscale="log", xlabel="labels", ylabel="% of test images wrong", title=PARTS[part])
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(out / "active_mnist.png", dpi=110)


def draw(out: Path) -> None:
    report = [f"## {p}\n\n{table(p, found)}\n" for p in PARTS if (found := curves(out, p))]
    (out / "tables.md").write_text("\n".join(report))
    print("\n".join(report), flush=True)
    figure(out)
