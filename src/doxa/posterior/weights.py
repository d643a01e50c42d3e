"""Posteriors over a network's weights: samples, Gaussians, and implicit ones (dropout).

All predict the same way: parameter draws go through the engine in tiles of samples × rows, with
whatever is common to all draws (a frozen trunk, the layers before the first dropout) computed once.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import free_memory, rows_of
from doxa.engine import Engine, choose, tiles
from doxa.engine.threads import threads_for
from doxa.engine.work import Count
from doxa.errors import MemoryBudgetError, ModelError, StoreError, Unavailable
from doxa.linalg.layout import Layout, Params
from doxa.model import Model
from doxa.model.layers import plain_weights
from doxa.noise import generator
from doxa.posterior.base import Posterior, each, leaves
from doxa.posterior.function_draws import FunctionDraws
from doxa.predictive import Moments, Predictive
from doxa.priors import bind

log = logging.getLogger("doxa")

DEFAULT_SAMPLES = 100
_HEAVY = 4e6  # rows × weights


class WeightPosterior(Posterior):
    """A posterior whose functions are the network at drawn parameters.

    Parameters
    ----------
    constants: fixed likelihood parameters, in fitted units.
    buffers: each member's own buffers, [K, ...] (BatchNorm).
    layers: what rewritten layers brought and learned, flat, [K, Q].
    priors: each member's own prior, where it was learned; None: the model's.
    """

    same_weights = False  # a member's draws differ in layers' noise alone
    flat: ClassVar[str]  # the attribute that holds each member's weights, [..., P]
    memory_budget: int | None = None  # bytes for what predict returns; default: a quarter of free

    def __init__(
        self,
        *args: Any,
        constants: Params | None = None,
        buffers: Params | None = None,
        layers: Tensor | None = None,
        priors: Sequence[Any] | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.constants = constants or {}
        self.buffers = buffers or {}
        self.layers = layers
        self.priors = None if priors is None else list(priors)
        self._engine: Engine | None = None
        self._products: dict[Any, float] = {}  # multiplications in the largest product, by shapes

    @property
    def network(self) -> Model:
        assert self.model is not None
        return self.model

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @abstractmethod
    def groups(self, n: int | None, seed: int) -> Iterable[FunctionDraws]:
        """Draws, in groups that share parameters; n in all, or the default number. A generator
        where all of them together may not fit."""

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        if keep == "samples":
            self._check_memory(self._count(n), rows_of(x, "x"))
        groups = self.groups(n, seed)
        if keep == "moments":
            return self._stream(groups, x)
        parts = [(self._evaluate(draws, x), self._theta(draws)) for draws in groups]
        f, theta = concatenate([f for f, _ in parts], 0), concatenate([t for _, t in parts], 0)
        return Predictive(f, self.likelihood, theta)

    def _count(self, n: int | None) -> int:
        """How many samples `groups` will give."""
        return DEFAULT_SAMPLES if n is None else n

    def _theta(self, draws: FunctionDraws) -> Params:
        fixed = {k: v.expand(draws.count, *v.shape) for k, v in self.constants.items()}
        return draws.theta() | fixed

    def scratch(self) -> int:
        """Bytes that a prediction may use at a time, for what it returns and for its draws."""
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
                f"{budget / 2**30:.3g} GiB; ask for fewer samples or rows, or keep='moments'"
            )

    def _evaluate(self, draws: FunctionDraws, x: Any) -> Any:
        """Outputs of all draws at all rows: [count, N, ...]. The first tile, which is small, takes
        one thread; what it multiplies says how many the others take."""
        rows = rows_of(x, "x")

        def of(s: slice, r: slice) -> Any:
            whole = r == slice(0, rows)
            return self._forward(draws.part(s), x if whole else each(lambda t: t[r], x))

        first, *others = self._tiles(draws, rows)
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

    def _tiles(self, draws: FunctionDraws, rows: int) -> Iterator[tuple[slice, slice]]:
        """How to cut the work: see `engine.tiles`.

        On the CPU a draw that keeps a core busy by itself goes alone: one large product is faster
        than a batch of them.
        """
        heavy = not draws.constant and rows * self.layout.size > _HEAVY
        if heavy and self.device.type == "cpu":
            width = 2 * self.network.width()  # what goes in and what comes out, both in the cache
            cuts = list(tiles(1, rows, width, self.dtype.itemsize, self.device, trunk=True))
            return ((slice(s, s + 1), r) for s in range(draws.count) for _, r in cuts)
        whole = tiles(draws.count, rows, self.network.width(), self.dtype.itemsize, self.device)
        first = next(whole)
        if first == (slice(0, draws.count), slice(0, rows)):
            return iter([first])
        varying = [name for name in draws.params if name not in draws.constant] + [*draws.buffers]
        width = self.network.width([name.rpartition(".")[0] for name in varying])
        trunk = bool(draws.constant)
        heavy = self.network.width() > width  # the widest layer is in the trunk
        return tiles(draws.count, rows, width, self.dtype.itemsize, self.device, trunk, heavy)

    def _forward(self, draws: FunctionDraws, x: Any) -> Any:
        engine = self._engine or choose(
            self.network, max(2, draws.count), self.device, self.same_weights
        )
        call = lambda engine: engine.apply(  # noqa: E731
            self.network, draws.params, x, constant=draws.constant, buffers=draws.buffers,
        ).f  # fmt: skip
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
        """Moments over samples, a block of rows at a time, without keeping the samples."""
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
                    total.update(self._evaluate(draws, piece), theta)
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
        """One representative parameter vector a member, [K, P]."""

    def _split(self, n: int | None) -> list[int]:
        return self.split(DEFAULT_SAMPLES if n is None else n)

    def _own_buffers(self, k: int, count: int) -> Params:
        return {name: v[k].expand(count, *v.shape[1:]) for name, v in self.buffers.items()}

    def _own_layers(self, k: int) -> Params:
        """What member k's layers learned."""
        if self.layers is None:
            return {}
        return self.network.layers.unflatten(self.layers[k].to(self.device))

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """The network at weights drawn from the prior; layers' own trainables as they are."""
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
            drawn.append(self._evaluate(draws, x))
        f = concatenate(drawn, 0)
        if not isinstance(f, Tensor):
            raise Unavailable("functions of a model with several heads are not drawn")
        return self.likelihood.location(f, 1)

    def tensors(self) -> dict[str, Tensor]:
        constants = {f"constant.{k}": v for k, v in self.constants.items()}
        buffers = {f"buffer.{k}": v for k, v in self.buffers.items()}
        layers = {} if self.layers is None else {"layers": self.layers}
        return {"ids": torch.tensor(self.ids), **constants, **buffers, **layers}

    def extra(self) -> dict[str, Any]:
        return {} if self.priors is None else {"priors": self.priors}

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
            raise StoreError("what the network's layers learned is missing, or too much")
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
        """The leading axes of buffers and of what layers learned."""
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
            "constants": under("constant."), "buffers": under("buffer."),
            "ids": tensors["ids"].tolist(), "layers": tensors.get("layers"),
            "priors": extra.get("priors"),
        }  # fmt: skip


def concatenate(parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *t: torch.cat(t, dim), *parts)
