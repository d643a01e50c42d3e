"""An ensemble of infinitely wide networks, each trained by gradient descent.

An infinitely wide network is linear in its weights. If it is trained on half the mean squared
error, Σ(f − y)²/2n, with the noise σ² as regularisation towards the initial weights, then at time t

    f_t(x) = f_0(x) + Θ(x, X) A_t (y − f_0(X)),    A_t = (Θ + σ²I)⁻¹(I − exp(−t(Θ + σ²I)/n))

with f_0 ~ GP(0, K) its function at the start (Jacot et al. 2018). Over the starts, f_t is Gaussian
(Lee et al. 2019, eq. 13–16, where σ = 0):

    mean        Θ* A_t y
    covariance  K** + Θ* A_t K A_t Θ*ᵀ − Θ* A_t K* − (Θ* A_t K*)ᵀ

This is the predictive distribution of a deep ensemble of very wide networks. It is not a Bayesian
posterior and has no evidence. σ_w, σ_b and σ are found by the evidence of a GP whose kernel is Θ;
the noise of y, if it is learned, by leave-one-out residuals (`posterior.py`). It is for up to about
5,000 rows: it holds K, Θ and a factor. With kernel="empirical" the network that is passed to `fit`
is trained, of finite width and linear in its weights around the initial weights of each member
(`Tangent`). Its kernel is the scaled tangent kernel at the weights of each member,

    k(x, x') = s² Θ̂(x, x'),    Θ̂ = (1/O) Σ_o J_o(x) J_o(x')ᵀ,    J_o = ∂f_o/∂θ

the mean over its outputs, whose limit is Θ (Jacot et al. 2018; Novak et al. 2022). It is computed
from Jacobians of some rows at a time: J of all rows is never held. The prior over functions is

    f(x) = J(x)δ,   δ ~ N(0, s²I):    f ~ GP(0, s²Θ̂)

which is a network minus its initial function, linear in its weights (Chizat et al. 2019 subtract
that function, too). Θ = K = s²Θ̂ in the equations above: weights are drawn around the initial
weights, and trained. s and the noise are found by evidence times N(·, 1) priors on their
logarithms. The prior of s is centred where s²Θ̂ has y's variance on average, and that of the noise
at 1 in fitted units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError, ShapeError
from doxa.function.evidence import Problem, Solved, evenly, solve
from doxa.function.wide.fitting import InfinitelyWide, ProcessPrior, Scales
from doxa.function.wide.posterior import NTKPosterior, WidePosterior, spread_of
from doxa.laplace.curvature import Jacobians
from doxa.linalg.layout import Entry, Layout
from doxa.method import Run, State
from doxa.method.method import one_of, positive
from doxa.model import Model
from doxa.posterior import Posterior, register_posterior

_HELD = 256 << 20  # bytes of Jacobians that are multiplied with all others


@store.register("packed-rows")
@dataclass(frozen=True)
class Packed:
    """The positions of inputs of any kind in one matrix.

    names: of the tensors of a dict, numbers of those of a tuple, None for a single tensor.
    shapes: of a row of each. kinds: the types of those that are not floats, else "".
    """

    names: tuple[str, ...] | tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, x: Any) -> Packed:
        names: Any = None
        if not isinstance(x, Tensor):
            names = tuple(sorted(x)) if isinstance(x, dict) else tuple(range(len(x)))
        parts = [x] if names is None else [x[name] for name in names]
        kinds = ["" if p.is_floating_point() else str(p.dtype).split(".")[1] for p in parts]
        return cls(names, tuple(tuple(p.shape[1:]) for p in parts), tuple(kinds))

    def pack(self, x: Any, lead: int = 1) -> Tensor:
        """Rows as vectors [..., N, D], in float64, with `lead` axes up to the rows."""
        parts = [x] if self.names is None else [x[name] for name in self.names]
        for part, shape in zip(parts, self.shapes, strict=True):
            if tuple(part.shape[lead:]) != shape:
                raise ShapeError(
                    f"a tangent kernel is of rows of one shape, {list(shape)}, and x has "
                    f"{list(part.shape[lead:])}"
                )
        return torch.cat([part.reshape(*part.shape[:lead], -1).double() for part in parts], -1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Any:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        found = [
            part.reshape(*part.shape[:-1], *shape).to(getattr(torch, kind) if kind else dtype)
            for part, shape, kind in zip(
                rows.split(sizes, -1), self.shapes, self.kinds, strict=True
            )
        ]
        if self.names is None:
            return found[0]
        if self.names and isinstance(self.names[0], str):
            return dict(zip(self.names, found, strict=True))
        return tuple(found)


class TangentFunction:
    """k(hyper, a, b) of rows that are packed, for hyper [K, 1 + P]: log s and the weights."""

    def __init__(self, model: Model, packed: Packed) -> None:
        self.model, self.packed = model, packed
        self.layout = Layout((Entry("scale", (1,)), Entry("start", (model.layout.size,))))

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """[K, N, N'], or k(a_i, a_i) [K, N]; rows [N, D], or [K, N, D] of each member."""
        jacobians = Jacobians(self.model, self._weights(flat), self.model.subset_names)
        size = (2 * flat[:, 0]).exp() / jacobians.outputs
        if diag:
            each = [own.square().sum(-1) for _, own in self._pieces(jacobians, a)]
            found = torch.cat(each, 1) * size[:, None]
        else:
            found = self._products(jacobians, a, b) * size[:, None, None]
        return found

    def _weights(self, flat: Tensor) -> Tensor:
        return flat[:, 1:].to(self.model.dtype)

    def _products(self, jacobians: Jacobians, a: Tensor, b: Tensor) -> Tensor:
        """Σ_o J_o(a) J_o(b)ᵀ, [K, N, N']. One side is stored in blocks; the other is recomputed for
        each."""
        found = a.new_empty(jacobians.members, a.shape[-2], b.shape[-2])
        for left, own in self._panels(jacobians, a):
            if a is b:
                found[:, left, left] = own @ own.mT
            for right, other in self._pieces(jacobians, b, left.stop if a is b else 0):
                block = own @ other.mT
                found[:, left, right] = block
                if a is b:
                    found[:, right, left] = block.mT
        return found

    def _pieces(
        self, jacobians: Jacobians, x: Tensor, first: int = 0
    ) -> Iterator[tuple[slice, Tensor]]:
        """Pairs (rows, their J [K, n, O·P]) in float64, in which the product of rounded Jacobians
        is positive semi-definite."""
        for part in jacobians.chunks(x.shape[-2] - first):
            own = slice(first + part.start, first + part.stop)
            rows = self.packed.unpack(x[..., own, :], self.model.dtype)
            yield own, jacobians(rows, x.ndim == 2)[1].double().flatten(2)

    def _panels(self, jacobians: Jacobians, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        parts: list[Tensor] = []
        start = stop = held = 0
        for own, part in self._pieces(jacobians, x):
            if parts and held + 8 * part.numel() > _HELD:
                yield slice(start, stop), torch.cat(parts, 1)
                parts, start, held = [], stop, 0
            parts.append(part)
            stop, held = own.stop, held + 8 * part.numel()
        yield slice(start, stop), torch.cat(parts, 1)

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name: flat [K, 1 + P]."""
        return {"scale": flat[:, 0].exp().tolist()}


class _Known:
    """e^{2θ} times a known matrix, whose rows are x."""

    layout = Layout((Entry("scale", (1,)),))

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        return (2 * flat[..., 0]).exp()[..., None, None] * a


class KnownKernel(Scales):
    """The evidence for a K that is a matrix x [M, N, N] times a scale, with a prior on θ around
    0."""

    def _away(self, theta: Tensor) -> Tensor:
        return theta

    def thinned(self, count: int) -> Problem:
        columns = evenly(self.x.shape[-2], count).to(self.x.device)
        thin = super().thinned(count)
        return thin._replace(x=thin.x[..., columns])


class Tangent(ProcessPrior):
    """The prior of a network that is linear around its start."""

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        super().__init__(method, run)
        self.function = TangentFunction(run.net, Packed.of(run.rows.x))

    @property
    def posterior(self) -> type[WidePosterior]:
        return TangentPosterior

    @cached_property
    def _kernel(self) -> tuple[Tensor, Tensor]:
        """log s at the start [M], and s²Θ̂ of all rows there, [M, N, N]."""
        run = self.run
        batch = run.all_rows()
        x = self.rows(batch.x, 1 if batch.shared else 2)
        plain = torch.cat([x.new_zeros(run.size, 1), run.start().double()], 1)
        kernel = self.function(plain, x, x)
        scale = self.method.settings().get("scale")
        if scale is not None:
            unit = torch.full_like(kernel[:, 0, 0], math.log(scale))
        else:
            own = kernel.diagonal(0, -2, -1)  # [M, N]
            weight = torch.ones_like(own) if batch.weight is None else batch.weight.to(own)
            size = (own * weight).sum(1) / weight.sum(1)
            unit = spread_of(run).log() - 0.5 * size.clamp_min(1e-300).log()
        return unit, kernel.mul_((2 * unit).exp()[:, None, None])

    def start(self) -> Tensor:
        return torch.zeros_like(self._kernel[0]).unsqueeze(1)

    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        known: Any = _Known()
        return KnownKernel(known, self._kernel[1], *self._seen(batch), log_noise)

    def rows(self, x: Any, lead: int = 1) -> Tensor:
        return self.function.packed.pack(x, lead)

    def hyper(self, scales: Tensor) -> Tensor:
        return torch.cat([self._kernel[0][:, None] + scales, self.run.start().double()], 1)

    def settled(self, scales: Tensor) -> dict[str, Any]:
        return {"among": (2 * scales.double()).exp().unsqueeze(2) * self._kernel[1]}


@register_posterior
class TangentPosterior(NTKPosterior):
    """Linearised networks after training for a time, an equal mixture over members.

    among: s²Θ̂ of the training rows, [K, N, N], where it is known.
    """

    kind = "tangent-ensemble"

    def __init__(self, *args: Any, among: Tensor | None = None, **kw: Any) -> None:
        if among is not None:
            self.__dict__["_among"] = among
        super().__init__(*args, **kw)

    @property
    def start(self) -> Any:
        return self.kernel

    def _between(self, a: Tensor, b: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        cross = self.kernel(self.hyper[some], a, b)
        return cross, cross

    @cached_property
    def _solved(self) -> Solved:
        return self._checked(solve(self._among, self.y, self._levels, self.weight))

    def vectors(self, x: Any) -> Tensor:
        packed: Tensor = self.kernel.packed.pack(x)
        return packed.to(self.dtype)

    def extra(self) -> dict[str, Any]:
        return {"event": self.event, "ids": self.ids, "packed": self.kernel.packed}

    @classmethod
    def kernel_of(cls, common: dict[str, Any], extra: dict[str, Any]) -> Any:
        return TangentFunction(common["model"], extra["packed"])


_OF_THE_LIMIT = ("depth", "activation", "net", "weight_std", "bias_std")


@store.register("ntk")
@dataclass(frozen=True)
class NTK(InfinitelyWide):
    """Ensembles of infinitely wide networks after gradient descent.

    Parameters
    ----------
    depth : int
        Hidden layers of a fully connected network.
    activation : str
        "relu", "erf", "gelu", "tanh", …
    net : nn.Module or Architecture or None
        An `nn.Sequential` that is read off in their place, or an `Architecture`; so is the network
        that `fit` is given.
    weight_std, bias_std : float
        σ_w and σ_b where they start: f = σ_w/√n Wφ + σ_b b, with N(0, 1) weights.
    noise : float or None
        σ in units of y; it also regularises weights towards their start. None: that of the
        likelihood, or fitted; the remaining noise of y is then found by leave-one-out residuals, at
        the end of training (time=None).
    time : float or None
        How long networks are trained, steps times rate on Σ(f − y)²/2n, half the mean squared error
        (on the whole of it, give 2 × steps × rate); None: without end.
    learn_kernel : bool
        Fit σ_w, σ_b and the noise by the evidence of a GP with kernel Θ.
    refine : int
        Evaluations of the evidence, at most. Above 2,000 rows, of 500 of them.
    kernel : str
        "analytic", of infinite width, or "empirical": s²Θ̂ of the network that `fit` is given, any
        that `Model` takes, at the weights where each member starts.
    scale : float or None
        s where it starts, in fitted units: the deviation of weights about their start; None: the
        one at which functions vary as y does.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-2, 2, 30).double()[:, None]
    >>> posterior = doxa.fit(None, (x, x.abs()), doxa.NTK(depth=1, noise=0.01))
    >>> bool((posterior.predict(x).mean - x.abs()).abs().max() < 0.05)
    True
    """

    name: ClassVar[str] = "ntk"
    kind: ClassVar[str] = "ntk"
    posterior: ClassVar[type[WidePosterior]] = NTKPosterior
    matrices: ClassVar[int] = 2

    time: float | None = positive(None, per_run=True)
    kernel: str = one_of("analytic", "empirical")
    scale: float | None = positive(None)

    def check(self) -> None:
        if self.kernel != "empirical":
            if self.scale is not None:
                raise MethodError('scale is for kernel="empirical": weight_std and bias_std here')
            return
        named = {f.name: f.default for f in fields(self) if f.name in _OF_THE_LIMIT}
        given = [name for name, default in named.items() if getattr(self, name) != default]
        if given:
            raise MethodError(
                f'kernel="empirical" uses the network that is passed to fit, so {given[0]}= is not '
                "allowed: pass the network to fit, and scale= for its kernel"
            )
        object.__setattr__(self, "needs_network", True)

    def process_prior(self, run: Run) -> ProcessPrior:
        return Tangent(self, run) if self.kernel == "empirical" else super().process_prior(run)

    def settled(self, run: Run) -> dict[str, Tensor]:
        if self.time is None and "time" not in run.hyper:
            return {}
        return {"time": run.field(self, "time").double()}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = super().finish(run, state, kept)
        assert isinstance(posterior, NTKPosterior)
        if self._learned(run) and posterior.time is None and not run.likelihood.classifies:
            posterior.show_noise()
        return posterior
