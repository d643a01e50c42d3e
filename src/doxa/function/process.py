"""A Gaussian process after seeing data: the rows themselves are the posterior.

    B = I + W^½ K W^½ / σ²,    f* ~ N(k*ᵀ W^½ B⁻¹ W^½ y / σ², k** − k*ᵀ W^½ B⁻¹ W^½ k* / σ²)

with W the rows' weights (1 unless given): B has no eigenvalue below 1, so that its Cholesky
factor needs no jitter. `predict` gives marginals, `functions` draws jointly over rows.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import rows_of
from doxa.errors import NumericalError, StoreError
from doxa.exact.targets import Shape, new_targets, units_log_jacobian
from doxa.function.kernels import KernelFunction
from doxa.linalg.layout import Params
from doxa.posterior import ProcessPosterior, register_posterior
from doxa.posterior.process import square_root

_CHUNK_BYTES = 64 << 20  # of cross-covariances at a time


def _root_weights(log_noise: Tensor, weight: Tensor | None, rows: int) -> Tensor:
    """W^½/σ of each row: [N]."""
    inverse = (-log_noise).exp()
    return inverse.expand(rows) if weight is None else inverse * weight.sqrt()


class Solved(NamedTuple):
    """One noise level's share of the work."""

    y: Tensor  # [N, outputs of that level]
    root: Tensor  # W^½/σ [N]
    factor: Tensor  # the Cholesky factor of B; not a number where that failed
    solution: Tensor  # B⁻¹W^½y/σ


def solve(covariance: Tensor, y: Tensor, log_noise: Tensor, weight: Tensor | None) -> list[Solved]:
    """For each level of log σ [O'], O' = 1 or O, of targets y [N, O] under K [N, N]."""
    eye = torch.eye(len(y), dtype=covariance.dtype, device=covariance.device)
    parts = []
    for i, level in enumerate(log_noise):
        own = y if len(log_noise) == 1 else y[:, i : i + 1]
        root = _root_weights(level, weight, len(y))
        factor, info = torch.linalg.cholesky_ex(eye + root[:, None] * covariance * root)
        factor = torch.where(info == 0, factor, torch.full_like(factor, math.nan))
        parts.append(Solved(own, root, factor, torch.cholesky_solve(root[:, None] * own, factor)))
    return parts


def log_evidence(parts: list[Solved], log_noise: Tensor, n: Tensor | float) -> Tensor:
    """log p(y) in fitted units, with n the sum of weights."""
    total = log_noise.new_zeros(())
    for (y, root, factor, solution), level in zip(parts, log_noise, strict=True):
        misfit = (root[:, None] * y * solution).sum()
        logdet = 2 * factor.diagonal().log().sum()
        constant = n * (math.log(2 * math.pi) + 2 * level)
        total = total - 0.5 * (misfit + y.shape[1] * (logdet + constant))
    return total


