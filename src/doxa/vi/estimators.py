"""Where the noise of a factorised Gaussian's gradient is put: on weights, or on each row.

    weights  θ = μ + σ ∘ ε: one draw for all rows of a batch
    local    a linear layer's outputs, with the mean and variance that its weights give them
    flipout  one draw σ ∘ ε, with signs of its own for each row
    auto     one draw: weights; several: local ones in one pass, where that is exact and less work

All estimate the same expectation. With one draw for a batch, the rows' gradients are
correlated, and a larger batch averages no noise out; with noise of each row's own they are
independent (`local`), or uncorrelated (`flipout`). `doxa.model.spread` has the layers: linear,
convolutional and embedding ones whose weights are their own. All other uncertain weights (norms,
recurrent and attention layers, bare parameters, weights that two layers share) have noise of their
own in the same fit.

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
from doxa.model.spread import SPREAD, Local, Spread, with_spread
from doxa.vi.layer_noise import alone, layer_noise, under
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
    """With noise on rows in every layer that can have it; the others are named in the log."""
    uncertain = problem.net.subset_names
    layers = dict(problem.net.net.named_modules())
    taken = {name for name, layer in layers.items()
             if under(name, "weight") in uncertain and _fits(layer, layers)}  # fmt: skip
    if not taken:
        raise ModelError(
            f"estimator={kind!r} needs a linear, convolutional or embedding layer whose weight is "
            "its own, and the network, or its subset, has none: use estimator='weights'"
        )
    spread = {under(name, leaf) for name in taken for leaf in ("weight", "bias")}
    rest = [name for name in uncertain if name not in spread]
    if rest:
        log.info("mean-field: noise on weights, not on rows, for %s", ", ".join(rest))
    return problem.rewrite(lambda name, layer: with_spread(layer, kind) if name in taken else None)


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
    local: bool
    draws: int  # of each row, in one pass
    rest: Tensor  # positions of the other uncertain weights in the flat row,
    rest_in_subset: Tensor  # and among the uncertain ones

    @classmethod
    def of(cls, run: Run) -> Placed | None:
        """None where no layer was rewritten."""
        layers = {path: layer for path, layer in run.net.net.named_modules()
                  if isinstance(layer, Spread)}  # fmt: skip
        if not layers:
            return None
        sites = tuple(under(path, layer.row_noise) for path, layer in layers.items())
        for path, site in zip(layers, sites, strict=True):
            if site not in run.net.sites or run.net.sites[site].rows == 0:
                raise ModelError(
                    f"layer {path!r} is not called with rows on the first axis of its input, and "
                    "each row has noise of its own (batch_first=True?): use estimator='weights', "
                    "or leave the layer out of subset="
                )
        subset = run.layout.select(run.net.subset_names)
        names = {under(path, leaf): under(path, f"{leaf}_away")
                 for path in layers for leaf in ("weight", "bias")}  # fmt: skip
        rest = [name for name in subset.names if name not in names]
        return cls(
            subset, {name: names[name] for name in subset.names if name in names}, sites,
            any(isinstance(layer, Local) for layer in layers.values()), draws_of(run.problem),
            run.layout.index(rest).to(run.device), subset.index(rest).to(run.device),
        )  # fmt: skip

    def drawn(
        self, run: Run, mean: Tensor, std: Tensor, eps: Tensor, batch: Batch, clock: Clock
    ) -> tuple[Tensor, Params]:
        """The weights of S passes [M, S, P], and what layers are given [M·S, ...], from normals ε
        [M, S, uncertain], or of a local layer [M, S, rest]."""
        s = eps.shape[1]
        if self.local:
            away = std.unsqueeze(1).expand(-1, s, -1)
            rest = away[..., self.rest_in_subset] * eps
        else:
            away = std.unsqueeze(1) * eps
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
        return len(self.rest) if self.local else self.subset.size


def draws_of(problem: Problem) -> int:
    """How many draws of each row a pass has: more than one where they are nested."""
    assert isinstance(problem, Network)
    layers = problem.net.net.modules()
    return max((layer.draws for layer in layers if isinstance(layer, NestedLinear)), default=1)
