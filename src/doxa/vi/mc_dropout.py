"""Monte Carlo dropout: dropout training as variational inference.

    q(W) = M · diag(z),   z_j ~ Bernoulli(1 − p) / (1 − p)
    objective = E_q[Σ_i log p(y_i | θ)] − Σ_l ‖M_l‖² / (2 s² (1 − p_l)) + Σ_l Q_l H(p_l)

p is the probability to **drop**; masks are scaled by 1/(1 − p) in training. Q_l counts the masked
inputs of layer l, s is the prior's standard deviation. Gal & Ghahramani (2016). A constant is
dropped from the KL, so the objective is no bound on the evidence: it is reported as `objective`,
and serves to choose p on a grid. Prediction keeps the masks on, one mask a function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch, Pass
from doxa.errors import MethodError, ModelError
from doxa.fields import between, one_of
from doxa.method import Clock, Method, Objective, Run, Stage, State, batch_rows, optimise
from doxa.model import Model
from doxa.posterior import ImplicitPosterior, Posterior
from doxa.stacked import MaskedDropout, add_input_dropout

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@store.register("mc-dropout")
@dataclass(frozen=True)
class MCDropout(Method):
    """Dropout kept on at prediction.

    Parameters
    ----------
    p: the probability to drop, for every dropout layer; None: each layer's own, or 0.1 where
        layers are inserted.
    insert: what to do with a network without dropout layers: "hidden" masks the input of every
        linear and convolutional layer but the first, "all" of the first too (as in the paper),
        "never" makes it an error.
    """

    name: ClassVar[str] = "mc-dropout"
    default_validation: ClassVar[float] = 0.1

    p: float | None = between(
        None, 0, 1, "()", because="it is the probability to drop", per_run=True
    )
    insert: str = one_of("hidden", "all", "never")

    def prepare(self, model: Model) -> Model:
        rewritten = model.rewrite(lambda _name, _layer: None)
        if any(isinstance(layer, MaskedDropout) for layer in rewritten.net.modules()):
            return rewritten
        layers = [layer for layer in rewritten.net.modules() if isinstance(layer, _WEIGHTED)]
        chosen = layers if self.insert == "all" else layers[1:]
        if self.insert == "never" or not chosen:
            raise ModelError(
                "the network has no dropout layer and none can be inserted: MC dropout needs "
                "insert='hidden' and two weight layers, or insert='all'"
            )
        for layer in chosen:
            add_input_dropout(layer, 0.1 if self.p is None else self.p)
        return rewritten

    def init(self, run: Run) -> State:
        return {"theta": run.start(), **run.init_buffers()}

    def stages(self, run: Run, steps: int) -> Iterable[Stage]:
        yield optimise(self._objective(run), steps)

    def rates(self, run: Run) -> dict[str, Tensor]:
        """The dropout probability of each layer and member: {layer: [M]}."""
        if self.p is not None or "p" in run.hyper:
            return {site: run.field(self, "p") for site in run.net.sites}
        own = {site: run.net._site(site).p for site in run.net.sites}
        return {site: torch.full_like(run.n, p) for site, p in own.items()}

    def _objective(self, run: Run) -> Objective:
        rates = self.rates(run)
        factor, entropy = self._kl_terms(run, rates)

        def objective(
            run: Run, state: State, batch: Batch, clock: Clock
        ) -> tuple[Tensor, Tensor, State]:
            changed = {k: v.clone() for k, v in state.items() if k.startswith("buffer.")}
            fit, grad = run.grad(
                state["theta"], batch, masks=self._masks(run, rates, batch_rows(batch), clock),
                buffers=run.buffers(changed) or None, training=bool(changed),
            )  # fmt: skip
            score = factor * run.prior.score(state["theta"])
            return fit - self._kl(run, state, score) + entropy, grad + score, changed

        return objective

    def _masks(
        self, run: Run, rates: dict[str, Tensor], rows: int, clock: Clock
    ) -> dict[str, Tensor]:
        """A mask a row for every dropout layer: {layer: [M, rows, ...]}."""
        masks = {}
        for site, shape in run.net.sites.items():
            p = rates[site].reshape(-1, *(1,) * (1 + len(shape)))
            masks[site] = (clock.uniform(rows, *shape) > p).to(run.dtype) / (1 - p)
        return masks

    def _kl(self, run: Run, state: State, score: Tensor) -> Tensor:
        """Σ (θ − m)² / 2s²(1 − p), from the score of the prior with its factors: [M]."""
        return -0.5 * (score * (state["theta"] - run.prior.mean)).sum(1)

    def _kl_terms(self, run: Run, rates: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """1/(1 − p) for each masked weight, [M, P], and Σ Q·H(p), [M]."""
        if run.prior.precision is None:
            raise MethodError("MC dropout's objective needs Gaussian priors on the weights")
        factor = torch.ones(run.size, run.layout.size, device=run.device, dtype=run.dtype)
        entropy = torch.zeros_like(run.n)
        for site, p in rates.items():
            layer = run.net.masked.get(site)
            if layer is None:
                continue
            weight = f"{layer}.weight" if layer else "weight"
            if weight in run.layout.slices:
                factor[:, run.layout.slices[weight]] = 1 / (1 - p).unsqueeze(1)
            bits = -(p * p.log() + (1 - p) * torch.log1p(-p))
            entropy += math.prod(run.net.sites[site]) * bits
        return factor, entropy

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        rates = self.rates(run)
        posterior = ImplicitPosterior(
            theta=state["theta"], rates=rates, **run.common(self), **run.shared(state)
        )
        posterior.objective = self._final_objective(run, state)
        return posterior

    def _final_objective(self, run: Run, state: State) -> float:
        """The objective at the answer over all rows, one mask a row; the mean over members."""
        rates = self.rates(run)
        factor, entropy = self._kl_terms(run, rates)
        rows, noise = Pass(run.data, run.run_of, 4096), run.noise("objective")
        total = entropy - self._kl(run, state, factor * run.prior.score(state["theta"]))
        for t in range(rows.steps):
            batch, at = rows.batch(t), torch.tensor(t, device=run.device)
            clock = Clock(at, at, rows.steps, noise)
            masks = self._masks(run, rates, batch_rows(batch), clock)
            with torch.no_grad():
                total = total + run.log_likelihood(
                    state["theta"], batch, masks=masks, buffers=run.buffers(state) or None
                )
        return float((total.double() + run.units_log_jacobian()).mean())
