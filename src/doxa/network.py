"""Looking into a network: what runs in which order, how wide it is, how it starts afresh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from doxa.errors import ModelError
from doxa.layout import Entry
from doxa.stacked import MaskedDropout

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)
_DRAWING = (nn.RNNBase, nn.MultiheadAttention, nn.RReLU, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


def swap_dropout(net: nn.Module) -> None:
    """Replace dropout layers, in place, by ones that take their mask."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if kind in _DROPOUTS:
                setattr(parent, name, MaskedDropout(float(child.p), _DROPOUTS[kind]))  # type: ignore[arg-type]


def masked_layers(order: Sequence[str], sites: Mapping[str, Any]) -> dict[str, str]:
    """For each dropout layer, the parametrised layer it feeds: its owner, or the next to run."""
    masked = {}
    for i, name in enumerate(order):
        if name not in sites:
            continue
        owner = name.removesuffix(".dropout")
        later = [layer for layer in order[i + 1 :] if layer not in sites]
        if owner in order and owner != name:
            masked[name] = owner
        elif later:
            masked[name] = later[0]
    return masked


def reset(net: nn.Module) -> set[str]:
    """Re-initialise every layer that knows how; the names of parameters that none of them set,
    which keep their values."""
    given = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(torch.nan)  # what is still there afterwards was not set
        for module in net.modules():
            reset = getattr(module, "reset_parameters", None)
            reset = reset or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        missed = {name for name, p in net.named_parameters() if p.isnan().any()}
        for name, p in net.named_parameters():
            if name in missed:
                p.copy_(given[name])
    return missed


@dataclass
class Trace:
    """What one forward pass did."""

    order: list[str] = field(default_factory=list)  # parametrised and dropout layers, as they ran
    sites: dict[str, tuple[int, ...]] = field(default_factory=dict)  # dropout: one row's mask shape
    widths: list[tuple[str, int]] = field(default_factory=list)  # numbers each layer gave, in order

    @property
    def head(self) -> str | None:
        """The parametrised layer that ran last."""
        layers = [name for name in self.order if name not in self.sites]
        return layers[-1] if layers else None


@contextmanager
def watched(net: nn.Module) -> Iterator[Trace]:
    """Record the forward pass of one row."""
    trace = Trace()

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            trace.order.append(name)
            if isinstance(module, MaskedDropout):
                trace.sites[name] = module.mask_shape(args[0])

        return hook

    def after(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            trace.widths.append((name, max((leaf.numel() for leaf in leaves), default=1)))

        return hook

    hooks = []
    for name, module in net.named_modules():
        hooks.append(module.register_forward_hook(after(name)))
        own = any(p.requires_grad for p in module.parameters(recurse=False))
        if own or isinstance(module, MaskedDropout):
            hooks.append(module.register_forward_pre_hook(before(name)))
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def check_rows(one: Any, two: Any) -> None:
    """Outputs for one row and for two must be tensors with the rows first."""
    given = [v if isinstance(v, list | tuple) else (v,) for v in (one, two)]
    for count, leaves in enumerate(given, 1):
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ModelError(
                    "the network must give a tensor, or a tuple of tensors for several heads, not "
                    f"{type(leaf).__name__}"
                )
            if leaf.ndim == 0 or leaf.shape[0] != count:
                raise ModelError(
                    f"the network gives shape {list(leaf.shape)} for {count} row(s) of x: the "
                    "first axis must be the rows, also for one: squeeze(-1), not squeeze()"
                )


def call_arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, dict):
        return (), x
    return (tuple(x), {}) if isinstance(x, list | tuple) else ((x,), {})


def trainable(net: nn.Module) -> list[Entry]:
    """The trainable parameters: where each lies, its fan-in, and where a prior is centred."""
    owners = {id(p): module for module in net.modules() for p in module.parameters(recurse=False)}
    entries = []
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        scale = isinstance(owners[id(p)], _NORMS) and name.endswith("weight")
        fan_in = int(p.numel() // p.shape[0]) if p.ndim > 1 else 1
        entries.append(Entry(name, tuple(p.shape), max(fan_in, 1), 1.0 if scale else 0.0))
    return entries


def draws_itself(net: nn.Module) -> bool:
    """Whether layers may draw random numbers of their own in training."""
    return any(
        isinstance(m, _DRAWING) and getattr(m, "dropout", getattr(m, "p", 1.0)) != 0.0
        for m in net.modules()
    )
