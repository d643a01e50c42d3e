"""Mean-field variational inference (Bayes by Backprop).

    q(θ) = Π_j N(θ_j; μ_j, σ_j²),   σ = exp(ρ)
    ELBO = E_q[Σ_i log p(y_i | θ)] − KL(q ‖ p),   summed over the data set and over all weights

Blundell et al. (2015). The expected log-likelihood is estimated with `samples` draws per member and
step: of weights, by local reparametrisation, or by Flipout (`doxa.vi.estimators`, which also nests
several draws). The gradient of the entropy (by ρ it is T) is in closed form, and so is that of the
KL under a Gaussian or a Laplace prior. Point estimates and the bound are as for every Gaussian
(`doxa.vi.gaussian`). Prediction and the final bound draw weights, for any estimator. The family has
no correlations, so it is too narrow if the posterior has them.

The scale of a Gaussian prior can be learned, at the maximum of the ELBO (empirical Bayes):

    −KL(q ‖ p_τ) is largest, over precisions τ/s² of n weights, at   τ = n / Σ (σ² + (μ − m)²)/s²

in closed form, without training: every step uses the gradient at the best τ for the current q,
which is the gradient of max_τ ELBO. "shared": one τ for all uncertain weights; "layer": one for
each tensor. Point estimates keep the given prior. MacKay (1992) does the same for a Laplace
approximation; Blundell et al. (2015), section 3.3, warn against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method import (
    AnalyticGradient,
    Clock,
    Info,
    Objective,
    Problem,
    Run,
    Stage,
    State,
    Step,
    TensorGradient,
    average_from,
    first_averaged,
    gradients_by_tensor,
)
from doxa.method.method import one_of
from doxa.method.run import scaled_priors
from doxa.priors import Prior
from doxa.vi.estimators import Placed, draws_of, rewritten
from doxa.vi.gaussian import BLOCK, GaussianVI, columns, fit_one, moved


def check_gaussian(run: Run) -> None:
    if not run.subset_prior.is_gaussian:
        raise MethodError(
            "prior_scale learns the scale of a Gaussian prior: use doxa.Normal or FanInNormal, or "
            "prior_scale='given'"
        )


class Scaled:
    """A Gaussian prior at its best scale for one q: μ [M, subset] and σ, without gradients."""

    def __init__(self, run: Run, kind: str, mean: Tensor, std: Tensor) -> None:
        prior = run.subset_prior
        assert prior.precision is not None
        self.width = prior.precision * std
        self.pull = prior.precision * (mean - prior.mean)  # minus the score
        squares = self.pull * (mean - prior.mean) + self.width * std  # [M, subset]
        if kind == "shared":
            self.each = squares.mean(1, keepdim=True).reciprocal()  # τ, [M, 1]
            self.tau = self.each
        else:
            sizes = run.layout.select(run.net.subset_names).sizes
            parts = squares.split(sizes, 1)
            means = [part.mean(1, keepdim=True).reciprocal() for part in parts]
            self.each = torch.cat(means, 1)  # [M, tensors]
            wide = [one.expand(-1, size) for one, size in zip(means, sizes, strict=True)]
            self.tau = torch.cat(wide, 1)  # [M, subset]
        self.gain = 0.5 * (self.tau.log() - (self.tau - 1) * squares).sum(1)  # over τ = 1, [M]

    def more(self) -> tuple[Tensor, Tensor]:
        """The gradients by μ and σ in addition to those under the given prior, [M, subset]."""
        return (1 - self.tau) * self.pull, (1 - self.tau) * self.width


def best_priors(run: Run, kind: str, mean: Tensor, std: Tensor) -> list[Prior | dict[str, Prior]]:
    """Each member's prior at its best scale."""
    names = [name for name in run.layout.names if name in set(run.net.subset_names)]
    each = Scaled(run, kind, mean, std).each.expand(-1, len(names)).rsqrt()
    return scaled_priors(run, {name: each[:, i] for i, name in enumerate(names)})


