"""Gradient estimators of a factorised Gaussian: noise on the weights, or on each row.

    weights  θ = μ + σ ∘ ε: one draw for all rows of a batch
    local    draws of a layer's outputs, with the mean and variance that its weights imply
    flipout  one draw σ ∘ ε, with independent signs for each row
    auto     one draw: weights; several: local draws in one pass, where that is exact and cheaper

All estimators have the same expectation: each layer has the kind of noise that is exact for it, so
that every row sees a draw of q. Local noise is exact where a layer has one output vector per row.
Where its weight is used at several positions of a row (a convolution, a linear layer on tokens, a
layer that is called twice), the outputs under one weight are correlated, and local noise is not.
Such a layer uses flipout in a `local` fit. Where the rows are not the first axis of a layer's input
(positions folded into rows), each position would have different signs. Such a layer has noise on
its weights.

With one draw per batch, the gradients of the rows are correlated, and a larger batch does not
average the noise out. With separate noise for each row they are independent (`local`) or
uncorrelated (`flipout`). `doxa.model.spread` has the layers: linear, convolutional and embedding
layers that share their weights with no other layer. All other uncertain weights (norm, recurrent
and attention layers, bare parameters, weights that two layers share) have noise on the weights in
the same fit.

Several local draws, in a network that is a chain of linear layers, take one pass, in which layers
draw their outputs several times (`doxa.model.spread`). With `auto`, some of them share the noise of
the first layer. In other networks, and for the other estimators, each draw takes one pass.

Cost of several draws in one pass (`all_draws`, `nested_draws`). S draws of all weights are S passes
through the network. In one pass, a layer computes its products once for each draw of its input.
With n draws of the first layer's outputs, S draws of all others, and c_l multiplications per row in
layer l, one gradient takes about

    4 c_1 + 6 n c_2 + 6 S Σ_{l>2} c_l      where a point estimate's has   2 c_1 + 3 Σ_{l>1} c_l

multiplications (means and variances; forward, and backward by the weights and by the input, which
the first layer does not need). The last layers are often narrow. With n < S, draws share the noise
of the first layer, which increases the variance of the gradient. So n is as large as the budget
allows, and at least two (a pair ±ε). The budget is half of the cost of S draws of the weights, or
five gradients of a point estimate if that is more. Later layers never share noise: if several
layers did, the gradient by μ would have more variance than with S draws of the weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from doxa.data import Batch, batch_rows
from doxa.errors import ModelError
from doxa.linalg.layout import Layout, Params
from doxa.method import Clock, Problem, Run, State
from doxa.model import Model
from doxa.model.layers import Site
from doxa.model.model import Network
from doxa.model.spread import (
    SPREAD,
    Local,
    NestedLinear,
    Spread,
    applied,
    exact_noise,
    with_nested,
    with_spread,
)
from doxa.noise import Noise


def layer_noise(
    run: Run, batch: Batch, clock: Clock, sites: Collection[str] | None = None
) -> Params:
    """The noise of layers in training, as `run.layer_noise`, for all sites or some of them.

    To save calls, one call draws all noise that does not depend on the rows, and one call per
    number of entries draws the noise of the rows.
    """
    groups: dict[tuple[str, int], dict[str, Site]] = {}
    for name, site in run.net.sites.items():
        if site.use != "prediction" and (sites is None or name in sites):
            groups.setdefault((site.kind, site.rows), {})[name] = site
    found: Params = {}
    for (kind, entries), own in groups.items():
        sizes = [math.prod(site.shape) for site in own.values()]
        if entries:
            drawn = clock.rows(kind, batch_rows(batch) * entries, sum(sizes))
        else:
            drawn = (clock.noise if kind == "normal" else clock.uniform)(sum(sizes))
        for (name, site), part in zip(own.items(), drawn.split(sizes, -1), strict=True):
            found[name] = part.unflatten(-1, site.shape)
    return found


def alone(layer: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Whether no other layer shares the weight of this one."""
    holders = [one for one in layers.values() for p in one.parameters(recurse=False)
               if p is layer.weight]  # fmt: skip
    return len(holders) == 1


