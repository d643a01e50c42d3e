"""How stacked forward passes run: batched layers, vmap, or one member at a time.

`Engine.forward` gives the outputs of M members, [M, N, ...], whichever way is used; nothing else in
doxa knows. `stack` replays the net on stacked parameters (`stacked.Plan`) or vmaps the forward
pass; `loop` calls the net once a member. Gradients are plain autograd on the sum over members, so
that the backward pass never runs under vmap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from doxa.errors import DoxaError, MethodError
from doxa.model import Model

log = logging.getLogger("doxa")

MODES = ("eager", "traced", "compiled", "graph", "compiled-graph")
_TILE_BYTES = 4 << 20  # the widest activation of one tile on the CPU: what a cache holds
_UNSTACKABLE = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Engine:
    """The way work is executed.

    Parameters
    ----------
    kind: "stack" (all members at once) or "loop" (one at a time).
    mode: "eager", "traced" (recorded once, replayed without autograd's bookkeeping), "compiled",
        "graph" (a CUDA graph) or "compiled-graph".
    native: use batched layers instead of vmap where the net allows it.
    chunk: members at a time in one gradient; None for all.
    """

    kind: str = "stack"
    mode: str = "eager"
    native: bool = True
    chunk: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("stack", "loop"):
            raise MethodError(f"engine kind must be 'stack' or 'loop', not {self.kind!r}")
        if self.mode not in MODES:
            raise MethodError(f"engine mode must be one of {MODES}, not {self.mode!r}")

    @classmethod
    def parse(cls, spec: str | Engine) -> Engine:
        """ "stack", "loop", "stack:compiled", "loop:graph"…"""
        if isinstance(spec, Engine):
            return spec
        if not isinstance(spec, str):
            raise MethodError(f"engine must be a name or an Engine, not {spec!r}")
        kind, _, mode = spec.partition(":")
        return cls(kind, mode or "eager", reason="asked for")

    @property
    def label(self) -> str:
        return f"{self.kind}:{self.mode}"

    def chunks(self, members: int) -> Iterator[slice]:
        size = 1 if self.kind == "loop" else (self.chunk or members)
        for start in range(0, members, size):
            yield slice(start, min(start + size, members))

    def forward(
        self,
        model: Model,
        params: Mapping[str, Tensor],
        x: Any,
        *,
        shared: bool = True,
        constant: frozenset[str] = frozenset(),
        masks: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Any:
        """Outputs of all members: [M, N, ...].

        `shared` inputs have no member axis; `constant` parameters have none either (a trunk that is
        the same for all samples is computed once). Masks and buffers always have it.
        """
        params = {k: v for k, v in params.items() if not k.startswith("likelihood.")}
        if self.kind == "stack" and self.native and isinstance(x, Tensor) and model.plan:
            tensors = model.fixed | params
            stacked = lambda name: name in params and name not in constant  # noqa: E731
            out, has_axis = model.plan(tensors, stacked, x, not shared, masks)
            return out if has_axis else out.unsqueeze(0)
        axes = {name: None if name in constant else 0 for name in params}
        if self.kind == "loop":
            return _loop(model, params, axes, x, shared, masks, buffers, training)
        if not masks and not buffers and shared and all(a is None for a in axes.values()):
            return _add_axis(model.forward(params, x, training=training))

        def one(params: Any, x: Any, masks: Any, buffers: Any) -> Any:
            return model.forward(params, x, buffers=buffers, masks=masks, training=training)

        return vmap(one, in_dims=(axes, None if shared else 0, 0, 0), randomness="error")(
            params, x, dict(masks or {}), dict(buffers or {})
        )


def _add_axis(out: Any) -> Any:
    return tree_map(lambda t: t.unsqueeze(0), out)


def _loop(
    model: Model,
    params: Mapping[str, Tensor],
    axes: Mapping[str, int | None],
    x: Any,
    shared: bool,
    masks: Mapping[str, Tensor] | None,
    buffers: Mapping[str, Tensor] | None,
    training: bool,
) -> Any:
    stacks = [v for k, v in params.items() if axes[k] == 0]
    stacks += [*(masks or {}).values(), *(buffers or {}).values()]
    members = stacks[0].shape[0] if stacks else 1
    if members == 1:  # squeeze, not select: its backward pass is a view
        one = lambda tree: {k: v.squeeze(0) for k, v in (tree or {}).items()}  # noqa: E731
        own = {k: v.squeeze(0) if axes[k] == 0 else v for k, v in params.items()}
        rows = x if shared else tree_map(lambda t: t.squeeze(0), x)
        out = model.forward(own, rows, buffers=one(buffers), masks=one(masks), training=training)
        return _add_axis(out)
    outputs = []
    for m in range(members):
        at = lambda tree, m=m: None if tree is None else {k: v[m] for k, v in tree.items()}  # noqa: E731
        own = {k: v[m] if axes[k] == 0 else v for k, v in params.items()}
        rows = x if shared else tree_map(lambda t, m=m: t[m], x)
        outputs.append(
            model.forward(own, rows, buffers=at(buffers), masks=at(masks), training=training)
        )
    return tree_map(lambda *parts: torch.stack(parts), *outputs)


def choose(model: Model, members: int, device: torch.device) -> Engine:
    """The rule for the CPU, and the starting point for the measurement on a GPU."""
    kinds = [type(m) for m in model.net.modules()]
    if any(issubclass(k, _UNSTACKABLE) for k in kinds):
        return Engine("loop", reason="recurrent layers do not run under vmap")
    if model.draws_itself:
        return Engine("loop", reason="the net draws random numbers of its own")
    if members == 1:
        return Engine("loop", reason="one member")
    convs = [m for m in model.net.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    if device.type == "cpu" and convs and max(c.out_channels for c in convs) > 12:
        return Engine("loop", reason="wide convolutions are faster one member at a time on the CPU")
    how = "batched layers" if model.plan else "vmap"
    return Engine("stack", reason=f"{members} members at once, {how}")


def works(engine: Engine, trial: Callable[[Engine], Any]) -> Engine:
    """The engine, or the loop if a trial of the stack fails, with a line in the log."""
    try:
        trial(engine)
        return engine
    except DoxaError:
        raise
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        if engine.kind == "loop":
            raise
        reason = f"stacking failed ({str(error).splitlines()[0][:120]})"
        log.warning("engine: %s; members run one at a time", reason)
        return works(replace(engine, kind="loop", reason=reason), trial)


def tiles(
    samples: int, rows: int, width: int, itemsize: int, device: torch.device, trunk: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Pieces of samples × rows whose widest activation stays small; rows vary fastest.

    With a `trunk` that all samples share, all samples go through together, so that it is computed
    once for each row.
    """
    budget = _TILE_BYTES if device.type == "cpu" else 256 << 20
    cells = max(1, budget // max(1, width * itemsize))
    row_step = max(1, min(rows, cells))
    if trunk:
        row_step = max(1, min(rows, cells // samples)) if cells >= 16 * samples else row_step
    elif row_step < rows:  # several samples a tile amortise the calls
        row_step = max(1, min(rows, cells // min(samples, 4)))
    sample_step = max(1, min(samples, cells // row_step))
    for s in range(0, samples, sample_step):
        for r in range(0, rows, row_step):
            yield slice(s, min(s + sample_step, samples)), slice(r, min(r + row_step, rows))
