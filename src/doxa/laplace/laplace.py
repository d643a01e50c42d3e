"""Laplace: a Gaussian at the maximum of the log joint.

    q(θ) = N(θ*, T H⁻¹),    H = Σ_i J_iᵀ C_i J_i + Λ
    log p(D) ≈ log p(D, θ*) + (p/2) log 2π − ½ log |H|

MacKay (1992); Daxberger et al. (2021). Training is MAP's; one pass over the data then adds up the
generalised Gauss–Newton matrix of the uncertain weights (the model's `subset`), Λ is the prior's
curvature. A learned Gaussian noise level is re-estimated by type-II maximum likelihood, outside
the Hessian, and with it the scale of a prior that nobody chose; other likelihood parameters stay at
their joint maximum. Predictions are linearised unless asked otherwise. The evidence says which
scale explains the data, not which predicts best: where the posterior is no Gaussian, classes are
predicted with too little confidence. So the predictive is compared with that of θ* alone, on
held-out rows where there are any, and `status` says where it is much worse. Use it where one mode
is enough and the evidence is wanted; "full" is for up to about 5,000 weights, "diagonal" for any
number, at the price of all correlations. Dropout is off and BatchNorm frozen while curvature is
computed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch, free_memory
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import functional, links, maximum, statistics, verdict
from doxa.laplace.curvature import output_size
from doxa.laplace.dual import Dual
from doxa.laplace.evidence import covariance
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg import Structure
from doxa.method import (
    Clock,
    Info,
    Method,
    Run,
    Stage,
    State,
    log_joint,
    optimise,
    slice_state,
)
from doxa.method.fields import flag, one_of, positive, whole
from doxa.method.objectives import joined
from doxa.posterior import Posterior

log = logging.getLogger("doxa")

_STEPS = (1.0, 0.5, 0.25, 0.1, 0.02)  # shares of a Gauss–Newton step that polishing tries
# times the evidence's, nearest first: what validation tries; at the last, H is the prior's alone
_PRECISIONS = tuple(10 ** (k / 2) for k in sorted(range(-2, 9), key=abs))


@store.register("laplace")
@dataclass(frozen=True)
class Laplace(Method):
    """A Gaussian at the MAP from the Gauss–Newton matrix.

    Parameters
    ----------
    structure: "full", "diagonal", or "functional": as full, by way of the kernel on training rows.
    rows: how many of them, evenly ("functional" only); None: all.
    predictive: "linearised" (closed form for Gaussian noise) or "sampled" (weights into the net).
    link: from a Gaussian over logits to class probabilities, where the predictive is linearised.
        "samples": functions are drawn; "probit" and "bridge": in closed form (`laplace/links.py`).
    temperature: T multiplies the covariance; with T ≠ 1 there is no evidence.
    tune: how the scale of a Gaussian prior is found. "evidence": by type-II maximum likelihood;
        "validation": of half decades of the precision about that, the nearest that predicts
        held-out rows as well as the best, to a standard error (Breiman et al. 1984); None: it stays
        as given. "auto": as given where a prior was chosen for the model, else by evidence, and by
        validation where held-out rows show that θ* alone predicts better (by a tenth of a nat a
        row, where training stopped by the same rows).
    polish: Gauss–Newton steps on all rows after training, with a line search, each followed by the
        re-estimation of noise and prior scale: for an exact maximum ("full" only). None: ten where
        they are cheap, none after training that held-out rows could stop.
    train: False takes the weights as they are: for a trained network, with fit(init="given").
    """

    name: ClassVar[str] = "laplace"
    overfits: ClassVar[bool] = True

    structure: str = one_of("full", "diagonal", "functional")
    predictive: str = one_of("linearised", "sampled")
    link: str = one_of("samples", "probit", "bridge")
    temperature: float = positive(1.0, per_run=True)
    tune: str | None = one_of("auto", "evidence", "validation", None)
    polish: int | None = whole(None, least=0)
    train: bool = flag(True)
    rows: int | None = whole(None, least=1)

    def __post_init__(self) -> None:
        if isinstance(self.structure, str) and self.structure in ("kronecker", "low-rank"):
            raise MethodError(
                f"structure={self.structure!r} comes later; use 'diagonal', or 'full' with "
                "subset='last_layer'"
            )
        super().__post_init__()
        if self.polish and self.structure != "full":
            raise MethodError("polish solves with the full matrix: use structure='full'")
        if self.rows is not None and self.structure != "functional":
            raise MethodError("rows are those of a kernel: use structure='functional'")
        if self.link != "samples" and self.predictive != "linearised":
            raise MethodError(
                f"link={self.link!r} is for Gaussian logits: use predictive='linearised', or "
                "link='samples'"
            )

    def init(self, run: Run) -> State:
        if not self.train and run.settings.fresh:
            raise MethodError(
                "train=False takes the weights as they are, but init='fresh' would replace them by "
                "random ones: use fit(..., init='given') with a trained network"
            )
        if self.tunes(run) and not run.prior.is_gaussian:
            raise MethodError(
                f"tune={self.tune!r} scales a Gaussian prior: use Normal or FanInNormal, or None"
            )
        if self.tune == "validation" and run.rows.validation is None:
            raise MethodError(
                "tune='validation' needs held-out rows: use fit(..., validation=0.1), or "
                "validation=(x, y) with rows that a trained network has not seen"
            )
        links.check(self.link, run.likelihood)
        self._check_memory(run)
        one = torch.ones(run.size, device=run.device, dtype=torch.float64)
        return {**run.init_network(), "tau": one}

    @property
    def holds_out(self) -> bool:
        """A network that is trained already may know the rows that would be held out."""
        return self.train

    def tunes(self, run: Run) -> bool:
        """Whether the prior's scale is found."""
        if self.tune == "auto":
            return run.net.default_prior and not run.prior.runs  # a stack: a grid of priors
        return self.tune is not None

    def _check_memory(self, run: Run) -> None:
        if self.structure == "functional":
            functional.check(run, self.rows, statistics.noise_groups(run))
        size = len(run.subset_index)
        matrix = size if self.diagonal else size**2
        need = 3 * 8 * run.size * statistics.noise_groups(run) * matrix  # sum, copy and factor
        if need > 0.8 * free_memory(run.device):
            raise MemoryBudgetError(
                f"{run.size} {self.structure} matrices over {size} weights take "
                f"{need / 2**30:.3g} GiB; use structure='diagonal', subset='last_layer', or fewer "
                "members at once"
            )

    @property
    def diagonal(self) -> bool:
        """What is added up is the diagonal; a kernel needs it for its trace."""
        return self.structure in ("diagonal", "functional")

    def stages(self, run: Run) -> Iterable[Stage]:
        if run.net.batch_norm:
            log.info("laplace: BatchNorm uses its running statistics while curvature is computed")
        if self.train:
            yield optimise(log_joint, run.steps)
        made = partial(Stage, capturable=False, product=self._product(run))
        polish = self.polish
        if polish is None:
            polish = maximum.polishing(run, self.train) if self.structure == "full" else 0
        if polish:
            yield made("polish", self._polish, polish, "all")
        yield made("curvature", self._add, 0, "pass", enter=self._start)
        yield made("settle", self._add, 0, "all", enter=self._settle)

    def _product(self, run: Run) -> float | None:
        """Multiplications of JᵀΛJ, or of factoring it; None where there is no such matrix."""
        if self.diagonal:
            return None
        size, rows = len(run.subset_index), run.settings.batch_size * output_size(run.net.output)
        return float(run.size * size**2 * max(size, rows))

    def _start(self, run: Run, state: State) -> State:
        return state | statistics.empty(run, self.diagonal)

    def _add(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        return statistics.add(run, state, batch, self.diagonal), {}

    def _settle(self, run: Run, state: State) -> State:
        if self.structure == "functional":
            state = functional.complete(run, state, self.rows)
        return statistics.settle(run, state, self.tunes(run))

    def _polish(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """θ ← θ + t H⁻¹ ∇ log p(θ, D), with the best t; then noise and prior scale."""
        index, theta = run.subset_index, state["theta"]
        local, _ = self._add(run, self._start(run, state), batch, clock)
        prior, _ = statistics.prior_curvature(run, theta)
        tau = state["tau"][:, None]
        _, grads, _ = run.value_and_grad(maximum.log_likelihood, state, batch, clock)
        slope = grads["theta"][:, index].double()
        slope = slope + tau * run.prior.score(theta)[:, index].double()
        ones = torch.ones_like(local["chi"])
        direction = covariance(local["curvature"], ones, tau * prior).matmul(slope)
        with torch.no_grad():
            best, chosen = self._log_joint(run, state, theta, batch), theta
            for share in _STEPS:
                tried = theta.index_add(1, index, (share * direction).to(theta.dtype))
                reached = self._log_joint(run, state, tried, batch)
                better = reached > best
                best = torch.where(better, reached, best)
                chosen = torch.where(better[:, None], tried, chosen)
        new = {**state, "theta": chosen}
        if statistics.learns_noise(run) or self.tunes(run):
            there, _ = self._add(run, self._start(run, new), batch, clock)
            settled = self._settle(run, there)
            new |= {"theta": settled["theta"], "tau": settled["tau"]}
        return new, {"loss": -best / run.n, "gradient": slope.norm(dim=1)}

    def _log_joint(self, run: Run, state: State, theta: Tensor, batch: Batch) -> Tensor:
        """Up to a constant, with the prior's precision times τ where that is free: [M]."""
        tau = state["tau"]
        fit = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        for part in run.engine.chunks(run.size):
            own, rows = slice_state(state, part), batch.members(part)
            fit[part] = run.part(part).log_likelihood(theta[part], rows, own).double()
        if not self.tunes(run):
            return fit + run.prior.log_prob(theta).double()
        return fit - 0.5 * tau * statistics.prior_curvature(run, theta)[1]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        rows = verdict.judged(run)
        found = ["evidence" if self.tunes(run) else "given"] * run.size
        held_out = run.rows.validation is not None and rows is not None
        if held_out and self.tunes(run) and self.tune != "evidence":
            parts = [slice(k, k + 1) for k in range(run.size)]
            each = [self._checked(run.part(own), slice_state(state, own)) for own in parts]
            state, found = joined([own for own, _ in each]), [by for _, by in each]
        posterior = self._posterior(run, state)
        posterior.record.diagnostics["prior_from"] = found
        heat = run.field(self, "temperature")
        if rows is not None:
            expected = statistics.optimism(run, state, posterior.covariance, heat)
            verdict.judge(posterior, rows, expected)
        maximum.judge(run, state, posterior, heat)
        return posterior

    def _checked(self, run: Run, state: State) -> tuple[State, str]:
        """One member under the evidence's prior, or, where that is asked for or θ* alone predicts
        held-out rows better, under the nearest to it that predicts them as well as the best."""
        rows = verdict.judged(run)
        assert rows is not None and rows.held_out  # one member has one part
        if self.tune == "auto":
            below = verdict.below_its_maximum(self._posterior(run, state), rows)
            least = verdict.MUCH if self.train else 0.0  # it stopped where θ* was good
            if not verdict.beyond_chance(below) or float(below.mean()) <= least:
                return state, "evidence"
        tried, scores = [], []
        for factor in _PRECISIONS:  # learned noise is at its type-II maximum under each
            scaled = {**state, "tau": factor * state["tau"]}
            tried.append(statistics.settle(run, scaled, scale=False))
            scores.append(verdict.log_scores(self._posterior(run, tried[-1]), rows))
        best = max(scores, key=lambda each: float(each.mean()))
        behind = [verdict.beyond_chance(best - each, errors=1.0) for each in scores]
        chosen = tried[behind.index(False)]
        scale, before = (float(s["tau"].rsqrt()) for s in (chosen, state))
        log.info("laplace: prior scale %.3g by held-out rows (%.3g by evidence)", scale, before)
        return chosen, "validation"

    def _posterior(self, run: Run, state: State) -> LaplacePosterior:
        prior, quad = statistics.prior_curvature(run, state["theta"])
        tau = state["tau"]
        temperature = run.field(self, "temperature").double()
        kind, inverse = LaplacePosterior, self._inverse(run, state, tau[:, None] * prior)
        spread = inverse.scaled(temperature).to(dtype=run.dtype)
        if isinstance(spread, Dual):
            kind = functional.FunctionalPosterior
        else:
            tidy = {k: v.contiguous() for k, v in spread.state().items()}  # as a loaded one will be
            spread = spread.from_state(tidy)
        posterior = kind(
            mean=state["theta"], covariance=spread,
            priors=statistics.priors_used(run, tau) if self.tunes(run) else None,
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        exact = self.structure != "functional" or functional.whole(run, self.rows)
        if exact and bool((temperature == 1.0).all()) and not run.tempered:
            posterior.log_evidence = self._log_evidence(run, state, inverse.logdet(), prior, quad)
        if self.tunes(run):
            posterior.record.diagnostics["prior_scale"] = tau.rsqrt().tolist()
        return posterior

    def _inverse(self, run: Run, state: State, prior: Tensor) -> Structure:
        """H⁻¹, with τΛ [M, p]."""
        if self.structure == "functional":
            return functional.covariance(run, state, self.rows)
        return covariance(state["curvature"], torch.ones_like(state["chi"]), prior)

    def _log_evidence(
        self, run: Run, state: State, logdet: Tensor, prior: Tensor, quad: Tensor
    ) -> float:
        """In units of y; several members (modes) count by the mean of their evidences. Weights that
        are points, and learned noise, are given: their prior is not counted."""
        tau = state["tau"]
        if run.prior.is_gaussian:
            log_prior = 0.5 * ((tau[:, None] * prior).log().sum(1) - tau * quad)
        else:
            log_prior = run.subset_prior.log_prob(state["theta"][:, run.subset_index]).double()
            log_prior = log_prior + 0.5 * math.log(2 * math.pi) * prior.shape[1]
        each = state["fit"] + log_prior + 0.5 * logdet + run.units_log_jacobian()
        return float(torch.logsumexp(each, 0) - math.log(len(each)))