def check_calls(run: Run, paths: Iterable[str], advice: str) -> None:
    """Raise `ModelError` where the network uses the weight or bias of one of these layers without
    calling the layer: such a use would have no noise.

    The test: with other weights, but layers that return their earlier outputs, the outputs of the
    network must not change.
    """
    net, paths = run.net, list(paths)
    weights = net.layout.unflatten(run.start()[0])
    x = run.rows.take(run.rows.rows[0][:2], torch.tensor(0))[0]

    def outputs(paths: list[str], own: Params) -> list[Tensor]:
        def as_before(path: str) -> Any:
            layer: Any = net.net.get_submodule(path)
            weight = weights.get(under(path, "weight"), layer.weight)
            bias = weights.get(under(path, "bias"), getattr(layer, "bias", None))
            return lambda layer, args, _output: applied(layer, args[0], weight, bias)

        hooks = [net.net.get_submodule(p).register_forward_hook(as_before(p)) for p in paths]
        try:
            with torch.no_grad():
                return tree_flatten(net.forward(own, x))[0]
        finally:
            for hook in hooks:
                hook.remove()

    def elsewhere(paths: list[str]) -> bool:
        moved = dict(weights)
        for name in (under(path, leaf) for path in paths for leaf in ("weight", "bias")):
            if name in weights:
                value = weights[name]
                noise = Noise(0, "calls", [0], value.device, value.dtype).normal((value.numel(),))
                moved[name] = value + noise.reshape(value.shape)
        pairs = zip(outputs(paths, dict(weights)), outputs(paths, moved), strict=True)
        return not all(torch.allclose(a, b, 0.0, 0.0, equal_nan=True) for a, b in pairs)

    if not elsewhere(paths):
        return
    for path in paths:
        if elsewhere([path]):
            raise ModelError(
                f"the network uses the weight of layer {path!r} also without calling the layer, "
                f"but noise is added to the outputs of the layer: {advice}"
            )


def under(path: str, leaf: str) -> str:
    """The full name of a layer's tensor."""
    return f"{path}.{leaf}" if path else leaf


_LEAST = 5.0  # smallest budget, in gradients of a point estimate
_Path = list[tuple[str, int, bool]]  # linear layers as they run: name, weights, whether uncertain


def all_draws(net: Model, samples: int) -> dict[str, int] | None:
    """{layer: number of draws of its outputs}, without shared noise.

    None where several local draws in one pass are not equivalent to draws of the weights: all
    uncertain weights must be in a chain of linear layers, each of which sees each row once.
    """
    path = _path(net)
    if samples < 2 or path is None:
        return None
    return {name: samples for name, _, noisy in path if noisy}


def nested_draws(net: Model, samples: int) -> dict[str, int] | None:
    """The same, with as many draws of the first layer as the budget allows.

    None also where it would cost more than draws of the weights.
    """
    path, draws = _path(net), all_draws(net, samples)
    if path is None or draws is None:
        return None
    point = _work([(name, size, False) for name, size, _ in path], {})
    first, *others = draws
    least = next(d for d in range(2, samples + 1) if samples % d == 0)
    budget = min(samples, max(_LEAST, samples / 2)) * point
    if others:
        counts = [n for n in range(samples, least, -1) if samples % n == 0 and n % least == 0]
        fits = (n for n in counts if _work(path, draws | {first: n}) <= budget)
        draws[first] = next(fits, least)
    return draws if _work(path, draws) <= samples * point else None


def _path(net: Model) -> _Path | None:
    """The chain of linear layers; None where the network is not a chain, or where some uncertain
    weights are outside it."""
    if net.plan is None or not net.plan.is_path:
        return None
    layers, rest = dict(net.net.named_modules()), set(net.subset_names)
    calls = [name for name, _ in net.widths]
    path: _Path = []
    for name, numbers in net.widths:  # output size of each call of a layer, for one row
        layer = layers[name]
        if type(layer) is not nn.Linear:
            continue
        noisy = under(name, "weight") in net.subset_names
        once = calls.count(name) == 1 and numbers == layer.out_features and alone(layer, layers)
        if noisy and not once:
            return None
        path.append((name, layer.weight.numel(), noisy))
        if noisy:
            rest -= {under(name, "weight"), under(name, "bias")}
    return path if path and not rest else None


def _work(path: _Path, draws: dict[str, int]) -> int:
    """Multiplications per row for one gradient."""
    total, before = 0, 1  # draws of a layer's input
    for i, (name, size, noisy) in enumerate(path):
        total += (2 if noisy else 1) * (3 if i else 2) * size * before
        before = draws[name] if noisy else before
    return total


log = logging.getLogger("doxa")


def rewritten(problem: Problem, kind: str, samples: int) -> Problem:
    """The problem with noise on rows, where the estimator uses it."""
    assert isinstance(problem, Network)
    if kind == "weights" or (kind == "auto" and samples == 1):
        return problem
    if kind != "flipout":
        draws = (nested_draws if kind == "auto" else all_draws)(problem.net, samples)
        if draws is not None:
            return problem.rewrite(
                lambda name, layer: with_nested(layer, draws[name]) if name in draws else None
            )
    return problem if kind == "auto" else _spread(problem, kind)


def _spread(problem: Network, kind: str) -> Problem:
    """The problem with noise on rows in every layer where it is exact; the log names the others."""
    net = problem.net
    if not net.calls:
        return problem  # loaded from disk: prediction draws weights
    uncertain = net.subset_names
    layers = dict(net.net.named_modules())
    fitting = [name for name, layer in layers.items()
               if under(name, "weight") in uncertain and _fits(layer, layers)]  # fmt: skip
    if not fitting:
        raise ModelError(
            f"estimator={kind!r} needs a linear, convolutional or embedding layer whose weight no "
            "other layer shares, and the network, or its subset, has none: use estimator='weights'"
        )
    exact = {name: exact_noise(net, name) for name in fitting}
    kinds = {name: kind if found == "local" else found for name, found in exact.items() if found}
    spread = {under(name, leaf) for name in kinds for leaf in ("weight", "bias")}
    rest = [name for name in uncertain if name not in spread]
    if rest:
        log.info("mean-field: noise on weights, not on rows, for %s", ", ".join(rest))
    signed = [name for name, found in kinds.items() if found != kind]
    if signed:
        log.info(
            "mean-field: flipout for %s, used at several positions of a row", ", ".join(signed)
        )
    return problem.rewrite(
        lambda name, layer: with_spread(layer, kinds[name]) if name in kinds else None
    )


