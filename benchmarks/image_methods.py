"""How each method is run on the image classifiers: settings fixed beforehand, none by test rows.

All methods share one network, one prior, N(0, 1) on every weight, and one optimiser: Adam with a
cosine schedule.

`hmc` samples the posterior of the last layer, a reference for what approximates it. Features of the
MAP network at the training rows are computed once, and the chains run on them with all rows, in
double precision. On the weights themselves they do not meet in a thousand transitions (R-hat 5 on
Fashion-MNIST): directions differ a thousandfold in width. So they move in coordinates

    θ = μ + L u,   L Lᵀ the covariance of a full Laplace approximation at the maximum μ,

in which the posterior, a log-concave one, is nearly N(0, I). `closeness_to` fits approximations to
the same features and measures how far their predictions lie from those of the chains.

This module measures nothing by itself; the tables are made by `python -m benchmarks.images`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import doxa
from benchmarks.image_data import Images, Settings
from doxa.errors import MethodError
from doxa.evaluate.ood import features
from doxa.evaluate.reference_distance import agreement, total_variation
from doxa.likelihoods import Categorical
from doxa.posterior import Status
from doxa.predictive import Predictive

REGRESSION_ONLY = tuple(
    sorted(row.name for row in doxa.methods() if "classification" not in row.tasks)
)
Fit = Callable[[Images, Settings, int], Any]
PRIOR = 1.0  # the standard deviation of every weight, as in all image tables
# What is compared with the chains, on the same features.
HEADS: dict[str, Any] = {
    "laplace": doxa.Laplace(structure="full", train=False, mean_correction=False),
    "laplace-polished": doxa.Laplace(
        structure="full", train=False, newton_steps=10, mean_correction=False
    ),
    "laplace-probit": doxa.Laplace(
        structure="full", link="probit", train=False, mean_correction=False
    ),
    "laplace-bridge": doxa.Laplace(
        structure="full", link="bridge", train=False, mean_correction=False
    ),
    "laplace-last-kronecker": doxa.Laplace(
        structure="kronecker", train=False, mean_correction=False
    ),
    "laplace-last-diagonal": doxa.Laplace(structure="diagonal", train=False, mean_correction=False),
}


@dataclass(frozen=True)
class OnFeatures:
    """Draws of the last layer, on the features of a network that does not vary."""

    trunk: doxa.Posterior
    layer: nn.Linear  # the trunk's own
    weight: Tensor  # [S, classes, features]
    bias: Tensor  # [S, classes]
    status: Status
    base_likelihood = Categorical()

    def predict(
        self, x: Tensor, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        z = features(self.trunk, x)
        f = torch.einsum("nd,scd->snc", z.to(self.weight), self.weight) + self.bias.unsqueeze(1)
        return Predictive(f, self.base_likelihood)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk.features(x)

    def read(self, x: Any) -> Any:
        return self.trunk.read(x)


def last_layer_of(trunk: doxa.Posterior, classes: int) -> nn.Linear:
    """The last layer of a fitted network of one member, whose last layer is linear."""
    _, (weight, bias) = zip(*list(trunk.draw(1).items())[-2:], strict=True)
    layer = nn.Linear(weight.shape[2], classes, device=weight.device)
    layer.load_state_dict({"weight": weight[0], "bias": bias[0]})
    return layer


def head(layer: nn.Linear, z: Tensor, y: Tensor, method: Any, seed: int = 0) -> Any:
    """A posterior of the layer, from its weights, on features."""
    model = doxa.Model(layer, "categorical", doxa.Normal(PRIOR))
    return doxa.fit(
        model, (z, y), method, init="given", seed=seed, device=z.device, dtype=z.dtype,
        validation=None, progress=False,
    )  # fmt: skip


def sample_last_layer(
    trunk: doxa.Posterior, x: Tensor, y: Tensor, method: doxa.HMC, chains: int, seed: int
) -> OnFeatures:
    """Chains on the last layer of a fitted network, at its training rows."""
    z = features(trunk, x).double()
    layer = last_layer_of(trunk, int(y.max()) + 1)
    exact = doxa.Laplace(structure="full", train=False, newton_steps=10, mean_correction=False)
    approximate = head(layer.double(), z, y, exact, seed)
    mean = approximate.mean[0]  # [P]
    root = torch.linalg.cholesky(approximate.covariance.dense()[0])
    classes, width = layer.weight.shape
    cut = classes * width

    def weights(u: Tensor) -> tuple[Tensor, Tensor]:
        theta = mean + u @ root.T
        return theta[..., :cut].unflatten(-1, (classes, width)), theta[..., cut:]

    def log_joint(at: dict[str, Tensor]) -> Tensor:
        weight, bias = weights(at["u"])
        logits = z @ weight.T + bias
        data = -nn.functional.cross_entropy(logits, y, reduction="sum")
        return data - 0.5 * (weight.square().sum() + bias.square().sum()) / PRIOR**2

    draws = doxa.sample(
        log_joint, {"u": torch.zeros_like(mean)}, method, chains, seed=seed, progress=False
    )
    weight, bias = weights(draws["u"].flatten(0, 1))
    return OnFeatures(trunk, layer, weight, bias, draws.status)


def closeness_to(
    reference: OnFeatures, x: Tensor, y: Tensor, x_test: Tensor, samples: int, rows: int
) -> dict[str, dict[str, float]]:
    """{row: agreement with the chains, and total variation}, at some test rows."""
    z = features(reference.trunk, x).double()
    z_test = features(reference.trunk, x_test[:rows]).double()
    wanted = reference.predict(x_test[:rows])
    found = {"map": reference.trunk.predict(x_test[:rows])}
    for name, method in HEADS.items():
        found[name] = head(reference.layer, z, y, method).predict(z_test, samples)
    return {
        name: {"agreement": agreement(p, wanted), "total_variation": total_variation(p, wanted)}
        for name, p in found.items()
    }


@dataclass(frozen=True)
class Protocol:
    """How a method is run: the description that stands under the table, and the function. `draws`:
    predictions use as many samples as the settings say, not all that were kept."""

    description: str
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
    chosen = {"epochs": length * pieces * s.epochs, "batch_size": pieces * s.batch, "lr": s.rate}
    return doxa.fit(
        model, (data.x, data.y), method, seed=seed, device=data.x.device, progress=False,
        validation=None, **chosen | options,
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
    return doxa.SWAG(average=0.5, cycle=steps, rank=rank, samples=s.samples)


def _last_layer(structure: str, link: str = "samples") -> Fit:
    """About the mode, as it is published."""
    method = doxa.Laplace(structure=structure, link=link, mean_correction=False)
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
        _with(lambda data, s: doxa.SnapshotEnsemble(snapshots=s.members)),
    ),
    "batch-ensemble": Protocol(
        _COMPONENTS, _with(lambda data, s: doxa.BatchEnsemble(components=4), pieces=4)
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
        _with(lambda data, s: doxa.Rank1(components=4), pieces=4), True,
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
        _with(lambda data, s: doxa.ConcreteDropout(initial_p=0.1)), True,
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
