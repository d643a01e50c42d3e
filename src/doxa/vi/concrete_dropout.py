"""Concrete dropout: the dropout probability is learned, one per layer.

    z = sigmoid((logit p − logit u) / t),   x ∘ (1 − z) / (1 − p),   u ~ U(0, 1)       (training)
    objective = E_q[Σ_i log p(y_i | θ)] − Σ_l ‖M_l‖² / (2 s² (1 − p_l)) + Σ_l Q_l H(p_l)

Gal, Hron & Kendall (2017). The objective is that of MC dropout, with gradient ascent in place of a
grid search over p. In training, masks are relaxed to z in (0, 1); t is small, so z is nearly 0 or
1. In prediction, masks are ordinary ones. With few rows the entropy Q·H(p) pulls p towards ½. As
rows are added, the likelihood dominates and p falls, and so does the epistemic uncertainty.
Convolutions mask whole channels. The learned p are in `posterior.diagnostics["p"]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method import Clock, Method, Problem, Run, Stage, State, noise_on_held_out, optimise
from doxa.method.method import Alternatives, between, one_of
from doxa.model.layers import MaskedDropout, Slots, Value, mask
from doxa.posterior import ImplicitPosterior, Posterior
from doxa.vi.mc_dropout import weight_of, with_masks


class ConcreteMask(MaskedDropout):
    """Dropout with a trainable probability, `logit`: an ordinary mask, or a relaxed one if a
    `relaxation` t is given."""

    own = ("logit",)
    relaxation: Tensor | None

    def __init__(self, p: float, channels: bool) -> None:
        super().__init__(p, channels)
        self.logit = nn.Parameter(torch.tensor(math.log(p / (1 - p))))
        self.register_buffer("relaxation", None)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit, math.log(self.rate / (1 - self.rate)))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.uniform is None else x * kept(self.uniform, self.logit, self.relaxation)

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        u, logit, t = (slots.take(name) for name in ("uniform", "logit", "relaxation"))
        if u is None:
            return h, has_axis
        assert logit is not None
        wide = (-1, *(1,) * (u.ndim - 1))
        logit = logit.reshape(wide) if slots.has_axis("logit") else logit
        return h * kept(u, logit, None if t is None else t.reshape(wide)), True


def kept(u: Tensor, logit: Tensor, relaxation: Tensor | None) -> Tensor:
    """The factor of a mask, from uniforms."""
    p = torch.sigmoid(logit)
    if relaxation is None:
        return mask(u, p)
    u = u.clamp(max=1 - torch.finfo(u.dtype).eps)
    z = torch.sigmoid((logit - u.logit()) / relaxation)  # near 1: dropped, as where u ≤ p
    return (1 - z) / (1 - p)


@store.register("concrete-dropout")
@dataclass(frozen=True)
class ConcreteDropout(Method):
    """Dropout that learns how much to drop.

    Parameters
    ----------
    initial_p : float or None
        The probability to drop that every layer starts with; None: the network's own dropout layers
        start with theirs, inserted ones with 0.1.
    relaxation : float
        t, the temperature of the relaxed masks.
    insert : str
        As for MC dropout: "hidden" masks the input of every linear and convolutional layer but the
        first, "all" of the first too, "never" makes a network without dropout an error.
    """

    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    name: ClassVar[str] = "concrete-dropout"
    renamed: ClassVar[Mapping[str, str]] = {"initial": "initial_p"}
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()

    initial_p: float | None = between(None, 0, 1, "()")
    relaxation: float = between(0.1, 0, 10, "(]")
    insert: str = one_of("hidden", "all", "never")

    def prepare(self, problem: Problem) -> Problem:
        def make(rate: float, channels: bool) -> MaskedDropout:
            return ConcreteMask(self.initial_p or rate or 0.1, channels)

        return with_masks(problem, self.insert, make, spatial=True, points=False)

    def stages(self, run: Run) -> Iterable[Stage]:
        if run.prior.precision is None:
            raise MethodError("concrete dropout's objective needs Gaussian priors on the weights")
        yield optimise(self._objective, run.steps, over=("theta", "layers"))
        yield from noise_on_held_out(self.score, run)

    def _objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        relaxation = torch.full_like(run.n, self.relaxation)
        given = {f"{site}.relaxation": relaxation for site in _sites(run)}
        fit = run.train(params["theta"], params, batch, clock, **given)
        value = fit.value + self._regulariser(run, params["theta"], params["layers"])
        return value, fit.changed, run.known_prior(params["theta"])

    def _regulariser(self, run: Run, theta: Tensor, layers: Tensor) -> Tensor:
        """The terms besides the prior: Σ ‖M‖²/2s² (1 − 1/(1 − p)) + Q·H(p), [M]."""
        own = run.net.layers.unflatten(layers)
        total = torch.zeros_like(theta[:, 0])
        precision, centre = run.prior.precision, run.prior.mean
        assert precision is not None
        for site in _sites(run):
            p = torch.sigmoid(own[f"{site}.logit"])  # [M]
            layer = run.net.masked.get(site)
            if layer is None:
                continue
            where = run.layout.slices.get(weight_of(layer))
            if where is not None:
                square = (theta[:, where] - centre[..., where]).square() * precision[..., where]
                total = total - 0.5 * square.sum(1) * p / (1 - p)
            units = math.prod(run.net.sites[f"{site}.uniform"].shape)
            total = total + units * (torch.special.entr(p) + torch.special.entr(1 - p))
        return total

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = ImplicitPosterior(theta=state["theta"], **run.common(self), **run.shared(state))
        own = run.net.layers.unflatten(state["layers"])
        posterior.record.diagnostics["p"] = {
            site: torch.sigmoid(own[f"{site}.logit"]).tolist() for site in _sites(run)
        }
        return posterior


def _sites(run: Run) -> list[str]:
    """The layers that have a mask."""
    return [name.removesuffix(".uniform") for name in run.net.sites]
