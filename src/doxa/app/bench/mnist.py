"""MNIST with a fully connected network, 784-400-400-10, as Blundell et al. (2015) and others had.

Pixels from 0 to 1, Adam with a cosine schedule, all 60,000 training rows. A cell is one method with
three seeds side by side. The prior of mean-field and MNF, and the width that q starts with, are
chosen by the last sixth of the training rows, with a third of the epochs and one seed; the rest is
fixed.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import doxa
from doxa.app.bench.cells import Result
from doxa.app.bench.clock import wait, warm_up
from doxa.app.bench.image_cells import quality
from doxa.app.bench.image_methods import PROTOCOLS, run
from doxa.app.bench.image_settings import Settings, settings
from doxa.app.bench.images import Images, load_images
from doxa.errors import MethodError

# Tried, by the name of the row: the prior; and the width that q starts with.
PRIORS = {
    "mnf": (doxa.Normal(0.1), doxa.Normal(1.0)),
    "mean-field": (doxa.Normal(0.1), doxa.Normal(1.0)),
    "mean-field-mixture": (
        doxa.ScaleMixture(0.5, 1.0, 0.0025), doxa.ScaleMixture(0.25, 0.37, 0.0025)
    ),
}  # fmt: skip
WIDTHS = (0.001, 0.01)

Choice = tuple[Any, float]


def starting(method: str, width: float) -> doxa.MeanField | doxa.MNF:
    """The method of a row, with the width that q starts with."""
    return (doxa.MNF if method == "mnf" else doxa.MeanField)(initial_std=width)


def choose(data: Images, s: Settings, seed: int, name: str) -> Choice:
    """The prior and first width under which held-out rows are predicted best."""
    cut = len(data.x) * 5 // 6
    kept = replace(data, x=data.x[:cut], y=data.y[:cut])
    found: dict[Choice, float] = {}
    for prior, width in itertools.product(PRIORS[name], WIDTHS):
        method = starting(name, width)
        tried = run(kept, replace(s, seeds=1), seed, method, prior=prior, length=1 / 3)
        scores = quality(tried, data.x[cut:], data.y[cut:], s.samples)
        found[prior, width] = scores["log_likelihood"]
    return max(found, key=lambda choice: found[choice])


_CHOSEN = "and a first width of .001 or .01, by the last sixth of the training rows"
SAME = ("map", "deep-ensemble", "mc-dropout", "concrete-dropout", "rank1", "ivon", "swag")
WORDS = {
    "mnf": f"T = 1, {{samples}} samples; prior N(0, .1²) or N(0, 1), {_CHOSEN}",
    "mean-field": f"T = 1, {{samples}} samples; prior N(0, .1²) or N(0, 1), {_CHOSEN}",
    "mean-field-mixture": (
        "T = 1, {samples} samples; prior half N(0, 1), or a quarter N(0, .37²), the rest N(0, "
        f".0025²), {_CHOSEN}"
    ),
}
METHODS = (*SAME, *WORDS)
# Errors in %, of two hidden layers: 400 to 1200 units.
PUBLISHED = {
    "one network": 1.58, "Bayes by Backprop, Gaussian": 1.8, "Bayes by Backprop, mixture": 1.2,
    "MC dropout": 1.35, "Bayes by Backprop, mixture, reproduced by others": 2.38,
}  # fmt: skip


def mnist_cell(
    folder: str | Path, name: str, method: str, seed: int = 0, device: str = "cpu",
    scale: str = "full",
) -> Result:  # fmt: skip
    """One method with all its seeds."""
    if method not in METHODS:
        raise MethodError(f"MNIST is run with {', '.join(METHODS)}, not {method!r}")
    s = settings("mnist", scale)
    data = load_images(folder, name, s.train_rows, s.test_rows, device, strangers=False)
    data = replace(data, x=data.x.flatten(1), x_test=data.x_test.flatten(1))
    choice = choose(data, s, seed, method) if method in PRIORS else None
    warm_up(device)
    start = time.perf_counter()
    if choice is None:
        words, draws = PROTOCOLS[method].words, PROTOCOLS[method].draws
        sweep = PROTOCOLS[method].fit(data, s, seed)
    else:
        words, draws = WORDS[method], True
        sweep = run(data, s, seed, starting(method, choice[1]), prior=choice[0])
    wait(device)
    fitted = time.perf_counter() - start
    n = s.samples if draws else None
    each = [{"scores": quality(p, data.x_test, data.y_test, n)} for p in sweep]
    wait(device)
    return {
        "protocol": words.format(**asdict(s)),
        "settings": asdict(s),
        "rows": [len(data.x), len(data.x_test)],
        "seeds": each,
        "chosen": None if choice is None else {"prior": repr(choice[0]), "width": choice[1]},
        "status": str(sweep[0].status),
        "reason": sweep[0].status.reason,
        "fit_seconds": fitted,
        "predict_seconds": time.perf_counter() - start - fitted,
    }
