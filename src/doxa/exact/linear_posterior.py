"""The exact posterior of a linear model: a Gaussian over weights for each output.

    Σ_o⁻¹ = ΦᵀΦ/σ_o² + I/s²,    μ_o = Σ_o Φᵀy_o/σ_o²

It stores the sufficient statistics of the data, so that it can be updated exactly with further
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import rows_of
from doxa.errors import StoreError
from doxa.exact.evidence import Spectrum, Statistics
from doxa.exact.features import Basis, network_features
from doxa.exact.targets import Shape, new_targets, units_log_jacobian
from doxa.linalg import Dense
from doxa.linalg.layout import Params
from doxa.noise import Noise
from doxa.posterior import Posterior, register_posterior
from doxa.predictive import Predictive

_CHUNK_BYTES = 64 << 20  # of features at a time
_DEFAULT_DRAWS = 100


@register_posterior
class LinearPosterior(Posterior):
    """Weights [F, O] under exact inference, an equal mixture over members.

    Parameters
    ----------
    *args, **kw
        As in `Posterior`.
    basis : Basis
        The features φ.
    features : dict of str to Tensor
        The tensors that φ needs: centres or frequencies.
    statistics : Statistics
        The sums over the rows.
    log_noise : Tensor of shape [K, ...]
        log σ, in fitted units.
    log_std : Tensor of shape [K]
        log s.
    event : tuple of int
        The shape of one target.
    theta : Tensor, optional
        The weights of the network, if it gives the features.
    weighted : bool
        Whether the rows had weights. There is then no evidence.
    """

    kind = "linear"

    def __init__(
        self,
        *args: Any,
        basis: Basis,
        features: Params,
        statistics: Statistics,
        log_noise: Tensor,
        log_std: Tensor,
        event: Shape,
        theta: Tensor | None = None,
        weighted: bool = False,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.basis, self.feature_tensors = basis, features
        self.statistics = statistics
        self.log_noise, self.log_std = log_noise, log_std
        self.event = tuple(event)
        self.theta = theta
        self.weighted = weighted
        self.log_evidence = None if weighted else self._evidence()

    def check_restored(self) -> None:
        super().check_restored()
        if not all(type(size) is int and size >= 0 for size in self.event):
            raise StoreError(f"the artefact has an invalid target shape: {self.event!r:.60}")
        s, k, o = self.statistics, self.members, self.outputs
        f = s.gram.shape[-1]
        want = {"gram": (k, f, f), "cross": (k, f, o), "square": (k, o), "n": (k,),
                "origin": (k, f, o)}  # fmt: skip
        for name, shape in want.items():
            if getattr(s, name).shape != shape:
                raise StoreError(f"{name} is {list(getattr(s, name).shape)}, not {list(shape)}")
        if self.model is None:
            self.check_two_rows()

    @property
    def members(self) -> int:
        return self.log_noise.shape[0]

    def _reference(self) -> Tensor:
        return self.log_noise

    @property
    def outputs(self) -> int:
        return math.prod(self.event)

    @cached_property
    def _levels(self) -> Tensor:
        """log σ [K, O'], where O' = 1 if all outputs have the same σ, else O."""
        return self.log_noise.double().reshape(self.members, -1)

    @cached_property
    def _spectrum(self) -> Spectrum:
        return Spectrum.of(self.statistics, self.dtype)

    @property
    def undecided(self) -> Tensor:
        """Whether the data cannot distinguish the noise from zero, [K, O']."""
        return self._spectrum.undecided(self._levels, self.log_std)

    @cached_property
    def covariance(self) -> Dense:
        """Σ, one per member and noise level: K · O' covariances."""
        root = self._spectrum.precision_root(self._levels, self.log_std)
        return Dense.from_precision_root(root.flatten(0, 1))

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean μ, [K, F, O]."""
        return self._spectrum.mean(self._levels, self.log_std)

    @property
    def noise(self) -> Tensor:
        """The noise σ of each member in units of y, [K, ...]."""
        std = self.log_noise.double().exp()
        if self.scales.y_scale is None:
            return std
        return std.reshape(self.members, -1) * self.scales.y_scale.to(std)

    @property
    def prior_std(self) -> Tensor:
        """The prior standard deviation s of each member in fitted units, [K]."""
        return self.log_std.exp()

    def _evidence(self) -> float:
        """log N(y; 0, σ²I + s²ΦΦᵀ) over all outputs, in units of y."""
        each = self._spectrum.log_evidence(self._levels, self.log_std)
        total = each.sum(1) + units_log_jacobian(self, self.statistics.n, self.outputs)
        return float(torch.logsumexp(total, 0) - math.log(self.members))

    def _phi(self, x: Any) -> Tensor:
        """φ of inputs in fitted units, [N, F] or [K, N, F]."""
        if self.model is not None and self.theta is not None:
            return network_features(self.basis, self.model, self.theta, x)
        function = self.method.features if callable(self.method.features) else None
        return self.basis(x, self.feature_tensors, function)

    def _chunks(self, x: Any) -> Iterator[Tensor]:
        """φ in blocks of rows, [K, B, F] each."""
        width = 8 * self.members * self.statistics.gram.shape[-1]
        step = max(1, _CHUNK_BYTES // width)
        for start in range(0, rows_of(x, "x"), step):
            phi = self._phi(tree_map(lambda t, a=start: t[a : a + step], x))
            yield phi.expand(self.members, -1, -1)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """The prediction in closed form: a Gaussian per row and member, whatever n is. For draws,
        use `functions`."""
        self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        levels = self._levels.shape[1]
        means, variances = [], []
        for phi in self._chunks(x):
            means.append(phi @ self.mean)
            spread = self.covariance.quad(phi.repeat_interleave(levels, 0))  # [K·O', B]
            variances.append(spread.reshape(self.members, levels, -1).mT)
        f = torch.cat(means, 1)
        variance = torch.cat(variances, 1).expand_as(f)
        shape = (*f.shape[:2], *self.event)
        return Predictive(
            f.reshape(shape).to(self.dtype), self.likelihood, {"log_noise": self.log_noise},
            f_variance=variance.reshape(shape).to(self.dtype),
        )  # fmt: skip

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        owner = torch.repeat_interleave(torch.arange(self.members), torch.tensor(self.split(n)))
        return self._drawn(self.check_inputs(x), owner, self._weights(n, seed))

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws of Φw with w ~ N(0, s²I)."""
        seed = self.sampling(n, seed, "samples")
        counts, size = self.split(n), self.statistics.gram.shape[-1]
        keys = [f"{self.ids[k]}/{j}" for k, c in enumerate(counts) for j in range(c)]
        weight = Noise(seed, "prior", keys, self.device, torch.float64).normal((size, self.outputs))
        owner = torch.repeat_interleave(torch.arange(self.members), torch.tensor(counts))
        weight = weight * self.prior_std.double()[owner.to(weight.device), None, None]
        return self._drawn(self.check_inputs(x), owner, weight)

    def _drawn(self, x: Any, owner: Tensor, weight: Tensor) -> Tensor:
        """The functions with these weights [n, F, O], in units of y. Draw i uses the features of
        member `owner[i]`."""
        f = torch.cat([phi[owner.to(phi.device)] @ weight for phi in self._chunks(x)], 1)
        f = f.reshape(*f.shape[:2], *self.event).to(self.dtype)
        return self.likelihood.location(f, 1)

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        """Draws of the weights, {"weight": [n, F, O]}, in fitted units."""
        seed = self.sampling(n, seed, "samples")
        return {"weight": self._weights(_DEFAULT_DRAWS if n is None else n, seed).to(self.dtype)}

    def _weights(self, n: int, seed: int) -> Tensor:
        """Draws of the weights, [n, F, O], in the order of the members."""
        counts, size = self.split(n), self.statistics.gram.shape[-1]
        most, levels = max(counts), self._levels.shape[1]
        keys = [f"{k}/{j}" for k in self.ids for j in range(most)]
        noise = Noise(seed, "draws", keys, self.device, torch.float64)
        eps = noise.normal((self.outputs, size)).reshape(self.members, most, self.outputs, size)
        if levels == 1:
            away = self.covariance.sample(eps.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
        else:
            rows = eps.transpose(0, 1).reshape(most, self.members * levels, size)
            away = self.covariance.sample(rows).reshape(most, self.members, levels, size)
            away = away.transpose(0, 1)
        drawn = self.mean.unsqueeze(1) + away.mT  # [K, S, F, O]
        return torch.cat([drawn[k, :count] for k, count in enumerate(counts)])

    def features(self, x: Any) -> Tensor:
        """The mean of φ(x) over members, [N, F]."""
        phi = self._phi(self.check_inputs(x))
        return (phi.mean(0) if phi.ndim == 3 else phi).to(self.dtype)

    def _condition(self, x: Any, y: Any) -> LinearPosterior:
        """The exact posterior after further rows, at the same noise and prior."""
        x, y = new_targets(self, x, y, self.event)
        new = LinearPosterior(
            self.model, self.method, self.base_likelihood, self.scales, self.inputs,
            basis=self.basis, features=self.feature_tensors,
            statistics=self.statistics.plus(self._phi(x), y.double()), log_noise=self.log_noise,
            log_std=self.log_std, event=self.event, theta=self.theta, weighted=self.weighted,
            ids=self.ids,
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows"] = self.record.diagnostics.get("rows", 0) + len(y)
        return new

    def tensors(self) -> dict[str, Tensor]:
        data = self.statistics
        named = {f"statistics.{f.name}": getattr(data, f.name) for f in fields(data)}
        named |= {f"features.{k}": v for k, v in self.feature_tensors.items()}
        named |= {"log_noise": self.log_noise, "log_std": self.log_std}
        return named if self.theta is None else named | {"theta": self.theta}

    def extra(self) -> dict[str, Any]:
        return {
            "kind": self.basis.kind, "degree": self.basis.degree,
            "intercept": self.basis.intercept, "event": self.event, "weighted": self.weighted,
            "ids": self.ids,
        }  # fmt: skip

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> LinearPosterior:
        def under(prefix: str) -> Params:
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        sums = under("statistics.")
        if "cross" in sums:  # sums about 0, in artefacts without an origin
            sums.setdefault("origin", torch.zeros_like(sums["cross"]))
        try:
            statistics = Statistics(**sums)
        except TypeError as error:
            raise StoreError(f"the artefact lacks statistics of a linear model: {error}") from error
        return cls(
            **common, basis=Basis(extra["kind"], extra["degree"], extra["intercept"]),
            features=under("features."), statistics=statistics, log_noise=tensors["log_noise"],
            log_std=tensors["log_std"], event=extra["event"], theta=tensors.get("theta"),
            weighted=extra["weighted"], ids=extra.get("ids"),
        )  # fmt: skip
