"""A network's forward pass for all members at once, without vmap.

A network of linear layers, pointwise functions, layer norms and layers with a batched form
(`layers.MethodLayer`) is traced once with `torch.fx` and replayed on stacked parameters: a linear
layer becomes one `baddbmm`. Values that depend on no stacked parameter or noise (a frozen trunk,
everything before the first dropout) are computed once. For other networks, `Plan.of` returns None
and the engine uses vmap.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from doxa.model.layers import MethodLayer, Slots, Value

_POINTWISE_MODULES = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity,
    nn.ReLU6, nn.Hardtanh, nn.Softsign, nn.Mish, nn.SELU, nn.CELU, nn.LogSigmoid, nn.Tanhshrink,
)  # fmt: skip
_PLAIN = (nn.Linear, nn.LayerNorm, *_POINTWISE_MODULES)
_POINTWISE_FUNCTIONS = {
    torch.relu, F.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.gelu, F.silu, F.elu,
    F.leaky_relu, F.softplus, F.mish, F.selu, torch.sin, torch.cos, torch.exp, torch.abs,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.add, torch.sub,
    torch.mul,
}  # fmt: skip
_IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu_, nn.Tanh: torch.tanh_, nn.Sigmoid: torch.sigmoid_,
}  # fmt: skip
_POINTWISE_METHODS = {"relu", "tanh", "sigmoid", "sin", "cos", "exp", "abs", "add", "sub", "mul"}


class _Unread(dict[str, Any]):
    """Parameters that may only be used by their layer: a value that is read elsewhere would become
    a constant of the graph."""

    def __getitem__(self, name: str) -> None:
        if super().__getitem__(name) is not None:
            raise TypeError(f"the parameter {name!r} is used outside of a layer")


class _Tracer(torch.fx.Tracer):
    """Records a forward pass without `torch.fx.Tracer.trace`, which replaces `nn.Module.__call__`
    and `__getattr__` for the whole process: networks of other threads would be recorded into this
    graph. Here the layers of a copy, which shares the tensors, return a node instead."""

    def record(self, net: nn.Module) -> torch.fx.Graph:
        held = chain.from_iterable(
            (*m._parameters.values(), *m._buffers.values(), *vars(m).values())
            for m in net.modules()
        )
        self.root = copy.deepcopy(net, {id(t): t for t in held if isinstance(t, Tensor)})
        self.graph = torch.fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        for path, layer in self.root.named_modules():
            layer.__dict__["_parameters"] = _Unread(layer._parameters)
            if path and self.is_leaf_module(layer, path):
                layer.forward = partial(self._node, path)
        _, x_parameter = inspect.signature(type(net).forward).parameters.values()  # one input
        if x_parameter.kind is not x_parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError("not one input of its own name")
        x = self.create_proxy("placeholder", x_parameter.name, (), {})
        out = type(net).forward(self.root, x)
        self.create_node("output", "output", (self.create_arg(out),), {})
        return self.graph

    def _node(self, path: str, *args: Any, **kwargs: Any) -> torch.fx.Proxy:
        return self.create_proxy("call_module", path, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MethodLayer) or super().is_leaf_module(m, module_qualified_name)


class Plan:
    """The traced graph of one net, run on stacked parameters."""

    def __init__(self, net: nn.Module, graph: torch.fx.Graph) -> None:
        self._modules = dict(net.named_modules())
        self._nodes: list[Any] = list(graph.nodes)
        self._overwrites = {node: call for node in self._nodes if (call := self._in_place(node))}
        names = {id(p): name for name, p in net.named_parameters()}
        self._names = {
            (path, leaf): names[id(p)]
            for path, module in self._modules.items()
            for leaf, p in module.named_parameters(recurse=False)
        }

    @classmethod
    def of(cls, net: nn.Module) -> Plan | None:
        if isinstance(net, torch.jit.ScriptModule | MethodLayer):
            return None  # the trace would enter such a layer, and its terms would be proxies
        if any(m._forward_hooks or m._forward_pre_hooks for m in net.modules()):
            return None  # a replay would not run them
        if any("forward" in vars(m) for m in net.modules()):
            return None  # `forward` is replaced on the object: the type does not define the layer
        try:
            graph = _Tracer().record(net)
        except (
            Exception
        ):  # tracing runs the user's code on proxies: any failure means "not this way"
            return None
        modules = dict(net.named_modules())
        return cls(net, graph) if all(_supported(node, modules) for node in graph.nodes) else None

    @property
    def is_path(self) -> bool:
        """Whether the only input of each operation is the output of the one before. The number of
        rows may then change between operations."""
        steps = [node for node in self._nodes if node.op != "placeholder"]
        return all(node.all_input_nodes == [node.prev] for node in steps)

    def __call__(
        self,
        params: Mapping[str, Tensor],
        stacked: Callable[[str], bool],
        x: Tensor,
        x_stacked: bool,
        terms: dict[str, Tensor] | None = None,
    ) -> Value:
        """The output at x, and whether it has the member axis. `params` are all tensors of the
        network, with the noise; the terms of layers are put into `terms`."""
        terms = {} if terms is None else terms
        env: dict[torch.fx.Node, Value] = {}
        overwrites = {} if torch.is_grad_enabled() else self._overwrites

        def load(argument: Any) -> Value:
            return env[argument] if isinstance(argument, torch.fx.Node) else (argument, False)

        for node in self._nodes:
            if node.op == "placeholder":
                env[node] = (x, x_stacked)
            elif node.op == "output":
                return load(node.args[0])
            elif node in overwrites:
                value, flag = load(node.args[0])
                env[node] = (overwrites[node](value), flag)
            elif node.op == "call_module":
                path, (h, h_stacked) = node.target, load(node.args[0])
                layer = module = self._modules[path]
                if isinstance(layer, MethodLayer):
                    plain = partial(self._plain, path, module, params=params, stacked=stacked)
                    slots = Slots(path, params, stacked, terms)
                    env[node] = layer.batched(h, h_stacked, slots, plain)
                else:
                    env[node] = self._plain(path, module, h, h_stacked, params, stacked)
            else:
                args = [load(argument) for argument in node.args]
                values = [value for value, _ in args]
                call = (
                    node.target
                    if callable(node.target)
                    else operator.methodcaller(str(node.target), *values[1:], **node.kwargs)
                )
                value = call(*values, **node.kwargs) if callable(node.target) else call(values[0])
                env[node] = (value, any(flag for _, flag in args))
        raise AssertionError("a traced graph ends in an output node")

    def _in_place(self, node: torch.fx.Node) -> Callable[[Tensor], Tensor] | None:
        """An activation that may overwrite its input: the output of a linear layer, used only here.
        Without gradients, this halves the memory of a prediction."""
        if node.op != "call_module":
            return None
        source = node.args[0]
        alone = isinstance(source, torch.fx.Node) and len(source.users) == 1
        if not alone or source.op != "call_module":  # type: ignore[union-attr]
            return None
        module = self._modules[str(source.target)]  # type: ignore[union-attr]
        kept = isinstance(module, MethodLayer) and bool(module.gives)
        fresh = isinstance(module, nn.Linear) and not kept
        return _IN_PLACE.get(type(self._modules[str(node.target)])) if fresh else None

    def _plain(
        self,
        path: str,
        module: nn.Module,
        h: Tensor,
        h_stacked: bool,
        params: Mapping[str, Tensor],
        stacked: Callable[[str], bool],
    ) -> Value:
        if isinstance(module, nn.Linear):
            name, other = self._names[path, "weight"], self._names.get((path, "bias"))
            weight, bias = params[name], None if other is None else params[other]
            if stacked(name) or (other is not None and stacked(other)):
                return stacked_linear(h, h_stacked, weight, bias), True
            return F.linear(h, weight, bias), h_stacked
        if isinstance(module, nn.Flatten):
            return h.flatten(2 if h_stacked else 1), h_stacked
        if isinstance(module, nn.LayerNorm):
            return self._layer_norm(path, module, h, h_stacked, params, stacked)
        return module(h), h_stacked

    def _layer_norm(
        self,
        path: str,
        module: nn.LayerNorm,
        h: Tensor,
        h_stacked: bool,
        params: Mapping[str, Tensor],
        stacked: Callable[[str], bool],
    ) -> Value:
        out = F.layer_norm(h, module.normalized_shape, eps=module.eps)
        middle = h.ndim - len(module.normalized_shape) - (1 if h_stacked else 0)  # axes of rows
        for leaf, combine in (("weight", torch.mul), ("bias", torch.add)):
            name = self._names.get((path, leaf))
            if name is None:
                continue
            value = params[name]
            if stacked(name):
                value = value.reshape(value.shape[:1] + (1,) * middle + value.shape[1:])
                h_stacked = True
            out = combine(out, value)
        return out, h_stacked


def stacked_linear(h: Tensor, h_stacked: bool, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, ..., in] or shared [..., in] by weights [M, out, in] to [M, ..., out]."""
    if weight.ndim == 2:  # only the bias is stacked
        out = F.linear(h, weight)
        out = out if h_stacked else out.unsqueeze(0)
        return out + bias.reshape(bias.shape[0], *(1,) * (out.ndim - 2), -1)  # type: ignore[union-attr]
    members, outputs, inputs = weight.shape
    if members == 1:  # a plain product is faster than a batched product of one
        own = None if bias is None else bias.reshape(outputs)
        out = F.linear(h, weight.squeeze(0), own)
        return out if h_stacked else out.unsqueeze(0)
    shape = h.shape[1:-1] if h_stacked else h.shape[:-1]
    rows = h
    if len(shape) != 1:
        rows = h.reshape(members if h_stacked else 1, -1, inputs)
    if not h_stacked:
        rows = rows.expand(members, -1, -1)  # of [1, B, in] or [B, in]
    if bias is None:
        out = torch.bmm(rows, weight.mT)
    else:
        bias = bias.expand(members, -1) if bias.ndim == 1 else bias
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out if len(shape) == 1 else out.reshape(members, *shape, outputs)


def _supported(node: torch.fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op in ("placeholder", "output"):
        first = node.op == "placeholder" or isinstance(node.args[0], torch.fx.Node)
        return first and not (node.op == "placeholder" and node.prev.op == "placeholder")
    if node.op == "call_module":
        module = modules[str(node.target)]
        if len(node.args) != 1 or node.kwargs:
            return False
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and module.end_dim == -1
        if isinstance(module, MethodLayer):
            return module.batched is not None and module.inner in (None, *_PLAIN)
        return type(module) in _PLAIN
    if node.op == "call_function":
        return node.target in _POINTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in _POINTWISE_METHODS
