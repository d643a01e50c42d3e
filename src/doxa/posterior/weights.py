"""Posteriors over a network's weights: samples, Gaussians, and implicit ones (dropout).

All predict in the same way. The engine evaluates parameter draws in tiles of samples × rows. Layers
that are common to all draws (a frozen trunk, the layers before the first dropout) are computed
once.

`FunctionDraws`: the parameters of several functions, as the forward pass of a network takes them.

`SamplePosterior`: kept parameter vectors (ensembles, MCMC, snapshots). They may be on disk
(`store.DrawsFile`, or a saved posterior that is larger than its memory budget). `samples` is then a
memory-mapped tensor on the CPU, and a prediction reads the draws of one tile at a time.

`CentredPosterior`: a point for each member, and draws of the subset's weights around it.

`GaussianPosterior`: a Gaussian over the weights (variational inference, Laplace, SWAG).

`prior_scales`: the scales of a hierarchical prior, given drawn weights.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import linalg
from doxa.data import Standardisation, free_memory, rows_of
from doxa.engine import Engine, choose_engine, tiles
from doxa.engine.engine import Count, may_use_threads, threads_for
from doxa.errors import MemoryBudgetError, MethodError, ModelError, StoreError, Unavailable
from doxa.likelihoods import Affine, Likelihood, NoiseScale, ScaledNoise
from doxa.linalg.layout import Layout, Params
from doxa.model import Model, likelihood_parameters
from doxa.model.layers import plain_weights
from doxa.model.trunk import Split, remembered
from doxa.noise import generator, repeated
from doxa.posterior import chains
from doxa.posterior.base import Posterior, each, leaves, register_posterior
from doxa.predictive import Moments, Predictive
from doxa.predictive.form import MomentForm, mix
from doxa.predictive.mixture import Mixture
from doxa.priors import Hierarchical, bind, each_prior
from doxa.priors.hierarchical import SharedScale

BUFFERS = "buffer."  # the prefix of these tensors in an artefact


@dataclass
class FunctionDraws:
    """Parameters of `count` functions; those named in `constant` are common to all of them.

    `buffers` hold the noise and values of layers, and BatchNorm's statistics. Parameters that are
    elsewhere, such as on disk, are copied to `device` in parts."""

    params: Params
    count: int
    constant: frozenset[str] = frozenset()
    buffers: Params = field(default_factory=dict)  # {name: [count, ...]}
    device: torch.device | None = None  # None: where the parameters are

    def part(self, s: slice) -> FunctionDraws:
        """Some of the draws. A single draw has no draw axis, so that layers run as in the plain
        network."""
        if s.stop - s.start == 1:
            one = {k: v if k in self.constant else v[s.start] for k, v in self.params.items()}
            params = self._here(one)
            return FunctionDraws(
                params, 1, frozenset(params), {k: v[s] for k, v in self.buffers.items()}
            )
        if s == slice(0, self.count):
            return FunctionDraws(self._here(self.params), self.count, self.constant, self.buffers)
        some = {k: v if k in self.constant else v[s] for k, v in self.params.items()}
        params = self._here(some)
        count = len(range(*s.indices(self.count)))
        return FunctionDraws(
            params, count, self.constant, {k: v[s] for k, v in self.buffers.items()}
        )

    def _here(self, params: Params) -> Params:
        return params if self.device is None else {k: v.to(self.device) for k, v in params.items()}

    def theta(self) -> Params:
        """Likelihood parameters of each draw. They are copies, so that they do not keep all other
        parameters in memory."""
        own = {k: v.clone() for k, v in self._here(likelihood_parameters(self.params)).items()}
        return {
            k: v.expand(self.count, *v.shape) if f"likelihood.{k}" in self.constant else v
            for k, v in own.items()
        }


log = logging.getLogger("doxa")

DEFAULT_SAMPLES = 100
_HEAVY = 4e6  # rows × weights
_TRUNK_BYTES = 8 << 20  # of the widest activation, for the rows of one pass of a frozen trunk


class WeightPosterior(Posterior):
    """A posterior whose functions are the network at drawn parameters.

    Parameters
    ----------
    constants : dict of Tensor
        Fixed likelihood parameters, in fitted units.
    buffers : dict of Tensor
        The buffers of each member, [K, ...] (BatchNorm).
    layers : Tensor
        The learned parameters that rewritten layers add, flat, [K, Q].
    priors : list or None
        The learned prior of each member; None: the prior of the model.
    noise_scale : NoiseScale or None
        The factor on the noise that depends on the row, by held-out rows; None: no factor.
    """

    same_weights = False  # the draws of a member differ only in the noise of layers
    flat: ClassVar[str]  # the attribute that holds each member's weights, [..., P]
    memory_budget: int | None = None  # bytes for what predict returns; default: a quarter of free

    def __init__(
        self,
        *args: Any,
        constants: Params | None = None,
        buffers: Params | None = None,
        layers: Tensor | None = None,
        priors: Sequence[Any] | None = None,
        noise_scale: NoiseScale | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.constants = constants or {}
        self.buffers = buffers or {}
        self.layers = layers
        self.priors = None if priors is None else list(priors)
        self.noise_scale = noise_scale
        self._engine: Engine | None = None
        self._products: dict[Any, float] = {}  # multiplications in the largest product, by shapes

    def of_network(self, model: Any, inputs: Any, scales: Standardisation) -> None:
        super().of_network(model, inputs, scales)
        self._engine, self._products = None, {}

    @property
    def network(self) -> Model:
        assert self.model is not None
        return self.model

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @abstractmethod
    def groups(self, n: int | None, seed: int) -> Iterable[FunctionDraws]:
        """n draws, or the default number, in groups that share parameters. It is a generator where
        all draws together may not fit in memory."""

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        if self.noise_scale is None:
            return self._predict_constant_noise(x, n, seed, keep)
        x = self.read(x)
        p = self._predict_constant_noise(x, n, seed, keep)
        return _scaled(p, self.noise_scale, self.scales.x(x, self.dtype), self.scales)

    def _predict_constant_noise(
        self, x: Any, n: int | None, seed: int | None, keep: str
    ) -> Predictive:
        """The prediction without `noise_scale`."""
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        if keep == "samples":
            self._check_memory(self._count(n), rows_of(x, "x"))
        groups = self.groups(n, seed)
        with remembered() if self.network.at_rest else nullcontext():
            if keep == "moments":
                return self._stream(groups, x)
            parts = [(self.evaluate(draws, x), self._theta(draws)) for draws in groups]
        f, theta = concatenate([f for f, _ in parts], 0), concatenate([t for _, t in parts], 0)
        return Predictive(f, self.likelihood, theta)

    def _count(self, n: int | None) -> int:
        """The number of samples that `groups` returns."""
        return DEFAULT_SAMPLES if n is None else n

    def _theta(self, draws: FunctionDraws) -> Params:
        fixed = {k: v.expand(draws.count, *v.shape) for k, v in self.constants.items()}
        return draws.theta() | fixed

    def scratch(self) -> int:
        """Bytes that a prediction may use, for its result and its draws."""
        return self.memory_budget or free_memory(self.device) // 4

    def _check_memory(self, samples: int, rows: int) -> None:
        outputs = self.network.output
        shapes = outputs if outputs and isinstance(outputs[0], tuple) else [outputs]
        row = sum(torch.Size(shape).numel() for shape in shapes)
        size = samples * rows * row * self.dtype.itemsize
        budget = self.scratch()
        if size > budget:
            raise MemoryBudgetError(
                f"{samples} samples at {rows} rows take {size / 2**30:.3g} GiB, over the budget of "
                f"{budget / 2**30:.3g} GiB; use fewer samples or rows, or keep='moments'"
            )

    def evaluate(self, draws: FunctionDraws, x: Any) -> Any:
        """Outputs of all draws at all rows: [count, N, ...]. All draws share one pass of a frozen
        trunk."""
        parts = self._parts(draws, x)
        if parts is None:
            return self._evaluate(self.network, draws, x)
        found = []
        rows = rows_of(x, "x")
        size = max(1, _TRUNK_BYTES // max(1, self.network.width() * self.dtype.itemsize))
        for start in range(0, rows, size):
            part = each(lambda t, a=start: t[a : a + size], x) if size < rows else x
            with threads_for(self._trunk_product(parts, part)):
                features = parts.features(part)
            found.append(self._evaluate(parts.head, draws, features))
        return concatenate(found, 1)

    def _parts(self, draws: FunctionDraws, x: Any) -> Split | None:
        """The network as frozen trunk and trained part, if all that is drawn is of the latter."""
        parts = self.network.split(x)
        if parts is None:
            return None
        known = {name for name, _ in parts.head.net.named_buffers()} | set(parts.head.sites)
        return parts if draws.buffers.keys() <= known else None

    def _trunk_product(self, parts: Split, x: Any) -> float:
        """Multiplications in the largest product of a trunk at some rows."""
        key = "trunk", tuple(t.shape for t in leaves(x))
        if not may_use_threads():
            return 0.0
        if key not in self._products:
            with Count() as count:
                parts.features(each(lambda t: t[:1], x))
            self._products[key] = count.largest * rows_of(x, "x")
        return self._products[key]

    def _evaluate(self, network: Model, draws: FunctionDraws, x: Any) -> Any:
        """The outputs of a network. The first tile is small and uses one thread; the size of its
        products determines the number of threads of the others."""
        rows = rows_of(x, "x")

        def of(s: slice, r: slice) -> Any:
            whole = r == slice(0, rows)
            part = x if whole else each(lambda t: t[r], x)
            return self._forward(network, draws.part(s), part)

        first, *others = self._tiles(network, draws, rows)
        if not others:
            with threads_for(0.0):
                return of(*first)
        work = tuple((s.start, s.stop) for s in first), tuple(t.shape for t in leaves(x))
        if work in self._products:
            with threads_for(0.0):
                piece = of(*first)
        else:
            with threads_for(0.0), Count() as count:
                piece = of(*first)
            self._products[work] = count.largest
        out = each(lambda t: t.new_empty(draws.count, rows, *t.shape[2:]), piece)
        each(lambda all_, part: all_[first].copy_(part), out, piece)
        with threads_for(self._products[work]):
            for tile in others:
                each(lambda all_, part, tile=tile: all_[tile].copy_(part), out, of(*tile))
        return out

    def _tiles(
        self, network: Model, draws: FunctionDraws, rows: int
    ) -> Iterator[tuple[slice, slice]]:
        """The tiles of draws × rows; see `engine.tiles`.

        On the CPU, a draw that is large enough for one core is computed alone: one large product is
        faster than a batch of products.
        """
        heavy = not draws.constant and rows * self.layout.size > _HEAVY
        if heavy and self.device.type == "cpu":
            width = 2 * network.width()  # what goes in and what comes out, both in the cache
            cuts = list(tiles(1, rows, width, self.dtype.itemsize, self.device, trunk=True))
            return ((slice(s, s + 1), r) for s in range(draws.count) for _, r in cuts)
        whole = tiles(draws.count, rows, network.width(), self.dtype.itemsize, self.device)
        first = next(whole)
        if first == (slice(0, draws.count), slice(0, rows)):
            return iter([first])
        varying = [name for name in draws.params if name not in draws.constant] + [*draws.buffers]
        width = network.width([name.rpartition(".")[0] for name in varying])
        trunk = bool(draws.constant)
        heavy = network.width() > width  # the widest layer is in the trunk
        return tiles(draws.count, rows, width, self.dtype.itemsize, self.device, trunk, heavy)

    def _forward(self, network: Model, draws: FunctionDraws, x: Any) -> Any:
        engine = self._engine or choose_engine(
            network, max(2, draws.count), self.device, self.same_weights
        )

        def call(engine: Engine) -> Any:
            return engine.apply(
                network, draws.params, x, constant=draws.constant, buffers=draws.buffers
            ).f

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
        return each(lambda t: t.expand(draws.count, *t.shape[1:]), f)

    def _stream(self, groups: Iterable[FunctionDraws], x: Any) -> Predictive:
        """Moments over samples, in blocks of rows, without keeping the samples."""
        rows = rows_of(x, "x")
        block = max(1, (64 << 20) // max(1, self.network.width() * self.dtype.itemsize * 4))
        starts = range(0, rows, block)
        moments = [Moments(self.likelihood) for _ in starts]
        for group in groups:
            step = max(1, min(group.count, 8))
            for s in range(0, group.count, step):
                draws = group.part(slice(s, min(s + step, group.count)))
                theta = self._theta(draws)
                for start, total in zip(starts, moments, strict=True):
                    piece = each(lambda t, a=start: t[a : a + block], x)
                    total.update(self.evaluate(draws, piece), theta)
        parts = [total.result() for total in moments]
        return Predictive.concat(parts) if len(parts) > 1 else parts[0]

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        seed = self.sampling(n, seed, "samples")
        groups = self.groups(n, seed)
        full = [
            {k: v.expand(g.count, *v.shape) if k in g.constant else v for k, v in g.params.items()}
            for g in groups
        ]
        drawn = {k: torch.cat([p[k] for p in full]).to(self.device) for k in full[0]}
        return drawn | plain_weights(self.network.net, drawn)

    def features(self, x: Any) -> Tensor:
        x = self.check_inputs(x)
        point = self.layout.unflatten(self.point())
        each = []
        with torch.no_grad():
            for m in range(self.members):
                params = {k: v[m] for k, v in point.items()} | self._own_layers(m)
                buffers = {k: v[0] for k, v in self._own_buffers(m, 1).items()}
                each.append(self.network.features(params, x, buffers=buffers or None))
        return torch.stack(each).mean(0)

    @abstractmethod
    def point(self) -> Tensor:
        """One representative parameter vector per member, [K, P]."""

    def _split(self, n: int | None) -> list[int]:
        return self.split(DEFAULT_SAMPLES if n is None else n)

    def _own_buffers(self, k: int, count: int) -> Params:
        return {name: v[k].expand(count, *v.shape[1:]) for name, v in self.buffers.items()}

    def _own_layers(self, k: int) -> Params:
        """The learned parameters of the layers of member k."""
        if self.layers is None:
            return {}
        return self.network.layers.unflatten(self.layers[k].to(self.device))

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """The network at weights drawn from the prior; parameters that layers add keep their
        values."""
        seed = self.sampling(n, seed, "samples")
        x = self.check_inputs(x)
        drawn = []
        for k, count in enumerate(self.split(n)):
            if count == 0:
                continue
            prior = self.network.bound_prior if self.priors is None else bind(
                self.priors[k], self.layout
            )  # fmt: skip
            flat = prior.sample(count, generator("prior functions", seed, self.ids[k]))
            params = self.layout.unflatten(flat.to(self.device, self.dtype))
            own = self._own_layers(k)
            draws = FunctionDraws(
                {**params, **own}, count, frozenset(own), self._own_buffers(k, count)
            )
            drawn.append(self.evaluate(draws, x))
        f = concatenate(drawn, 0)
        if not isinstance(f, Tensor):
            raise Unavailable("functions of a model with several heads cannot be drawn")
        return self.likelihood.location(f, 1)

    def tensors(self) -> dict[str, Tensor]:
        constants = {f"constant.{k}": v for k, v in self.constants.items()}
        buffers = {BUFFERS + k: v for k, v in self.buffers.items()}
        layers = {} if self.layers is None else {"layers": self.layers}
        return {"ids": torch.tensor(self.ids), **constants, **buffers, **layers}

    def extra(self) -> dict[str, Any]:
        own = {"priors": self.priors, "noise_scale": self.noise_scale}
        return {name: value for name, value in own.items() if value is not None}

    def check_restored(self) -> None:
        super().check_restored()
        flat, lead = getattr(self, self.flat), self._lead()
        self._check_tensor(self.flat, flat, (*flat.shape[:-1], self.layout.size))
        own = {name: value.shape for name, value in self.network.net.named_buffers()}
        for name, value in self.buffers.items():
            if name not in own:
                raise StoreError(f"the network has no buffer {name!r}")
            if value.shape != (*lead, *own[name]):
                raise StoreError(f"buffer {name!r} has the shape {list(value.shape)}")
            if name.endswith("running_var") and bool((value < 0).any()):
                raise StoreError(f"buffer {name!r} holds negative variances")
        if (self.layers is None) != (self.network.layers.size == 0):
            raise StoreError(
                "the learned parameters of the network's layers are missing, or too many"
            )
        if self.layers is not None:
            self._check_tensor("layers", self.layers, (*lead, self.network.layers.size))
        if self.priors is not None and len(self.priors) != self.members:
            raise StoreError(f"{len(self.priors)} priors for {self.members} members")
        wanted = self.base_likelihood.parameters(self.network.output or (1,))
        known = {f"likelihood.{name}": value.shape for name, value in wanted.items()}
        for name, value in self.constants.items():
            if value.shape != known.get(name, value.shape):
                raise StoreError(f"constant {name!r} has the shape {list(value.shape)}")

    def _lead(self) -> tuple[int, ...]:
        """The leading axes of buffers and of layers' learned parameters."""
        return (self.members,)

    def _check_tensor(self, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        if value.shape != shape or value.dtype != self.network.dtype:
            raise StoreError(
                f"{name} is {list(value.shape)} of {value.dtype}, the network needs {list(shape)} "
                f"of {self.network.dtype}"
            )

    @staticmethod
    def _shared(tensors: dict[str, Tensor], extra: dict[str, Any]) -> dict[str, Any]:
        def under(prefix: str) -> Params:
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        return {
            "constants": under("constant."), "buffers": under(BUFFERS),
            "ids": tensors["ids"].tolist(), "layers": tensors.get("layers"),
            "priors": extra.get("priors"), "noise_scale": _read_noise_scale(extra),
        }  # fmt: skip


def _read_noise_scale(extra: dict[str, Any]) -> NoiseScale | None:
    found = extra.get("noise_scale")
    if found is not None and not isinstance(found, NoiseScale):
        raise StoreError(f"the factor on the noise is {found!r:.60}")
    return found


def _scaled(p: Predictive, scale: NoiseScale, x: Tensor, scales: Standardisation) -> Predictive:
    """The predictive p at x, in fitted units, with its noise multiplied by the factor of each
    row."""
    form = p.form
    if isinstance(form, MomentForm):
        mean = form.mean
        if scales.y_loc is not None:
            loc, size = (t.to(mean.device) for t in (scales.y_loc, scales.y_scale))
            mean = (mean - loc) / size
        h = scale.log_scale(mean[:, 0], x.to(mean.device)).to(form.mean).unsqueeze(1)
        noise, entropy = (2.0 * h).exp() * form.aleatoric, h + form.expected_entropy
        return Predictive.of(MomentForm(form.likelihood, form.mean, noise, form.epistemic, entropy))
    if not isinstance(form, Mixture):
        raise Unavailable(f"the noise of a {type(form).__name__} has no factor for each row")
    f, variance = form.f, form.f_variance
    mean = mix(f, form.weights)[:, 0]
    h = scale.log_scale(mean, x.to(f.device)).to(f).reshape(1, -1, 1)
    f = torch.cat([f, h.expand_as(f)], 2)
    if variance is not None:
        variance = torch.cat([variance, torch.zeros_like(variance)], 2)
    base = form.likelihood
    if isinstance(base, Affine):
        scaled: Likelihood = Affine(ScaledNoise(base.base), base.loc, base.scale)
    else:
        scaled = ScaledNoise(base)
    return Predictive.of(Mixture(scaled, f, form.theta, form.weights, variance))


def concatenate(parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *t: torch.cat(t, dim), *parts)


_GATHERED = 8 << 20  # bytes of draws that are copied at a time


@register_posterior
class SamplePosterior(WeightPosterior):
    """Kept parameter vectors: ensembles, MCMC, snapshots, particles.

    samples: [K members, T draws, P], in memory on the posterior's device, or on disk.
    chain: True where the draws of a member are a Markov chain, so that mixing can be diagnosed;
        False where they are exchangeable (particles, snapshots). Default: True for several draws.
    per_draw: buffers and layers' learned parameters are per draw, [K, T, ...], not per member.
    """

    kind = "sample"
    flat = "samples"

    def __init__(
        self, *args: Any, samples: Tensor, chain: bool | None = None, per_draw: bool = False,
        **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kw)
        self.samples = samples
        self.chain = samples.shape[1] > 1 if chain is None else chain
        self.per_draw = per_draw

    @property
    def members(self) -> int:
        return self.samples.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of predictions; draws on disk are not on it."""
        return self.samples.device if self.model is None else self.model.device

    def select_members(self, some: slice) -> SamplePosterior:
        """The posterior of some of the members."""
        part = self.shadow()
        part.samples = self.samples[some]
        part.buffers = {name: value[some] for name, value in self.buffers.items()}
        part.layers = None if self.layers is None else self.layers[some]
        part._ids = self.ids[some]
        return part

    def check_restored(self) -> None:
        if self.samples.ndim != 3 or not self.samples.shape[1]:
            raise StoreError(f"samples have the shape {list(self.samples.shape)}")
        if not (isinstance(self.chain, bool) and isinstance(self.per_draw, bool)):
            raise StoreError("chain and per_draw are True or False")
        super().check_restored()

    def _lead(self) -> tuple[int, ...]:
        return tuple(self.samples.shape[:2]) if self.per_draw else (self.members,)

    def _reference(self) -> Tensor:
        return self.samples

    def point(self) -> Tensor:
        return self.samples[:, -1].to(self.device)

    def _count(self, n: int | None) -> int:
        return self.samples.shape[0] * self.samples.shape[1] if n is None else n

    def groups(self, n: int | None, seed: int) -> Iterator[FunctionDraws]:
        members, kept, size = self.samples.shape
        total = members * kept
        if n is not None and n > total:
            raise MethodError(
                f"{n} draws requested, but {total} are kept; fit with more draws or members"
            )
        flat = self.samples.reshape(total, size)
        if n is None or n == total:
            yield self._group(flat, None)
            return
        counts = torch.tensor(self._split(n))  # evenly thinned within each member
        member = torch.repeat_interleave(torch.arange(members), counts)
        before = (counts.cumsum(0) - counts)[member]
        place = (torch.arange(n) - before) * kept // counts[member]
        for index in (member * kept + place).split(max(1, _GATHERED // flat[0].nbytes)):
            yield self._group(flat[index.to(flat.device)], index)

    def _group(self, flat: Tensor, index: Tensor | None) -> FunctionDraws:
        """Draws [S, P] with the indices [S] among all draws; None: all draws."""
        if not self.buffers and self.layers is None:
            return FunctionDraws(self.layout.unflatten(flat), len(flat), device=self.device)
        index = torch.arange(len(flat)) if index is None else index
        kept = self.samples.shape[1]
        place = (index if self.per_draw else index // kept).to(self.device)

        def each(v: Tensor) -> Tensor:
            return v.flatten(0, 1) if self.per_draw else v

        buffers = {name: each(v)[place] for name, v in self.buffers.items()}
        params = self.layout.unflatten(flat)
        if self.layers is not None:
            params |= self.network.layers.unflatten(each(self.layers)[place])
        return FunctionDraws(params, len(flat), buffers=buffers, device=self.device)

    def _own_buffers(self, k: int, count: int) -> Params:
        if not self.per_draw:
            return super()._own_buffers(k, count)
        return {name: v[k, -1].expand(count, *v.shape[2:]) for name, v in self.buffers.items()}

    def _own_layers(self, k: int) -> Params:
        if self.layers is None or not self.per_draw:
            return super()._own_layers(k)
        return self.network.layers.unflatten(self.layers[k, -1])

    def to_arviz(self) -> Any:
        return chains.to_arviz(self.layout.unflatten(self.samples), self.record.stats)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"samples": self.samples}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"chain": self.chain, "per_draw": self.per_draw}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SamplePosterior:
        facts = {name: extra[name] for name in ("chain", "per_draw") if name in extra}
        return cls(**common, **cls._shared(tensors, extra), samples=tensors["samples"], **facts)


_DRAWN_BYTES = (
    256 << 20
)  # bytes of draws per call; fixed, so that results do not depend on the free memory


class CentredPosterior(WeightPosterior):
    """A draw is the centre of a member plus a deviation of the weights of the subset: a Gaussian,
    or a flow. Weights outside the subset are common to all draws of a member."""

    @abstractmethod
    def centre(self) -> Tensor:
        """The centre of the deviations, [K, P]."""

    @abstractmethod
    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        """Deviations of all members, or of member k alone, [K, S, subset], for keys that run over
        members, then draws."""

    @property
    def members(self) -> int:
        return self.centre().shape[0]

    def _reference(self) -> Tensor:
        return self.centre()

    def point(self) -> Tensor:
        return self.centre()

    @property
    def subset(self) -> Layout:
        return self.layout.select(self.network.subset_names)

    def groups(self, n: int | None, seed: int) -> Iterator[FunctionDraws]:
        counts = self._split(n)
        budget = self.memory_budget or _DRAWN_BYTES
        most = budget // (4 * self.subset.size * self.dtype.itemsize) or 1
        if self.members * max(counts) <= most:
            keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
            away = self.deviations(keys, seed)  # [K, S, subset]
            groups = [self._group(k, away[k, :c]) for k, c in enumerate(counts) if c]
            yield from groups if groups[0].constant else [_merge(groups)]
            return
        for k, count in enumerate(counts):
            for start in range(0, count, most):
                keys = [f"{self.ids[k]}/{j}" for j in range(start, min(start + most, count))]
                yield self._group(k, self.deviations(keys, seed, k)[0])

    def _group(self, k: int, away: Tensor) -> FunctionDraws:
        """Draws of member k; weights outside the subset are common to them."""
        names = self.network.subset_names
        params = self.layout.unflatten(self.centre()[k])
        centre = self.subset.flatten(params)
        params |= self.subset.unflatten(centre + away)
        own = self._own_layers(k)
        params |= own
        constant = (frozenset(self.layout.names) - set(names)) | set(own)
        return FunctionDraws(params, len(away), constant, buffers=self._own_buffers(k, len(away)))


def _merge(groups: list[FunctionDraws]) -> FunctionDraws:
    if len(groups) == 1:
        return groups[0]
    params = concatenate([g.params for g in groups], 0)
    buffers = concatenate([g.buffers for g in groups], 0)
    return FunctionDraws(params, sum(g.count for g in groups), buffers=buffers)


@register_posterior
class GaussianPosterior(CentredPosterior):
    """A Gaussian over the subset's parameters, one per member; the rest are points.

    mean: [K, P]; covariance: a `Structure` over the subset's elements, in layout order.
    """

    kind = "gaussian"
    flat = "mean"

    def __init__(self, *args: Any, mean: Tensor, covariance: linalg.Structure, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean = mean
        self.covariance = covariance

    def check_restored(self) -> None:
        if self.mean.ndim != 2:
            raise StoreError(f"the mean has the shape {list(self.mean.shape)}")
        super().check_restored()
        size = len(self.layout.index(self.network.subset_names))
        found = self.covariance.shape
        if found != (self.members, size):
            raise StoreError(f"a covariance of {found}, for {self.members} members, {size} weights")
        if len({v.dtype for v in self.covariance.state().values() if v.is_floating_point()}) > 1:
            raise StoreError("the covariance has numbers of several types")
        self._check_covariance()

    def _check_covariance(self) -> None:
        """Check that its parts are consistent: compute a draw, and a variance along a direction."""
        k, covariance = self.members, self.covariance
        drawn = covariance.sample(self.mean.new_zeros(1, k, covariance.numbers))
        along = covariance.quad(self.mean.new_zeros(k, 1, covariance.size))
        if not (bool(torch.isfinite(drawn).all()) and bool(torch.isfinite(along).all())):
            raise StoreError("the covariance is not finite")

    def centre(self) -> Tensor:
        return self.mean

    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        covariance = self.covariance if k is None else self.covariance.member(k)
        return self.draw_deviations(covariance, keys, seed)

    def draw_deviations(self, covariance: linalg.Structure, keys: list[str], seed: int) -> Tensor:
        """Deviations from the mean, [K, S, subset], for keys that run over members, then draws."""
        size = (covariance.numbers,)
        eps = repeated("normal", seed, "draws", keys, size, self.device, self.dtype)
        each = eps.reshape(covariance.members, -1, covariance.numbers)  # [K, S, numbers]
        return covariance.sample(each.transpose(0, 1)).transpose(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        state = {f"covariance.{k}": v for k, v in self.covariance.state().items()}
        return super().tensors() | {"mean": self.mean} | state

    def extra(self) -> dict[str, Any]:
        bounds = {"elbo": self.elbo, "evidence": self.log_evidence}
        return super().extra() | {"structure": self.covariance.name} | bounds

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        prefix = "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        covariance = linalg.structure(extra["structure"], state)
        new = cls(
            **common, **cls._shared(tensors, extra), mean=tensors["mean"], covariance=covariance
        )
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def prior_scales(
    posterior: WeightPosterior, n: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """σ of each tensor under a `Hierarchical` prior, {name: [n]}.

    There is one draw of p(σ | w) for each of n draws of the weights; by default, for all kept
    draws. Weights and scales together are then draws from their joint posterior. For a method with
    point estimates, the scales are draws from their conditional distribution.
    """
    network = posterior.network
    spec = network.prior if posterior.priors is None else posterior.priors[0]
    pairs = zip(network.layout.entries, each_prior(spec, network.layout), strict=True)
    own = {entry: prior for entry, prior in pairs if isinstance(prior, Hierarchical)}
    if not own:
        raise Unavailable(
            "no weight of this posterior has a Hierarchical prior, so there are no scales to draw"
        )
    draws, scales = posterior.draw(n), {}
    for entry, prior in own.items():
        (part,) = prior.bind(Layout((entry,))).parts
        flat = part.centred(draws[entry.name].double().cpu().reshape(-1, entry.size))
        assert isinstance(part.family, SharedScale)
        drawn = part.family.scales(flat, generator("prior scales", seed, entry.name))
        scales[entry.name] = drawn[..., 0]
    return scales
