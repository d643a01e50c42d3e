"""CamVid: a class for every pixel of a street scene, with its uncertainty (Kendall et al. 2015).

A small U-Net on 367 frames of 72 × 96 pixels, 11 classes; unlabelled pixels count nowhere, in the
loss or in a metric. Epistemic uncertainty is the mutual information of each pixel's class and the
function. A cell holds the numbers of one method and, for the three panels of the figure (input,
prediction, epistemic uncertainty), its predicted classes and mutual information on a few test
frames. The table is made by

    python -m benchmarks.images camvid --device cuda
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
from torch import Tensor, nn
from torch.nn import functional as F

import doxa
from benchmarks.image_data import open_set, to_pixels, wait
from benchmarks.image_tables import INK, ImageTable, blank_figure
from doxa.app.bench.cells import Result, Store, Table, mean_of
from doxa.app.bench.uci import data_folder
from doxa.errors import DataError, MethodError
from doxa.evaluate import Segmentation, Streaming, segmentation
from doxa.nets import register_net

UNLABELLED = 11
CLASSES = 11
METHODS = ("map", "deep-ensemble", "mc-dropout")
Array = np.ndarray[Any, Any]
_WHERE = ("right", "wrong")
# CamVid's classes in their customary colours, in the order of their numbers.
PALETTE = np.array(
    [
        (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
        (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192), (0, 0, 0),
    ],
    dtype=np.uint8,
)  # fmt: skip


@register_net("unet")
def unet(inputs: int = 3, outputs: int = 11, width: int = 24, dropout: float = 0.0) -> nn.Module:
    """A small U-Net (Ronneberger et al. 2015) with GroupNorm: two halvings, two doublings.

    `dropout` drops whole channels after the deepest block and the one that follows it, as Bayesian
    SegNet (Kendall et al. 2015) does in its centre.
    """
    return UNet(inputs, outputs, width, dropout)


class UNet(nn.Module):
    """[N, inputs, H, W] to logits [N, outputs, H, W]; H and W are multiples of 4."""

    def __init__(self, inputs: int, outputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.down1 = _block(inputs, width)
        self.down2 = _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.up2 = _block(6 * width, 2 * width)
        self.up1 = _block(3 * width, width)
        self.drop_bottom: nn.Module = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.drop_up: nn.Module = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        middle = self.down2(F.max_pool2d(fine, 2))
        h = self.drop_bottom(self.bottom(F.max_pool2d(middle, 2)))
        h = self.drop_up(self.up2(torch.cat([_doubled(h), middle], -3)))
        return self.head(self.up1(torch.cat([_doubled(h), fine], -3)))


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


@dataclass(frozen=True)
class Scenes:
    """CamVid: street scenes [N, 3, 72, 96] and a class for every pixel [N, 72, 96]."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]


def load_scenes(
    folder: str | Path,
    train_rows: int | None = None,
    test_rows: int | None = None,
    device: Any = "cpu",
) -> Scenes:
    """Evenly spaced frames if only some are used, because neighbours are similar."""
    with open_set(folder, "camvid") as stored:
        parts = {}
        for part, rows in (("train", train_rows), ("test", test_rows)):
            chosen = _spread(len(stored[f"x_{part}"]), rows)
            parts[f"x_{part}"] = to_pixels(stored[f"x_{part}"][chosen]).to(device)
            parts[f"y_{part}"] = torch.tensor(stored[f"y_{part}"][chosen]).long().to(device)
        names = tuple(str(name) for name in stored["class_names"])
    return Scenes(parts["x_train"], parts["y_train"], parts["x_test"], parts["y_test"], names)


def _spread(total: int, wanted: int | None) -> np.ndarray[Any, Any]:
    if wanted is None or wanted >= total:
        return np.arange(total)
    return np.arange(wanted) * total // wanted


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
    numbers, uncertainty = score(posterior, scenes, s)
    shown = panels(posterior, scenes, s)
    return {
        "protocol": description(method, s),
        "settings": asdict(s),
        "rows": [len(scenes.x), len(scenes.x_test)],
        "scores": numbers,
        "doubt": uncertainty,
        "status": str(posterior.status),
        "fit_seconds": fitted,
        "predict_seconds": time.perf_counter() - start - fitted,
        "panels": [pack(panel) for panel in shown],
    }