class Away(torch.autograd.Function):
    """exp(ρ) ε, [M, S, P], whose derivative by ρ is itself: the backward pass is one pass over
    memory, where autograd takes two. Also returns exp(ρ), without a derivative."""

    @staticmethod
    def forward(rho: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        std = rho.exp()
        return std.unsqueeze(1) * eps, std

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (away,) = ctx.saved_tensors
        each = grads[0] * away
        return each.squeeze(1) if each.shape[1] == 1 else each.sum(1), None


@store.register("mean-field")
@dataclass(frozen=True)
class MeanField(GaussianVI):
    """A factorised Gaussian over the weights.

    Parameters
    ----------
    temperature : float
        T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    samples : int
        Draws of the weights per member and step.
    average : float
        The share of the last steps over which (μ, ρ) is averaged (Polyak), to take the gradient
        noise out of the result; 0 for the last iterate.
    elbo_samples : int
        Draws with which the final ELBO is estimated.
    initial_std : float
        The standard deviation each weight starts with.
    estimator : str
        "weights": one draw for all rows of a batch; "local" (reparametrisation) and "flipout":
        separate noise for each row, which is exact in linear, convolutional and embedding layers
        (`doxa.vi.estimators`). "auto": "weights" of one draw; of several "local", where the
        uncertain weights are those of linear layers, one after the other, that see each row once,
        and where that is less work than "weights". Of these draws some share the noise of the first
        layer (`doxa.vi.estimators`).
    prior_scale : str
        "given"; or at the maximum of the ELBO, "shared" by all weights or of each "layer" (a factor
        for each tensor).
    """

    name: ClassVar[str] = "mean-field"
    shape: ClassVar[tuple[str, ...]] = ("rho",)
    large_rows: ClassVar[tuple[int, int] | None] = 2, 6  # μ, ρ; their moments, θ and ε

    estimator: str = one_of("auto", "weights", "local", "flipout")
    prior_scale: str = one_of("given", "shared", "layer")

    def prepare(self, problem: Problem) -> Problem:
        return rewritten(problem, self.estimator, self.samples)

    def num_particles_on(self, problem: Problem) -> int:
        return self.samples // draws_of(problem)

    def init_shape(self, run: Run) -> State:
        std = run.field(self, "initial_std").unsqueeze(1)
        return {"rho": std.log().expand(run.size, run.subset_size).clone()}

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1]

    def away(self, params: State, eps: Tensor) -> Tensor:
        return std_of(params).unsqueeze(1) * eps

    def variances(self, params: State) -> Tensor:
        return std_of(params).square()

    def logdet(self, params: State) -> Tensor:
        return 2 * params["rho"].sum(1)

    def covariance(self, params: State) -> linalg.Structure:
        return linalg.Diagonal(self.variances(params))

    def normals(self, clock: Clock, numbers: int) -> Tensor:
        if self.samples > 1:
            return super().normals(clock, numbers)
        return clock.alternating(numbers).unsqueeze(1)

    def objective(self, run: Run) -> Objective:
        if self.prior_scale != "given":
            check_gaussian(run)
        return partial(self._estimate, placed=Placed.of(run))

    def stages(self, run: Run) -> Iterable[Stage]:
        for stage in super().stages(run):
            if stage.name == "optimise" and run.by_tensor:
                placed = Placed.of(run)
                if self._columnwise(run, placed):
                    stage = replace(stage, step=partial(self._large_step, placed, stage.step))
            yield stage

    def _columnwise(self, run: Run, placed: Placed | None) -> bool:
        """Whether a step is a function of each weight alone: one draw, a Gaussian prior with one
        precision for each tensor, and points after all uncertain weights."""
        if self.samples > 1 or self.prior_scale != "given" or run.device.type != "cpu":
            return False  # blocks are for the cache of a processor
        if placed is not None and (placed.draws > 1 or not placed.all_local):
            return False
        uncertain, prior = run.subset_size, run.prior[0] if run.prior.runs else run.prior
        own = [where for where in run.layout.slices.values() if where.start < uncertain]
        return run.subset_where == slice(0, uncertain) and all(
            prior.precision_in(where) is not None for where in own
        )

    def _large_step(
        self, placed: Placed | None, by_rows: Step, run: Run, state: State, batch: Batch,
        clock: Clock,
    ) -> tuple[State, Info]:  # fmt: skip
        """A step for a large network in blocks of columns, in place. By rows if the network needs
        whole rows of weights."""
        moments = run.settings.optimizer.moments
        both = {k: [k, *(f"optim.{kind}.{k}" for kind in moments)] for k in ("mean", "rho")}
        new = {
            k: state[k] if clock.owned else state[k].clone() for own in both.values() for k in own
        }
        mean, rho = new["mean"], new["rho"]
        drawn: Tensor = run.once("steps: draws", lambda: torch.empty_like(mean))  # θ, or σ²
        uncertain, called = rho.shape[1], list(clock.calls)
        eps = clock.alternating_row(uncertain) if placed is None else None
        for m in range(run.size):
            drawn[m, uncertain:] = mean[m, uncertain:]
            for part in columns(uncertain):
                out, logs = drawn[m, part], rho[m, part]
                if eps is None:
                    torch.mul(logs, 2.0, out=out).exp_()
                else:
                    own = eps.columns(m, part.start, part.stop)
                    torch.addcmul(mean[m, part], logs.exp(), own, value=eps.sign, out=out)
        closed = self._closed_form(run, mean, rho) if clock.reported else 0.0

        def use(gradients: list[TensorGradient]) -> None:
            m = gradients[0].member
            prior, n = run.prior[m] if run.prior.runs else run.prior, float(run.n[m])
            heat = float(run.field(self, "temperature")[m]) / n
            rate = (clock.rate[m] if clock.rate.ndim else clock.rate).reshape(())
            by_variance = {g.where.start: g.grad for g in gradients if g.name == "variance"}
            for tensor in gradients:
                if tensor.name == "variance":
                    continue
                pull = (prior.precision_in(tensor.where) or 0.0) / n
                for block in tensor.blocks():
                    values, grads, names = [block.of(mean)], [block.grad], ["mean"]
                    if tensor.where.start < uncertain:
                        if eps is None:
                            at = block.where.start - tensor.where.start
                            by_rho = by_variance[tensor.where.start][at : at + len(block.grad)]
                            by_rho.mul_(2.0).add_(pull).mul_(block.of(drawn)).sub_(heat)
                        else:
                            std = block.of(rho).exp()
                            away = eps.columns(m, block.where.start, block.where.stop) * std
                            by_rho = std.square_().mul_(pull).sub_(heat)
                            by_rho.addcmul_(away, block.grad, value=eps.sign)
                        values, grads, names = [*values, block.of(rho)], [*grads, by_rho], [*both]
                    prior.add_score_(block.grad, values[0], block.where, -1.0 / n)
                    kept = [
                        [block.of(new[both[name][1 + i]]) for name in names]
                        for i in range(len(moments))
                    ]
                    run.settings.optimizer.update_(values, grads, kept, rate, clock.t)

        rows = {"theta": drawn} if placed is None else {"theta": mean, "variance": drawn}
        objective = fit_one if placed is None else placed.log_likelihood
        found = gradients_by_tensor(
            run, objective, {**state, **rows}, batch, clock, use, loss=True, over=tuple(rows)
        )
        if found is None:
            clock.calls[:] = called
            return by_rows(run, state, batch, clock)
        value, changed = found
        if self.average:
            both_new = {name: new[name] for name in both}
            new |= average_from(first_averaged(self.average, run.steps), both_new, state, clock)
        info = {"loss": (value + closed) * run.per_example} if clock.reported else {}
        return {**state, **changed, **new}, info

    def _closed_form(self, run: Run, mean: Tensor, rho: Tensor) -> Tensor:
        """T·H[q] + E_q log p(θ), [M], without a copy of a row."""
        value = run.field(self, "temperature") * self.entropy(run, {"rho": rho})
        value = value + run.prior.log_prob(mean)
        for m in range(run.size):
            prior = run.prior[m] if run.prior.runs else run.prior
            for where in run.layout.slices.values():
                if where.start < rho.shape[1]:
                    squares = sum(
                        float((2.0 * part).exp_().sum()) for part in rho[m, where].split(BLOCK)
                    )
                    value[m] -= 0.5 * (prior.precision_in(where) or 0.0) * squares
        return value

    def _estimate(
        self, run: Run, params: State, batch: Batch, clock: Clock, placed: Placed | None
    ) -> Any:
        mean, rho = params["mean"], params["rho"]
        given: State = {}
        if placed is None:
            away, std = Away.apply(rho, self.normals(clock, rho.shape[1]))
            theta = moved(run, mean.unsqueeze(1), away)
        else:
            std, nested = rho.exp(), placed.draws > 1
            batch = batch.repeat_targets(placed.draws) if nested else batch
            eps = rho.new_empty(len(rho), 1, 0) if nested else self.normals(clock, placed.numbers())
            theta, given = placed.drawn(run, mean, std, eps, batch, clock)
        value, changed = self.log_likelihood_at(run, params, batch, theta, **given)
        if not run.subset_prior.widens:
            if placed is not None:  # weights whose layers add noise are not drawn
                size = std.shape[1]
                eps = self.normals(clock, size) if nested else clock.noise(size).unsqueeze(1)
                away = std.unsqueeze(1) * eps
                theta = moved(run, mean.unsqueeze(1), away)
            value = value + self.log_prior_at(run, theta)
        return value, changed, self._known(run, params, std.detach())

    def _known(self, run: Run, params: State, std: Tensor) -> AnalyticGradient:
        """T·H[q], and E_q log p(θ) if it is in closed form, with their gradients."""
        mean, heat = params["mean"].detach(), run.setting(self, "temperature")
        entropy = self.entropy(run, {"rho": params["rho"].detach()})
        value = run.field(self, "temperature") * entropy
        prior, own = run.subset_prior, mean[:, run.subset_where]
        if not prior.widens:
            return AnalyticGradient(value, {"rho": lambda grad: grad + heat})
        value = value + run.prior.log_prob(mean) + prior.widening(own, std)
        more = None if prior.is_gaussian else prior.widening_score(own, std)[0]
        narrower = None
        if self.prior_scale != "given":
            scaled = Scaled(run, self.prior_scale, own, std)
            value, (more, narrower) = value + scaled.gain, scaled.more()

        def by_mean(grad: Tensor) -> Tensor:
            grad = run.prior.add_score(grad, mean)
            return grad if more is None else moved(run, grad, more)

        def by_rho(grad: Tensor) -> Tensor:
            grad = prior.add_widening_score(grad, own, std).add_(heat)
            return grad if narrower is None else torch.addcmul(grad, narrower, std)

        return AnalyticGradient(value, {"mean": by_mean, "rho": by_rho})

    def learned_priors(self, run: Run, q: State) -> list[Any] | None:
        if self.prior_scale == "given":
            return None
        own = q["mean"][:, run.subset_where]
        return best_priors(run, self.prior_scale, own, std_of(q))

    def subset_log_prior(self, run: Run, q: State) -> Tensor | None:
        value = super().subset_log_prior(run, q)
        if value is None or self.prior_scale == "given":
            return value
        own, std = q["mean"][:, run.subset_where], std_of(q)
        return value + Scaled(run, self.prior_scale, own, std).gain


def std_of(params: State) -> Tensor:
    """σ = exp(ρ), bounded below so that its square does not vanish."""
    rho = params["rho"]
    return rho.clamp_min(0.5 * math.log(torch.finfo(rho.dtype).tiny)).exp()
