"""Variational inference on the last layer: a full Gaussian over it, features learned with it.

    u(x) = W φ(x) + b,   f(x) = A u(x) + c(x),   q(W, b) = N(μ, L Lᵀ)
    Gaussian noise:  E_q log N(y; f, σ²) = log N(y; f_μ, σ²) − Σ_k Var_q f_k / 2σ²
    softmax, bound:  E_q log p(y) ≥ f_μ,y − log Σ_k exp(f_μ,k + ½ Var_q f_k)
    Var_q f_k = Σ_n (A (L_n φ̃))_k²,   φ̃ = (φ, 1),   f_μ the output of the mean weights

The expectation under Gaussian noise is exact, so only the batch is random in the objective. With
fixed features, this is Bayesian linear regression, found by gradients. Other likelihoods are
averaged over draws of the weights, or, for a softmax, bounded without draws (Jensen).

Both closed forms need outputs f that are affine in the last layer's output u, with the same A for
all rows and all weights. Usually f is u. A fixed output scale, a fixed or row-dependent shift, a
permutation and a mean over positions are affine, too. A is found by a probe before the fit
(`output_map`); any other network is an error.

The features are points with their prior, trained on the same bound (`features="joint"`), or not
trained ("frozen"). After the Bayesian last layers of Snoek et al. (2015); the bound as in Harrison,
Willes & Snoek (2024). The uncertainty of f is linear in the features: far from the data it grows
only as the features do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa import linalg, store
from doxa.data import Batch
from doxa.errors import MemoryBudgetError, MethodError, ModelError
from doxa.likelihoods import Categorical
from doxa.linalg.layout import Params
from doxa.method import Clock, Objective, Problem, Run, State, of_subset
from doxa.method.method import one_of, whole
from doxa.model.inspection import draws_itself
from doxa.model.layers import MethodLayer, Slots, Value, deviation, extended
from doxa.model.model import Network
from doxa.noise import generator
from doxa.vi.estimators import under
from doxa.vi.gaussian import GaussianVI

_MOST = 5000  # most weights of a last layer: its covariance is a dense matrix
_PROBED = 64  # rows of the probe
_MOST_ENTRIES = 1 << 20  # of the matrix A, where it is not diagonal
_HELD = 1 << 24  # numbers of A L φ̃ per block, for the final bound


class Tapped(MethodLayer):
    """Mixin of layers that also return their input φ. An optional `shift` is added to their output,
    to probe how the network uses it."""

    gives = ("features",)
    shift: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.features = x
        out: Tensor = super().forward(x)  # type: ignore[misc]
        return out if self.shift is None else out + self.shift

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        out, stacked = inner(h, has_axis)
        given = h if has_axis else h.unsqueeze(0).expand(len(out), *h.shape)
        slots.give("features", given)
        shift = slots.take("shift")
        return (out, stacked) if shift is None else (out + shift, True)


def tapped(layer: nn.Module) -> nn.Module:
    new = extended(layer, Tapped, inner=type(layer))
    new.register_buffer("features", torch.zeros(0))
    new.register_buffer("shift", None)
    return new


@store.register("last-layer-vi")
@dataclass(frozen=True)
class LastLayerVI(GaussianVI):
    """A full Gaussian over the last layer.

    Parameters
    ----------
    features : str
        "joint" trains the layers before on the same bound; "frozen" leaves them as they are given
        (with init="given").
    softmax : str
        How a categorical likelihood is averaged: "sampled" draws of the weights, or a "bound"
        without draws.
    samples : int
        Draws per member and step, if the objective needs draws.
    initial_std, temperature, average, elbo_samples
        As in `MeanField`. The final ELBO under Gaussian noise is in closed form, without draws.
    """

    name: ClassVar[str] = "last-layer-vi"
    shape: ClassVar[tuple[str, ...]] = ("rho", "lower")

    features: str = one_of("joint", "frozen")
    softmax: str = one_of("sampled", "bound")
    samples: int = whole(4, least=1)

    def prepare(self, problem: Problem) -> Problem:
        """Only the last layer is uncertain, and gives its input."""
        assert isinstance(problem, Network)
        name = problem.model.head
        layer = None if name is None else problem.model.net.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"the last layer, {name!r}, is a {type(layer).__name__}: last-layer VI needs a "
                "linear one; low-rank-vi takes any"
            )
        if problem.model.last not in (None, name):
            raise ModelError(
                f"the last layer, {problem.model.last!r}, is frozen (requires_grad=False): "
                "last-layer VI has nothing to learn there; low-rank-vi takes weights anywhere"
            )
        if problem.model.subset not in ("all", "last_layer"):
            raise ModelError("last-layer VI is about the last layer: leave subset= out")
        size = layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel())
        if size > _MOST:
            raise MemoryBudgetError(
                f"the covariance of the {size} weights of {name!r} would take "
                f"{size**2 * layer.weight.element_size() / 2**30:.3g} GiB: at most {_MOST} are "
                "held whole; low-rank-vi with subset='last_layer' takes any number"
            )
        if self.features == "frozen":
            problem = problem.freeze("last_layer")
        return problem.rewrite(
            lambda path, one: tapped(one) if path == name else None, "last_layer"
        )

    def init_shape(self, run: Run) -> State:
        size = run.subset_size
        std = run.field(self, "initial_std").unsqueeze(1)
        return {
            "rho": std.expm1().log().expand(run.size, size).clone(),
            "lower": run.n.new_zeros(run.size, size, size),
        }

    def factor(self, params: State) -> Tensor:
        """L: softplus(ρ) on its diagonal; the entries below it are relative to the diagonal."""
        std = deviation(params["rho"])
        return std.unsqueeze(2) * params["lower"].tril(-1) + torch.diag_embed(std)

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1]

    def away(self, params: State, eps: Tensor) -> Tensor:
        return eps @ self.factor(params).mT

    def variances(self, params: State) -> Tensor:
        return self.factor(params).square().sum(2)

    def logdet(self, params: State) -> Tensor:
        return 2 * deviation(params["rho"]).log().sum(1)

    def covariance(self, params: State) -> linalg.Structure:
        return linalg.Dense(self.factor(params), of_precision=False)

    def objective(self, run: Run) -> Objective:
        own: Objective = self._elbo
        if self._closed(run):
            own = partial(self._closed_elbo, output=output_map(run, self.features))
        if self.features == "joint":
            return own
        if run.settings.fresh:
            raise MethodError(
                "features='frozen' leaves the layers before the last as they are: it needs a "
                "trained network and init='given'"
            )
        return of_subset(own, "mean")

    def _closed_elbo(
        self, run: Run, params: State, batch: Batch, clock: Clock, output: Tensor | None
    ) -> Any:
        """The bound whose expected log-likelihood is in closed form."""
        mean = params["mean"]
        fit = run.train(mean, params, batch, None)
        features = fit.terms[under(run.net.head or "", "features")]  # [M, B, ..., d]
        lost = self._lost(run, params, fit.f, features, output)
        theta = mean.unsqueeze(1)
        if not run.subset_prior.widens:
            theta = self.drawn(run, params, self.normals(clock, self.numbers(params)))
        value = fit.value - run.total(lost, batch) + self.expected_log_prior(run, params, theta)
        return value + run.field(self, "temperature") * self.entropy(run, params), fit.changed

    def exact_log_likelihood(self, run: Run, q: State, state: State) -> Tensor | None:
        if not run.likelihood.integrates_normal:
            return None
        output, mean = output_map(run, self.features), q["mean"]
        each_row = run.size * dict(run.net.widths)[run.net.head or ""] * self.numbers(q)
        rows = run.passes(min(4096, max(1, _HELD // each_row)))
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        for t in range(rows.count):
            batch = rows.batch(t)
            f, terms, _ = run.engine.apply(
                run.net, run.layout.unflatten(mean), batch.x, shared=batch.shared,
                buffers=run.buffers(state),
            )  # fmt: skip
            each = run.log_likelihoods_of(f, mean, batch)
            features = terms[under(run.net.head or "", "features")]
            total += run.total(each - self._lost(run, q, f, features, output), batch).double()
        return total

    def _closed(self, run: Run) -> bool:
        """Whether the expected log-likelihood, or a bound on it, is in closed form."""
        return run.likelihood.integrates_normal or self._bounded(run)

    def _bounded(self, run: Run) -> bool:
        likelihood = run.likelihood
        plain = likelihood.class_axis and len(run.net.output) == 1
        return self.softmax == "bound" and plain and likelihood == Categorical()

    def _lost(
        self, run: Run, params: State, f: Tensor, features: Tensor, output: Tensor | None
    ) -> Tensor:
        """log p(y | f_μ) − E_q log p(y | f) of each row, or a bound on it, [M, B], of the outputs
        f_μ [M, B, ...]."""
        variance = self._variance(run, params, features, output, f.shape[1])
        if not run.likelihood.integrates_normal:
            return lost_to_softmax(f, variance)
        given = run.likelihood_theta(params["mean"])
        noise = given["log_noise"].reshape(run.size, 1, -1)
        return 0.5 * (variance * (-2 * noise).exp()).sum(2)

    def _variance(
        self, run: Run, params: State, features: Tensor, output: Tensor | None, rows: int
    ) -> Tensor:
        """Var_q f of each row and output, [M, B, outputs]."""
        factor, name = self.factor(params), run.net.head or ""
        layer = run.net.net.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        half, start = factor.new_zeros(()), 0
        if under(name, "weight") in run.net.subset_names:  # else it is frozen
            start = layer.weight.numel()
            each = factor[:, :start].unflatten(1, layer.weight.shape)  # [M, K, d, n]
            half = torch.einsum("mrd,mkdn->mrkn", features.flatten(1, -2), each)
        if under(name, "bias") in run.net.subset_names:
            half = half + factor[:, start:].unsqueeze(1)
        if half.shape[1] == 1:  # only the bias is uncertain
            half = half.expand(-1, features.flatten(1, -2).shape[1], -1, -1)
        if output is not None and output.ndim == 2:  # [M, B, places · K, n] to [M, B, outputs, n]
            half = half.reshape(len(half), rows, -1, half.shape[-1])
            half = torch.einsum("fu,mbun->mbfn", output, half)
        variance = half.square().sum(3).reshape(len(half), rows, -1)
        return variance if output is None or output.ndim == 2 else variance * output.square()


def output_map(run: Run, features: str) -> Tensor | None:
    """A in f = A u + c, where u is the last layer's output for one row, flat, and f the network's.

    None where A is the identity; a number where it is a multiple of that; else its diagonal
    [outputs], or the matrix [outputs, size of u]. A is the derivative of f by u. It is checked on
    rows of the data, at the first weights and at others near them that training may reach, that
    large and small changes of u, and changes of the last layer's weights, move f as A says.
    `ModelError` where they do not.
    """
    net, name = run.net, run.net.head or ""
    if [layer for layer, _ in net.widths].count(name) > 1:
        raise ModelError(
            f"the last layer, {name!r}, is called more than once for one output: last-layer VI "
            "needs one call; low-rank-vi with subset='last_layer' takes any network"
        )
    probe = _Probe(run, features)
    found = probe.diagonal()
    if found is None or not probe.agrees(found):
        found = probe.matrix()
        if found is None or not probe.agrees(found):
            other = "softmax='sampled', or " if run.likelihood.class_axis else ""
            raise ModelError(
                f"the network's output is no affine function of that of its last layer, {name!r}, "
                "with the same factor for all rows and weights (an activation after it? a factor "
                "that is learned or depends on x?): last-layer VI in closed form needs one; use "
                f"{other}low-rank-vi with subset='last_layer', which takes any network"
            )
    if found.ndim == 1 and bool((found == found[0]).all()):
        found = found[0]
    return None if found.ndim == 0 and float(found) == 1.0 else found


class _Probe:
    """The network's outputs as a function of the output of its last layer, on a few rows and at two
    sets of weights."""

    def __init__(self, run: Run, features: str) -> None:
        self.net, self.name = run.net, run.net.head or ""
        rows = run.rows.rows[0]
        spread = torch.linspace(0, len(rows) - 1, _PROBED, device=rows.device).long()
        spread = spread if len(rows) > _PROBED else torch.arange(len(rows), device=rows.device)
        if len(rows) == 1:  # BatchNorm needs two
            spread = spread.repeat(2)
        self.x = run.rows.take(rows[spread], torch.tensor(0))[0]
        self.rows = len(spread)
        self._generator = generator("last-layer probe")
        start, free = run.start(), run.free
        theta = start[0]
        away = 0.01 * (1 + theta.abs()) * self._normal(theta)
        if features == "frozen" and free is not None and bool((start == theta).all()):
            away = away * free  # the other weights never change
        near = theta + away
        self.weights = [self.net.layout.unflatten(each) for each in (theta, near)]
        with torch.no_grad():
            given = self.net.apply(self.weights[0], self.x).terms[under(self.name, "features")]
        layer = self.net.net.get_submodule(self.name)
        self.shape = (*given.shape[:-1], layer.out_features)  # of u

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator, dtype=torch.float64).to(like)

    def outputs(
        self, weights: Params, shift: Tensor | None = None, training: bool = False
    ) -> Tensor:
        """f, [rows, outputs]."""
        given = {} if shift is None else {under(self.name, "shift"): shift.reshape(self.shape)}
        f = self.net.apply(weights, self.x, buffers=given, training=training).f
        return f.reshape(self.rows, -1)

    def _differentiable(self) -> tuple[Tensor, Tensor]:
        weights = {name: value.detach() for name, value in self.weights[0].items()}
        like = next(iter(weights.values()))
        shift = torch.zeros(self.shape, dtype=like.dtype, device=like.device, requires_grad=True)
        return shift, self.outputs(weights, shift)

    def diagonal(self) -> Tensor | None:
        """The sums of A's columns, which are its diagonal if it has no other entries."""
        with torch.enable_grad():
            shift, f = self._differentiable()
            if f.numel() != shift.numel() or not f.requires_grad:
                return None
            (slope,) = torch.autograd.grad(f.sum(), shift)
        return slope.reshape(self.rows, -1)[0]

    def matrix(self) -> Tensor | None:
        """A, from the first row; None where it is too large or no map of each row by itself."""
        with torch.enable_grad():
            shift, f = self._differentiable()
            size = shift.numel() // self.rows
            own = len(f[0]) * size <= _MOST_ENTRIES and size * self.rows == shift.numel()
            if not own or not f.requires_grad:
                return None
            every = torch.eye(len(f[0]), dtype=f.dtype, device=f.device)
            (slope,) = torch.autograd.grad(f[0], shift, every, is_grads_batched=True)
        return slope.reshape(len(every), self.rows, size)[:, 0]

    def agrees(self, found: Tensor) -> bool:
        """Whether f changes as A predicts, up to rounding."""
        modes = [False]
        if self.net.tracked and not draws_itself(self.net.net):
            modes.append(True)
        with torch.no_grad():
            for weights in self.weights:
                for training in modes:
                    before = self.outputs(weights, training=training)
                    for size in (1.0, 100.0):
                        u = size * self._normal(before.new_empty(self.shape))
                        after = self.outputs(weights, u, training)
                        if not self._moved(found, before, after, u):
                            return False
            return self._moved(found, *self._other_layer())

    def _other_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        """f before and after a change of the last layer's weights, and that of u."""
        weights = self.weights[0]
        names = {leaf: under(self.name, leaf) for leaf in ("weight", "bias")}
        away = {leaf: self._normal(weights[n]) for leaf, n in names.items() if n in weights}
        moved = {names[leaf]: weights[names[leaf]] + by for leaf, by in away.items()}
        features = self.net.apply(weights, self.x).terms[under(self.name, "features")]
        u = away.get("bias", features.new_zeros(())).expand(self.shape)
        if "weight" in away:
            u = u + features @ away["weight"].mT
        return self.outputs(weights), self.outputs({**weights, **moved}), u

    def _moved(self, found: Tensor, before: Tensor, after: Tensor, u: Tensor) -> bool:
        u = u.reshape(self.rows, -1)
        wanted = u @ found.mT if found.ndim == 2 else u * found
        if wanted.shape != before.shape or not bool(after.isfinite().all()):
            return False
        eps = torch.finfo(before.dtype).eps
        size = max(float(before.abs().max()), float(after.abs().max()))
        most = eps**0.5 * float(wanted.abs().max()) + 64 * eps * size
        return float((after - before - wanted).abs().max()) <= most


def lost_to_softmax(mean: Tensor, variance: Tensor) -> Tensor:
    """log E Σ_k exp f_k − log Σ_k exp m_k of normal logits, [M, B]: the loss of Jensen's bound."""
    return torch.logsumexp(mean + 0.5 * variance, 2) - torch.logsumexp(mean, 2)