def _fits(layer: nn.Module, layers: dict[str, nn.Module]) -> bool:
    return (
        type(layer) in SPREAD and alone(layer, layers)
        and getattr(layer, "max_norm", None) is None
    )  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """The uncertain weights whose layers have noise on rows, and those with noise on weights."""

    subset: Layout
    buffers: dict[str, str]  # {weight: the buffer of its layer that takes its variance or σ ∘ ε}
    local: frozenset[str]  # the weights of local layers
    sites: tuple[str, ...]  # names of the noise on rows
    drawn_in_subset: Tensor | None  # uncertain weights that normals are drawn for; None: all
    draws: int  # of each row, in one pass
    rest: Tensor  # positions of the weights with noise on weights, in the flat vector,
    rest_in_subset: Tensor  # and among the uncertain weights

    @classmethod
    def of(cls, run: Run) -> Placed | None:
        """None where no layer was rewritten."""
        layers = {path: layer for path, layer in run.net.net.named_modules()
                  if isinstance(layer, Spread)}  # fmt: skip
        if not layers:
            return None
        check_calls(run, layers, "use estimator='weights', or exclude the layer from subset=")
        sites = tuple(under(path, layer.row_noise) for path, layer in layers.items())
        subset = run.layout.select(run.net.subset_names)
        names = {under(path, leaf): under(path, f"{leaf}_away")
                 for path in layers for leaf in ("weight", "bias")}  # fmt: skip
        rest = [name for name in subset.names if name not in names]
        local = {under(path, leaf) for path, layer in layers.items() if isinstance(layer, Local)
                 for leaf in ("weight", "bias")}  # fmt: skip
        drawn = [name for name in subset.names if name not in local]
        return cls(
            subset, {name: names[name] for name in subset.names if name in names},
            frozenset(local), sites,
            subset.index(drawn).to(run.device) if local else None, draws_of(run.problem),
            run.layout.index(rest).to(run.device), subset.index(rest).to(run.device),
        )  # fmt: skip

    def drawn(
        self, run: Run, mean: Tensor, std: Tensor, eps: Tensor, batch: Batch, clock: Clock
    ) -> tuple[Tensor, Params]:
        """The weights of S passes [M, S, P], and the buffers of layers [M·S, ...], from normals ε
        [M, S, `numbers`]. Local layers take variances, flipout layers take σ ∘ ε."""
        s = eps.shape[1]
        drawn = self.drawn_in_subset
        if drawn is None:
            away = std.unsqueeze(1) * eps
        else:
            away = std.unsqueeze(1).expand(-1, s, -1)
            if len(drawn):
                away = away.index_copy(-1, drawn, away[..., drawn] * eps)
        rest = away[..., self.rest_in_subset]
        theta = mean.unsqueeze(1).expand(-1, s, -1)
        if len(self.rest):
            theta = theta.index_add(-1, self.rest, rest)
        parts = self.subset.unflatten(away)
        given = {
            buffer: (parts[name].square() if name in self.local else parts[name]).flatten(0, 1)
            for name, buffer in self.buffers.items()
        }
        many, at = (run, clock) if s == 1 else (run.expand_particles(s), clock.expand_particles(s))
        rows = batch if s == 1 else batch.expand_particles(s)
        return theta, given | layer_noise(many, rows, at, self.sites)

    @property
    def all_local(self) -> bool:
        """Whether all uncertain weights are those of local layers."""
        return all(name in self.local for name in self.subset.names)

    def log_likelihood(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        """The log-likelihood with local noise in all layers, as an objective of the means "theta"
        and the variances, two rows in the layout of the weights."""
        parts = run.layout.unflatten(params["variance"])
        given = {buffer: parts[name] for name, buffer in self.buffers.items()}
        given |= layer_noise(run, batch, clock, self.sites)
        fit = run.train(params["theta"], params, batch, None, **given)
        return fit.value, fit.changed

    def numbers(self) -> int:
        """The number of normals per draw, without the noise of rows."""
        drawn = self.drawn_in_subset
        return self.subset.size if drawn is None else len(drawn)


def draws_of(problem: Problem) -> int:
    """The number of draws of each row in one pass; more than one where draws are nested."""
    assert isinstance(problem, Network)
    layers = problem.net.net.modules()
    return max((layer.draws for layer in layers if isinstance(layer, NestedLinear)), default=1)
