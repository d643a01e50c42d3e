"""Where random, fixed and adaptive designs measure: runs of `location_finding.py` as a picture.

python benchmarks/location_figure.py benchmarks/results/location_finding.json figure.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

INK = "#22303c"


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in ("random", "fixed", "dad") if name in found["runs"]]
    figure = Figure(figsize=(4.6 * len(names), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for ax, name in zip(figure.subplots(1, len(names)), names, strict=True):
        runs, bound = found["runs"][name], found["bounds"][name]
        x, y = ([step[0][i] for step in runs["designs"]] for i in (0, 1))
        ax.plot(x, y, "-", color="#9aa5ad", lw=0.6)
        dots = ax.scatter(x, y, c=range(1, len(x) + 1), cmap="viridis", s=26, zorder=3)
        for source in runs["theta"][0]:
            ax.plot(*source, "*", color="#c8553d", ms=15, mec="white", zorder=4)
        ax.set_title(
            f"{name}: {bound['lower']:.2f} to {bound['upper']:.2f} nats", loc="left", fontsize=11,
            color=INK,
        )  # fmt: skip
        ax.set_xlim(-3, 3)
        ax.set_ylim(-3, 3)
        ax.set_aspect("equal")
        ax.spines[["top", "right"]].set_visible(False)
    figure.colorbar(dots, ax=figure.axes, label="measurement", shrink=0.8)
    figure.savefig(path, dpi=110)


def main() -> None:
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
