"""Sparse Gaussian processes by stochastic variational inference (SVGP), for any likelihood.

    f ~ GP(0, k),   y_i ~ p(y | f(x_i)),   q(f) = ∫ p(f | u) q(u) du,   u = f(Z)

Titsias (2009), Hensman, Fusi & Lawrence (2013), Hensman, Matthews & Ghahramani (2015); the bound
and its natural gradients are in `variational.py`. A step costs Z³ + BZ², whatever the number of
rows, and no row is kept. Classes are one GP each, with the same kernel and points.

With Gaussian noise the best q(v) is known: a last pass over the rows sets it,

    Λ = I + Σ a_i a_iᵀ/σ²,   Λm = Σ a_i y_i/σ²
    ELBO = Σ_i [log p(y_i | 0) − (k_ii − |a_i|²)/2σ²] + ½ (mᵀΛm − log |Λ|)

and further rows are added to it later without a refit. With the inducing points at the rows this is
the exact GP, and the bound its evidence.

The posterior is q(v) at the inducing points; it stores no training rows. With Gaussian noise
`predict` returns marginals in closed form, otherwise it draws whole functions, as `functions`
always does (`inducing.py`); `joint` has the exact covariance over rows. With Gaussian noise
`condition` adds rows to q(v) as to the last pass of the fit:

    Λ ← Λ + Σ a aᵀ/σ²,   Λm ← Λm + Σ a y/σ²
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch, rows_of
from doxa.errors import Unavailable
from doxa.exact.targets import Shape, new_targets
from doxa.function.inducing import (
    FEATURES,
    MOST_POINTS,
    Layer,
    draw,
    factor,
    from_precision,
    whitened,
)
from doxa.function.kernels import Composed
from doxa.function.variational import VariationalProcess
from doxa.linalg.layout import Params
from doxa.method import Clock, Info, Run, State
from doxa.method.row_sums import added
from doxa.noise import Noise
from doxa.posterior import Posterior, ProcessPosterior, register_posterior
from doxa.posterior.process import square_root
from doxa.predictive import Moments, Predictive

_CHUNK_BYTES = 64 << 20  # of features or whitened covariances at a time
DRAWS = 100
_OWN = ("hyper", "points", "mean", "root", "reference")


@register_posterior
class SparsePosterior(ProcessPosterior):
    """An equal mixture over members, each a GP through its inducing points.

    Parameters
    ----------
    hyper: the kernel's logarithms [K, H]. points: [K, Z, D]. mean, root: q(v), [K, O, Z] and
        [K, O, Z, Z], all in float64. output: the shape of f at a row.
    learned: the likelihood's parameters {name: [K, ...]}. reference: a tensor of the fit's type.
    """

    kind = "sparse-process"

    def __init__(
        self,
        *args: Any,
        hyper: Tensor,
        points: Tensor,
        mean: Tensor,
        root: Tensor,
        output: Shape,
        learned: Params,
        reference: Tensor,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.hyper, self.points, self.mean, self.root = hyper, points, mean, root
        self.event, self.learned, self.reference = tuple(output), learned, reference

    @property
    def members(self) -> int:
        return self.hyper.shape[0]

    def _reference(self) -> Tensor:
        return self.reference

    @property
    def kernel(self) -> Composed:
        return self.method.covariance(self.points.shape[2])

    def layer(self, member: slice = slice(None)) -> Layer:
        own = (part[member] for part in (self.hyper, self.points, self.mean, self.root))
        return Layer(self.kernel, *own)

    def layers(self, k: int) -> list[tuple[Layer, Tensor | None]]:
        """The layers of one member, each with the part of its input that it keeps; None for the
        last layer."""
        return [(self.layer(slice(k, k + 1)), None)]

    def prepared(self, x: Any) -> Tensor:
        x = self.check_inputs(x)
        return (x.unsqueeze(-1) if x.ndim == 1 else x).double()

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.in_parts(self.layer(), x.expand(self.members, *x.shape))
        f, variance = (part.reshape(self.members, len(x), *self.event) for part in found)
        return f, variance

    def in_parts(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """The marginals of a layer at rows [K, N, D], in blocks of rows."""
        members, outputs, points = layer.mean.shape
        step = max(1, _CHUNK_BYTES // (8 * members * points * (1 + outputs)))
        root = factor(layer.kernel, layer.hyper, layer.points)
        parts = []
        for h in x.split(step, 1):
            cross = layer.kernel(layer.hyper, layer.points, h)
            basis = torch.linalg.solve_triangular(root, cross, upper=False)
            parts.append(layer.marginals(h, basis))
        f, variance = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return f, variance

    def joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, covariance = self.layer(slice(k, k + 1)).joint(x.unsqueeze(0))
        return mean[0], torch.stack([square_root(own) for own in covariance[0]])

    def prior_joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at = x.unsqueeze(0)
        root = square_root(self.kernel(self.hyper[k : k + 1], at, at)[0])
        return root.new_zeros(len(x), math.prod(self.event)), root[None]

    def theta(self) -> Params:
        return {name: value.to(self.dtype) for name, value in self.learned.items()}

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """With Gaussian noise a closed form, for any n; otherwise n whole functions."""
        if self.likelihood.integrates_normal:
            return super()._predict(x, n, seed, keep)
        seed, x = self.sampling(n, seed, keep), self.prepared(x)
        counts = self.split(n or max(DRAWS, self.members))
        f, theta = self._drawn(x, counts, seed), self._theta_of(counts)
        if keep == "moments":
            moments = Moments(self.likelihood, seed)
            moments.update(f, theta)
            return moments.result()
        return Predictive(f, self.likelihood, theta)

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Whole functions, [n, N, ...], in units of y. The value at a row does not depend on the
        other rows."""
        seed = self.sampling(n, seed, "samples")
        return self.likelihood.location(self._drawn(self.prepared(x), self.split(n), seed), 1)

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        f = self._drawn(self.prepared(x), self.split(n), seed, prior=True)
        return self.likelihood.location(f, 1)

    def _theta_of(self, counts: list[int]) -> Params:
        """The likelihood's parameters of each draw."""
        who = torch.arange(self.members).repeat_interleave(torch.tensor(counts)).to(self.device)
        return {name: value[who] for name, value in self.theta().items()}

    def _drawn(self, x: Tensor, counts: list[int], seed: int, prior: bool = False) -> Tensor:
        """A number of functions from each member: [n, N, *output]."""
        each = [
            self._through(self.layers(k), x, self._noise(k, count, seed, prior), prior)
            for k, count in enumerate(counts) if count
        ]  # fmt: skip
        return torch.cat(each).reshape(sum(counts), len(x), *self.event).to(self.dtype)

    def _noise(self, k: int, count: int, seed: int, prior: bool = False) -> Noise:
        keys = [f"{self.ids[k]}/{j}" for j in range(count)]
        return Noise(seed, "prior" if prior else "paths", keys, self.device, torch.float64)

    def _through(
        self, layers: list[tuple[Layer, Tensor | None]], x: Tensor, noise: Noise, prior: bool
    ) -> Tensor:
        """Draws through all layers at rows x [N, D]: [S, N, O]."""
        width = len(noise.members) if len(layers) > 1 else 1
        step = max(1, _CHUNK_BYTES // (8 * width * (self.mean.shape[2] + FEATURES)))
        parts = []
        for start in range(0, len(x), step):
            h = x[start : start + step].unsqueeze(0)
            for call, (layer, project) in enumerate(layers):
                f = draw(layer, h, noise, call, prior)
                h = f if project is None else h @ project + f
            parts.append(h)
        return torch.cat(parts, 1)

    def _condition(self, x: Any, y: Any) -> SparsePosterior:
        """The process with further rows, at the same kernel, points and noise."""
        likelihood = self.base_likelihood
        if not likelihood.integrates_normal:
            raise Unavailable(
                f"rows are added in closed form with Gaussian noise only, not {likelihood.name}: "
                "fit again with all rows"
            )
        x, y = new_targets(self, x, y, self.event)
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        x = x.double().expand(self.members, *x.shape)
        a = whitened(self.kernel, self.hyper, self.points, x)  # [K, Z, N]
        given = likelihood.constants(self.event, self.scales.y_scale)
        theta = self.learned | {k: v.to(self.hyper) for k, v in given.items()}
        at = torch.zeros(self.members, len(y), *self.event).to(self.hyper)
        bend = likelihood.curvature(at, theta, 1).diagonal(dim1=-2, dim2=-1)  # 1/σ² [K, N, O]
        half = torch.linalg.inv(self.root)
        precision = half.mT @ half
        shift = (precision @ self.mean.unsqueeze(-1)).squeeze(-1)
        precision = precision + (a.unsqueeze(1) * bend.mT.unsqueeze(2)) @ a.mT.unsqueeze(1)
        mean, root, _ = from_precision(precision, shift + (bend * y.double()).mT @ a.mT)
        new = SparsePosterior(
            self.model, self.method, likelihood, self.scales, self.inputs, ids=self.ids,
            hyper=self.hyper, points=self.points, mean=mean, root=root, output=self.event,
            learned=self.learned, reference=self.reference,
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows added"] = rows_of(y, "y")
        return new

    def tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in _OWN}
        return own | {f"likelihood.{name}": value for name, value in self.learned.items()}

    def extra(self) -> dict[str, Any]:
        return {"output": self.event, "ids": self.ids, "elbo": self.elbo}

    @classmethod
    def own(cls, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The constructor's arguments from the stored tensors."""
        prefix = "likelihood."
        learned = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        return {name: tensors[name] for name in _OWN} | {"learned": learned}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SparsePosterior:
        new = cls(**common, output=extra["output"], ids=extra["ids"], **cls.own(tensors))
        new.elbo = extra["elbo"]
        return new


@store.register("sparse-gp")
@dataclass(frozen=True)
class SparseGP(VariationalProcess):
    """A GP with inducing points, fitted on mini-batches. Its settings are those of
    `VariationalProcess`.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-3, 3, 200).double()[:, None]
    >>> y = (x[:, 0] > 0).long()
    >>> posterior = doxa.fit(None, (x, y), doxa.SparseGP(inducing=10), likelihood="categorical",
    ...                      steps=50)
    >>> bool((posterior.predict(x).probs.argmax(1) == y).double().mean() > 0.95)
    True
    """

    name: ClassVar[str] = "sparse-gp"
    shares: ClassVar[str] = "rows"

    @property
    def row_work(self) -> int:
        """The products of the values at the inducing points of a row."""
        return (self.inducing or MOST_POINTS) ** 2

    def init_inner(self, points: Tensor) -> tuple[State, Tensor]:
        return {}, points

    def inner(self, run: Run, params: State, x: Tensor, clock: Clock) -> tuple[Tensor, Tensor, int]:
        return x, x.new_zeros(len(x)), 1

    def _enter_last(self, run: Run, state: State) -> State:
        state = super()._enter_last(run, state)
        if not run.likelihood.integrates_normal:
            return state
        eye = torch.eye(state["shift"].shape[2], dtype=torch.float64, device=run.device)
        none = torch.zeros_like(state["shift"])
        return state | {"precision": eye.expand_as(state["precision"]).clone(), "shift": none}

    def _last(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """With Gaussian noise: the sums over all rows that determine q(v), about f = 0."""
        if not run.likelihood.integrates_normal:
            return super()._last(run, state, batch, clock)
        mean, root = (torch.zeros_like(state[name]) for name in ("shift", "precision"))

        def step(state: State, where: slice, rows: Batch) -> State:
            with torch.enable_grad():
                at = self.at(run, state, rows, clock, mean, root)
                slope, width = torch.autograd.grad(at.fit.sum(), [at.mean, at.variance])
            precision, shift = at.sites(slope, -2.0 * width)
            return {
                **state, "fit": state["fit"] + at.fit.detach(), "shift": state["shift"] + shift,
                "precision": state["precision"] + precision,
            }  # fmt: skip

        return added(run, batch, state, ("fit", "shift", "precision"), step), {}

    def bound(self, run: Run, state: State) -> float | None:
        if run.tempered or not run.likelihood.integrates_normal:
            return super().bound(run, state)
        mean, _, half_logdet = from_precision(state["precision"], state["shift"])
        each = state["fit"] + 0.5 * (mean * state["shift"]).sum((1, 2)) + half_logdet
        return float((each + run.units_log_jacobian()).mean())

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return self.recorded(run, state, SparsePosterior(**self.posterior_parts(run, state)))
