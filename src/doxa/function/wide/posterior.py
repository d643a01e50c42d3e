"""Posteriors of infinitely wide networks: Gaussian processes with the kernel of an architecture.

They extend `GPPosterior`. Classes are regression targets, and functions divided by a temperature
are logits:

    p(c | x) = E[softmax(f(x)/T)_c],   f ~ the process conditioned on one-hot rows

The temperature T maximises the likelihood of leave-one-out predictions, which are in closed form
for a Gaussian process (Rasmussen & Williams 2006, eq. 5.12): with P = (K + σ²I)⁻¹,

    f_i | y_{−i} ~ N(y_i − [Py]_i/P_ii, 1/P_ii − σ²)

and E[softmax] by MacKay's approximation, softmax(m/√(T² + πv/8)). T is at least σ√3/π, at which the
logistic noise of a logit is as wide as the noise of the regression.

The noise of y under trained networks (NTK) comes from leave-one-out residuals. The residual of row
i under a network trained on all others is [P(y − f_0)]_i/P_ii, with P = (Θ + σ²W⁻¹)⁻¹, as for every
linear smoother (Rasmussen & Williams 2006, eq. 5.12). Over starts f_0 ~ GP(0, K) it has

    mean r_i = [Py]_i/P_ii,   variance v_i = [PKP]_ii/P_ii²

σ² regularises weights towards their start. The spread v of an ensemble does not contain errors that
all its members share, so σ² + v is too small for y. The noise of y is the remaining part of the
leave-one-out residuals: τ² = mean(r_i² − v_i), and at least σ².

`NTKPosterior` has the equations of `ntk.py`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.data import as_tensor, rows_of
from doxa.errors import MethodError, ShapeError
from doxa.exact.targets import event_of, new_targets
from doxa.function.evidence import Solved, by_level, sample_rows
from doxa.function.process import GPPosterior
from doxa.function.wide.architecture import WideFunction
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import Params
from doxa.method import Run
from doxa.noise import Noise
from doxa.posterior import register_posterior
from doxa.posterior.process import square_root
from doxa.predictive import Moments, Predictive

_TIMES = torch.logspace(0.0, 3.0, 61, dtype=torch.float64)  # times the least temperature


def outputs_of(run: Run) -> tuple[int, ...]:
    """The shape of one function value."""
    if not run.likelihood.class_axis:
        return event_of(run)
    output = tuple(run.output)
    if len(output) != 1 or run.likelihood.ignore_index is not None or run.likelihood.tempered:
        raise MethodError(
            "classes are regressed on: one class a row, without class weights and ignore_index"
        )
    return output


def as_numbers(run: Run, y: Tensor, lead: int = 1) -> Tensor:
    """Targets as numbers [..., N, O], with `lead` axes up to the rows."""
    return coded(y, run.likelihood, outputs_of(run), lead)


def coded(y: Tensor, likelihood: Likelihood, outputs: tuple[int, ...], lead: int = 1) -> Tensor:
    if likelihood.class_axis:
        return torch.nn.functional.one_hot(y.long(), outputs[0]).double() - 1.0 / outputs[0]
    y = y.reshape(*y.shape[:lead], -1).double()
    return 2.0 * y - 1.0 if likelihood.binary else y


def spread_of(run: Run) -> Tensor:
    """The standard deviation of each member's targets, 1 where they are all the same, [M]."""
    seen = sample_rows(run)
    y = as_numbers(run, seen.y, 2)
    share = (seen.shares(y) / y.shape[2]).unsqueeze(2)
    away = y - (share * y).sum((1, 2), keepdim=True)
    found = (away.square() * share).sum((1, 2)).sqrt()
    return torch.where(found > 0, found, torch.ones_like(found))


