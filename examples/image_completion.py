"""Image completion: a neural process predicts the pixels of a digit from some of them.

    python examples/image_completion.py [figure.png [FOLDER]]

An image is a task: the position of a pixel is x, its value y. The file mnist.npz is in the folder
of the environment variable DOXA_DATA. The columns are the digit, its context (10, 50 and 300
pixels; unknown pixels are blue), the mean, three draws, and the standard deviation. A conditional
process draws pixels independently, so its draws are noise around the mean; a process with a latent
variable draws whole images.

Without FOLDER, a small convolutional process is trained for a minute, which is far from
convergence. FOLDER holds the results of longer training on a GPU, saved by
`benchmarks/neural_processes.py`; they are then drawn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa
from doxa.data import TaskSampler
from doxa.data.tasks import pixel_tasks, places

CONTEXTS = (10, 50, 300)
Shown = dict[int, list[Tensor]]  # by the size of the context: mask, mean, draws, spread


def digits(part: str) -> Tensor:
    """[N, 28, 28], from 0 to 1."""
    with np.load(Path(os.environ.get("DOXA_DATA", "data")) / "mnist.npz") as file:
        return torch.tensor(file[part]).reshape(-1, 28, 28) / 255


def trained(steps: int) -> Any:
    method = doxa.ConvCNP(width=16, layers=4, kernel_size=5, density=1.0)
    data = TaskSampler(pixel_tasks(digits("x_train"), 250, (3, 200)), look=16)
    return doxa.fit(None, data, method, steps=steps, batch_size=4, lr=2e-3)


def completed(posterior: Any, images: Tensor) -> Shown:
    """The predictions for some images [B, 28, 28] from contexts of each size."""
    flat, x = images.reshape(-1, 784, 1), places(28, 28).expand(len(images), -1, -1)
    order = torch.rand(len(images), 784, generator=torch.Generator().manual_seed(0))
    found: Shown = {}
    for size in CONTEXTS:
        mask = (order.argsort(1).argsort(1) < size).float()
        seen = mask.unsqueeze(2)
        given = {"context_x": x * seen, "context_y": flat * seen, "context": mask, "target_x": x}
        p = posterior.predict(given)
        parts = (mask, p.mean, p.sample(3), p.std)
        found[size] = [part.reshape(-1, len(images), 784) for part in parts]
    return found


def draw(shown: dict[str, tuple[Tensor, Shown]], path: Path, which: int = 0) -> None:
    """Draw one digit, with a block of rows for each method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = ["digit", "context", "mean", "draw", "draw", "draw", "std"]
    rows = [(name, size) for name in shown for size in CONTEXTS]
    figure = Figure(figsize=(7.6, 1.1 * len(rows) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(names), squeeze=False)
    for line, (name, size) in zip(grid, rows, strict=True):
        images, found = shown[name]
        mask, mean, draws, spread = (part[:, which].reshape(-1, 28, 28) for part in found[size])
        digit = images[which].reshape(28, 28)
        coloured = torch.stack([digit, digit, digit], 2)
        coloured[mask[0] == 0] = torch.tensor([0.16, 0.44, 0.59])
        for axes, title, picture in zip(
            line, names, (digit, coloured, mean[0], *draws, spread[0]), strict=True
        ):
            top = 0.5 if title == "std" else 1.0
            axes.imshow(picture.clamp(0, 1), cmap="gray", vmin=0, vmax=top)
            axes.set(xticks=[], yticks=[], title=title if (name, size) == rows[0] else None)
        line[0].set_ylabel(f"{name}\n{size}", fontsize=8)
    figure.savefig(path, dpi=150)


def main(path: Path, folder: Path | None = None, steps: int = 400) -> None:
    shown: dict[str, tuple[Tensor, Shown]] = {}
    if folder is None:
        images = digits("x_test")[:4]
        shown["convcnp"] = images, completed(trained(steps), images)
    else:
        for file in sorted(folder.glob("mnist-*.pt")):
            saved = torch.load(file, weights_only=True)
            shown[file.stem.removeprefix("mnist-")] = saved["images"], saved["shown"]
    draw(shown, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    main(*(given or [Path("image_completion.png")]))
