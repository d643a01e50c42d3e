"""Where the noise of a factorised Gaussian's gradient is put: on weights, or on each row.

    weights  θ = μ + σ ∘ ε: one draw for all rows of a batch
    local    a layer's outputs, with the mean and variance that its weights give them
    flipout  one draw σ ∘ ε, with signs of its own for each row
    auto     one draw: weights; several: local ones in one pass, where that is exact and less work

All estimate the same expectation, because each layer has noise that is exact there: what a row sees
is a draw of q. Local noise is that where a layer gives one output vector for each row. Where its
weight is used at several places of a row (a convolution, a linear layer on tokens, a layer that is
called twice), outputs under one weight are correlated and local noise is not: such a layer has
flipout in a `local` fit. Where the rows are not the first axis of a layer's input (places folded
into rows), each place would have signs of its own: such a layer has noise on its weights.

With one draw for a batch, the rows' gradients are correlated, and a larger batch averages no noise
out; with noise of each row's own they are independent (`local`), or uncorrelated (`flipout`).
`doxa.model.spread` has the layers: linear, convolutional and embedding ones whose weights are their
own. All other uncertain weights (norms, recurrent and attention layers, bare parameters, weights
that two layers share) have noise of their own in the same fit, on the weights.

Several draws of local noise in a network of linear layers, one after the other, are one pass whose
layers draw their outputs several times (`doxa.model.nested`); of those of `auto` some share the
first layer's noise (`doxa.vi.nesting`). Elsewhere, and of the other kinds, each draw is a pass.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor, nn

from doxa.data import Batch
from doxa.errors import ModelError
from doxa.linalg.layout import Layout, Params
from doxa.method import Clock, Problem, Run
from doxa.model.nested import NestedLinear, with_nested
from doxa.model.problem import Network
from doxa.model.spread import SPREAD, Local, Spread, exact_noise, with_spread
from doxa.vi.layer_noise import alone, check_calls, layer_noise, under
from doxa.vi.nesting import all_draws, nested_draws

log = logging.getLogger("doxa")


def rewritten(problem: Problem, kind: str, samples: int) -> Problem:
    """With noise on rows, where the estimator has it."""
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
    """With noise on rows in every layer where it is exact; the others are named in the log."""
    net = problem.net
    if not net.calls:
        return problem  # read from disk: it only predicts, and draws weights
    uncertain = net.subset_names
    layers = dict(net.net.named_modules())
    fitting = [name for name, layer in layers.items()
               if under(name, "weight") in uncertain and _fits(layer, layers)]  # fmt: skip
    if not fitting:
        raise ModelError(
            f"estimator={kind!r} needs a linear, convolutional or embedding layer whose weight is "
            "its own, and the network, or its subset, has none: use estimator='weights'"
        )
    exact = {name: exact_noise(net, name) for name in fitting}
    kinds = {name: kind if found == "local" else found for name, found in exact.items() if found}
    spread = {under(name, leaf) for name in kinds for leaf in ("weight", "bias")}
    rest = [name for name in uncertain if name not in spread]
    if rest:
        log.info("mean-field: noise on weights, not on rows, for %s", ", ".join(rest))
    signed = [name for name, found in kinds.items() if found != kind]
    if signed:
        log.info("mean-field: flipout for %s, used at several places of a row", ", ".join(signed))
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
    """Which uncertain weights' noise layers put on rows, and which is put on weights."""

    subset: Layout
    buffers: dict[str, str]  # {weight: the buffer of its layer that takes its deviation}
    sites: tuple[str, ...]  # the noise of rows
    drawn_in_subset: Tensor | None  # uncertain weights that normals are drawn for; None: all
    draws: int  # of each row, in one pass
    rest: Tensor  # positions of the weights with noise on them in the flat row,
    rest_in_subset: Tensor  # and among the uncertain ones

    @classmethod
    def of(cls, run: Run) -> Placed | None:
        """None where no layer was rewritten."""
        layers = {path: layer for path, layer in run.net.net.named_modules()
                  if isinstance(layer, Spread)}  # fmt: skip
        if not layers:
            return None
        check_calls(run, layers, "use estimator='weights', or leave the layer out of subset=")
        sites = tuple(under(path, layer.row_noise) for path, layer in layers.items())
        subset = run.layout.select(run.net.subset_names)
        names = {under(path, leaf): under(path, f"{leaf}_away")
                 for path in layers for leaf in ("weight", "bias")}  # fmt: skip
        rest = [name for name in subset.names if name not in names]
        local = {under(path, leaf) for path, layer in layers.items() if isinstance(layer, Local)
                 for leaf in ("weight", "bias")}  # fmt: skip
        drawn = [name for name in subset.names if name not in local]
        return cls(
            subset, {name: names[name] for name in subset.names if name in names}, sites,
            subset.index(drawn).to(run.device) if local else None, draws_of(run.problem),
            run.layout.index(rest).to(run.device), subset.index(rest).to(run.device),
        )  # fmt: skip

    def drawn(
        self, run: Run, mean: Tensor, std: Tensor, eps: Tensor, batch: Batch, clock: Clock
    ) -> tuple[Tensor, Params]:
        """The weights of S passes [M, S, P], and what layers are given [M·S, ...], from normals ε
        [M, S, `numbers`]: local layers are given deviations, the others differences."""
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
        given = {buffer: parts[name].flatten(0, 1) for name, buffer in self.buffers.items()}
        many, at = (run, clock) if s == 1 else (run.times(s), clock.times(s))
        rows = batch if s == 1 else batch.times(s)
        return theta, given | layer_noise(many, rows, at, self.sites)

    def numbers(self) -> int:
        """Normals a draw is made of, besides the rows'."""
        drawn = self.drawn_in_subset
        return self.subset.size if drawn is None else len(drawn)


def draws_of(problem: Problem) -> int:
    """How many draws of each row a pass has: more than one where they are nested."""
    assert isinstance(problem, Network)
    layers = problem.net.net.modules()
    return max((layer.draws for layer in layers if isinstance(layer, NestedLinear)), default=1)
