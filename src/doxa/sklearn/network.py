"""The network that an estimator is given: a module, or a builder of one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from doxa.errors import ModelError

Builder = Callable[[int, int], nn.Module]  # (inputs, outputs) -> network


def made(net: nn.Module | Builder, inputs: int, outputs: int) -> nn.Module:
    """The network itself, or what its builder gives for (inputs, outputs)."""
    if isinstance(net, nn.Module):
        return net
    if not callable(net):
        raise ModelError(
            f"net is a torch.nn.Module or a builder (inputs, outputs) -> Module, not {net!r}"
        )
    try:
        built = net(inputs, outputs)
    except TypeError as error:
        raise ModelError(f"net was called as net({inputs}, {outputs}): {error}") from error
    if not isinstance(built, nn.Module):
        raise ModelError(f"net gave {type(built).__name__}, not a torch.nn.Module")
    return built