@register_posterior
class GPPosterior(ProcessPosterior):
    """A GP conditioned on rows, an equal mixture over members (sets of hyper-parameters).

    Parameters
    ----------
    kernel: k as a function of hyper-parameters. hyper: [K, H]. log_noise: log σ [K, ...].
    x: training inputs [N, D]. y: targets [N, O], both in fitted units. weight: [N] or None.
    event: the shape of one target.
    """

    kind = "process"

    def __init__(
        self,
        *args: Any,
        kernel: KernelFunction,
        hyper: Tensor,
        log_noise: Tensor,
        x: Tensor,
        y: Tensor,
        event: Shape,
        weight: Tensor | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.kernel, self.hyper, self.log_noise = kernel, hyper, log_noise
        self.x, self.y, self.weight = x, y, weight
        self.event = tuple(event)
        self.log_evidence = None if weight is not None else self._evidence()

    @property
    def members(self) -> int:
        return self.hyper.shape[0]

    def _reference(self) -> Tensor:
        return self.x

    @property
    def _levels(self) -> Tensor:
        """log σ [K, O'], O' = 1 where all outputs share it."""
        return self.log_noise.double().reshape(self.members, -1)

    @cached_property
    def _solved(self) -> list[list[Solved]]:
        """For each member, its noise levels."""
        solved = []
        x = self.x.double()
        for k in range(self.members):
            covariance = self.kernel(self.hyper[k], x, x).detach()
            parts = solve(covariance, self.y, self._levels[k], self.weight)
            if not all(bool(torch.isfinite(part.factor).all()) for part in parts):
                raise NumericalError(
                    f"member {k}: the Cholesky decomposition of K + σ²I failed; the kernel's "
                    "hyper-parameters are out of range"
                )
            solved.append(parts)
        return solved

    def _evidence(self) -> float:
        n = float(len(self.y))
        each = [log_evidence(self._solved[k], self._levels[k], n) for k in range(self.members)]
        jacobian = units_log_jacobian(self, torch.tensor(n), self.y.shape[1])
        total = torch.logsumexp(torch.stack(each), 0) - math.log(self.members)
        return float(total) + float(jacobian)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = max(1, _CHUNK_BYTES // (8 * len(self.x)))
        blocks = [x[a : a + step] for a in range(0, len(x), step)]
        pairs = [
            [torch.cat(part) for part in zip(*(self._marginal(b, k) for b in blocks), strict=True)]
            for k in range(self.members)
        ]
        shape = (self.members, len(x), *self.event)
        f, variance = (torch.stack(part).reshape(shape) for part in zip(*pairs, strict=True))
        return f, variance

    def _marginal(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at x [B, D] under one member: [B, O] each."""
        cross = self.kernel(self.hyper[k], self.x.double(), x).detach()  # [N, B]
        prior = self.kernel(self.hyper[k], x, x, True).detach()  # [B]
        means, variances = [], []
        for _, root, factor, solution in self._solved[k]:
            seen = root[:, None] * cross
            half = torch.linalg.solve_triangular(factor, seen, upper=False)
            mean = seen.mT @ solution
            variance = (prior - half.square().sum(0)).clamp_min(0.0)
            means.append(mean)
            variances.append(variance[:, None].expand_as(mean))
        return torch.cat(means, 1), torch.cat(variances, 1)

    def joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        cross = self.kernel(self.hyper[k], self.x.double(), x).detach()
        prior = self.kernel(self.hyper[k], x, x).detach()
        means, roots = [], []
        for _, root, factor, solution in self._solved[k]:
            seen = root[:, None] * cross
            half = torch.linalg.solve_triangular(factor, seen, upper=False)
            means.append(seen.mT @ solution)
            roots.append(square_root(prior - half.mT @ half))
        return torch.cat(means, 1), torch.stack(roots)

    def prior_joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        root = square_root(self.kernel(self.hyper[k], x, x).detach())
        return root.new_zeros(len(x), self.y.shape[1]), root[None]

    def theta(self) -> Params:
        return {"log_noise": self.log_noise.to(self.dtype)}

    def prepared(self, x: Any) -> Tensor:
        x = self.check_inputs(x)
        return (x.unsqueeze(-1) if x.ndim == 1 else x).double()

    def condition(self, x: Any, y: Any) -> GPPosterior:
        """The process with further rows, at the same hyper-parameters."""
        x, y = new_targets(self, x, y, self.event)
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        weight = self.weight
        if weight is not None:
            weight = torch.cat([weight, weight.new_ones(len(y))])
        new = GPPosterior(
            self.model, self.method, self.base_likelihood, self.scales, self.inputs,
            kernel=self.kernel, hyper=self.hyper, log_noise=self.log_noise,
            x=torch.cat([self.x, x]), y=torch.cat([self.y, y.double()]), weight=weight,
            event=self.event, ids=self.ids,
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows"] = rows_of(new.x, "x")
        return new

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.method.kernel, str) and not hasattr(self.method.kernel, "builder"):
            raise StoreError(
                "this kernel was not made by a registered builder and cannot be saved: write a "
                "function that returns it and decorate it with "
                "@doxa.function.kernels.register_kernel(name)"
            )
        named = {"hyper": self.hyper, "log_noise": self.log_noise, "x": self.x, "y": self.y}
        return named if self.weight is None else named | {"weight": self.weight}

    def extra(self) -> dict[str, Any]:
        return {"event": self.event, "ids": self.ids}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GPPosterior:
        names = ("hyper", "log_noise", "x", "y", "weight")
        own = {name: tensors[name] for name in names if name in tensors}
        kernel = common["method"].function(own["x"].shape[1])
        ids = extra.get("ids")
        return cls(**common, kernel=kernel, event=extra["event"], ids=ids, **own)
