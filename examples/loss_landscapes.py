"""Members of an ensemble end in different functions; draws around one mode stay near it.

    python examples/loss_landscapes.py [figure.png]

After Fort, Hu & Lakshminarayanan (2019). Left: the predictions of four networks on their way from
different starts, in the plane that keeps their distances best (classical multidimensional scaling
of Hellinger distances), with draws of SWAG and of MC dropout, each around one mode. Right: the
share of test rows on which two functions predict different classes, relative to their error rate.
Handwritten digits of scikit-learn, a deep, narrow network; under a minute on one core.
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import doxa

MEMBERS, DRAWS, ROWS = 4, 12, 900
STEPS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
COLOURS = {"SWAG": "#2fa4a8", "dropout": "#c8553d"}
BLUES = ("#01497c", "#3f8fc4", "#8a5fa8", "#5c6b7a")


def main(path: str = "loss_landscapes.png") -> None:
    x, y, x_test, y_test = digits()
    way = trajectories(x, y, x_test)  # [time, member, rows, classes]
    around = {
        "SWAG": draws(doxa.SWAG(average=0.5, cycle=20), x, y, x_test),
        "dropout": draws(doxa.MCDropout(p=0.05), x, y, x_test),
    }
    every = torch.cat([way.flatten(0, 1), *around.values()])
    places = scaled(hellinger(every))
    classes = {"ensemble": way[-1], **around}
    labels = torch.cat([p[:MEMBERS] for p in classes.values()]).argmax(-1)
    wrong = (labels != y_test).double().mean(1)
    share = disagreement(labels) / (0.5 * (wrong + wrong.unsqueeze(1)))
    off = ~torch.eye(MEMBERS, dtype=torch.bool)
    for i, name in enumerate(classes):
        own = slice(i * MEMBERS, (i + 1) * MEMBERS)
        print(
            f"{name:9s} wrong on {100 * float(wrong[own].mean()):.1f} % of the test rows, "
            f"two differ on {float(share[own, own][off].mean()):.2f} times as many"
        )
    draw(places, share, list(classes), path)
    print(f"figure: {path}")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels from 0 to 1; the first rows to train on, the others to test."""
    stored = load_digits()
    x, y = torch.tensor(stored.data, dtype=torch.float32) / 16, torch.tensor(stored.target)
    return x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:]


def net() -> torch.nn.Module:
    return doxa.nets.mlp(64, 10, hidden=(20, 20, 20, 20))


def fitted(method: Any, x: Tensor, y: Tensor, **options: Any) -> Any:
    return doxa.fit(
        net(), (x, y), method, likelihood="categorical", batch_size=50, lr=1e-2,
        schedule="constant", validation=None, progress=False, **options,
    )  # fmt: skip


def trajectories(x: Tensor, y: Tensor, x_test: Tensor) -> Tensor:
    """Predictions after more and more steps. A fit of t steps is the beginning of a longer one with
    the same seed and a constant rate, since its noise is a function of seed and step."""
    way = []
    for steps in STEPS:
        posterior = fitted("deep-ensemble", x, y, members=MEMBERS, steps=steps)
        way.append(posterior.predict(x_test).samples.softmax(-1))
    return torch.stack(way)


def draws(method: Any, x: Tensor, y: Tensor, x_test: Tensor) -> Tensor:
    """Functions from one posterior around one mode, [draws, rows, classes]."""
    posterior = fitted(method, x, y, steps=STEPS[-1])
    return posterior.predict(x_test, DRAWS).samples.softmax(-1)


def hellinger(p: Tensor) -> Tensor:
    """Distances between functions [S, rows, classes]: √(1 − Σ√pq), root mean square over rows."""
    root = p.double().sqrt().flatten(1)
    return torch.cdist(root, root) / (2 * p.shape[1]) ** 0.5


def scaled(distance: Tensor, dimensions: int = 2) -> Tensor:
    """Classical multidimensional scaling (Torgerson, 1952): B = −½ J D² J, J the centring; the
    coordinates are its leading eigenvectors, times the roots of their eigenvalues."""
    centred = distance.square()
    centred = centred - centred.mean(0) - centred.mean(1, keepdim=True) + centred.mean()
    values, vectors = torch.linalg.eigh(-0.5 * centred)
    return vectors[:, -dimensions:].flip(1) * values[-dimensions:].flip(0).clamp(min=0).sqrt()


def disagreement(labels: Tensor) -> Tensor:
    """The share of rows on which two functions predict different classes, [S, S]."""
    return (labels.unsqueeze(0) != labels.unsqueeze(1)).double().mean(2)


def draw(places: Tensor, share: Tensor, names: list[str], path: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), constrained_layout=True)
    count = len(STEPS) * MEMBERS
    way = places[:count].unflatten(0, (len(STEPS), MEMBERS))
    for m in range(MEMBERS):
        left.plot(*way[:, m].T, "-", color=BLUES[m], lw=1.2, alpha=0.8)
        left.scatter(*way[:-1, m].T, s=8, color=BLUES[m])
        left.scatter(*way[-1, m], s=90, marker="*", color=BLUES[m], zorder=3,
                     label="a member at its end" if m == 0 else None)  # fmt: skip
    left.scatter(
        *way[0].T,
        s=40,
        facecolors="white",
        edgecolors="#22303c",
        zorder=3,
        label=f"after {STEPS[0]} steps",
    )
    for i, name in enumerate(names[1:]):
        own = places[count + i * DRAWS : count + (i + 1) * DRAWS]
        left.scatter(*own.T, s=18, alpha=0.8, color=COLOURS[name], label=f"{name}, draws")
    left.set(title="predictions, by their distances", xticks=[], yticks=[])
    left.legend(frameon=False, fontsize=8)
    shown = right.imshow(share, cmap="magma", vmin=0)
    middle = [(i + 0.5) * MEMBERS - 0.5 for i in range(len(names))]
    right.set_xticks(middle, names)
    right.set_yticks(middle, names, rotation=90, va="center")
    for i in range(1, len(names)):
        right.axhline(i * MEMBERS - 0.5, color="white", lw=1)
        right.axvline(i * MEMBERS - 0.5, color="white", lw=1)
    right.set(title="rows on which two functions disagree")
    figure.colorbar(shown, ax=right, shrink=0.85, label="in units of their error")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:2])
