"""CamVid: a class for every pixel of a street scene, and how sure of it (Kendall et al. 2015).

A small U-Net on 367 frames of 72 × 96 pixels, 11 classes; unlabelled pixels count nowhere, in the
loss or in a metric. Epistemic uncertainty is the mutual information of each pixel's class and the
function. A cell holds the numbers of one method and, for the lecture's three panels, its predicted
classes and mutual information on a few test frames.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa
from doxa.app.bench.cells import Result
from doxa.app.bench.clock import wait
from doxa.app.bench.image_nets import unet
from doxa.app.bench.images import Scenes, load_scenes
from doxa.errors import MethodError
from doxa.evaluate import Segmentation, Streaming, segmentation

UNLABELLED = 11
CLASSES = 11
METHODS = ("map", "deep-ensemble", "mc-dropout")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """Fixed beforehand; the dropout rate is Bayesian SegNet's."""

    epochs: int = 60
    batch: int = 8
    rate: float = 2e-3
    width: int = 24
    dropout: float = 0.5
    members: int = 5
    samples: int = 50
    rows: int = 16  # predicted at a time
    shown: tuple[int, ...] = (20, 110, 200)  # test frames in the figure
    train_rows: int | None = None
    test_rows: int | None = None


FULL = Settings()
SMALL = Settings(
    epochs=2, batch=4, width=8, members=2, samples=4, rows=4, shown=(0, 3), train_rows=24,
    test_rows=6,
)  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One frame: the predicted class of each pixel, and its mutual information in nats."""

    frame: int
    predicted: Array
    epistemic: Array


def camvid_cell(
    folder: str | Path, name: str = "camvid", method: str = "mc-dropout", seed: int = 0,
    device: str = "cpu", scale: str = "full",
) -> Result:  # fmt: skip
    """Fit one method and score it on the test frames."""
    if scale not in ("full", "small"):
        raise MethodError(f"scale must be 'full' or 'small', not {scale!r}")
    s = FULL if scale == "full" else SMALL
    scenes = load_scenes(folder, s.train_rows, s.test_rows, device)
    start = time.perf_counter()
    posterior = fit(scenes, method, s, seed)
    wait(device)
    fitted = time.perf_counter() - start
    numbers, doubt = score(posterior, scenes, s)
    shown = panels(posterior, scenes, s)
    return {
        "protocol": words(method, s),
        "settings": asdict(s),
        "rows": [len(scenes.x), len(scenes.x_test)],
        "scores": numbers,
        "doubt": doubt,
        "status": str(posterior.status),
        "fit_seconds": fitted,
        "predict_seconds": time.perf_counter() - start - fitted,
        "panels": [pack(panel) for panel in shown],
    }


def words(method: str, s: Settings) -> str:
    how = {
        "map": "one U-Net without dropout",
        "deep-ensemble": f"{s.members} U-Nets without dropout, from different starts",
        "mc-dropout": f"whole channels dropped in the centre with p = {s.dropout}, "
        f"{s.samples} masks",
    }
    if method not in how:
        raise MethodError(f"CamVid is run with {', '.join(METHODS)}, not {method!r}")
    return how[method]


def fit(scenes: Scenes, method: str, s: Settings = FULL, seed: int = 0) -> doxa.Posterior:
    """A posterior over pixel classes."""
    words(method, s)  # refuses what is not run here
    net = unet(3, CLASSES, s.width, s.dropout if method == "mc-dropout" else 0.0)
    likelihood = doxa.Categorical(ignore_index=UNLABELLED)
    members = s.members if method == "deep-ensemble" else 1
    posterior: doxa.Posterior = doxa.fit(
        net, (scenes.x, scenes.y), method, likelihood=likelihood, prior=doxa.Normal(1.0),
        seed=seed, device=scenes.x.device, epochs=s.epochs, batch_size=s.batch, lr=s.rate,
        progress=False, members=members, validation=None,
    )  # fmt: skip
    return posterior


def score(posterior: doxa.Posterior, scenes: Scenes, s: Settings) -> tuple[Result, Result]:
    """Metrics of the labelled pixels, and mean doubt where the prediction is right and wrong."""
    stream, total = Streaming(), None
    sums = torch.zeros(2, 3, dtype=torch.float64)  # right and wrong: entropy, MI, pixels
    for start in range(0, len(scenes.x_test), s.rows):
        rows = slice(start, start + s.rows)
        y = scenes.y_test[rows]
        p = posterior.predict(scenes.x_test[rows], _samples(posterior, s))
        stream.update(p, y)
        part = segmentation(p, y, ignore_index=UNLABELLED)
        total = part if total is None else total + part
        doubt = torch.stack([p.entropy, p.mutual_information, torch.ones_like(p.entropy)])
        hit = p.probs.argmax(1) == y
        for k, where in enumerate((hit, ~hit)):
            counted = where & (y != UNLABELLED)
            sums[k] += doubt[:, counted].double().sum(1).cpu()
    assert isinstance(total, Segmentation)
    means = (sums[:, :2] / sums[:, 2:].clamp_min(1)).tolist()
    named = [dict(zip(("entropy", "mutual_information"), row, strict=True)) for row in means]
    return (
        {"mean_iou": total.mean_iou, **stream.result(), "iou": total.iou.tolist()},
        {"right": named[0], "wrong": named[1]},
    )


def panels(
    posterior: doxa.Posterior, scenes: Scenes, s: Settings = FULL, frames: Sequence[int] = ()
) -> list[Panel]:
    """What the figure shows of some test frames."""
    chosen = list(frames or s.shown)
    p = posterior.predict(scenes.x_test[chosen], _samples(posterior, s))
    predicted, doubt = p.probs.argmax(1).cpu().numpy(), p.mutual_information.cpu().numpy()
    return [Panel(f, a, b) for f, a, b in zip(chosen, predicted, doubt, strict=True)]


def _samples(posterior: doxa.Posterior, s: Settings) -> int | None:
    return s.samples if posterior.kind == "implicit" else None


def pack(panel: Panel) -> Result:
    """As text, small: mutual information in 255 steps of its maximum."""
    top = max(float(panel.epistemic.max()), 1e-12)
    steps = np.rint(255.0 * panel.epistemic / top)
    return {
        "frame": panel.frame,
        "shape": list(panel.predicted.shape),
        "predicted": _text(panel.predicted),
        "epistemic": _text(steps),
        "epistemic_max": top,
    }


def unpack(stored: Result) -> Panel:
    predicted, steps = (_bytes(stored[k], stored["shape"]) for k in ("predicted", "epistemic"))
    return Panel(stored["frame"], predicted, steps / 255.0 * stored["epistemic_max"])


def _text(values: Array) -> str:
    return base64.b64encode(zlib.compress(values.astype(np.uint8).tobytes(), 9)).decode()


def _bytes(text: str, shape: Sequence[int]) -> Array:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(shape)


def shown_frames(folder: str | Path, frames: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Test images and labels of some frames."""
    scenes = load_scenes(folder)
    return scenes.x_test[list(frames)], scenes.y_test[list(frames)]
