"""Laplace: a Gaussian at the maximum of the log joint.

    q(θ) = N(θ*, T H⁻¹),    H = Σ_i J_iᵀ C_i J_i + Λ
    log p(D) ≈ log p(D, θ*) + (p/2) log 2π − ½ log |H|

MacKay (1992); Daxberger et al. (2021). Training is MAP's; one pass over the data then adds up the
generalised Gauss–Newton matrix of the uncertain weights (the model's `subset`), Λ is the prior's
curvature. A learned Gaussian noise level is re-estimated by type-II maximum likelihood, outside
the Hessian; other likelihood parameters stay at their joint maximum. Predictions are linearised
unless asked otherwise. Use it where one mode is enough and the evidence is wanted; "full" is for up
to about 5,000 weights, "diagonal" for any number, at the price of all correlations. Dropout is off
and BatchNorm frozen while curvature is computed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import store
from doxa.data import Batch, free_memory
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace.curvature import (
    Jacobians, flatten_outputs, gauss_newton, output_size, unflatten_outputs,
)  # fmt: skip
from doxa.laplace.evidence import covariance, reestimate
from doxa.laplace.posterior import LaplacePosterior
from doxa.layout import Params
from doxa.likelihoods import Gaussian
from doxa.method import (
    Clock, Info, Method, Run, Stage, State, batch_rows, log_joint, optimise,
)  # fmt: skip
from doxa.model import likelihood_parameters
from doxa.posterior import Posterior

log = logging.getLogger("doxa")

_NOISE = "likelihood.log_noise"
_STEPS = (1.0, 0.5, 0.25, 0.1, 0.02)  # shares of a Gauss–Newton step that polishing tries


@store.register("laplace")
@dataclass(frozen=True)
class Laplace(Method):
    """A Gaussian at the MAP from the Gauss–Newton matrix.

    Parameters
    ----------
    structure: "full" or "diagonal".
    predictive: "linearised" (closed form for Gaussian noise) or "sampled" (weights into the net).
    temperature: T multiplies the covariance; with T ≠ 1 there is no evidence.
    tune: "evidence" also fits the scale of the (Gaussian) prior by type-II maximum likelihood.
    polish: Gauss–Newton steps on all rows after training, with a line search, each followed by the
        re-estimation of noise and prior scale: for an exact maximum ("full" only).
    """

    name: ClassVar[str] = "laplace"

    structure: str = "full"
    predictive: str = "linearised"
    temperature: float = 1.0
    tune: str | None = None
    polish: int = 0

    def __post_init__(self) -> None:
        if self.structure in ("kronecker", "low-rank"):
            raise MethodError(
                f"structure={self.structure!r} comes later; use 'diagonal', or 'full' with "
                "subset='last_layer'"
            )
        choices = {
            "structure": ("full", "diagonal"),
            "predictive": ("linearised", "sampled"),
            "tune": (None, "evidence"),
        }
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise MethodError(f"{field} must be one of {known}, not {getattr(self, field)!r}")
        if self.temperature <= 0 or self.polish < 0:
            raise MethodError("laplace needs temperature > 0 and polish ≥ 0")
        if self.polish and self.structure != "full":
            raise MethodError("polish solves with the full matrix: use structure='full'")

    def init(self, run: Run) -> State:
        if self.tune and not run.prior.is_gaussian:
            raise MethodError("tune='evidence' scales a Gaussian prior; use Normal or FanInNormal")
        self._check_memory(run)
        one = torch.ones(run.size, device=run.device, dtype=torch.float64)
        return {"theta": run.start(), "tau": one, **run.init_buffers()}

    def _check_memory(self, run: Run) -> None:
        size = len(run.subset_index())
        matrix = size if self.structure == "diagonal" else size**2
        need = 3 * 8 * run.size * self._groups(run) * matrix  # the sum, a copy, its factor
        if need > 0.8 * free_memory(run.device):
            raise MemoryBudgetError(
                f"{run.size} {self.structure} matrices over {size} weights take "
                f"{need / 2**30:.3g} GiB; use structure='diagonal', subset='last_layer', or fewer "
                "members at once"
            )

    def stages(self, run: Run, steps: int) -> Iterable[Stage]:
        if run.net.batch_norm:
            log.info("laplace: BatchNorm uses its running statistics while curvature is computed")
        yield optimise(log_joint, steps)
        if self.polish:
            yield Stage("polish", self._polish, self.polish, "all", capturable=False)
        yield Stage("curvature", self._add, 0, "pass", enter=self._start, capturable=False)
        yield Stage("settle", self._add, 0, "all", enter=self._settle, capturable=False)

    def total_steps(self, steps: int) -> int:
        return steps + self.polish

    def _tunes_noise(self, run: Run) -> bool:
        return isinstance(run.likelihood, Gaussian) and _NOISE in run.layout.slices

    def _groups(self, run: Run) -> int:
        """How many groups of outputs have a noise level of their own."""
        return run.layout.select([_NOISE]).size if self._tunes_noise(run) else 1

    def _theta(self, run: Run, flat: Tensor) -> Params:
        return likelihood_parameters(run.layout.unflatten(flat)) | run.constants

    def _start(self, run: Run, state: State) -> State:
        size, groups = len(run.subset_index()), self._groups(run)
        shape = (size,) if self.structure == "diagonal" else (size, size)
        zeros = lambda *s: torch.zeros(run.size, *s, device=run.device, dtype=torch.float64)  # noqa: E731
        return {**state, "curvature": zeros(groups, *shape), "chi": zeros(groups), "fit": zeros()}

    def _add(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """Add some rows' curvature, squared residuals and log-likelihood."""
        new = dict(state)
        theta, groups = self._theta(run, state["theta"]), self._groups(run)
        jacobians = Jacobians(
            run.net, state["theta"], run.net.subset_names, run.buffers(state) or None
        )
        for rows in jacobians.chunks(batch_rows(batch)):
            part = _rows(batch, rows)
            flat, j = jacobians(part.x, part.shared)
            f = unflatten_outputs(flat, run.net.output)
            c = run.likelihood.curvature(f, theta, 1, part.y)
            diagonal = self.structure == "diagonal"
            if groups == 1:
                total = gauss_newton(j, c, part.weight, diagonal).unsqueeze(1)
            else:  # each output has its own noise level
                each = [
                    gauss_newton(j[:, :, o : o + 1], c[:, :, o : o + 1, o : o + 1],
                                 part.weight, diagonal)
                    for o in range(groups)
                ]  # fmt: skip
                total = torch.stack(each, 1)
            fit = run.likelihood.log_prob(f, part.y, theta, 1).double()
            if part.weight is not None:
                fit = fit * part.weight
            new["curvature"] = new["curvature"] + total
            new["fit"] = new["fit"] + fit.sum(1)
            if self._tunes_noise(run):
                new["chi"] = new["chi"] + _chi(f, part, theta, groups)
        return new, {}

    def _prior(self, run: Run, state: State) -> tuple[Tensor, Tensor]:
        """The curvature Λ of the subset's prior, [M, p], and (θ − m)ᵀ Λ (θ − m), [M]."""
        index, theta = run.subset_index(), state["theta"]
        prior = run.prior.curvature(theta).expand_as(theta)[:, index].double()
        away = (theta - run.prior.mean).double()[:, index]
        return prior, (prior * away.square()).sum(1)

    def _settle(self, run: Run, state: State) -> State:
        """Noise and prior scale at their type-II maximum for the current θ*."""
        prior, quad = self._prior(run, state)
        tau, groups = state["tau"], self._groups(run)
        outputs = output_size(run.net.output) // groups  # in each group
        count = run.n.double()[:, None].expand(-1, groups) * outputs
        ratio, rescale = reestimate(
            state["curvature"], state["chi"], count, tau[:, None] * prior, tau * quad,
            noise=self._tunes_noise(run), scale=self.tune is not None,
            gaussian=run.prior.is_gaussian,
        )  # fmt: skip
        new = {**state, "tau": tau * rescale}
        if self._tunes_noise(run):
            theta, at = state["theta"].clone(), run.layout.slices[_NOISE]
            theta[:, at] += 0.5 * ratio.log().to(theta.dtype)
            trail = (1,) * (state["curvature"].ndim - 2)
            new["theta"] = theta
            new["curvature"] = state["curvature"] / ratio.reshape(*ratio.shape, *trail)
            new["chi"] = state["chi"] / ratio
            change = count * ratio.log() + state["chi"] * (1 / ratio - 1)
            new["fit"] = state["fit"] - 0.5 * change.sum(1)
        return new

    def _polish(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """θ ← θ + t H⁻¹ ∇ log p(θ, D), with the best t; then noise and prior scale."""
        index, theta = run.subset_index(), state["theta"]
        buffers = run.buffers(state) or None
        local, _ = self._add(run, self._start(run, state), batch, clock)
        prior, _ = self._prior(run, state)
        tau = state["tau"][:, None]
        _, grad = run.grad(theta, batch, buffers=buffers)
        slope = grad[:, index].double() + tau * run.prior.score(theta)[:, index].double()
        ones = torch.ones_like(local["chi"])
        direction = covariance(local["curvature"], ones, tau * prior).matmul(slope)

        def value(flat: Tensor) -> Tensor:
            fit = torch.zeros(run.size, device=run.device, dtype=torch.float64)
            for part in run.engine.chunks(run.size):
                own = None if buffers is None else {k: v[part] for k, v in buffers.items()}
                rows = batch.members(part)
                fit[part] = run.log_likelihood(flat[part], rows, part, buffers=own).double()
            return fit + self._tempered_prior(run, flat, state["tau"])

        with torch.no_grad():
            best, chosen = value(theta), theta
            for share in _STEPS:
                tried = theta.index_add(1, index, (share * direction).to(theta.dtype))
                reached = value(tried)
                better = reached > best
                best = torch.where(better, reached, best)
                chosen = torch.where(better[:, None], tried, chosen)
        new = {**state, "theta": chosen}
        if self._tunes_noise(run) or self.tune:
            at_new, _ = self._add(run, self._start(run, new), batch, clock)
            settled = self._settle(run, at_new)
            new |= {"theta": settled["theta"], "tau": settled["tau"]}
        return new, {"loss": -best / run.n, "gradient": slope.norm(dim=1)}

    def _tempered_prior(self, run: Run, flat: Tensor, tau: Tensor) -> Tensor:
        """The log prior up to a constant: τ times that of the subset, where τ is free."""
        if not self.tune:
            return run.prior.log_prob(flat).double()
        index = run.subset_index()
        away = (flat - run.prior.mean)[:, index].double()
        prior = run.prior.curvature(flat).expand_as(flat)[:, index].double()
        return -0.5 * tau * (prior * away.square()).sum(1)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        prior, quad = self._prior(run, state)
        tau = state["tau"]
        ones = torch.ones_like(state["chi"])
        inverse = covariance(state["curvature"], ones, tau[:, None] * prior)
        temperature = run.field(self, "temperature").double()
        posterior = LaplacePosterior(
            mean=state["theta"], covariance=inverse.scaled(temperature).to(dtype=run.dtype),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        weighted = run.data.weight is not None or run.likelihood.tempered
        if bool((temperature == 1.0).all()) and not weighted:
            posterior.log_evidence = self._log_evidence(run, state, inverse.logdet(), prior, quad)
        if self.tune:
            posterior.record.diagnostics["prior_scale"] = tau.rsqrt().tolist()
        return posterior

    def _log_evidence(
        self, run: Run, state: State, logdet: Tensor, prior: Tensor, quad: Tensor
    ) -> float | None:
        """In units of y; several members (modes) count by the mean of their evidences."""
        tau = state["tau"]
        if run.prior.is_gaussian:
            log_prior = 0.5 * ((tau[:, None] * prior).log().sum(1) - tau * quad)
        elif run.net.subset == "all":
            own = run.layout.index(n for n in run.layout.names if n.startswith("likelihood."))
            learned = state["theta"][:, own.to(run.device)].double()
            constant = 0.5 * math.log(2 * math.pi)
            log_prior = run.prior.log_prob(state["theta"]).double()
            log_prior = log_prior + (0.5 * learned.square() + constant).sum(1)
            log_prior = log_prior + constant * prior.shape[1]
        else:
            log.info("laplace: no evidence for a part of the weights under a non-Gaussian prior")
            return None
        each = state["fit"] + log_prior + 0.5 * logdet + run.units_log_jacobian()
        return float(torch.logsumexp(each, 0) - math.log(len(each)))


def _chi(f: Tensor, batch: Batch, theta: Params, groups: int) -> Tensor:
    """Σ w (y − f)² / σ² for each group of outputs: [M, g]."""
    log_noise = theta["log_noise"].double()
    each = flatten_outputs((batch.y - f).double().square(), 1)  # [M, B, O]
    if batch.weight is not None:
        each = each * batch.weight.double()[..., None]
    squares = each.sum(1) if groups > 1 else each.sum((1, 2)).unsqueeze(1)
    return squares * (-2.0 * log_noise.reshape(len(f), groups)).exp()


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, for all members."""
    at = (rows,) if batch.shared else (slice(None), rows)
    weight = None if batch.weight is None else batch.weight[..., rows]
    pick = lambda tree: tree_map(lambda t: t[at], tree)  # noqa: E731
    return Batch(pick(batch.x), pick(batch.y), batch.scale, weight, batch.shared)
