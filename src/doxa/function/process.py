"""The posterior of an exact Gaussian process, which stores the training rows.

    f* ~ N(k*ᵀ W^½ α / σ, k** − k*ᵀ W^½ B⁻¹ W^½ k* / σ²),  with B and α of `evidence.py`

`predict` returns marginals, `functions` draws jointly over rows, and `condition` adds rows by a
block of the Cholesky factor. All members are computed at once.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from doxa.data import rows_of
from doxa.errors import NumericalError, StoreError
from doxa.exact.targets import Shape, new_targets, units_log_jacobian
from doxa.function.evidence import Problem, Solved, extended
from doxa.linalg.layout import Params
from doxa.posterior import ProcessPosterior, register_posterior
from doxa.posterior.process import square_root

if TYPE_CHECKING:
    from doxa.function.kernels import KernelFunction

_CHUNK_BYTES = 64 << 20  # of cross-covariances at a time


def matrix(x: Tensor, shared: bool = True) -> Tensor:
    """Rows as vectors, also if a row is one number: [N, D], or [M, N, D] if they are not shared."""
    return x.unsqueeze(-1) if x.ndim == (1 if shared else 2) else x


def shared_level(log_noise: Tensor) -> Tensor:
    """log σ [K, O], or [K, 1] if all outputs have the same."""
    same = log_noise.shape[1] > 1 and bool((log_noise == log_noise[:, :1]).all())
    return log_noise[:, :1] if same else log_noise


@register_posterior
class GPPosterior(ProcessPosterior):
    """A GP conditioned on rows, an equal mixture over members (sets of hyper-parameters).

    Parameters
    ----------
    kernel: k as a function of hyper-parameters. hyper: [K, H]. log_noise: log σ [K, ...].
    x: training inputs [N, D]. y: targets [N, O], both in fitted units. weight: [N] or None.
    event: the shape of one target. solved: the factor of B, where it is known.
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
        solved: Solved | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.kernel, self.hyper, self.log_noise = kernel, hyper, log_noise
        self.x, self.y, self.weight = x, y, weight
        self.event = tuple(event)
        if solved is not None:
            self.__dict__["_solved"] = solved
        self.log_evidence = None if weight is not None else self._evidence()

    @property
    def members(self) -> int:
        return self.hyper.shape[0]

    def _reference(self) -> Tensor:
        return self.x

    @property
    def _levels(self) -> Tensor:
        """log σ [K, L], with L = 1 if all outputs share it."""
        return shared_level(self.log_noise.double().reshape(self.members, -1))

    @cached_property
    def _problem(self) -> Problem:
        n = torch.tensor(float(len(self.y)), dtype=torch.float64, device=self.y.device)
        x, n = self.x.double(), n.expand(self.members)
        return Problem(self.kernel, x, self.y, self.weight, n, self._levels)

    @cached_property
    def _solved(self) -> Solved:
        return self._checked(self._problem.solve(self.hyper))

    def _checked(self, solved: Solved) -> Solved:
        failed = solved.factor.diagonal(0, -2, -1).isnan().flatten(1).any(1).nonzero()[:, 0]
        if len(failed):
            raise NumericalError(
                f"member {int(failed[0])}: the Cholesky decomposition of K + σ²I failed: with "
                "these hyper-parameters the kernel is not positive definite, or its values are "
                "out of range; fit for longer, or start elsewhere (lengthscale, variance, noise)"
            )
        return solved

    def _evidence(self) -> float:
        each = self._problem.value(self.hyper, self._solved)
        jacobian = units_log_jacobian(self, self._problem.n[0], self.y.shape[1])
        total = torch.logsumexp(each, 0) - math.log(self.members)
        return float(total) + float(jacobian)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = max(1, _CHUNK_BYTES // (8 * len(self.x) * self._solved.root[..., 0].numel()))
        blocks = [self._marginal(x[a : a + step]) for a in range(0, len(x), step)]
        shape = (self.members, len(x), *self.event)
        f, variance = (torch.cat(p, 1).reshape(shape) for p in zip(*blocks, strict=True))
        return f, variance

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at x [B, D]: [K, B, O] each."""
        mean, half = self._seen(x, slice(None))
        prior = self.kernel(self.hyper, x, x, True).detach()  # [K, B]
        variance = (prior.unsqueeze(1) - half.square().sum(-2)).clamp_min(0.0)  # [K, L, B]
        return mean, variance.mT.expand_as(mean)

    def _seen(self, x: Tensor, members: slice) -> tuple[Tensor, Tensor]:
        """The mean of f at x, [K, B, O], and a root [K, L, N, B] of the reduction of its covariance
        by the data."""
        _, root, factor, solution = (part[members] for part in self._solved)
        cross = self.kernel(self.hyper[members], self.x.double(), x).detach()  # [K, N, B]
        seen = root.unsqueeze(-1) * cross.unsqueeze(1)
        mean = seen.mT @ solution  # [K, L, B, O/L]
        half = torch.linalg.solve_triangular(factor, seen, upper=False)
        return mean[:, 0] if mean.shape[1] == 1 else mean.squeeze(-1).mT, half

    def joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, root = self.joints(x, slice(k, k + 1))
        return mean[0], root[0]

    def joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        mean, half = self._seen(x, members)
        prior = self.kernel(self.hyper[members], x, x).detach().unsqueeze(1)
        return mean, square_root(prior - half.mT @ half)

    def prior_joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, root = self.prior_joints(x, slice(k, k + 1))
        return mean[0], root[0]

    def prior_joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        root = square_root(self.kernel(self.hyper[members], x, x).detach().unsqueeze(1))
        return root.new_zeros(len(root), len(x), self.y.shape[1]), root

    def theta(self) -> Params:
        return {"log_noise": self.log_noise.to(self.dtype)}

    def prepared(self, x: Any) -> Tensor:
        return matrix(self.check_inputs(x)).double()

    def _condition(self, x: Any, y: Any) -> GPPosterior:
        """The process with further rows, at the same hyper-parameters."""
        x, y = new_targets(self, x, y, self.event)
        x, y = matrix(x), y.double()
        solved = self._checked(extended(self._solved, self._blocks(x.double()), y, self._levels))
        weight = self.weight
        if weight is not None:
            weight = torch.cat([weight, weight.new_ones(len(y))])
        new = GPPosterior(
            self.model, self.method, self.base_likelihood, self.scales, self.inputs,
            kernel=self.kernel, hyper=self.hyper, log_noise=self.log_noise,
            x=torch.cat([self.x, x]), y=torch.cat([self.y, y]), weight=weight,
            event=self.event, solved=solved, ids=self.ids,
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows"] = rows_of(new.x, "x")
        return new

    def _blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """K between old and new rows, and K of the new rows: [K, N, B], [K, B, B]."""
        old = self.x.double()
        return self.kernel(self.hyper, old, x).detach(), self.kernel(self.hyper, x, x).detach()

    def tensors(self) -> dict[str, Tensor]:
        if isinstance(self.method.kernel, nn.Module):  # else a name or a `KernelSpec`
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
        own: dict[str, Any] = {name: tensors[name] for name in names if name in tensors}
        kernel = common["method"].function(own["x"].shape[1])
        ids = extra.get("ids")
        return cls(**common, kernel=kernel, event=extra["event"], ids=ids, **own)
