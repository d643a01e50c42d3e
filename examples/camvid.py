"""Segmentation of street scenes, with the epistemic uncertainty of every pixel.

    DOXA_DATA=folder python examples/camvid.py [figure.png] [cuda]

The model is a small U-Net whose centre drops whole channels, in training and in prediction: MC
dropout. The three panels are the input, the predicted classes, and the mutual information between
the class of a pixel and the function. It is large at object borders, on rare classes and on
out-of-distribution objects. On a GPU the settings are those of `python -m benchmarks.images camvid`
(two minutes); on a CPU a narrower net is trained for ten epochs (about two minutes).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

# The network, its settings and its scores are those of the benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import scenes


def main(path: str = "camvid.png", device: str = "cpu") -> None:
    folder = os.environ.get("DOXA_DATA")
    if not folder:
        raise SystemExit("set DOXA_DATA to the folder that holds camvid.npz")
    settings = scenes.FULL
    if device == "cpu":
        settings = replace(settings, epochs=10, width=8, dropout=0.2, samples=20)
    street = scenes.load_scenes(folder, device=device)
    posterior = scenes.fit(street, "mc-dropout", settings)
    numbers, uncertainty = scenes.score(posterior, street, settings)
    print(
        f"mean IoU {numbers['mean_iou']:.3f}, pixel accuracy {numbers['accuracy']:.3f}, "
        f"NLL {-numbers['log_likelihood']:.3f}, ECE {numbers['ece']:.3f}"
    )
    for where, values in uncertainty.items():
        print(
            f"where it is {where}: entropy {values['entropy']:.3f}, "
            f"mutual information {values['mutual_information']:.3f}"
        )
    panels = scenes.panels(posterior, street, settings)
    shown = street.x_test[[panel.frame for panel in panels]]
    print(f"figure: {scenes.scene_figure(shown, panels, Path(path))}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
