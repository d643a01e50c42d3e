"""What a variational implicit process gives: S functions, and a Gaussian over their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from doxa.data import rows_of
from doxa.errors import ModelError, StoreError, Unavailable
from doxa.linalg.layout import Params
from doxa.model import likelihood_parameters
from doxa.noise import Noise
from doxa.posterior import register_posterior
from doxa.posterior.base import each
from doxa.posterior.function_draws import FunctionDraws
from doxa.posterior.weights import DEFAULT_SAMPLES, WeightPosterior
from doxa.predictive import Moments, Predictive

_BLOCK_BYTES = 64 << 20  # of draws at a time


@register_posterior
class ImplicitProcessPosterior(WeightPosterior):
    """f = m + Σ_s a_s φ_s with a ~ N(b, LLᵀ), one a member: a Gaussian process of rank S.

    point: weights outside the subset and the likelihood's own parameters, [K, P]. basis: the
    weights of the S functions, [K, S, P], or the noise of a given prior's, [K, S, numbers]. a_mean:
    b, [K, S]. a_root: L, [K, S, S].

    With Gaussian noise `predict` gives marginals in closed form, whatever n; otherwise it draws a.
    `functions` draws a, and so whole functions.
    """

    kind = "implicit-process"
    flat = "_point"

    def __init__(
        self, *args: Any, point: Tensor, basis: Tensor, a_mean: Tensor, a_root: Tensor, **kw: Any
    ) -> None:
        super().__init__(*args, **kw)
        self._point, self.basis, self.a_mean, self.a_root = point, basis, a_mean, a_root

    def check_restored(self) -> None:
        if self._point.ndim != 2 or self.basis.ndim != 3:
            raise StoreError(f"the basis has the shape {list(self.basis.shape)}")
        super().check_restored()
        k, s, p = self.basis.shape
        size = self.layout.size if self.method.function_prior is None else p
        for name, shape in (("basis", (k, s, size)), ("a_mean", (k, s)), ("a_root", (k, s, s))):
            self._check_tensor(name, getattr(self, name), shape)
        self._check_tensor("point", self._point, (k, self.layout.size))

    @property
    def members(self) -> int:
        return self.basis.shape[0]

    def _reference(self) -> Tensor:
        return self._point

    def point(self) -> Tensor:
        """The prior's mean weights."""
        return self._point

    def groups(self, n: int | None, seed: int) -> Iterable[FunctionDraws]:
        raise Unavailable(f"a {self.kind} posterior has no weights to draw: it mixes functions")

    def _basis(self, x: Any, who: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """m [K, N, ...] and φ [K, S, N, ...] at fitted x, of all members or of those named."""
        who = torch.arange(self.members, device=self.device) if who is None else who
        basis, given = self.basis[who], self.method.function_prior
        k, s = basis.shape[:2]
        if given is None:
            params = self.layout.unflatten(basis.flatten(0, 1))
            each_function = who.repeat_interleave(s)
            if self.layers is not None:
                params |= self.network.layers.unflatten(self.layers[each_function])
            buffers = {name: v[each_function] for name, v in self.buffers.items()}
            f = self._evaluate(FunctionDraws(params, k * s, buffers=buffers), x)
            if not isinstance(f, Tensor):
                raise ModelError("vip takes networks of one head, and this one has several")
            f = f.unflatten(0, (k, s))
        else:
            output = tuple(self.network.output)
            f = given.functions(x.expand(k, *x.shape), basis, math.prod(output))
            f = f.reshape(*f.shape[:3], *output)
        mean = f.mean(1)
        return mean, (f - mean.unsqueeze(1)) / math.sqrt(s)

    def _pieces(self, x: Any, functions: int) -> Iterator[Any]:
        """Blocks of rows at which so many functions, or all of the basis, take little memory."""
        outputs = math.prod(self.network.output) * self.dtype.itemsize
        block = max(1, _BLOCK_BYTES // (max(functions, self.basis[..., 0].numel()) * outputs))
        for start in range(0, rows_of(x, "x"), block):
            yield each(lambda t, a=start: t[a : a + block], x)

    def _own_theta(self) -> Params:
        """The likelihood's parameters of each member, {name: [K, ...]}."""
        own = likelihood_parameters(self.layout.unflatten(self._point))
        count = len(self._point)
        return own | {name: v.expand(count, *v.shape) for name, v in self.constants.items()}

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        if self.base_likelihood.integrates_normal:
            parts = [self._marginals(piece) for piece in self._pieces(x, 1)]
            f, variance = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            return Predictive(f, self.likelihood, self._own_theta(), f_variance=variance)
        count = DEFAULT_SAMPLES if n is None else n
        who = torch.tensor([k for k, c in enumerate(self.split(count)) for _ in range(c)])
        theta = {name: v[who.to(v.device)] for name, v in self._own_theta().items()}
        if keep == "moments":
            return self._moments(x, count, seed, theta)
        self._check_memory(count, rows_of(x, "x"))
        return Predictive(self._drawn(x, count, seed, "draws"), self.likelihood, theta)

    def _marginals(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of f of each member, [K, N, ...]."""
        mean, phi = self._basis(x)
        flat = phi.flatten(2)
        half = self.a_root.mT @ flat
        shift, variance = (self.a_mean.unsqueeze(1) @ flat).squeeze(1), half.square().sum(1)
        return mean + shift.view_as(mean), variance.view_as(mean)

    def _moments(self, x: Any, n: int, seed: int, theta: Params) -> Predictive:
        """Over n draws, a block of rows at a time: the same functions in every block."""
        parts = []
        for piece in self._pieces(x, n):
            total = Moments(self.likelihood)
            total.update(self._drawn(piece, n, seed, "draws"), theta)
            parts.append(total.result())
        return Predictive.concat(parts) if len(parts) > 1 else parts[0]

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        return self.likelihood.location(self._drawn(self.check_inputs(x), n, seed, "draws"), 1)

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Of the process before the data, a ~ N(0, I), under the prior that was learned."""
        seed = self.sampling(n, seed, "samples")
        return self.likelihood.location(self._drawn(self.check_inputs(x), n, seed, "prior"), 1)

    def _drawn(self, x: Any, n: int, seed: int, purpose: str) -> Tensor:
        """Whole functions at fitted x, [n, N, ...], member by member."""
        counts = [count for count in self.split(n) if count]  # the first members have the most
        who = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(self.device)
        nth = torch.cat([torch.arange(count) for count in counts]).to(self.device)
        keys = [f"{self.ids[k]}/{j}" for k, count in enumerate(counts) for j in range(count)]
        a = Noise(seed, purpose, keys, self.device, self.dtype).normal((self.basis.shape[1],))
        if purpose == "draws":
            a = self.a_mean[who] + (self.a_root[who] @ a.unsqueeze(-1)).squeeze(-1)
        dealt = a.new_zeros(len(counts), max(counts), a.shape[1]).index_put((who, nth), a)
        members = torch.arange(len(counts), device=self.device)
        parts = []
        for piece in self._pieces(x, n):
            mean, phi = self._basis(piece, members)
            away = (dealt @ phi.flatten(2)).unflatten(2, phi.shape[2:])
            parts.append((mean.unsqueeze(1) + away)[who, nth])
        return torch.cat(parts, 1)

    def tensors(self) -> dict[str, Tensor]:
        own = {"point": self._point, "basis": self.basis}
        return super().tensors() | own | {"a_mean": self.a_mean, "a_root": self.a_root}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitProcessPosterior:
        own = {name: tensors[name] for name in ("point", "basis", "a_mean", "a_root")}
        new = cls(**common, **cls._shared(tensors, extra), **own)
        new.elbo = extra.get("elbo")
        return new
