"""Laplace: a Gaussian at the maximum of the log joint.

    q(θ) = N(θ*, T H⁻¹),    H = Σ_i J_iᵀ C_i J_i + Λ
    log p(D) ≈ log p(D, θ*) + ½ gᵀ H⁻¹ g + (p/2) log 2π − ½ log |H|,    g = ∇ log p(D, θ*)

MacKay (1992); Daxberger et al. (2021). Training is that of MAP. One pass over the data then sums
the generalised Gauss–Newton matrix of the uncertain weights (the `subset` of the model); Λ is the
curvature of the prior. g is zero at the maximum, but not after early stopping on held-out rows: the
evidence is the integral of the quadratic at θ*, with H in its structure. A learned Gaussian noise
level is re-estimated by type-II maximum likelihood, outside the Hessian. So is the scale of the
prior, if the user has not chosen a prior. This happens after training or, with `evidence_steps`,
during it. Other likelihood parameters stay at their joint maximum. Predictions are linearised by
default.

The evidence selects the scale that explains the data, which is not always the one that predicts
best: where the posterior is not Gaussian, class predictions have too little confidence. So the
predictive is compared with that of θ* alone, on held-out rows if there are any. Where it is much
worse, the mean of the Gaussian is corrected for classes (`mean_correction`), or `status` reports
it.

Use Laplace where one mode is enough and the evidence is needed. "full" is for up to about 5,000
weights (2,000 by default), "block-diagonal" for as many in each layer, "kronecker" for networks of
Linear layers, convolutions and embeddings, "low-rank" for few rows. "diagonal" is for any number of
weights, but has no correlations. Dropout is off and BatchNorm frozen while curvature is computed.

Subnetwork (`Subnetwork`). The weights with the largest variance 1/(G_jj + Λ_jj) under the diagonal
approximation have a full matrix, and the others are points. They are chosen for each member. Of all
subsets of that size, this one has the smallest Wasserstein distance between its diagonal posterior
and that of all weights (Daxberger, Nalisnick, Allingham, Antorán & Hernández-Lobato 2021). The
matrix of the chosen weights is then exact, with all correlations.

Training with evidence steps (`evidence_stage`). The prior scale and the noise level follow the
evidence during training.

    θ ← an optimiser's steps on log p(D | θ, σ) + log p(θ | τ)
    τ, σ ← now and then, up log p(D | θ, σ) + log p(θ | τ) + (p/2) log 2π − ½ log |H(θ, τ, σ)|

Immer, Bauer, Fortuin, Rätsch & Khan (2021). The curvature is that of all rows at the current
weights. (τ, σ) take a few rounds of MacKay's fixed-point iteration, without converging, also after
training, because the weights have not yet adapted to them. Between two updates σ is fixed, because
the noise is underestimated on training rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.laplace import forms as scales
from doxa.laplace import forms as statistics
from doxa.laplace import mean_correction, status
from doxa.laplace.curvature import Jacobians, Outputs, chunk_bytes, output_size
from doxa.laplace.forms import (
    CHOSEN,
    NOISE,
    Blocks,
    Effective,
    Form,
    Matrix,
    Scales,
    Sums,
    added,
    slope,
)
from doxa.laplace.functional import Dual, FunctionalPosterior, Kernel
from doxa.laplace.hessian import Hessian
from doxa.laplace.kronecker import Factors
from doxa.laplace.low_rank import LowRank
from doxa.laplace.posterior import LaplacePosterior
from doxa.laplace.sampling_error import SamplingError, sampling_error
from doxa.laplace.status import HeldOut
from doxa.linalg import Dense, Embedded, Structure
from doxa.method import (
    AnalyticGradient,
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
from doxa.method.method import Alternatives, Workload, flag, one_of, positive, whole
from doxa.method.state import joined
from doxa.posterior import Posterior


@dataclass(frozen=True)
class Subnetwork(Form):
    """G [M, g, size, size] over the chosen weights."""

    size: int

    def chosen(self, run: Run, state: State, prior: Tensor) -> State:
        """The state with the chosen weights, selected by its diagonal curvature and Λ [M, p]."""
        precision = state["curvature"].sum(1) + prior
        order = precision.argsort(dim=1, stable=True)[
            :, : self._size(run)
        ]  # the smallest precision is the largest variance
        return state | {CHOSEN: order.sort(1).values}

    def _size(self, run: Run) -> int:
        return min(self.size, len(run.subset_index))

    def empty(self, run: Run, groups: int) -> State:
        size = self._size(run)
        return {"curvature": run.n.new_zeros(run.size, groups, size, size).double()}

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        flat, j = source(outputs.part.x, outputs.part.shared)
        index = state[CHOSEN][:, None, None].expand(*j.shape[:3], -1)
        sums = added(state, j.gather(3, index), flat, outputs, groups, diagonal=False)
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Embedded:
        inner = _MATRIX.covariance(run, state, prior)
        assert isinstance(inner, Dense)
        return Embedded(inner, state[CHOSEN], len(run.subset_index))

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        return _MATRIX.effective(run, state, prior, scales)

    def bytes(self, run: Run, groups: int) -> int:
        return 3 * 8 * run.size * groups * (self._size(run) ** 2 + len(run.subset_index))

    def product(self, run: Run) -> float | None:
        size, rows = self._size(run), run.settings.batch_size * output_size(run.net.output)
        return float(run.size * size**2 * max(size, rows))


_MATRIX = Matrix(diagonal=False)


EVIDENCE_ROUNDS = 3
_DRAWN = 100  # functions that predict held-out rows: normals, and the weights from them


def evidence_stage(run: Run, sums: Sums, tunes: bool, count: int) -> Stage:
    """The training stage, with `count` re-estimations at even intervals."""
    objective = Objective(sums.learns_noise(run))
    ascent = optimise(objective, run.steps)
    times = {max(1, round(run.steps * k / (count + 1))) for k in range(1, count + 1)}

    def mark(run: Run, state: State) -> State:
        return reestimated(run, state, sums, tunes)

    return replace(ascent, hooks=dict.fromkeys(sorted(times), mark))


def reestimated(run: Run, state: State, sums: Sums, tunes: bool) -> State:
    """Update learned noise, and the prior scale where it is tuned, by the evidence at these
    weights."""
    rows = run.passes(max(4096, run.pass_rows))
    local = state | sums.empty(run)
    for t in range(rows.count):
        local = sums.add(run, local, rows.batch(t))
    settled = sums.settle(run, local, tunes, most=EVIDENCE_ROUNDS)
    return {**state, "theta": settled["theta"], "tau": settled["tau"]}


class Objective:
    """log p(D | θ) + log p(θ | τ) in training, with τ from the state; `fixed` noise is not
    trained."""

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed

    def __call__(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        fit = run.train(params["theta"], params, batch, clock)
        at = params["theta"].detach()
        tau = _of_all(run, params).to(at.dtype)
        pull = run.prior.score(at)
        # the log-density of a Gaussian, minus that under τ = 1
        more = 0.5 * (tau.log() + (tau - 1) * pull * (at - run.prior.mean)).sum(1)
        value = run.prior.log_prob(at) + more

        def add(grad: Tensor) -> Tensor:
            grad = torch.addcmul(grad, tau, pull)
            if self.fixed:
                grad[:, run.layout.slices[NOISE]] = 0.0
            return grad

        return fit.value, fit.changed, AnalyticGradient(value, {"theta": add})


def _of_all(run: Run, params: State) -> Tensor:
    """τ of every weight, [M, P]: 1 for weights that are points, and for learned noise."""
    every = torch.ones_like(params["theta"], dtype=torch.float64)
    each = Scales.of(run, params).each(params["tau"])
    return every.index_copy(1, run.subset_index, each.expand(-1, len(run.subset_index)))


log = logging.getLogger("doxa")

_DIAGONAL = statistics.Sums(Matrix(diagonal=True))  # selects a subnetwork


@store.register("laplace")
@dataclass(frozen=True)
class Laplace(Method):
    """A Gaussian at the MAP from the Gauss–Newton matrix.

    Parameters
    ----------
    structure : str
        "full"; "diagonal"; "block-diagonal": the full matrix of each layer, without correlations
        between layers; "kronecker": two small factors for each layer; "low-rank": the leading
        eigenpairs over all layers; "functional": as full, computed with the kernel over rows.
        "auto": full up to 2,000 uncertain weights, functional up to 2,000 rows × outputs, then
        Kronecker factors, where the network has them.
    predictive : str
        "linearised" (closed form for Gaussian noise), or "sampled" (drawn weights in the network).
    temperature : float
        T multiplies the covariance. With T ≠ 1 there is no evidence.
    tune : str or None
        How the scale of a Gaussian prior is selected. "evidence": type-II maximum likelihood.
        "validation": among half decades of the precision around that one, the nearest whose
        held-out score is within one standard error of the best (Breiman et al. 1984). None: it
        stays as given. "auto": as given, if the user chose a prior for the model; otherwise
        "evidence", and "validation" where held-out rows show that θ* alone predicts better (by 0.1
        nats per row, if the same rows stopped the training).
    newton_steps : int or None
        The number of Gauss–Newton steps on all rows after training, for an exact maximum ("full"
        only). Each has a line search, and is followed by the re-estimation of noise and prior
        scale. None: ten where they are cheap, and none after training with early stopping.
    train : bool
        False keeps the weights: for a trained network, with fit(init="given").
    curvature : str
        "ggn": the generalised Gauss–Newton matrix, with one backward pass per output. "sampled": an
        unbiased estimate of it, with one backward pass per draw, for many classes and for outputs
        at every pixel; its error is in `diagnostics["curvature"]`, and that of the evidence in
        `diagnostics["log_evidence_error"]`. "auto": "sampled" for more than ten outputs per row
        with the structures "diagonal" and "kronecker", else "ggn". "fisher": the empirical Fisher;
        learned noise then stays as trained. "hessian": for small networks ("full" only); it is an
        error where the Hessian of the log joint has a negative eigenvalue.
    curvature_draws : int
        The number of draws of a row for curvature="sampled".
    rank : int
        The number of eigenpairs of structure="low-rank".
    link : str
        From a Gaussian over logits to class probabilities, where the predictive is linearised.
        "log-odds": functions are drawn, and the log odds are integrated over a Gaussian with the
        moments of the draws (`predictive/classes.py`). "samples": drawn functions are averaged.
        "probit", "bridge", and "probit-marginal" (the probit of laplace-torch): closed forms
        (`laplace/posterior.py`).
    kernel_rows : int or None
        The number of evenly spaced rows of structure="functional"; None: all.
    subnetwork : int or None
        The number of weights, those of largest variance, with a full matrix; the others are points.
    tuned_scale : str
        The factors that are tuned: one factor, "shared" by all uncertain weights, or one for each
        "layer" (each tensor).
    evidence_steps : int
        How many times learned noise and the prior scale are re-estimated during training, at even
        intervals; training continues under the new values (`laplace/laplace.py`). No rows are then
        held out by default. 0: only after training.
    mean_correction : bool or "auto"
        For classes. False: the Gaussian stays at θ*. True: its mean moves, in the linearised
        network, to the point where the average gradient is zero, and its covariance follows from
        the average curvature (`laplace/mean_correction.py`). The uncertainty under the prior of
        maximal evidence then costs little accuracy of probabilities. "auto": True where the
        Gaussian at θ* would be "worse-than-map", that is, predict much worse than θ* alone.
    """

    rate_by_network: ClassVar[bool] = True
    shares: ClassVar[str] = "both"
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    name: ClassVar[str] = "laplace"
    renamed: ClassVar[Mapping[str, str]] = {
        "polish": "newton_steps",
        "centre": "mean_correction",
        "rows": "kernel_rows",
        "prior_scale": "tuned_scale",
    }
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "link": {"odds": "log-odds"},
        "mean_correction": {"mode": False, "mean": True},
    }
    by_held_out: ClassVar[Mapping[str, Any]] = MappingProxyType({"tune": "validation"})
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()

    structure: str = one_of(
        "auto", "full", "diagonal", "block-diagonal", "kronecker", "low-rank", "functional"
    )
    predictive: str = one_of("linearised", "sampled")
    temperature: float = positive(1.0, per_run=True)
    tune: str | None = one_of("auto", "evidence", "validation", None)
    newton_steps: int | None = whole(None, least=0)
    train: bool = flag(True)
    curvature: str = one_of("auto", "ggn", "sampled", "fisher", "hessian")
    rank: int = whole(50, least=1)
    link: str = one_of("log-odds", "samples", "probit", "bridge", "probit-marginal")
    kernel_rows: int | None = whole(None, least=1)
    subnetwork: int | None = whole(None, least=1)
    tuned_scale: str = one_of("shared", "layer")
    evidence_steps: int = whole(0, least=0)
    mean_correction: bool | str = one_of("auto", or_a=bool, called="True or False")
    curvature_draws: int = whole(10, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        status.check_settings(self)

    def planned_bytes(self, work: Workload) -> int:
        """The peak of training, or of the curvature and the predictions after it."""
        p, m = work.uncertain, work.members
        block = min(chunk_bytes(torch.device("cpu")), work.rows * m * work.outputs * p * 8)
        each = 1 if self.structure in ("auto", "kronecker") else 2
        drawn = each * _DRAWN * m * p * work.itemsize if work.held_out else 0
        after = int(1.5 * block) + drawn + m * self._matrix_bytes(work)
        return max(super().planned_bytes(work), after)

    def _matrix_bytes(self, work: Workload) -> int:
        """Sums, copies and factors of the curvature of one member, in double precision; those of
        the blocks of layers are not counted."""
        p, few = work.uncertain, work.rows * work.outputs
        structure = self.structure
        if self.subnetwork is not None:
            p, structure = min(p, self.subnetwork), "full"
        if structure == "auto":
            structure = "full" if p <= status.FULL else "kronecker"
        sizes = {
            "full": 9 * p**2, "functional": 5 * few**2, "kronecker": 3 * (work.factors + p),
            "low-rank": 4 * self.rank * p, "diagonal": 3 * p,
        }  # fmt: skip
        return 8 * sizes.get(structure, 0)

    def init(self, run: Run) -> State:
        method = self._settled(run)
        status.check_run(method, run, method._sums)
        return {**run.init_network(), "tau": scales.initial_scales(run, self.tuned_scale)}

    @property
    def holds_out(self) -> bool:
        """A trained network may have been trained on the rows that would be held out. With evidence
        steps, the evidence prevents overfitting, and no held-out rows are needed."""
        return self.train and not self.evidence_steps

    def tunes(self, run: Run) -> bool:
        """Whether the prior scale is tuned."""
        if self.tune == "auto":
            return run.net.default_prior and not run.prior.runs  # a stack: a grid of priors
        return self.tune is not None

    def _settled(self, run: Run) -> Laplace:
        """The method with "auto" of structure and curvature resolved for the network of this
        run."""
        settled = replace(self, structure=status.choose_structure(self, run))
        return replace(settled, curvature=status.choose_curvature(settled, run))

    @property
    def _sums(self) -> statistics.Sums:
        forms: dict[str, Form] = {
            "full": Matrix(diagonal=False), "diagonal": Matrix(diagonal=True),
            "block-diagonal": Blocks(), "kronecker": Factors(), "low-rank": LowRank(self.rank),
            "functional": Kernel(self.kernel_rows, self.curvature),
        }  # fmt: skip
        form = Hessian() if self.curvature == "hessian" else forms[self.structure]
        form = form if self.subnetwork is None else Subnetwork(self.subnetwork)
        draws = self.curvature_draws if self.curvature == "sampled" else 0
        return statistics.Sums(form, self.curvature, draws)

    def stages(self, run: Run) -> Iterable[Stage]:
        return self._settled(run)._stages(run)

    def _stages(self, run: Run) -> Iterable[Stage]:
        if run.net.batch_norm:
            log.info("laplace: BatchNorm uses its running statistics while curvature is computed")
        if self.evidence_steps:
            yield evidence_stage(run, self._sums, self.tunes(run), self.evidence_steps)
        elif self.train:
            yield optimise(log_joint, run.steps)
        if self.curvature == "sampled":
            outputs = output_size(run.net.output)
            log.info(
                "laplace: curvature is sampled: %d draws for the %d outputs of a row "
                "(curvature='ggn' is exact, and takes %.3g times as many gradients)",
                self.curvature_draws, outputs, outputs / self.curvature_draws,
            )  # fmt: skip
        made = partial(Stage, capturable=False, product=self._sums.form.product(run))
        newton_steps = self.newton_steps
        if newton_steps is None:
            few = self.structure == "full"
            newton_steps = mean_correction.default_newton_steps(run, self.train) if few else 0
        if newton_steps:
            yield made("polish", self._newton_step, newton_steps, "all")
        if self.subnetwork is not None:
            yield Stage("choose", self._add_diagonal, 0, "pass", capturable=False,
                        enter=lambda run, state: state | _DIAGONAL.empty(run))  # fmt: skip
        yield made("curvature", self._add, 0, "pass", enter=self._start)
        yield made("settle", self._add, 0, "all", enter=self._settle)

    def _start(self, run: Run, state: State) -> State:
        form = self._sums.form
        if isinstance(form, Subnetwork):
            state = form.chosen(run, state, scales.prior_curvature(run, state)[0])
        return state | self._sums.empty(run)

    def _add_diagonal(
        self, run: Run, state: State, batch: Batch, clock: Clock
    ) -> tuple[State, Info]:
        return _DIAGONAL.add(run, state, batch), {}

    def _add(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        return self._sums.add(run, state, batch), {}

    def _settle(self, run: Run, state: State) -> State:
        rounds = EVIDENCE_ROUNDS if self.evidence_steps else statistics.ROUNDS
        return self._sums.settle(run, state, self.tunes(run), rounds)

    def _newton_step(
        self, run: Run, state: State, batch: Batch, clock: Clock
    ) -> tuple[State, Info]:
        return mean_correction.gauss_newton_step(run, state, batch, clock, self.tunes(run))

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return self._settled(run)._finish(run, state)

    def _finish(self, run: Run, state: State) -> Posterior:
        rows = status.evaluation_rows(run)
        found = ["evidence" if self.tunes(run) else "given"] * run.size
        held_out = run.rows.validation is not None and rows is not None and not run.pooled_rows
        if held_out and self.tunes(run) and self.tune != "evidence":
            parts = [slice(k, k + 1) for k in range(run.size)]
            held = HeldOut(self._sums, self._posterior, self.tune == "auto", self.train)
            each = [held.chosen(run.select_members(own), slice_state(state, own)) for own in parts]
            state, found = joined([own for own, _ in each]), [by for _, by in each]
        error = None
        if self.curvature == "sampled":
            inverse = self._sums.form.covariance(run, state, scales.prior_precision(run, state))
            step, _ = mean_correction.newton_step(run, state, inverse)
            error = sampling_error(run, state, self._sums, inverse, step)
            if not bool(error.small.all()):
                log.warning(
                    "laplace: %d draws per row are too few for this matrix (%s), and its evidence "
                    "is not reliable: use more (curvature_draws=), curvature='ggn', or 'diagonal'",
                    self.curvature_draws, self.structure,
                )  # fmt: skip
        posterior = self._evaluated(run, state, rows, error)
        may_move = self._may_move(run) and run.rows.stream is None  # it needs all rows at once
        if posterior.record.status == status.WORSE and may_move:
            posterior = self._evaluated(run, state, rows, error, moves=True)
        if error is not None:
            diagnostics = posterior.record.diagnostics
            diagnostics["curvature"] = error.described(self.curvature_draws)
            if posterior.log_evidence is not None:
                diagnostics["log_evidence_error"] = stated = float(error.evidence.max())
                log.info("laplace: log evidence %.6g ± %.2g from %d draws", posterior.log_evidence,
                         stated, self.curvature_draws)  # fmt: skip
        posterior.record.diagnostics["prior_from"] = found
        posterior.record.diagnostics["chosen_on_held_out"] = int("validation" in found)
        if run.likelihood.classifies:
            posterior.record.diagnostics["mean_correction"] = posterior.at is not None
        at_mode = posterior.covariance if posterior.at is None else self._spread(run, state)
        mean_correction.check_maximum(
            run, state, posterior, at_mode, run.field(self, "temperature")
        )
        return posterior

    def _may_move(self, run: Run) -> bool:
        classes = run.likelihood.classifies and self.predictive == "linearised"
        return self.mean_correction == "auto" and classes

    def _evaluated(
        self,
        run: Run,
        state: State,
        rows: status.EvaluationRows | None,
        error: SamplingError | None,
        moves: bool = False,
    ) -> LaplacePosterior:
        posterior = self._posterior(run, state, moves, error)
        if rows is not None:
            heat = run.field(self, "temperature")
            share = statistics.determined(run, state, posterior.covariance, heat)
            nearer = None
            if self.structure == "diagonal" and status.has_factors(run):
                factors = replace(self._sums, form=Factors())
                nearer = partial(factors.determined, run, state, heat)
            status.compare_with_map(posterior, rows, share, nearer)
        return posterior

    def _spread(self, run: Run, state: State) -> Structure:
        """T H⁻¹, as the posterior stores it."""
        inverse = self._sums.form.covariance(run, state, scales.prior_precision(run, state))
        return self._kept(run, inverse)

    def _kept(self, run: Run, inverse: Structure) -> Structure:
        spread = inverse.scaled(run.field(self, "temperature").double()).to(dtype=run.dtype)
        if isinstance(spread, Dual):
            return spread
        tidy = {k: v.contiguous() for k, v in spread.state().items()}  # as after loading
        return spread.from_state(tidy)

    def _posterior(
        self, run: Run, state: State, moves: bool = False, error: SamplingError | None = None
    ) -> LaplacePosterior:
        prior, tau = scales.prior_precision(run, state), state["tau"]
        inverse = self._sums.form.covariance(run, state, prior)
        kind = LaplacePosterior if not isinstance(inverse, Dual) else FunctionalPosterior
        posterior = kind(
            mean=state["theta"], covariance=self._kept(run, inverse),
            priors=scales.priors_used(run, tau) if self.tunes(run) else None,
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        if moves or self.mean_correction is True:
            width = partial(self._averaged, run, state) if self._sums.averages else None
            mean_correction.move(run, posterior, prior, width, asked=self.mean_correction is True)
        temperature = run.field(self, "temperature")
        if self._sums.form.whole(run) and bool((temperature == 1.0).all()) and not run.tempered:
            quad = (tau * scales.prior_curvature(run, state)[1]).sum(1)
            above = 0.5 * mean_correction.newton_step(run, state, inverse)[1]
            logdet = inverse.logdet() if error is None else inverse.logdet() - error.added
            posterior.log_evidence = self._log_evidence(run, state, logdet, prior, quad, above)
        if self.tunes(run):
            posterior.record.diagnostics["prior_scale"] = scales.reported_scales(run, tau)
        return posterior

    def _averaged(self, run: Run, state: State, away: Tensor) -> Structure:
        """T H⁻¹ with the curvature averaged over outputs f + d, as a function of d [M, S, B, O]."""
        return self._spread(run, self._sums.averaged(run, state, away))

    def _log_evidence(
        self, run: Run, state: State, logdet: Tensor, prior: Tensor, quad: Tensor, above: Tensor
    ) -> float:
        """The log evidence in units of y; with several members (modes), the mean of their
        evidences.

        Weights that are points, and learned noise, count as given: their prior is not included.
        `above` [M] is the maximum of the quadratic minus its value at θ*.
        """
        if run.prior.is_gaussian:
            log_prior = 0.5 * (prior.log().sum(1) - quad)
        else:
            log_prior = run.subset_prior.log_prob(state["theta"][:, run.subset_index]).double()
            log_prior = log_prior + 0.5 * math.log(2 * math.pi) * prior.shape[1]
        each = state["fit"] + log_prior + above + 0.5 * logdet + run.units_log_jacobian()
        return float(torch.logsumexp(each, 0) - math.log(len(each)))