def temperatures(solved: Solved, log_noise: Tensor, likelihood: Likelihood) -> Tensor:
    """T of each member, for log σ [K]: [K]. Rows are weighted."""
    y, root, factor, solution = (part[:, 0] for part in solved)  # one level of noise
    precision = torch.cholesky_inverse(factor).diagonal(0, -2, -1) * root.square()  # P_ii [K, N]
    counts = root > 0
    precision = torch.where(counts, precision, torch.ones_like(precision))
    mean = y - root.unsqueeze(-1) * solution / precision.unsqueeze(-1)  # [K, N, C]
    noise = torch.where(counts, root, torch.ones_like(root)).square().reciprocal()
    variance = (1.0 / precision - noise).clamp_min(0.0).unsqueeze(-1)
    least = log_noise.exp() * (math.sqrt(3.0) / math.pi)
    tried = _TIMES.to(least)[:, None] * least  # [61, K]
    weight = (root / root.amax(-1, keepdim=True)).square()  # 1 where all rows count alike
    found = []
    for t in tried:
        logits = mean / (t.square()[:, None, None] + math.pi / 8 * variance).sqrt()
        if likelihood.binary:
            each = torch.nn.functional.logsigmoid(y * logits).sum(-1)
        else:
            each = (logits * (y > 0)).sum(-1) - logits.logsumexp(-1)
        found.append((each * weight).sum(-1))
    best = torch.stack(found).argmax(0)
    return tried.gather(0, best[None])[0]


_DRAWS = 100  # of each member, of classes


