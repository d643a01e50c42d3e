"""How each method is run on the image classifiers: settings fixed beforehand, none by test rows.

All methods share one network, one prior, N(0, 1) on every weight, and one optimiser: Adam with a
cosine schedule. `hmc` samples the last layer of the MAP network: see `last_layer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.app.bench.image_settings import Settings
from doxa.app.bench.images import Images
from doxa.app.bench.last_layer import OnFeatures, sample_last_layer
from doxa.errors import MethodError

REGRESSION_ONLY = tuple(
    sorted(row.name for row in doxa.methods() if "classification" not in row.tasks)
)


Fit = Callable[[Images, Settings, int], Any]


@dataclass(frozen=True)
class Protocol:
    """What is done, in words that stand under the table, and the doing. `draws`: predictions are
    of as many samples as the settings say, not of all that were kept."""

    words: str
    fit: Fit
    draws: bool = False


def run(
    data: Images,
    s: Settings,
    seed: int,
    method: Any,
    *,
    pieces: int = 1,
    length: float = 1,
    prior: Any = None,
    **options: Any,
) -> Any:
    """A fit with the table's settings; where a method cuts its batches into `pieces`, in batches so
    many times as large, for so many times the epochs. A sweep where there are several seeds."""
    if s.seeds > 1:
        options.setdefault("runs", doxa.Runs(seeds=range(seed, seed + s.seeds)))
    subset = options.pop("subset", "all")
    model = doxa.Model(s.build(data), "categorical", prior or doxa.Normal(1.0), subset)
    asked = {"epochs": length * pieces * s.epochs, "batch_size": pieces * s.batch, "lr": s.rate}
    return doxa.fit(
        model, (data.x, data.y), method, seed=seed, device=data.x.device, progress=False,
        validation=None, **asked | options,
    )  # fmt: skip


def _with(method: Callable[[Images, Settings], Any], members: bool = False, **how: Any) -> Fit:
    """`method(data, settings)` fitted by `run`, with as many members as the settings say."""

    def fit(data: Images, s: Settings, seed: int) -> Any:
        more = {"members": s.members} if members else {}
        return run(data, s, seed, method(data, s), **how, **more)

    return fit


def _chosen(method: Any, grid: Mapping[str, Sequence[Any]], **how: Any) -> Fit:
    """Where the settings say so, the point of the grid under which the last fifth of the training
    rows is predicted best by a fit to the others, all points side by side; then all rows."""

    def fit(data: Images, s: Settings, seed: int) -> Any:
        if not s.choose:
            return run(data, s, seed, method, **how)
        start, cut = time.perf_counter(), len(data.x) * 4 // 5
        kept = replace(data, x=data.x[:cut], y=data.y[:cut])
        tried = run(kept, s, seed, method, **how | {"runs": doxa.Runs(grid=grid, seeds=[seed])})
        scores = [_score(p, data.x[cut:], data.y[cut:], s.sweep_samples) for p in tried]
        best, _ = max(zip(tried.specs, scores, strict=True), key=lambda pair: pair[1])
        choice = {
            "tried": [f"{dict(spec.hyper)}: {score:.4f}"
                      for spec, score in zip(tried.specs, scores, strict=True)],
            "chosen": str(dict(best.hyper)), "seconds": time.perf_counter() - start,
        }  # fmt: skip
        one = doxa.Runs(grid={name: [value] for name, value in best.hyper.items()})
        posterior = run(data, s, seed, method, **how | {"runs": one})[0]
        posterior.record.metadata["choice"] = choice
        return posterior

    return fit


def _score(posterior: Any, x: Tensor, y: Tensor, n: int) -> float:
    """The mean log predictive density, 500 rows at a time."""
    parts = [posterior.predict(x[i : i + 500], n).log_prob(y[i : i + 500])
             for i in range(0, len(x), 500)]  # fmt: skip
    return float(torch.cat(parts).mean())


def _swag(data: Images, s: Settings) -> doxa.SWAG:
    """Half of the epochs to train, half for the trajectory, a point at the end of each; the last
    is short of one where rows do not fill its batches."""
    steps = -(-len(data.x) // s.batch)
    rank = min(20, s.epochs - 1) if s.epochs > 2 else 0
    return doxa.SWAG(share=0.5, cycle=steps, rank=rank, samples=s.samples)


def _last_layer(structure: str, link: str = "samples") -> Fit:
    """About the mode, as it is published."""
    method = doxa.Laplace(structure=structure, link=link, centre="mode")
    return _with(lambda data, s: method, subset="last_layer")


def _chains(s: Settings) -> doxa.HMC:
    return doxa.HMC(draws=s.draws, burn_in=s.burn_in, leapfrog=s.leapfrog, thin=s.thin)


def _hmc_all(data: Images, s: Settings, seed: int) -> Any:
    """Eager: a step is so many passes over all rows that a graph saves little."""
    model = doxa.Model(s.build(data), "categorical", doxa.Normal(1.0))
    return doxa.fit(
        model, (data.x, data.y), _chains(s), members=s.chains, seed=seed, device=data.x.device,
        progress=False, validation=None, engine="stack:eager",
    )  # fmt: skip


def _hmc(data: Images, s: Settings, seed: int) -> OnFeatures:
    trunk = run(data, s, seed, "map")
    return sample_last_layer(trunk, data.x, data.y, _chains(s), s.chains, seed)


_COMPONENTS = (
    "4 components; batches and epochs four times MAP's, of which each component has a quarter: as "
    "many steps and rows a component"
)
_TRAJECTORY = (
    "{epochs} epochs of training and {epochs} of trajectory at half the rate, a point an epoch, "
    "rank 20, or one less than the epochs; {samples} samples"
)

PROTOCOLS: dict[str, Protocol] = {
    "map": Protocol("one network", _with(lambda data, s: "map")),
    "deep-ensemble": Protocol(
        "{members} networks from different starts", _with(lambda data, s: "deep-ensemble", True)
    ),
    "adversarial-ensemble": Protocol(
        "{members} networks from different starts, half of each step on images moved by .01 of a "
        "pixel's range",
        _with(lambda data, s: doxa.DeepEnsemble(adversarial=0.01), True),
    ),
    "bootstrap": Protocol(
        "{members} networks from different starts, each under Dirichlet weights of the images",
        _with(lambda data, s: "bootstrap", True),
    ),
    "snapshot": Protocol(
        "one network, {members} cycles in as many epochs as MAP has",
        _with(lambda data, s: doxa.SnapshotEnsemble(size=s.members)),
    ),
    "batch-ensemble": Protocol(
        _COMPONENTS, _with(lambda data, s: doxa.BatchEnsemble(size=4), pieces=4)
    ),
    "swag": Protocol(_TRAJECTORY, _with(_swag, length=2), True),
    "multiswag": Protocol(
        f"{{members}} networks from different starts, each with {_TRAJECTORY}",
        _with(_swag, True, length=2), True,
    ),
    "mean-field": Protocol(
        "T = 1, all weights, {samples} samples; on CIFAR the prior, N(0, 1) or N(0, 2/fan-in), and "
        "a first width of .001, .003 or .01, by the last fifth of the images",
        _chosen(
            doxa.MeanField(),
            {"prior": (doxa.Normal(1.0), doxa.FanInNormal(2**0.5)),
             "initial_std": (0.001, 0.003, 0.01)},
        ), True,
    ),
    "last-layer-vi": Protocol(
        "features learned on the same bound, {samples} samples",
        _with(lambda data, s: "last-layer-vi"), True,
    ),
    "mnf": Protocol("T = 1, all weights, {samples} samples", _with(lambda data, s: "mnf"), True),
    "rank1": Protocol(
        f"{_COMPONENTS}; factors N(1, .3²), {{samples}} samples",
        _with(lambda data, s: doxa.Rank1(size=4), pieces=4), True,
    ),
    "ivon": Protocol(
        "T = 1, all weights, the defaults, {samples} samples; on CIFAR the rate, .1, .3 or 1, and "
        "the first curvature, 1 or 10, by the last fifth of the images",
        _chosen(
            doxa.IVON(), {"lr": (0.1, 0.3, 1.0), "initial_curvature": (1.0, 10.0)}, lr=0.1
        ), True,
    ),
    "mc-dropout": Protocol(
        "p = {dropout} on the inputs of every layer but the first, {samples} masks",
        _with(lambda data, s: doxa.MCDropout(p=s.dropout)), True,
    ),
    "concrete-dropout": Protocol(
        "p learned, from .1, on the inputs of every layer but the first, {samples} masks",
        _with(lambda data, s: doxa.ConcreteDropout(initial=0.1)), True,
    ),
    "laplace": Protocol(
        "last layer, full Gauss–Newton, linearised, {samples} samples", _last_layer("full"), True
    ),
    "laplace-probit": Protocol(
        "last layer, full Gauss–Newton, linearised, MacKay's probit of each logit and the others",
        _last_layer("full", "probit"),
    ),
    "laplace-bridge": Protocol(
        "last layer, full Gauss–Newton, linearised, a Dirichlet by the Laplace bridge",
        _last_layer("full", "bridge"),
    ),
    "laplace-last-kronecker": Protocol(
        "last layer, Kronecker-factored, linearised, {samples} samples",
        _last_layer("kronecker"), True,
    ),
    "laplace-last-diagonal": Protocol(
        "last layer, diagonal, linearised, {samples} samples", _last_layer("diagonal"), True
    ),
    "laplace-kronecker": Protocol(
        "all weights, Kronecker-factored, linearised, log odds integrated over {samples} samples",
        _with(lambda data, s: doxa.Laplace(structure="kronecker")), True,
    ),
    "hmc": Protocol(
        "last layer, on the features of the MAP network and all rows: {chains} chains in the "
        "coordinates of its Laplace covariance, {burn_in} transitions of {leapfrog} steps, then "
        "{draws} kept, one in {thin}",
        _hmc,
    ),
    "hmc-all": Protocol(
        "all weights, all rows: {chains} chains, {burn_in} transitions of {leapfrog} steps, then "
        "{draws} kept, one in {thin}",
        _hmc_all,
    ),
}  # fmt: skip


def find(method: str) -> Protocol:
    """The protocol of a method; the reason where it has none."""
    if method in REGRESSION_ONLY:
        raise MethodError(f"{method} is for regression with Gaussian noise, not for classes")
    if method not in PROTOCOLS:
        raise MethodError(f"no image protocol for {method!r}; there are {', '.join(PROTOCOLS)}")
    return PROTOCOLS[method]
