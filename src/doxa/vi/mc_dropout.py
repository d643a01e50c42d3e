"""Monte Carlo dropout: dropout training as variational inference.

    q(W) = M · diag(z),   z_j ~ Bernoulli(1 − p) / (1 − p)
    objective = E_q[Σ_i log p(y_i | θ)] − Σ_l ‖M_l‖² / (2 s² (1 − p_l)) + Σ_l Q_l H(p_l)

p is the probability to **drop**; masks are scaled by 1/(1 − p) in training. Q_l counts the masked
inputs of layer l, s is the prior's standard deviation. Gal & Ghahramani (2016). A constant is
dropped from the KL, so the objective is no bound on the evidence: it is reported as `objective`,
with the standard error of its masks as `objective_error`, and serves to choose p on a grid.
Prediction keeps the masks on, with one mask per function.

In the lecture's letters: a prior length-scale l is s = 1/l, `prior=doxa.Normal(1 / l)`, and a noise
precision τ is σ = τ^(−1/2), `likelihood=doxa.Gaussian(noise=tau**-0.5)`. Divided by N and times σ²
the objective is standard dropout training, ½ mean (y − f)² + ½ Σ_l λ_l ‖M_l‖², with weight decay

    λ = σ² / (s² N (1 − p)) = l² / (τ N (1 − p)),   without 1 − p where nothing is masked

so p, l and τ are to be chosen together. `doxa.tune(net, data, "mc-dropout", {"p": [...],
"likelihood": [...], "prior": [...]})` tries them as runs of one stacked fit; `by="objective"`
chooses among p and τ without held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError, ModelError
from doxa.method import (
    AnalyticGradient,
    Clock,
    Method,
    Problem,
    Run,
    Stage,
    State,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import Alternatives, between, one_of
from doxa.model.inspection import lies_in
from doxa.model.layers import MaskedDropout, with_input_dropout
from doxa.model.model import Model, Network
from doxa.posterior import ImplicitPosterior, Posterior

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@store.register("mc-dropout")
@dataclass(frozen=True)
class MCDropout(Method):
    """Dropout kept on at prediction.

    Parameters
    ----------
    p : float or None
        The probability to drop, for every dropout layer; None: that of each layer. Where layers
        are inserted, None is 0.1, or 0.02 or 0.005 if held-out rows are predicted clearly better
        (`driver/alternatives.py`).
    insert : str
        What to do with a network without dropout layers: "hidden" masks the input of every linear
        and convolutional layer but the first, "all" of the first too (as in the paper), "never"
        makes it an error.
    """

    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    name: ClassVar[str] = "mc-dropout"
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives(settings=({"p": 0.02}, {"p": 0.005}))

    p: float | None = between(
        None, 0, 1, "()", because="it is the probability to drop", per_run=True
    )
    insert: str = one_of("hidden", "all", "never")

    def prepare(self, problem: Problem) -> Problem:
        """Give the method's p to layers with masks; insert such layers if there are none."""
        return with_masks(
            problem, self.insert,
            lambda rate, channels: MaskedDropout(self.p or rate or 0.1, channels),
        )  # fmt: skip

    def alternatives_on(self, problem: Problem) -> Alternatives | None:
        """The user's dropout layers keep their p."""
        assert isinstance(problem, Network)
        own = bool(dropout_layers(problem.net))
        return replace(self.alternatives, settings=({},)) if own else self.alternatives

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._objective, run.steps)
        yield from noise_on_held_out(self.score, run)

    def init(self, run: Run) -> State:
        rates = self.rates(run)
        factor, entropy = self._kl_terms(run, rates)
        own = {f"rate.{name}": p for name, p in rates.items()}
        return {**run.init_network(), **own, "factor": factor, "entropy": entropy}

    def rates(self, run: Run) -> dict[str, Tensor]:
        """The dropout probability of each layer and member, as buffers of the layers: {"LAYER.p":
        [M]}."""
        layers = [name.removesuffix(".uniform") for name in run.net.sites]
        if run.problem.partial:
            return self._rates_of_subset(run, layers)
        return self._rates(run, layers)

    def _rates_of_subset(self, run: Run, layers: list[str]) -> dict[str, Tensor]:
        """Weights outside the subset are points: what feeds them is not masked, p = 0."""
        uncertain = set(run.net.subset_names)
        masked = [site for site in layers if weight_of(run.net.masked.get(site)) in uncertain]
        if not masked:
            raise MethodError(
                "no dropout layer feeds a weight of the subset: nothing would be uncertain; use a "
                "larger subset, or insert='all'"
            )
        off = {f"{layer}.p": torch.zeros_like(run.n) for layer in layers}
        return off | self._rates(run, masked)

    def _rates(self, run: Run, layers: list[str]) -> dict[str, Tensor]:
        if self.p is not None or "p" in run.hyper:
            return {f"{layer}.p": run.field(self, "p") for layer in layers}
        own = {layer: run.net.net.get_submodule(layer).rate for layer in layers}
        return {f"{layer}.p": torch.full_like(run.n, float(p)) for layer, p in own.items()}  # type: ignore[arg-type]

    def _objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        fit = run.train(params["theta"], params, batch, clock, **_given_rates(params))
        theta = params["theta"].detach()
        score = params["factor"] * run.prior.score(theta)
        value = params["entropy"] - _kl(run, theta, score)
        return fit.value, fit.changed, AnalyticGradient(value, {"theta": lambda grad: grad + score})

    def _kl_terms(self, run: Run, rates: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """1/(1 − p) for each masked weight, [M, P], and Σ Q·H(p), [M]."""
        if run.prior.precision is None:
            raise MethodError("MC dropout's objective needs Gaussian priors on the weights")
        factor = torch.ones(run.size, run.layout.size, device=run.device, dtype=run.dtype)
        entropy = torch.zeros_like(run.n)
        for name, p in rates.items():
            site = name.removesuffix(".p")
            layer = run.net.masked.get(site)
            if layer is None:
                continue
            weight = weight_of(layer)
            if weight in run.layout.slices:
                factor[:, run.layout.slices[weight]] = 1 / (1 - p).unsqueeze(1)
            bits = torch.special.entr(p) + torch.special.entr(1 - p)
            entropy += math.prod(run.net.sites[f"{site}.uniform"].shape) * bits
        return factor, entropy

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = ImplicitPosterior(
            theta=state["theta"], values=self.rates(run), **run.common(self), **run.shared(state)
        )
        posterior.objective, posterior.objective_error = self._final_objective(run, state)
        return posterior

    def _final_objective(self, run: Run, state: State) -> tuple[float, float]:
        """The objective of the final weights and its standard error, the mean over members.

        Every pass draws one mask per row. The number of passes gives 10,000 masks; it is between 4
        and 100, and in total the passes see at most a tenth of the rows that training saw.
        """
        rows, noise = run.passes(), run.noise("objective")
        seen = run.steps * min(run.settings.batch_size, rows.longest)
        most = min(-(-10_000 // run.rows.total), 100, seen // (10 * rows.longest))
        count = max(most, 4)
        score = state["factor"] * run.prior.score(state["theta"])
        known = state["entropy"] - _kl(run, state["theta"], score) + run.units_log_jacobian()
        passes = run.n.new_zeros((count, run.size), dtype=torch.float64)
        with torch.no_grad():
            for t in range(count * rows.count):
                at = torch.tensor(t, device=run.device)
                clock = Clock(at, at, count * rows.count, noise)
                passes[t // rows.count] += run.masked_log_likelihood(
                    state["theta"], state, rows.batch(t % rows.count), clock, **_given_rates(state)
                )
        error = (passes.mean(1).var() / count).sqrt()
        return float((passes.mean(0) + known.double()).mean()), float(error)


def with_masks(
    problem: Problem, insert: str, make: Callable[[float, bool], MaskedDropout],
    spatial: bool = False, points: bool = True,
) -> Problem:  # fmt: skip
    """The problem with masks from `make`, which takes a rate and whether whole channels are masked.

    The network's dropout layers are replaced. If it has none, layers are inserted; before
    convolutions they mask channels if `spatial`. Weights outside the subset are points: unless
    `points`, the inputs of their layers are not masked.
    """
    assert isinstance(problem, Network)
    net = problem.net.net
    has = bool(dropout_layers(problem.net))
    layers = [name for name, layer in net.named_modules() if isinstance(layer, _WEIGHTED)]
    trained = problem.net.layout.slices  # a frozen layer has no weights and is not masked
    chosen = [n for n in (layers if insert == "all" else layers[1:]) if weight_of(n) in trained]
    uncertain = set(problem.net.subset_names)
    if not points:
        chosen = [name for name in chosen if weight_of(name) in uncertain]
    if not has and (insert == "never" or not chosen):
        raise ModelError(
            "the network has no dropout layer and none can be inserted: dropout needs "
            "insert='hidden' and two weight layers, or insert='all'"
        )

    def rule(name: str, layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, MaskedDropout):
            fed = weight_of(problem.net.masked.get(name))
            return make(layer.rate, layer.channels) if points or fed in uncertain else nn.Identity()
        inserted = not has and name in chosen
        whole = spatial and not isinstance(layer, nn.Linear)
        return with_input_dropout(layer, make(0.0, whole)) if inserted else None

    return problem.rewrite(rule)


def dropout_layers(net: Model) -> list[str]:
    """The network's dropout layers, without those of a frozen trunk, which are off."""
    return [
        name for name, layer in net.net.named_modules()
        if isinstance(layer, MaskedDropout) and not lies_in(name, net.at_rest)
    ]  # fmt: skip


def _given_rates(state: State) -> dict[str, Tensor]:
    """{"LAYER.p": [M]}, for the members in the state."""
    return {k.removeprefix("rate."): v for k, v in state.items() if k.startswith("rate.")}


def weight_of(layer: str | None) -> str:
    """The name of a layer's weight."""
    return f"{layer}.weight" if layer else "weight"


def _kl(run: Run, theta: Tensor, score: Tensor) -> Tensor:
    """Σ (θ − m)² / 2s²(1 − p), from the score of the prior with its factors: [M]."""
    return -0.5 * (score * (theta - run.prior.mean)).sum(1)
