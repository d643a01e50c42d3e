"""Posteriors over a network's weights: samples, Gaussians, and implicit ones (dropout).

All predict the same way: parameter draws go through the engine in tiles of samples × rows, with
whatever is common to all draws (a frozen trunk, the layers before the first dropout) computed once.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import linalg
from doxa.data import free_memory, rows_of
from doxa.engine import Engine, choose, tiles
from doxa.errors import MemoryBudgetError, MethodError, ModelError, Unavailable
from doxa.layout import Layout, Params
from doxa.model import Model, likelihood_parameters
from doxa.noise import Noise
from doxa.posterior.base import Posterior, leaves, register_posterior
from doxa.predictive import Moments, Predictive

log = logging.getLogger("doxa")

DEFAULT_SAMPLES = 100


@dataclass
class Draws:
    """Parameters of `count` functions; those named in `constant` are common to all of them."""

    params: Params
    count: int
    constant: frozenset[str] = frozenset()
    masks: Params = field(default_factory=dict)  # {layer: [count, 1, ...]}
    buffers: Params = field(default_factory=dict)  # {name: [count, ...]}

    def part(self, s: slice) -> Draws:
        pick = lambda tree: {k: v[s] for k, v in tree.items()}  # noqa: E731
        params = {k: v if k in self.constant else v[s] for k, v in self.params.items()}
        count = len(range(*s.indices(self.count)))
        return Draws(params, count, self.constant, pick(self.masks), pick(self.buffers))

    def theta(self) -> Params:
        """Likelihood parameters of each draw."""
        own = likelihood_parameters(self.params)
        return {
            k: v.expand(self.count, *v.shape) if f"likelihood.{k}" in self.constant else v
            for k, v in own.items()
        }


class WeightPosterior(Posterior):
    """A posterior whose functions are the network at drawn parameters.

    Parameters
    ----------
    constants: fixed likelihood parameters, in fitted units.
    buffers: each member's own buffers, [K, ...] (BatchNorm).
    """

    memory_budget: int | None = None  # bytes for what predict returns; default: a quarter of free

    def __init__(
        self, *args: Any, constants: Params | None = None, buffers: Params | None = None, **kw: Any
    ) -> None:
        super().__init__(*args, **kw)
        self.constants = constants or {}
        self.buffers = buffers or {}
        self._engine: Engine | None = None

    @property
    def network(self) -> Model:
        assert self.model is not None
        return self.model

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @abstractmethod
    def groups(self, n: int | None, seed: int) -> list[Draws]:
        """Draws, in groups that share parameters; n in all, or the default number."""

    def predict(
        self, x: Any, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        if keep == "samples":
            self._check_memory(self._count(n), rows_of(x, "x"))
        groups = self.groups(n, seed)
        if keep == "moments":
            return self._stream(groups, x)
        f = _cat([self._evaluate(g, x) for g in groups], 0)
        return Predictive(f, self.likelihood, self._theta(groups))

    def _count(self, n: int | None) -> int:
        """How many samples `groups` will give."""
        return DEFAULT_SAMPLES if n is None else n

    def _theta(self, groups: Sequence[Draws]) -> Params:
        parts = [g.theta() for g in groups]
        theta = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
        count = sum(g.count for g in groups)
        return theta | {k: v.expand(count, *v.shape) for k, v in self.constants.items()}

    def _check_memory(self, samples: int, rows: int) -> None:
        outputs = self.network.output
        shapes = outputs if outputs and isinstance(outputs[0], tuple) else [outputs]
        row = sum(torch.Size(shape).numel() for shape in shapes)
        size = samples * rows * row * self.dtype.itemsize
        budget = self.memory_budget or free_memory(self.device) // 4
        if size > budget:
            raise MemoryBudgetError(
                f"{samples} samples at {rows} rows take {size / 2**30:.3g} GiB, over the budget of "
                f"{budget / 2**30:.3g} GiB; ask for fewer samples or rows, or keep='moments'"
            )

    def _evaluate(self, draws: Draws, x: Any) -> Any:
        """Outputs of all draws at all rows: [count, N, ...]."""
        rows = rows_of(x, "x")
        pieces = tiles(draws.count, rows, self.network.width, self.dtype.itemsize, self.device)
        out: Any = None
        for s, r in pieces:
            piece = self._forward(draws.part(s), tree_map(lambda t, r=r: t[r], x))
            if s == slice(0, draws.count) and r == slice(0, rows):
                return piece
            if out is None:
                out = tree_map(lambda t: t.new_empty(draws.count, rows, *t.shape[2:]), piece)
            tree_map(lambda whole, part, s=s, r=r: whole[s, r].copy_(part), out, piece)
        return out

    def _forward(self, draws: Draws, x: Any) -> Any:
        engine = self._engine or choose(self.network, max(2, draws.count), self.device)
        call = lambda engine: engine.forward(  # noqa: E731
            self.network, draws.params, x, constant=draws.constant,
            masks=draws.masks or None, buffers=draws.buffers or None,
        )  # fmt: skip
        with torch.no_grad():
            try:
                f = call(engine)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                reason, engine = error, Engine("loop")
                try:
                    f = call(engine)
                except torch.OutOfMemoryError:
                    raise
                except Exception as failure:  # whatever the user's forward raises
                    shapes = [list(t.shape) for t in leaves(x)]
                    raise ModelError(
                        f"the network fails on x of shape {shapes}: {failure}"
                    ) from failure
                log.warning("prediction: stacking failed (%s); one draw at a time", reason)
        self._engine = engine
        return tree_map(lambda t: t.expand(draws.count, *t.shape[1:]), f)

    def _stream(self, groups: Sequence[Draws], x: Any) -> Predictive:
        """Moments over samples, a block of rows at a time, without keeping the samples."""
        rows = rows_of(x, "x")
        total = sum(g.count for g in groups)
        block = max(1, (64 << 20) // max(1, self.network.width * self.dtype.itemsize * 4))
        parts = []
        for start in range(0, rows, block):
            piece = tree_map(lambda t, a=start: t[a : a + block], x)
            moments = Moments(self.likelihood)
            for group in groups:
                step = max(1, min(group.count, total // 16 or 1))
                for s in range(0, group.count, step):
                    draws = group.part(slice(s, min(s + step, group.count)))
                    moments.update(self._evaluate(draws, piece), self._theta([draws]))
            parts.append(moments.result())
        return Predictive.concat(parts) if len(parts) > 1 else parts[0]

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        seed = self.sampling(n, seed, "samples")
        groups = self.groups(n, seed)
        full = [
            {k: v.expand(g.count, *v.shape) if k in g.constant else v for k, v in g.params.items()}
            for g in groups
        ]
        return {k: torch.cat([p[k] for p in full]) for k in full[0]}

    def features(self, x: Any) -> Tensor:
        x = self.check_inputs(x)
        point = self.layout.unflatten(self.point())
        with torch.no_grad():
            each = [
                self.network.features({k: v[m] for k, v in point.items()}, x)
                for m in range(self.members)
            ]
        return torch.stack(each).mean(0)

    @abstractmethod
    def point(self) -> Tensor:
        """One representative parameter vector a member, [K, P]."""

    def _split(self, n: int | None) -> list[int]:
        """n samples over the members, as evenly as they go."""
        total = DEFAULT_SAMPLES if n is None else n
        base, rest = divmod(total, self.members)
        return [base + (k < rest) for k in range(self.members)]

    def _own_buffers(self, k: int, count: int) -> Params:
        return {name: v[k].expand(count, *v.shape[1:]) for name, v in self.buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"constant.{k}": v for k, v in self.constants.items()} | {
            f"buffer.{k}": v for k, v in self.buffers.items()
        }

    @staticmethod
    def _shared(tensors: dict[str, Tensor]) -> dict[str, Params]:
        def under(prefix: str) -> Params:
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        return {"constants": under("constant."), "buffers": under("buffer.")}


def _cat(parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *t: torch.cat(t, dim), *parts)


@register_posterior
class SamplePosterior(WeightPosterior):
    """Kept parameter vectors: ensembles, chains, snapshots. samples: [K members, T draws, P]."""

    kind = "sample"

    def __init__(self, *args: Any, samples: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.samples = samples

    @property
    def members(self) -> int:
        return self.samples.shape[0]

    def _reference(self) -> Tensor:
        return self.samples

    def point(self) -> Tensor:
        return self.samples[:, -1]

    def _count(self, n: int | None) -> int:
        return self.samples.shape[0] * self.samples.shape[1] if n is None else n

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        members, kept, size = self.samples.shape
        total = members * kept
        if n is not None and n > total:
            raise MethodError(f"{n} draws asked for, {total} kept; fit with more draws or members")
        flat = self.samples.reshape(total, size)
        index = torch.arange(total, device=flat.device)
        if n is not None and n < total:  # evenly thinned within each member
            parts = [
                k * kept + (torch.arange(c) * kept) // max(c, 1)
                for k, c in enumerate(self._split(n))
            ]
            index = torch.cat(parts).to(flat.device)
            flat = flat[index]
        owner = index // kept
        buffers = {name: v[owner] for name, v in self.buffers.items()}
        return [Draws(self.layout.unflatten(flat), len(index), buffers=buffers)]

    def to_arviz(self) -> Any:
        try:
            import arviz_base
        except ImportError as error:
            from doxa.errors import MissingExtra

            raise MissingExtra("to_arviz needs the extra 'diagnostics': pip install 'doxa[diagnostics]'") from error  # fmt: skip
        values = self.layout.unflatten(self.samples.cpu())
        return arviz_base.from_dict({"posterior": {k: v.numpy() for k, v in values.items()}})

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"samples": self.samples}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SamplePosterior:
        return cls(**common, **cls._shared(tensors), samples=tensors["samples"])


@register_posterior
class GaussianPosterior(WeightPosterior):
    """A Gaussian over the subset's parameters, one a member; the rest are points.

    mean: [K, P]; covariance: a `Structure` over the subset's elements, in layout order.
    """

    kind = "gaussian"

    def __init__(self, *args: Any, mean: Tensor, covariance: linalg.Structure, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean = mean
        self.covariance = covariance

    @property
    def members(self) -> int:
        return self.mean.shape[0]

    def _reference(self) -> Tensor:
        return self.mean

    def point(self) -> Tensor:
        return self.mean

    @property
    def subset(self) -> Layout:
        return self.layout.select(self.network.subset_names)

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        index = self.layout.index(self.network.subset_names).to(self.mean.device)
        counts = self._split(n)
        keys = [f"{k}/{j}" for k in range(self.members) for j in range(max(counts))]
        noise = Noise(seed, "draws", keys, self.device, self.dtype)
        eps = noise.normal((len(index),)).reshape(self.members, max(counts), -1).transpose(0, 1)
        away = self.covariance.sample(eps).transpose(0, 1)  # [K, S, subset]
        names = frozenset(self.layout.names) - set(self.network.subset_names)
        groups = []
        for k, count in enumerate(counts):
            if count == 0:
                continue
            chosen = self.mean[k, index] + away[k, :count]
            params = self.layout.unflatten(self.mean[k])
            params |= self.subset.unflatten(chosen)
            groups.append(Draws(params, count, names, buffers=self._own_buffers(k, count)))
        return groups if names else [_merge(groups)]

    def tensors(self) -> dict[str, Tensor]:
        state = {f"covariance.{k}": v for k, v in self.covariance.state().items()}
        return super().tensors() | {"mean": self.mean} | state

    def extra(self) -> dict[str, Any]:
        bounds = {"elbo": self.elbo, "evidence": self.log_evidence}
        return {"structure": self.covariance.name} | bounds

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        prefix = "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        covariance = linalg.structure(extra["structure"], state)
        new = cls(**common, **cls._shared(tensors), mean=tensors["mean"], covariance=covariance)
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def _merge(groups: list[Draws]) -> Draws:
    if len(groups) == 1:
        return groups[0]
    cat = lambda name: _cat([getattr(g, name) for g in groups], 0)  # noqa: E731
    return Draws(cat("params"), sum(g.count for g in groups), buffers=cat("buffers"))


@register_posterior
class ImplicitPosterior(WeightPosterior):
    """Point weights and random masks: dropout. theta: [K, P]; rates: {layer: p} of each member [K]."""

    kind = "implicit"
    objective: float | None = None

    def __init__(self, *args: Any, theta: Tensor, rates: Params, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.theta = theta
        self.rates = rates

    @property
    def members(self) -> int:
        return self.theta.shape[0]

    def _reference(self) -> Tensor:
        return self.theta

    def point(self) -> Tensor:
        return self.theta

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        groups = []
        for k, count in enumerate(self._split(n)):
            if count == 0:
                continue
            keys = [f"{k}/{j}" for j in range(count)]
            masks = {}
            for site, shape in self.network.sites.items():
                p = self.rates[site][k]
                u = Noise(seed, f"masks/{site}", keys, self.device, self.dtype).uniform((1, *shape))
                masks[site] = (u > p).to(self.dtype) / (1 - p)
            params = self.layout.unflatten(self.theta[k])
            groups.append(
                Draws(params, count, frozenset(params), masks, self._own_buffers(k, count))
            )
        return groups

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        raise Unavailable("a dropout posterior draws masks, not weights; use functions(x, n)")

    def tensors(self) -> dict[str, Tensor]:
        rates = {f"rate.{k}": v for k, v in self.rates.items()}
        return super().tensors() | {"theta": self.theta} | rates

    def extra(self) -> dict[str, Any]:
        return {"objective": self.objective}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitPosterior:
        rates = {k[5:]: v for k, v in tensors.items() if k.startswith("rate.")}
        new = cls(**common, **cls._shared(tensors), theta=tensors["theta"], rates=rates)
        new.objective = extra.get("objective")
        return new
