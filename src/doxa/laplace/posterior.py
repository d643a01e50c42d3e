"""A Gaussian at the maximum, seen through the network or through its linearisation.

    f(x; θ* + δ) ≈ f(x; θ*) + J(x) δ,    δ ~ N(0, Σ)    ⇒    f(x) ~ N(f(x; θ*), J Σ Jᵀ)

The Gauss–Newton curvature is that of the linearised network, so the linearised predictive is the
one it belongs to (Khan et al. 2019; Immer, Korzepa & Bauer 2021). With Gaussian noise it is a
closed form; otherwise whole functions f + Jδ are drawn, by which classes have their probabilities
(`predictive/odds.py`), or these are approximated in closed form (`links.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import rows_of
from doxa.errors import StoreError
from doxa.laplace import links
from doxa.laplace.curvature import Jacobians, unflatten_outputs
from doxa.laplace.factored import Factored
from doxa.linalg import Kronecker
from doxa.linalg.layout import Params
from doxa.posterior import FunctionDraws, GaussianPosterior, register_posterior
from doxa.predictive import Predictive, odds
from doxa.predictive.form import Form
from doxa.predictive.mixture import build
from doxa.predictive.summary import moments

Drawn = tuple[Any, Any]  # functions, and the centres of the Gaussians that they are drawn from


@register_posterior
class LaplacePosterior(GaussianPosterior):
    """A `GaussianPosterior` that predicts by its linearisation unless its method says "sampled".

    at: θ*, where the network is linearised, [K, P], if that is not its mean.
    """

    kind = "laplace"

    def __init__(self, *args: Any, at: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.at = at

    def check_restored(self) -> None:
        super().check_restored()
        if not (isinstance(self.method.predictive, str) and isinstance(self.method.link, str)):
            raise StoreError("the method is no Laplace approximation")
        if self.at is not None:
            self._check_tensor("at", self.at, tuple(self.mean.shape))
        state = self.covariance.state()
        for i, entry in enumerate(self.subset.entries):  # of a Kronecker block both factors, or one
            left = state.get(f"{i}.left")
            both = left is not None and f"{i}.right" in state
            if left is not None and both and left.shape[-1] != entry.shape[0]:
                raise StoreError(f"a factor of {list(left.shape)} for {entry.name}, {entry.shape}")

    @property
    def maximum(self) -> Tensor:
        """θ*, [K, P]."""
        return self.mean if self.at is None else self.at

    def point(self) -> Tensor:
        return self.maximum

    @property
    def moved(self) -> Tensor | None:
        """From θ* to the mean, over the uncertain weights, [K, p]; None: they are one."""
        if self.at is None:
            return None
        return self.subset.flatten(self.layout.unflatten(self.mean - self.at))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | ({} if self.at is None else {"at": self.at})

    @property
    def linearised(self) -> bool:
        return bool(self.method.predictive == "linearised")

    def extra(self) -> dict[str, Any]:
        return super().extra() | links.marked()

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        method = links.as_saved(common["method"], extra)
        own = {"method": method} | ({"at": tensors["at"]} if "at" in tensors else {})
        return super().restore(common | own, tensors, extra)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """As for every posterior; the linearised predictive with Gaussian noise is a closed form,
        and needs no samples."""
        if not self.linearised:
            return super()._predict(x, n, seed, keep)
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        jacobians = self._jacobians()
        if self.likelihood.integrates_normal:
            pieces = [self._marginal(jacobians, x, r) for r in jacobians.chunks(rows_of(x, "x"))]
            f, variance = (torch.cat(part, 1) for part in zip(*pieces, strict=True))
            output = self.network.output
            return Predictive(
                unflatten_outputs(f, output), self.likelihood, self._member_theta(),
                f_variance=unflatten_outputs(variance, output),
            )  # fmt: skip
        if self.method.link not in links.DRAWN:
            return links.predict(self, jacobians, x, self._member_theta())
        counts = self._split(n)
        theta = self._theta_of(counts)
        if keep == "moments":
            parts = []
            for drawn in self._function_chunks(jacobians, x, counts, seed):
                parts.append(Predictive.of(moments(self._form(drawn, theta, counts))))
            return parts[0] if len(parts) == 1 else Predictive.concat(parts)
        drawn = self._functions(jacobians, x, counts, seed)
        return Predictive.of(self._form(drawn, theta, counts))

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Whole functions f + Jδ (or the network at drawn weights), [n, N, ...], in units of y."""
        seed = self.sampling(n, seed, "samples")
        if not self.linearised:
            return super()._draw_functions(x, n, seed)
        x = self.check_inputs(x)
        f, _ = self._functions(self._jacobians(), x, self._split(n), seed)
        location: Tensor = self.likelihood.location(f, 1)
        return location

    def _jacobians(self) -> Jacobians:
        kind = Factored if isinstance(self.covariance, Kronecker) else Jacobians
        return kind(self.network, self.maximum, self.network.subset_names, self.buffers)

    def _marginal(self, jacobians: Jacobians, x: Any, rows: slice) -> tuple[Tensor, Tensor]:
        return jacobians.variance(tree_map(lambda t: t[rows], x), self.covariance)

    def _form(self, drawn: Drawn, theta: Params, counts: list[int]) -> Form:
        f, centres = drawn
        form = build(f, self.likelihood, theta, None, None, 0, 1)
        if self.method.link == "samples":
            return form
        return odds.averaged(form, self.likelihood, centres, counts)

    def _functions(self, jacobians: Jacobians, x: Any, counts: list[int], seed: int) -> Drawn:
        """Functions [S, N, ...] and what they are drawn about, [K, N, ...]."""
        self._check_memory(sum(counts), rows_of(x, "x"))
        pieces = self._function_chunks(jacobians, x, counts, seed)
        f, centres = tree_map(lambda *parts: torch.cat(parts, 1), *pieces)
        return f, centres

    def _function_chunks(
        self, jacobians: Jacobians, x: Any, counts: list[int], seed: int
    ) -> Iterator[Drawn]:
        """The same at some rows after others: f + Jδ for every draw, and for its mean."""
        delta, moved = self._deltas(counts, seed), self.moved
        for rows in jacobians.chunks(rows_of(x, "x")):
            f, away = jacobians.along(tree_map(lambda t, r=rows: t[r], x), delta)
            drawn = away + f.unsqueeze(1)  # [K, S, B, O]
            own = [drawn[k, :count] for k, count in enumerate(counts)]
            centre = f if moved is None else drawn[:, -1]
            yield tuple(unflatten_outputs(t, self.network.output) for t in (torch.cat(own), centre))

    def _deltas(self, counts: list[int], seed: int) -> Tensor:
        """Draws of θ − θ*, [K, S, p], the same ones as `draw` uses; their mean is one more, where
        it is not zero."""
        keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
        away, moved = self._away(self.covariance, keys, seed), self.moved
        if moved is None:
            return away
        return torch.cat([away, torch.zeros_like(away[:, :1])], 1) + moved.unsqueeze(1)

    def _member_theta(self) -> Params:
        return self._theta(FunctionDraws(self.layout.unflatten(self.mean), self.members))

    def _theta_of(self, counts: list[int]) -> Params:
        repeats = torch.tensor(counts, device=self.device)
        return {k: v.repeat_interleave(repeats, 0) for k, v in self._member_theta().items()}
