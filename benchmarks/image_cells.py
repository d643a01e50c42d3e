"""The cells of the image tables: fit a classifier, score it, and test out-of-distribution inputs.

A cell of "ood" is one method trained on MNIST or Fashion-MNIST: quality on its test rows, AUROC,
AUPR and FPR95 of every score against three other sets, and, for MNIST, the sweep over rotations. A
cell of "cifar" is the same on the CIFAR-10 subset, against patches of street scenes, with nine
kinds of corruption at five severities.

"mnist" has a fully connected network, 784-400-400-10, as Blundell et al. (2015) and others had:
pixels from 0 to 1, Adam with a cosine schedule, all 60,000 training rows. A cell is one method with
three seeds side by side. The prior of mean-field and MNF, and the width that q starts with, are
chosen by the last sixth of the training rows, with a third of the epochs and one seed; the rest is
fixed.

"reference" trains a LeNet on so few images that full-data chains of all weights are affordable, and
keeps the class probabilities at test rows, to compare methods with the chains.

This module is a part of `python -m benchmarks.images`.
"""

from __future__ import annotations

import base64
import itertools
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa
from benchmarks.image_data import Images, Settings, load_images, settings, wait, warm_up
from benchmarks.image_methods import PROTOCOLS, OnFeatures, closeness_to, find, run
from doxa.app.bench.cells import Result
from doxa.errors import MethodError
from doxa.evaluate.ood import FeatureDensity, ood_metrics, ood_scores
from doxa.evaluate.shifts import SHIFTS, sweep
from doxa.evaluate.streaming import Streaming

ANGLES = tuple(range(0, 181, 15))
ROWS = 1000  # predicted at a time
SCORES = ("msp", "entropy", "mutual_information", "energy", "mahalanobis", "density", "knn")
CHAINS = "hmc-all"  # the row that the others are compared with
KEPT_ROWS = 1000  # test rows whose probabilities are kept
_LEVELS = 65535
# Tried, by the name of the row: the prior; and the width that q starts with.
PRIORS = {
    "mnf": (doxa.Normal(0.1), doxa.Normal(1.0)),
    "mean-field": (doxa.Normal(0.1), doxa.Normal(1.0)),
    "mean-field-mixture": (
        doxa.ScaleMixture(0.5, 1.0, 0.0025), doxa.ScaleMixture(0.25, 0.37, 0.0025)
    ),
}  # fmt: skip
FIRST_WIDTHS = (0.001, 0.01)

Choice = tuple[Any, float]

_CHOSEN = "and a first width of .001 or .01, by the last sixth of the training rows"
SAME = ("map", "deep-ensemble", "mc-dropout", "concrete-dropout", "rank1", "ivon", "swag")
DESCRIPTIONS = {
    "mnf": f"T = 1, {{samples}} samples; prior N(0, .1²) or N(0, 1), {_CHOSEN}",
    "mean-field": f"T = 1, {{samples}} samples; prior N(0, .1²) or N(0, 1), {_CHOSEN}",
    "mean-field-mixture": (
        "T = 1, {samples} samples; prior half N(0, 1), or a quarter N(0, .37²), the rest N(0, "
        f".0025²), {_CHOSEN}"
    ),
}
MNIST_METHODS = (*SAME, *DESCRIPTIONS)
# Errors in %, of two hidden layers: 400 to 1200 units.
MNIST_PUBLISHED = {
    "one network": 1.58, "Bayes by Backprop, Gaussian": 1.8, "Bayes by Backprop, mixture": 1.2,
    "MC dropout": 1.35, "Bayes by Backprop, mixture, reproduced by others": 2.38,
}  # fmt: skip


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
        "protocol": protocol.description.format(**asdict(s)),
        "settings": asdict(s),
        "rows": [len(data.x), len(data.x_test)],
        "scores": quality(posterior, data.x_test, data.y_test, n),
        "ood": ood_quality(posterior, data, n),
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


def ood_quality(posterior: Any, data: Images, n: int | None) -> Result:
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
    for other, x in data.outside.items():
        outside = ood_scores(posterior, x, density, names, batch=ROWS, n=n)
        found[other] = {name: ood_metrics(inside[name], outside[name]) for name in names}
    return found


def reference_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full",
) -> Result:  # fmt: skip
    """One method on a few images of "fashion_mnist", with its probabilities at test rows."""
    s = settings("reference", scale)
    result, posterior, data = fitted_and_scored(folder, name, method, s, seed, device)
    n = s.samples if find(method).draws else None
    result["probs"] = packed(posterior.predict(data.x_test[:KEPT_ROWS], n).probs)
    return result


def packed(probs: Tensor) -> dict[str, Any]:
    """As text, in steps of 1/65535."""
    steps = np.rint(_LEVELS * probs.double().cpu().numpy()).astype("<u2")
    text = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()
    return {"shape": list(probs.shape), "text": text}


def unpacked(stored: Mapping[str, Any]) -> Tensor:
    """[rows, classes] in float64, each row adding up to one."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(stored["text"])), "<u2")
    steps = torch.from_numpy(raw.astype(np.float64)).reshape(stored["shape"])
    return steps / steps.sum(1, keepdim=True)


def starting(method: str, width: float) -> doxa.MeanField | doxa.MNF:
    """The method of a row, with the width that q starts with."""
    return (doxa.MNF if method == "mnf" else doxa.MeanField)(initial_std=width)


def choose(data: Images, s: Settings, seed: int, name: str) -> Choice:
    """The prior and first width under which held-out rows are predicted best."""
    cut = len(data.x) * 5 // 6
    kept = replace(data, x=data.x[:cut], y=data.y[:cut])
    found: dict[Choice, float] = {}
    for prior, width in itertools.product(PRIORS[name], FIRST_WIDTHS):
        method = starting(name, width)
        tried = run(kept, replace(s, seeds=1), seed, method, prior=prior, length=1 / 3)
        scores = quality(tried, data.x[cut:], data.y[cut:], s.samples)
        found[prior, width] = scores["log_likelihood"]
    return max(found, key=lambda choice: found[choice])


def mnist_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full",
) -> Result:  # fmt: skip
    """One method with all its seeds."""
    if method not in MNIST_METHODS:
        raise MethodError(f"MNIST is run with {', '.join(MNIST_METHODS)}, not {method!r}")
    s = settings("mnist", scale)
    data = load_images(folder, name, s.train_rows, s.test_rows, device, outside=False)
    data = replace(data, x=data.x.flatten(1), x_test=data.x_test.flatten(1))
    choice = choose(data, s, seed, method) if method in PRIORS else None
    warm_up(device)
    start = time.perf_counter()
    if choice is None:
        description, draws = PROTOCOLS[method].description, PROTOCOLS[method].draws
        fits = PROTOCOLS[method].fit(data, s, seed)
    else:
        description, draws = DESCRIPTIONS[method], True
        fits = run(data, s, seed, starting(method, choice[1]), prior=choice[0])
    wait(device)
    fitted = time.perf_counter() - start
    n = s.samples if draws else None
    each = [{"scores": quality(p, data.x_test, data.y_test, n)} for p in fits]
    wait(device)
    return {
        "protocol": description.format(**asdict(s)),
        "settings": asdict(s),
        "rows": [len(data.x), len(data.x_test)],
        "seeds": each,
        "chosen": None if choice is None else {"prior": repr(choice[0]), "width": choice[1]},
        "status": str(fits[0].status),
        "reason": fits[0].status.reason,
        "fit_seconds": fitted,
        "predict_seconds": time.perf_counter() - start - fitted,
    }
