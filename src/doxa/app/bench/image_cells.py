"""The cells of the image tables: fit a classifier, score it, show it what it never saw.

A cell of "ood" is one method trained on MNIST or Fashion-MNIST: quality on its test rows, every
score's AUROC, AUPR and FPR95 against three other sets, and, for MNIST, the sweep over rotations.
A cell of "cifar" is the same on the CIFAR-10 subset, against patches of street scenes, with nine
kinds of corruption at five severities.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from doxa.app.bench.cells import Result
from doxa.app.bench.clock import wait, warm_up
from doxa.app.bench.image_methods import find
from doxa.app.bench.image_settings import Settings, settings
from doxa.app.bench.images import Images, load_images
from doxa.app.bench.last_layer import OnFeatures, closeness_to
from doxa.evaluate.ood import FeatureDensity, ood_metrics, ood_scores
from doxa.evaluate.shifts import SHIFTS, sweep
from doxa.evaluate.streaming import Streaming

ANGLES = tuple(range(0, 181, 15))
ROWS = 1000  # predicted at a time
SCORES = ("msp", "entropy", "mutual_information", "energy", "mahalanobis", "density", "knn")


def ood_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full",
) -> Result:  # fmt: skip
    """One method on "mnist" or "fashion_mnist"."""
    s = settings("ood", scale)
    result, posterior, data = fitted_and_scored(folder, name, method, s, seed, device)
    if name == "mnist":
        x, y = data.x_test[: s.sweep_rows], data.y_test[: s.sweep_rows]
        n = s.sweep_samples if find(method).draws else None
        result["rotation"] = sweep(posterior, x, y, "rotation", ANGLES, n=n)
    return result


def cifar_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full", table: str = "cifar",
) -> Result:  # fmt: skip
    """One method on "cifar10", with the network of a table."""
    s = settings(table, scale)
    result, posterior, data = fitted_and_scored(folder, name, method, s, seed, device)
    x, y = data.x_test[: s.sweep_rows], data.y_test[: s.sweep_rows]
    n = s.sweep_samples if find(method).draws else None
    result["corrupted"] = {shift: sweep(posterior, x, y, shift, n=n) for shift in SHIFTS}
    return result


def fitted_and_scored(
    folder: str | Path, name: str, method: str, s: Settings, seed: int, device: str
) -> tuple[Result, Any, Images]:
    """What every cell has; the posterior and the data, for what is special to a table."""
    protocol = find(method)
    data = load_images(folder, name, s.train_rows, s.test_rows, device)
    warm_up(device)
    start = time.perf_counter()
    posterior = protocol.fit(data, s, seed)
    wait(device)
    fitted = time.perf_counter() - start
    n = s.samples if protocol.draws else None
    choice = getattr(posterior, "metadata", {}).get("choice", {"seconds": 0.0})
    result = {
        "protocol": protocol.words.format(**asdict(s)),
        "settings": asdict(s),
        "rows": [len(data.x), len(data.x_test)],
        "scores": quality(posterior, data.x_test, data.y_test, n),
        "ood": strangeness(posterior, data, n),
        "status": str(posterior.status),
        "reason": posterior.status.reason,
        "fit_seconds": fitted - choice["seconds"],
        "choice": choice,
    }
    wait(device)
    result["predict_seconds"] = time.perf_counter() - start - fitted
    if isinstance(posterior, OnFeatures):
        result["closeness"] = closeness_to(
            posterior, data.x, data.y, data.x_test, s.samples, s.sweep_rows
        )
    return result, posterior, data


def quality(posterior: Any, x: Tensor, y: Tensor, n: int | None) -> dict[str, float]:
    """The usual metrics, a block of rows at a time."""
    stream = Streaming()
    for start in range(0, len(x), ROWS):
        rows = slice(start, start + ROWS)
        stream.update(posterior.predict(x[rows], n), y[rows])
    return stream.result()


def strangeness(posterior: Any, data: Images, n: int | None) -> Result:
    """{other set: {score: AUROC, AUPR and FPR95}}. A single function has no mutual information, a
    closed form no energy, and they get no number for it."""
    density = FeatureDensity.of(posterior, (data.x, data.y))
    p = posterior.predict(data.x_test[:2], n)
    names = list(SCORES)
    if not hasattr(p, "samples"):
        names.remove("energy")
    if not hasattr(p, "mutual_information") or len(p.weights) == 1:
        names.remove("mutual_information")
    inside = ood_scores(posterior, data.x_test, density, names, batch=ROWS, n=n)
    found: Result = {}
    for other, x in data.strangers.items():
        outside = ood_scores(posterior, x, density, names, batch=ROWS, n=n)
        found[other] = {name: ood_metrics(inside[name], outside[name]) for name in names}
    return found