def description(method: str, s: Settings) -> str:
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
    description(method, s)  # refuses what is not run here
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
    """Metrics of the labelled pixels; mean uncertainty where the prediction is right and wrong."""
    stream, total = Streaming(), None
    sums = torch.zeros(2, 3, dtype=torch.float64)  # right and wrong: entropy, MI, pixels
    for start in range(0, len(scenes.x_test), s.rows):
        rows = slice(start, start + s.rows)
        y = scenes.y_test[rows]
        p = posterior.predict(scenes.x_test[rows], _samples(posterior, s))
        stream.update(p, y)
        part = segmentation(p, y, ignore_index=UNLABELLED)
        total = part if total is None else total + part
        both = torch.stack([p.entropy, p.mutual_information, torch.ones_like(p.entropy)])
        hit = p.probs.argmax(1) == y
        for k, where in enumerate((hit, ~hit)):
            counted = where & (y != UNLABELLED)
            sums[k] += both[:, counted].double().sum(1).cpu()
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
    predicted, information = p.probs.argmax(1).cpu().numpy(), p.mutual_information.cpu().numpy()
    return [Panel(f, a, b) for f, a, b in zip(chosen, predicted, information, strict=True)]


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


def scene_figure(images: Tensor, panels: Sequence[Panel], path: Path) -> Path:
    """Input, prediction, epistemic uncertainty: one row per frame, one scale for all maps."""
    figure = blank_figure((9.6, 2.15 * len(panels) + 0.3))
    axes = figure.subplots(len(panels), 3, squeeze=False)
    top = max(float(np.quantile(panel.epistemic, 0.995)) for panel in panels)
    titles = ("input", "prediction", "epistemic uncertainty")
    for row, image, panel in zip(axes, images, panels, strict=True):
        row[0].imshow(image.permute(1, 2, 0).cpu().numpy())
        row[1].imshow(coloured(panel.predicted))
        drawn = row[2].imshow(panel.epistemic, cmap="inferno", vmin=0.0, vmax=top)
        for ax in row:
            ax.set_axis_off()
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=12, color=INK)
    bar = figure.colorbar(drawn, ax=axes[:, 2], shrink=0.7, label="mutual information (nats)")
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def coloured(labels: Array) -> Array:
    """Classes [H, W] as colours [H, W, 3]."""
    return PALETTE[labels.astype(int)]


@dataclass(frozen=True)
class SceneTable(ImageTable):
    """Pixels instead of rows."""

    def tables(self, store: Store) -> list[Table]:
        cells = {method: own for (_, method), own in self.cells(store).items()}
        columns = ["mean IoU", "pixel accuracy %", "NLL", "Brier", "ECE", "entropy right / wrong",
                   "MI right / wrong", "fit s", "predict s"]  # fmt: skip
        table = Table(f"{self.title}: labelled test pixels", ["method", *columns])
        for method, own in cells.items():
            results = [c["result"] for c in own]
            of = lambda key, results=results: [r["scores"][key] for r in results]  # noqa: E731
            accuracy = [100 * value for value in of("accuracy")]
            uncertainty = [
                " / ".join(mean_of([r["doubt"][w][kind] for r in results], 3) for w in _WHERE)
                for kind in ("entropy", "mutual_information")
            ]
            seconds = [mean_of([r[f"{p}_seconds"] for r in results], 1) for p in ("fit", "predict")]
            table.rows.append(
                [
                    method, mean_of(of("mean_iou"), 3), mean_of(accuracy, 2),
                    mean_of([-v for v in of("log_likelihood")], 3), mean_of(of("brier"), 3),
                    mean_of(of("ece"), 3), *uncertainty, *seconds,
                ]
            )  # fmt: skip
        table.notes += [f"{m}: {own[0]['result']['protocol']}" for m, own in cells.items()]
        table.notes.append("367 frames of 72 × 96 pixels to train on, 233 to test on, 11 classes")
        return [table] if table.rows else []

    def figures(self, store: Store, folder: Path) -> list[Path]:
        """The panels of MC dropout, where the frames are at hand."""
        cells = {method: own[0]["result"] for (_, method), own in self.cells(store).items()}
        chosen = cells.get("mc-dropout") or next(iter(cells.values()), None)
        if chosen is None or chosen["settings"].get("test_rows") is not None:
            return []
        try:
            data = data_folder(None)
        except DataError:
            return []
        panels = [unpack(panel) for panel in chosen["panels"]]
        images, _ = shown_frames(data, [panel.frame for panel in panels])
        return [scene_figure(images, panels, folder / "camvid.png")]


CAMVID = SceneTable("camvid", "CamVid", ("camvid",), METHODS, camvid_cell)
