"""Improved variational online Newton: a factorised Gaussian by natural-gradient steps.

    θ = m + σε,   σ² = T/(n(h + δ)),   ĝ = ∇ℓ(θ),   ĥ = ĝ ε/σ            ℓ: the mean loss of a batch
    g ← β₁g + (1−β₁)ĝ
    h ← β₂h + (1−β₂)ĥ + ½(1−β₂)²(h − ĥ)²/(h + δ)                       δ: prior precision / n
    m ← m − α (g/(1−β₁ᵗ) + δ(m − m₀))/(h + δ)

Shen et al. (2024), Algorithm 1. One gradient per step is used twice: ĝ moves the mean, and ĝε/σ is,
on average over ε, the diagonal of the Hessian under q (Price's theorem). The state has σ² in place
of h. With G = −nĝ, the gradient of the log-likelihood of all rows, and τ the prior's precision, the
same equations are

    σ² ← σ²/(1 + x + x²/2),   x = (1−β₂)((τσ² − G(θ − m))/T − 1)
    m ← m + α (σ²/T)(Ḡ + ∇log p(m))

1 + x + x²/2 is never below ½: for any gradients, h + δ stays above 0, and σ² at most doubles per
step. (h alone may be negative, where the loss is not convex.) The rate α is a share of a Newton
step, so that α = 1 needs one step on a quadratic with a diagonal Hessian; the paper's code
multiplies it by h₀ + δ, about 1 here. `average` averages σ²: for small x, E[x] = 0 implies that the
mean of σ², not that of h, is right. The bias correction of g is in the weight of a new gradient,
(1−β₁)/(1−β₁ᵗ). With one draw per step, every second step uses the negative of the ε before, which
saves draws, and over two steps removes its noise from the mean.

β₂ is 1 − 4/steps, so that h₀ has the weight e⁻⁴, or 2 %, in the result. Most weights of a large
network have almost no curvature: their h is the remainder of h₀, and their σ grows by (1−β₂)/2 per
step during the whole fit. Hence the memory is a share of the run. With a shorter memory, variances
grow to those of the prior before anything is learned. With the paper's 1 − 1e-5, for 10⁵ steps and
more, h₀ would never be forgotten here. h₀ = 1 is that of the paper's code. With less memory σ² is
noisier, by √((1−β₂)/2) times the noise of one ĥ/(h + δ).

The prior is Gaussian. Weights outside the subset and learned noise are points with their prior,
trained by Adam at a tenth of the rate. As in mean-field, q has no correlations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method import (
    Clock,
    Info,
    Run,
    Stage,
    State,
    TensorGradient,
    average_from,
    average_name,
    first_averaged,
    gradients_by_tensor,
    noise_on_held_out,
)
from doxa.method.method import Alternatives, between, positive
from doxa.optim import Adam
from doxa.priors import FanInNormal
from doxa.vi.gaussian import VariationalGaussian, columns, fit_one, moved

_POINTS = 0.1  # Adam's rate for points, relative to the rate of the mean
_FORGETS = 4  # length of the run over that of the Hessian's memory


@store.register("ivon")
@dataclass(frozen=True)
class IVON(VariationalGaussian):
    """A factorised Gaussian over the weights, by variational online Newton steps.

    Parameters
    ----------
    initial_curvature : float
        h₀, the Hessian of the mean loss that each weight is taken to have at first.
    beta1, beta2 : float, float or None
        How much of the gradient and of the Hessian is remembered at each step. 1/(1−β₂) steps make
        a Hessian; None: a quarter of the fit's.
    clip : float
        The largest Newton step of a weight, before the rate: at 1 no weight moves by more than the
        rate, as with Adam, while the Hessian is not known yet.
    average : float
        The share of the last steps over which q is averaged. A rate that falls to 0 has taken the
        noise out of the mean; with a constant one, average.
    samples : int
        Draws per step; an even number comes in pairs ±ε, which reduces the noise of the Hessian.
    temperature, elbo_samples
        As in `MeanField`.
    """

    name: ClassVar[str] = "ivon"
    default_rate: ClassVar[float] = 0.1
    state_copies: ClassVar[float | None] = 2.0  # the variance and the momentum
    large_rows: ClassVar[tuple[int, int] | None] = 2, 3  # m, σ²; the momentum, θ and ε
    shape: ClassVar[tuple[str, ...]] = ("variance",)
    alternatives: ClassVar[Alternatives] = Alternatives(
        FanInNormal(30.0), 1.0, ({"initial_curvature": 10.0}, {"initial_curvature": 100.0})
    )

    initial_curvature: float = positive(1.0, per_run=True)
    beta1: float = between(0.9, 0, 1, "[)")
    beta2: float | None = between(None, 0, 1, "[)")
    clip: float = positive(1.0)
    average: float = between(0.0, 0, 1, "[)")

    def init_shape(self, run: Run) -> State:
        prior = run.subset_prior
        if not prior.is_gaussian:
            raise MethodError(
                "ivon's steps need a Gaussian prior: prior=doxa.Normal(...); mean-field takes any"
            )
        heat = run.field(self, "temperature").unsqueeze(1)
        curvature = run.field(self, "initial_curvature") * run.n
        precision = prior.precision if prior.shared_precision is None else prior.shared_precision
        assert precision is not None
        variance = heat / (curvature.unsqueeze(1) + precision)
        return {"variance": variance.expand(run.size, run.subset_size).clone()}

    def numbers(self, params: State) -> int:
        return params["variance"].shape[1]

    def away(self, params: State, eps: Tensor) -> Tensor:
        return params["variance"].unsqueeze(1).sqrt() * eps

    def variances(self, params: State) -> Tensor:
        return params["variance"]

    def logdet(self, params: State) -> Tensor:
        return params["variance"].log().sum(1)

    def covariance(self, params: State) -> linalg.Structure:
        return linalg.Diagonal(params["variance"])

    def stages(self, run: Run) -> Iterable[Stage]:
        points = _points(run)
        first = first_averaged(self.average, run.steps)

        def enter(run: Run, state: State) -> State:
            new: State = {"momentum": torch.zeros_like(state["variance"])}
            if len(points):
                new |= Adam().init({"points": state["mean"][:, points]})
            if self.average:
                new |= {average_name(name): state[name].clone() for name in ("mean", "variance")}
            return {**state, **new}

        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            new, value = self._step(run, state, batch, clock, points)
            if self.average:
                own = {name: new[name] for name in ("mean", "variance")}
                new |= average_from(first, own, state, clock)
            return {**state, **new}, {"loss": value * run.per_example} if clock.reported else {}

        over = ("mean", "variance")
        yield Stage(
            "newton", step, run.steps, over=over, enter=enter, validates=True, passing=("momentum",)
        )
        yield from noise_on_held_out(self.score, run, average_name("mean", self.average))

    def _step(
        self, run: Run, state: State, batch: Batch, clock: Clock, points: Tensor
    ) -> tuple[State, Tensor]:
        """The new state entries, and E_q log p(y | θ) of all rows, [M]."""
        found = self._in_blocks(run, state, batch, clock, points)
        if found is not None:
            return found
        mean, variance, where = state["mean"], state["variance"], run.subset_where
        away = self.away(state, self.normals(clock, variance.shape[1]))  # θ − m, [M, S, subset]
        params = {**state, "draws": moved(run, mean.unsqueeze(1), away)}
        value, grads, new = run.value_and_grad(self._fit, params, batch, clock, ("draws",))
        each = grads["draws"]  # [M, S, P], of the mean over draws
        grad, t = summed(each), clock.t.to(run.dtype) + 1
        variance = self._variance(run, variance, away, each[..., where])
        share = (1 - self.beta1) / (1 - self.beta1**t)  # all of it at the first step
        own = state["momentum"]
        momentum = (own.lerp_ if clock.owned else own.lerp)(grad[:, where], share)
        move = run.subset_prior.add_score(momentum, mean[:, where]) * variance
        heat = run.setting(self, "temperature")
        if isinstance(heat, Tensor) or heat != 1.0:
            move = move / heat
        move = move.clamp(-self.clip, self.clip)
        new |= {"variance": variance, "momentum": momentum}
        if not len(points):
            new["mean"] = (mean.addcmul_ if clock.owned else mean.addcmul)(move, clock.rate)
            return new, value
        other = {"points": mean[:, points]}
        slope = grad[:, points] + run.prior.score(mean)[:, points]
        descent = {"points": run.descent(slope)}
        adam = Adam().update(other, descent, state, _POINTS * clock.rate, clock.t, clock.owned)
        new["mean"] = moved(run, mean, move * clock.rate)
        new["mean"] = new["mean"].index_copy(1, points, adam.pop("points"))
        return {**new, **adam}, value

    def _in_blocks(
        self, run: Run, state: State, batch: Batch, clock: Clock, points: Tensor
    ) -> tuple[State, Tensor] | None:
        """The same step for a large network in blocks of columns, in place. None if the network is
        not large, if points are not after all uncertain weights, or with several draws."""
        uncertain = state["variance"].shape[1]
        if not run.by_tensor or run.device.type != "cpu":  # blocks are for a processor's cache
            return None
        if self.samples > 1 or run.subset_where != slice(0, uncertain):
            return None
        names = ("mean", "variance", "momentum")
        rows = {k: state[k] if clock.owned else state[k].clone() for k in names}
        theta: Tensor = run.once("steps: draws", lambda: torch.empty_like(rows["mean"]))
        eps = clock.alternating_row(uncertain)
        theta[:, uncertain:] = rows["mean"][:, uncertain:]
        slopes = torch.zeros_like(theta[:, uncertain:])  # of points
        for m in range(run.size):
            for part in columns(uncertain):
                mean, std = rows["mean"][m, part], rows["variance"][m, part].sqrt()
                own = eps.columns(m, part.start, part.stop)
                torch.addcmul(mean, std, own, value=eps.sign, out=theta[m, part])
        share = (1 - self.beta1) / (1 - self.beta1 ** (clock.t.to(run.dtype) + 1))

        def use(gradients: list[TensorGradient]) -> None:
            m = gradients[0].member
            own, rate = run.select_members(slice(m, m + 1)), clock.rate
            prior, heat = own.subset_prior, own.setting(self, "temperature")
            prior = prior[0] if prior.runs else prior
            rate = rate[m : m + 1] if rate.ndim else rate
            for tensor in gradients:
                if tensor.where.start >= uncertain:
                    whole = own.prior[0] if own.prior.runs else own.prior
                    whole.add_score_(tensor.grad, tensor.of(rows["mean"]), tensor.where, 1.0)
                    at = tensor.where.start - uncertain
                    slopes[m, at : at + len(tensor.grad)] = tensor.grad
                    continue
                for block in tensor.blocks():
                    mean, variance, momentum = (block.of(rows[name]).unsqueeze(0) for name in names)
                    grad = block.grad.unsqueeze(0)
                    away = variance.sqrt().mul_(eps.columns(m, block.where.start, block.where.stop))
                    new = self._variance(
                        own, variance, away.unsqueeze(1), grad.unsqueeze(1), block.where, eps.sign
                    )
                    move = momentum.lerp_(grad, share).clone()
                    prior.add_score_(move[0], mean[0], block.where, 1.0)
                    move = move.mul_(variance.copy_(new)) / heat
                    mean.addcmul_(move.clamp_(-self.clip, self.clip), rate)

        params = {**state, "theta": theta}
        given = gradients_by_tensor(run, fit_one, params, batch, clock, use)
        if given is None:
            return None
        value, new = given
        if len(points):
            other, rate = {"points": rows["mean"][:, points]}, _POINTS * clock.rate
            descent = {"points": run.descent(slopes)}
            new |= Adam().update(other, descent, state, rate, clock.t, clock.owned)
            rows["mean"][:, uncertain:] = new.pop("points")
        return {**new, **rows}, value

    def _variance(
        self, run: Run, variance: Tensor, away: Tensor, slope: Tensor,
        columns: slice = slice(None), sign: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """σ² after a step, in few passes over memory: 2σ²/(1 + u²), u = 1 + x. The smallest number
        is added, so that it never vanishes; to all but the smallest values this is less than
        rounding. `sign` is a factor of `away`."""
        beta2, prior = self._kept(run.steps), run.subset_prior
        share = (1 - beta2) / run.setting(self, "temperature")
        kept, half, tiny = (
            variance.new_full((), number) for number in (beta2, 0.5, torch.finfo(run.dtype).tiny)
        )
        if isinstance(share, float) and prior.shared_precision is not None:
            u = torch.add(kept, variance, alpha=share * prior.shared_precision)
        else:
            assert prior.precision is not None
            u = torch.addcmul(kept, variance, prior.precision[..., columns] * share)
        if isinstance(share, float) and away.shape[1] == 1:
            u = torch.addcmul(u, away[:, 0], slope[:, 0], value=-sign * share)
        else:
            u = u - sign * share * (away * slope).sum(1)
        return torch.addcdiv(tiny, variance, torch.addcmul(half, u, u, value=0.5))

    def _kept(self, steps: int) -> float:
        """β₂ for a run with this number of steps; the memory is at least ten steps."""
        return max(0.9, 1 - _FORGETS / max(steps, 1)) if self.beta2 is None else self.beta2

    def normals(self, clock: Clock, numbers: int) -> Tensor:
        if self.samples > 1:
            return super().normals(clock, numbers)
        return clock.alternating(numbers).unsqueeze(1)

    def _fit(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        return self.log_likelihood_at(run, params, batch, params["draws"])


def _points(run: Run) -> Tensor:
    """The positions of the weights that are not in q."""
    where, size = run.subset_where, run.layout.size
    if isinstance(where, slice):
        ends = torch.arange(where.start), torch.arange(where.stop, size)
        return torch.cat(ends).to(run.device)
    kept = torch.ones(size, dtype=torch.bool, device=run.device)
    kept[where] = False
    return kept.nonzero()[:, 0]


def summed(each: Tensor) -> Tensor:
    """[M, S, ...] over the draws."""
    return each[:, 0] if each.shape[1] == 1 else each.sum(1)
