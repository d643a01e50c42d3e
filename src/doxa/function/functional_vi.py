"""Functional variational inference: a network under a prior over its functions.

    L = (n/B) Σ_batch E_q log p(y_i | f(x_i)) − T · KL(q(f^X) ‖ p(f^X)),   θ ~ q = N(μ, diag σ²)
    ∇ KL = E_q[(∇_f log q(f^X) − ∇_f log p(f^X)) ∂f^X/∂(μ, σ)]

Sun, Zhang, Shi & Grosse (2019), functional variational Bayesian neural networks. X are measurement
points: rows of the batch, and points drawn at random around the data. ∇_f log q is the spectral
Stein estimate from `samples` functions. ∇_f log p is in closed form for a Gaussian process, and the
Stein estimate for a prior that is given by its draws. Independent noise of standard deviation
`smoothing` is added to the functions of both, so that both have densities. The paper weights the KL
by λ beside the mean over rows; λ = 1/n is T = 1.

The kernel of a named prior is fitted first, by the marginal likelihood of mini-batches of real
targets (as in the paper), in `prior_steps` steps of Adam. With other targets, its lengthscale is
the median distance, and its variance is 1, or 8 for the logits of classes.

The objective is not a bound. KL(q ‖ p) over functions is the supremum over measurement sets, of
which one is used at a time. Between the functions of a network and of a GP this supremum is
infinite (Burt, Ober, Garriga-Alonso & van der Wilk, 2020): a network with finitely many weights
lies in a set of functions to which the GP assigns no mass. `elbo` is therefore None. The fitted
network resembles the posterior of the GP at the measurement points, up to differences of the size
of `smoothing`.

The spectral Stein estimator is the score of a distribution from its draws only:

    ∇ log q(f) ≈ Σ_{j ≤ J} β_j ψ_j(f),   β_j = −E_q ∇ψ_j,   by Stein's identity
    ψ_j(f) = (√S/λ_j) Σ_s u_js k(f, f_s),   K u_j = λ_j u_j,   K the draws' Gram matrix

Shi, Sun & Zhu (2018), equations 9 to 13: ψ_j are Nyström's eigenfunctions of the kernel under q,
here of exp(−‖f − f'‖²/2ℓ²) with ℓ the median distance between draws. At the draws themselves it is
−(U Λ⁻¹ Uᵀ)_J G with G_t = Σ_s ∇_{f_s} k(f_s, f_t). J is the least number of eigenvalues that make
up a fraction `eigenvalue_share` of their sum. The others are masked, so that shapes do not depend
on values.

In many dimensions, the leading eigenfunctions contain less of a score, and the estimate is too
small: for 40 values of a smooth function and 100 draws, it is about eight tenths of the score. A q
that is fitted with it is somewhat too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa import linalg, store
from doxa.data import Batch, batch_rows
from doxa.errors import MethodError, ModelError
from doxa.function.evidence_prior import (
    Measured,
    box,
    by_evidence,
    first_kernel,
    measured,
    noise_index,
    with_noise_of_evidence,
)
from doxa.method import (
    Clock,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    network_part,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import between, one_of, positive, whole
from doxa.noise import Noise
from doxa.posterior import GaussianPosterior, Posterior, register_posterior
from doxa.priors.functions import KERNELS, FunctionPrior, GPPrior, flat_inputs
from doxa.vi.gaussian import DrawnWeights, moved


def stein_score(draws: Tensor, at: Tensor | None = None, share: float = 0.99) -> Tensor:
    """∇ log q at the draws [M, S, K] themselves, or at other points [M, S', K].

    Parameters
    ----------
    draws: S draws of K numbers from each of M distributions.
    share: the fraction of the sum of the eigenvalues that is kept.
    """
    squares = _squares(draws, draws)
    width = _median(squares)  # ℓ², [M, 1, 1]
    gram = (-0.5 * squares / width).exp()  # [M, S, S]
    # Σ_s ∇_{f_s} k(f_s, f_t) = −(1/ℓ²) Σ_s k_st (f_s − f_t)
    pull = (gram.sum(-1, keepdim=True) * draws - gram @ draws) / width  # [M, S, K]
    # ascending; the decomposition would raise for NaN, which stay NaN
    values, vectors = torch.linalg.eigh(gram.nan_to_num())
    values = values.clamp_min(torch.finfo(gram.dtype).eps * gram.shape[-1])
    kept = values.cumsum(-1) > (1 - share) * values.sum(-1, keepdim=True)
    inverse = torch.where(kept, 1 / values, 0.0).unsqueeze(-1)  # [M, S, 1]
    weights = vectors.mT @ pull * inverse  # −√S β_j, [M, S, K]
    if at is None:
        return -vectors @ weights
    across = (-0.5 * _squares(at, draws) / width).exp()  # [M, S', S]
    return -(across @ vectors * inverse.mT) @ weights


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances, [M, S, S']."""
    centre = b.mean(1, keepdim=True)
    a, b = a - centre, b - centre
    both = a.square().sum(-1).unsqueeze(2) + b.square().sum(-1).unsqueeze(1)
    return (both - 2 * a @ b.mT).clamp_min(0.0)


def _median(squares: Tensor) -> Tensor:
    """Of the squared distances between different draws, [M, 1, 1]."""
    count = squares.shape[-1]
    upper = torch.triu_indices(count, count, 1, device=squares.device)
    own = squares[:, upper[0], upper[1]]
    return own.median(-1).values.clamp_min(torch.finfo(squares.dtype).tiny)[:, None, None]


@register_posterior
class FunctionalPosterior(GaussianPosterior):
    """A Gaussian over the weights, one per member, whose prior is over functions.

    kernel: log (lengthscales, variance, period) of each member's Gaussian process, [K, D + 2],
    where they were fitted; else None.
    """

    kind = "functional"

    def __init__(self, *args: Any, kernel: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.kernel = kernel

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws from the prior over functions that was used in the fit."""
        prior = self.method.function_prior
        if prior == "weights":
            return super()._draw_prior_functions(x, n, seed)
        seed = self.sampling(n, seed, "samples")
        x = self.check_inputs(x).unsqueeze(0)  # [1, N, ...]
        output = tuple(self.network.output)
        outputs = torch.Size(output).numel()
        drawn = []
        for k, count in enumerate(self.split(n)):
            keys = [f"{self.ids[k]}/{j}" for j in range(count)]
            noise = Noise(seed, "prior", keys, self.device, self.dtype)
            named = not isinstance(prior, FunctionPrior)
            own = GPPrior(prior) if named else prior
            eps = noise.normal(own.noise_shape(x.shape[1], outputs)).unsqueeze(0)
            if named and self.kernel is not None:
                root = own.root(flat_inputs(x), hyper=self.kernel[k : k + 1])
                drawn.append((root.unsqueeze(1) @ eps)[0])
            else:
                drawn.append(own.functions(x, eps, outputs)[0])
        f = torch.cat(drawn).reshape(n, x.shape[1], *output)
        return self.likelihood.location(f, 1)

    def tensors(self) -> dict[str, Tensor]:
        own = {} if self.kernel is None else {"kernel": self.kernel}
        return super().tensors() | own

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        new = super().restore(common, tensors, extra)
        assert isinstance(new, FunctionalPosterior)
        new.kernel = tensors.get("kernel")
        return new


_Q = ("mean", "rho")


@store.register("fbnn")
@dataclass(frozen=True)
class FunctionalVI(DrawnWeights):
    """A factorised Gaussian over the weights, under a prior over functions.

    Parameters
    ----------
    function_prior : str or FunctionPrior
        "rbf", "matern", "periodic" or "linear": a Gaussian process with that kernel, a lengthscale
        for each column of x, fitted to real targets first; "weights": the functions of the network
        under its (Gaussian) weight prior; or a `doxa.GPPrior` or `doxa.ImplicitPrior`, as it is.
    samples : int
        Functions per member and step, from which the score of q is estimated.
    measured_rows : int
        The number of rows of the batch that are measurement points.
    extra_points : int or None
        The number of further measurement points, drawn around the data; None: 20, or 0 where x is
        not an array of real numbers.
    margin : float
        How much wider than the data their box is on each side, as a share of its range.
    smoothing : float
        The standard deviation of the noise added to functions, in fitted units.
    eigenvalue_share : float
        The share of the eigenvalues' sum that the Stein estimate keeps: nearer to 1 it shrinks less
        and is noisier.
    prior_steps : int
        Steps that fit the kernel of a named prior; 0: none.
    noise_from : str
        Where learned Gaussian noise comes from. "training": it is learned with the weights.
        "evidence": it is that of the kernel's fit, in which functions are integrated out. Held-out
        rows may still correct it.
    initial_std : float
        The standard deviation each weight starts with.
    temperature : float
        T, the weight of the KL.
    average : float
        The share of the last steps over which q is averaged (Polyak); 0: the last iterate.
    """

    sums_over_rows: ClassVar[bool] = False
    name: ClassVar[str] = "fbnn"
    renamed: ClassVar[Mapping[str, str]] = {
        "share": "eigenvalue_share",
        "noise": "noise_from",
        "rows": "measured_rows",
        "points": "extra_points",
    }
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "noise_from": {"learned": "training"}
    }
    default_batch: ClassVar[int] = 64

    samples: int = whole(64, least=4)
    function_prior: str | FunctionPrior = one_of(
        *KERNELS, "weights", or_a=FunctionPrior, called="a doxa.GPPrior or doxa.ImplicitPrior"
    )
    measured_rows: int = whole(40, least=1)
    extra_points: int | None = whole(None, least=0)
    margin: float = positive(0.5)
    smoothing: float = positive(0.1)
    eigenvalue_share: float = between(0.99, 0, 1, "()")
    prior_steps: int = whole(500, least=0)
    noise_from: str = one_of("training", "evidence")
    initial_std: float = positive(0.05, per_run=True)

    def reads_inputs(self, run: Run) -> bool:
        return True

    def init(self, run: Run) -> State:
        state = run.init_network()
        std = run.field(self, "initial_std").unsqueeze(1)
        rho = std.log().expand(run.size, run.subset_size).clone()
        state = {"mean": state.pop("theta"), **state, "rho": rho}
        if self._points(run):
            state |= box(run, self.margin)
        if self.function_prior in KERNELS:
            state |= first_kernel(run)
        if self.function_prior == "weights" and not run.subset_prior.is_gaussian:
            raise ModelError(
                "function_prior='weights' draws weights at each step, from a Gaussian prior alone; "
                "give the model doxa.Normal or doxa.FanInNormal"
            )
        return state

    def _points(self, run: Run) -> int:
        if self.extra_points is not None:
            return self.extra_points
        leaves = tree_flatten(run.rows.x)[0]
        return 20 if len(leaves) == 1 and leaves[0].is_floating_point() else 0

    def stages(self, run: Run) -> Iterable[Stage]:
        fitted = self.function_prior in KERNELS and self.prior_steps
        if fitted and run.likelihood.scales_targets:
            yield by_evidence(str(self.function_prior), self.prior_steps)
        where = noise_index(run) if self.noise_from == "evidence" else None
        main = optimise(
            partial(self._functional, where), run.steps, over=_Q, average=self.average,
            # on a GPU the eigendecomposition waits for the host, so a graph cannot contain it
            capturable=run.device.type == "cpu",
        )  # fmt: skip
        if self.noise_from == "evidence":
            if not fitted or where is None:
                raise MethodError(
                    'noise_from="evidence" is that of a named function_prior, fitted in '
                    "prior_steps, for Gaussian noise that is learned: leave it out"
                )
            main = with_noise_of_evidence(main, "mean", where)
        yield main
        yield from noise_on_held_out(self.score, run, average_name("mean", self.average))

    def _functional(
        self, held: Tensor | None, run: Run, params: State, batch: Batch, clock: Clock
    ) -> Any:
        """The objective; weights at the positions `held` stay where they are."""
        s, rows = self.samples, batch_rows(batch)
        if held is not None:
            mean = params["mean"]
            params = {**params, "mean": mean.index_copy(1, held, mean[:, held].detach())}
        std = params["rho"].exp()
        eps = clock.expand_particles(s).noise(std.shape[1]).unflatten(0, (-1, s))  # [M, S, subset]
        theta = moved(run, params["mean"].unsqueeze(1), std.unsqueeze(1) * eps)  # [M, S, P]
        at = measured(params, batch, clock, self.measured_rows, self._points(run))
        f = self._functions(run, params, theta, at)  # [M, S, N, ...]
        if run.net.tracked:  # BatchNorm's statistics are of rows of the data only
            value, changed = self.log_likelihood_at(run, params, batch, theta)
        else:
            own, changed = f[:, :, :rows].flatten(0, 1), {}
            many, again = run.expand_particles(s), batch.expand_particles(s)
            each = many.total(many.log_likelihoods_of(own, theta.flatten(0, 1), again), again)
            value = each.unflatten(0, (-1, s)).mean(1)
        f = at.values(_flat(f))  # [M, S, K, O]
        away = self._away(run, params, at, f.detach(), clock)
        kl = (away * f).sum((2, 3)).mean(1)  # its gradient is that of the KL
        outside = run.prior.log_prob(params["mean"]) - run.subset_prior.log_prob(
            params["mean"][:, run.subset_where]
        )  # of weights that are points
        heat = run.field(self, "temperature")
        return value + outside - heat * (kl - kl.detach()), changed

    def _functions(self, run: Run, params: State, theta: Tensor, at: Measured) -> Tensor:
        """The functions of weights [M, S, P] at all inputs, [M, S, N, ...]."""
        s = theta.shape[1]
        inner = {k: v.repeat_interleave(s, 0) for k, v in network_part(params).items()}
        x = at.x if at.shared else at.x.repeat_interleave(s, 0)
        f = run.expand_particles(s).outputs(theta.flatten(0, 1), x, inner, at.shared)
        if not isinstance(f, Tensor):
            raise ModelError("fbnn compares functions of one head, and this network has several")
        return f.unflatten(0, (-1, s))

    def _away(self, run: Run, params: State, at: Measured, f: Tensor, clock: Clock) -> Tensor:
        """∇ log q − ∇ log p at functions f [M, S, K, O] with noise added, [M, S, K, O]."""
        noisy = f + self.smoothing * clock.noise(*f.shape[1:])
        flat = noisy.flatten(2)
        ours = stein_score(flat, share=self.eigenvalue_share).view_as(f)
        known = self._known_score(params, at, noisy)
        if known is not None:
            return ours - known
        before = self._prior_functions(run, params, at, f, clock)
        drawn = before + self.smoothing * clock.noise(*f.shape[1:])
        return ours - stein_score(drawn.flatten(2), flat, self.eigenvalue_share).view_as(f)

    def _known_score(self, params: State, at: Measured, f: Tensor) -> Tensor | None:
        """∇ log p, if the prior has a density."""
        if self.function_prior == "weights":
            return None
        if isinstance(self.function_prior, FunctionPrior):
            return self.function_prior.score(at.inputs(), f, self.smoothing)
        own = GPPrior(self.function_prior)
        return own.score(at.inputs(), f, self.smoothing, params["kernel"])

    def _prior_functions(
        self, run: Run, params: State, at: Measured, f: Tensor, clock: Clock
    ) -> Tensor:
        """The same number of draws from the prior, [M, S, K, O]."""
        m, s, k, outputs = f.shape
        if isinstance(self.function_prior, FunctionPrior):
            shape = self.function_prior.noise_shape(k, outputs)
            eps = clock.expand_particles(s).noise(*shape).unflatten(0, (m, s))
            return self.function_prior.functions(at.inputs(), eps, outputs)
        prior, index = run.subset_prior, run.subset_index
        assert prior.precision is not None
        eps = clock.expand_particles(s).noise(len(index)).unflatten(0, (m, s))
        away = prior.mean.unsqueeze(-2) + eps * prior.precision.rsqrt().unsqueeze(-2)
        mean = params["mean"].detach().index_fill(1, index, 0.0)
        theta = moved(run, mean.unsqueeze(1), away)
        return at.values(_flat(self._functions(run, params, theta, at))).detach()

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "mean")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        q = {name: averaged(state, name) for name in _Q}
        return FunctionalPosterior(
            mean=q["mean"], covariance=linalg.Diagonal((2 * q["rho"]).exp()),
            kernel=state.get("kernel"), **run.common(self), **run.shared(state),
        )  # fmt: skip


def _flat(f: Tensor) -> Tensor:
    """Functions [M, S, N, ...] with one axis of outputs."""
    return f.flatten(3) if f.ndim > 3 else f.unsqueeze(-1)