@register_posterior
class WidePosterior(GPPosterior):
    """A process with an architecture's kernel.

    temperature: T of each member, [K], by which functions become logits; None: as calibrated on
    the training rows by leave-one-out.
    """

    kind = "infinite-width"
    kernel: Any  # a WideFunction

    def __init__(self, *args: Any, temperature: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        if temperature is not None:
            self.__dict__["temperature"] = temperature
        if self.base_likelihood.classifies:
            self.log_evidence = None  # the evidence of numbers is not one of classes

    @cached_property
    def temperature(self) -> Tensor:
        return temperatures(self._solved, self._levels[:, 0], self.base_likelihood)

    def _logits(self, mean: Tensor, spread: Tensor, power: int, some: slice) -> Any:
        if not self.base_likelihood.classifies:
            return mean, spread
        t = self.temperature[some]
        by = lambda value: t.reshape(-1, *(1,) * (value.ndim - 1))  # noqa: E731
        return mean / by(mean), spread / by(spread) ** power

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._logits(*super().marginals(x), 2, slice(None))

    def joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return self._logits(*super().joints(x, members), 1, members)

    def prior_joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return self._logits(*super().prior_joints(x, members), 1, members)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """The closed form, for any n. For classes n draws, by default 100 per member.

        A draw is the same number of standard deviations from the mean at every row. Probabilities
        are those of each row by itself, and do not depend on the other rows.
        """
        if not self.base_likelihood.classifies:
            return super()._predict(x, n, seed, keep)
        seed = self.sampling(n, seed, keep)
        f = self._drawn(x, n or _DRAWS * self.members, seed)
        if keep == "samples":
            return Predictive(f, self.likelihood)
        moments = Moments(self.likelihood, seed)
        moments.update(f, {})
        return moments.result()

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws of f, jointly over the rows of x; for classes, the draws of `predict`."""
        if not self.base_likelihood.classifies:
            return super()._draw_functions(x, n, seed)
        return self._drawn(x, n, self.sampling(n, seed, "samples"))

    def _drawn(self, x: Any, n: int, seed: int) -> Tensor:
        """Logits [n, N, *event]."""
        f, variance = self.marginals(self.prepared(x))  # [K, N, *event]
        who = [k for k, count in enumerate(self.split(n)) for _ in range(count)]
        keys = [f"{self.ids[k]}/{who[:i].count(k)}" for i, k in enumerate(who)]
        away = Noise(seed, "draws", keys, f.device, f.dtype).normal((1, *self.event))
        return torch.addcmul(f[who], variance.sqrt()[who], away).to(self.dtype)

    def theta(self) -> Params:
        return {} if self.base_likelihood.classifies else super().theta()

    def prepared(self, x: Any) -> Tensor:
        return self.vectors(self.check_inputs(x)).double()

    def vectors(self, x: Any) -> Tensor:
        """Inputs as rows of numbers, [N, D]."""
        return x.unsqueeze(-1) if x.ndim == 1 else x.flatten(1)

    def _condition(self, x: Any, y: Any) -> WidePosterior:
        """The process with further rows, at the same hyper-parameters."""
        x, y = self._targets(x, y)
        weight = self.weight
        if weight is not None:
            weight = torch.cat([weight, weight.new_ones(len(y))])
        rows = {"x": torch.cat([self.x, x]), "y": torch.cat([self.y, y]), "weight": weight}
        tensors = {k: v for k, v in self.tensors().items() if k != "temperature"}
        new = type(self).restore(
            {
                "model": self.model, "method": self.method, "likelihood": self.base_likelihood,
                "scales": self.scales, "inputs": self.inputs,
            },
            tensors | {k: v for k, v in rows.items() if v is not None},
            self.extra(),
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows"] = rows_of(new.x, "x")
        return new

    def _targets(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        if not self.base_likelihood.classifies:
            x, y = new_targets(self, x, y, self.event)
            return self.vectors(x), y.double()
        x = self.vectors(self.check_inputs(x))
        y = self.base_likelihood.prepare_targets(as_tensor(y, "y"), self.event).to(self.device)
        if len(y) != len(x):
            raise ShapeError(f"x has {len(x)} rows and y {len(y)}")
        return x, coded(y, self.base_likelihood, self.event)

    def tensors(self) -> dict[str, Tensor]:
        named = {"hyper": self.hyper, "log_noise": self.log_noise, "x": self.x, "y": self.y}
        if self.base_likelihood.classifies:
            named["temperature"] = self.temperature
        return named if self.weight is None else named | {"weight": self.weight}

    def extra(self) -> dict[str, Any]:
        kernel = self.kernel
        return super().extra() | {
            "architecture": kernel.architecture, "shape": kernel.shape, "kernel": kernel.kind
        }  # fmt: skip

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> WidePosterior:
        names = ("hyper", "log_noise", "x", "y", "weight", "temperature", "time", "shown")
        own = {name: tensors[name] for name in names if name in tensors}
        kernel = cls.kernel_of(common, extra)
        return cls(**common, kernel=kernel, event=extra["event"], ids=extra["ids"], **own)

    @classmethod
    def kernel_of(cls, common: dict[str, Any], extra: dict[str, Any]) -> Any:
        """The kernel described by `extra`."""
        return WideFunction(extra["architecture"], tuple(extra["shape"]), extra["kernel"])


def residuals(solved: Solved, among: Tensor) -> tuple[Tensor, Tensor]:
    """r [K, L, N, O/L] and v [K, L, N], given K of the rows, [K, N, N]."""
    _, root, factor, solution = solved
    precision = torch.cholesky_inverse(factor) * root.unsqueeze(-1) * root.unsqueeze(-2)
    own = precision.diagonal(0, -2, -1).clamp_min(torch.finfo(root.dtype).tiny)
    spread = (precision @ among.unsqueeze(1) * precision).sum(-1) / own.square()
    return root.unsqueeze(-1) * solution / own.unsqueeze(-1), spread


def noise_of(solved: Solved, among: Tensor, levels: Tensor) -> Tensor:
    """log τ [K, L], for log σ [K, L]. Rows are weighted."""
    left, spread = residuals(solved, among)
    weight = solved.root.square() * (2 * levels).exp().unsqueeze(-1)  # [K, L, N]
    each = (left.square().mean(-1) - spread) * weight
    shown = torch.where(weight > 0, each, torch.zeros_like(each)).sum(-1) / weight.sum(-1)
    return 0.5 * torch.maximum(shown, (2 * levels).exp()).log()


@register_posterior
class NTKPosterior(WidePosterior):
    """Infinitely wide networks after training for a time, an equal mixture over members.

    time: t of each member [K]; None: the end of training. shown: log τ of the noise of y, as
    log_noise, if it was found by leave-one-out; None: it is log σ.
    """

    kind = "wide-ensemble"

    def __init__(
        self, *args: Any, time: Tensor | None = None, shown: Tensor | None = None, **kw: Any
    ) -> None:
        self.time, self.shown = time, shown
        super().__init__(*args, **kw)
        self.log_evidence = None

    def theta(self) -> Params:
        if self.shown is None or self.base_likelihood.classifies:
            return super().theta()
        return {"log_noise": self.shown.to(self.dtype)}

    def show_noise(self) -> None:
        """Estimate the noise of y from leave-one-out residuals."""
        levels = noise_of(self._solved, self._among, self._levels)  # [K, L]
        self.shown = levels.expand(-1, self.log_noise[0].numel()).reshape(self.log_noise.shape)

    @property
    def start(self) -> Any:
        """K, the kernel of functions before training."""
        return WideFunction(self.kernel.architecture, self.kernel.shape, "nngp")

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors of B, [K, L, N, N], and the effect of time on each: (1 − e^{−τλ})/λ."""
        factor = self._solved.factor
        values, vectors = torch.linalg.eigh(factor @ factor.mT)
        assert self.time is not None
        n = len(self.x) if self.weight is None else self.weight.sum()
        done = self.time[:, None] * (2 * self._levels).exp() / n  # σ²t/n [K, L]
        return vectors, -torch.expm1(-done.unsqueeze(-1) * values) / values

    def _between(self, a: Tensor, b: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Θ and K between two sets of rows, for all or some members: [K, N, B] each."""
        hyper = self.hyper[some]
        return self.kernel(hyper, a, b).detach(), self.start(hyper, a, b).detach()

    @cached_property
    def _among(self) -> Tensor:
        """K of the training rows, [K, N, N]."""
        x = self.x.double()
        return self.start(self.hyper, x, x).detach()

    def _operated(self, cross: Tensor, some: slice) -> Tensor:
        """A_t Θ*ᵀ [K, L, N, B] for Θ*ᵀ [K, N, B]: R g(B) R, R = W^½/σ, with B of `evidence.py`."""
        root = self._solved.root[some].unsqueeze(-1)
        seen = root * cross.unsqueeze(1)
        if self.time is None:
            return root * torch.cholesky_solve(seen, self._solved.factor[some])
        vectors, share = (part[some] for part in self._spectrum)
        return root * (vectors @ (share.unsqueeze(-1) * (vectors.mT @ seen)))

    def _trained(self, x: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The mean at x [K, B, O], A_tΘ*ᵀ [K, L, N, B] and K* [K, 1, N, B]."""
        tangent, cross = self._between(self.x.double(), x, some)
        weights = self._operated(tangent, some)
        mean = weights.mT @ by_level(self.y, weights.shape[1])  # [K, L, B, O/L]
        mean = mean[:, 0] if mean.shape[1] == 1 else mean.squeeze(-1).mT
        return mean, weights, cross.unsqueeze(1)

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, weights, cross = self._trained(x, slice(None))
        prior = self.start(self.hyper, x, x, True).detach().unsqueeze(1)  # [K, 1, B]
        spread = weights * (self._among.unsqueeze(1) @ weights - 2 * cross)
        variance = (prior + spread.sum(-2)).clamp_min(0.0)
        return mean, variance.mT.expand_as(mean)

    def joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        mean, weights, cross = self._trained(x, members)
        shared = weights.mT @ cross
        prior = self.start(self.hyper[members], x, x).detach().unsqueeze(1)
        spread = weights.mT @ self._among[members].unsqueeze(1) @ weights - shared - shared.mT
        return self._logits(mean, square_root(prior + spread), 1, members)

    def prior_joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        root = square_root(self.start(self.hyper[members], x, x).detach().unsqueeze(1))
        zero = root.new_zeros(len(root), len(x), self.y.shape[1])
        return self._logits(zero, root, 1, members)

    def tensors(self) -> dict[str, Tensor]:
        own = {"time": self.time, "shown": self.shown}
        return super().tensors() | {name: part for name, part in own.items() if part is not None}
