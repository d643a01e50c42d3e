"""Layers whose curvature has Kronecker factors, and the gradients of their weights per row.

A layer maps an input a_t to z_t = W a_t + b at each position t of a row. Positions are the pixels
of a convolution, the tokens of a sequence, or the calls of a layer that is called several times.
The gradients are

    ∂f/∂W = Σ_t g_t a_tᵀ,    ∂f/∂b = Σ_t g_t,    g_t = ∂f/∂z_t

For a convolution, a_t is the unfolded patch under its window (Grosse & Martens 2016). For an
embedding, W is the transposed weight, and a_t is the unit vector of a token, stored as the number
of the token.

Other modules without children, such as norm layers and transposed convolutions, have no factors
(`Leaf`). The gradient of their parameters per row is a vector–Jacobian product of the module alone.
It needs the input of the module and the gradient at its output, which `passes.py` records.

`Head` is a last layer whose output is the output of the network, f = W a(x) + b. Its Jacobian gives

    (Jδ)(x) = δW a(x) + δb,    Jᵀv = (v aᵀ, v)

The features a are computed once for given rows. Products with J then need no further pass of the
network. J itself, with outputs × weights numbers per row, is never formed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map

from doxa.errors import MethodError
from doxa.linalg.layout import Layout, Params
from doxa.model import Model

if TYPE_CHECKING:
    from doxa.laplace.curvature import Jacobians

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FACTORED: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS, nn.Embedding)
_LEFT = 0.1  # largest share of weights without factors for which `factored` is true


@dataclass(frozen=True)
class Layer:
    """A layer with Kronecker factors: one weight and its bias.

    Parameters
    ----------
    module : Module
        The first module with this weight and bias.
    weight, bias : str or None
        Their names in the network. None if they are not uncertain, or if there is no bias.
    inputs, outputs : int
        The sizes of a_t and z_t. For an embedding, the number of tokens and the size of a vector.
    paths : list of str
        The paths of the module in the network. There are several if modules share the weight.
    """

    module: Any
    weight: str | None
    bias: str | None
    inputs: int
    outputs: int
    paths: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def key(self) -> str:
        return self.names[0]

    @property
    def embeds(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    @property
    def convolves(self) -> bool:
        return isinstance(self.module, _CONVOLUTIONS)

    @property
    def window(self) -> int:
        """The positions of the input under the window of a convolution; 1 for other layers."""
        return math.prod(self.module.kernel_size) if self.convolves else 1

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as [inputs, outputs]: an embedding, a Conv1D of GPT-2."""
        return self.embeds or _is_conv1d(self.module)

    def positions(self, a: Tensor, lead: int) -> Tensor:
        """Reshape inputs of the layer, [*lead, *a], to a_t, [*lead, T, inputs]; for an embedding,
        to tokens [*lead, T]. `lead` is the number of leading axes."""
        shape = a.shape[:lead]
        if self.embeds:
            return a.reshape(*shape, -1)
        if self.convolves:
            pixels = a.shape[-len(self.module.kernel_size) - 1 :]
            return unfold(self.module, a.reshape(-1, *pixels)).reshape(*shape, -1, self.inputs)
        return a.reshape(*shape, -1, self.inputs)

    def gradients(self, g: Tensor, lead: int) -> Tensor:
        """Reshape gradients at the layer's output, [*lead, *z], to g_t, [*lead, T, outputs]."""
        if self.convolves:
            pixels = len(self.module.kernel_size)
            g = g.reshape(*g.shape[:lead], -1, *g.shape[-pixels - 1 :]).flatten(-pixels)
            if g.shape[lead] == 1:  # a view, without a copy
                return g.squeeze(lead).mT
            return g.mT.flatten(lead, lead + 1)
        return g.reshape(*g.shape[:lead], -1, self.outputs)

    def slopes(self, g: Tensor, a: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter and its gradient per row, [M, R, B, size], from the gradients
        g [M, R, B, T, outputs] and the inputs a [M, B, T, inputs]."""
        if self.bias is not None:
            yield self.bias, g.sum(3)
        if self.weight is None:
            return
        if self.embeds:
            tokens = a[:, None, ..., None].expand_as(g)
            total = g.new_zeros(*g.shape[:3], self.inputs, self.outputs)
            yield self.weight, total.scatter_add(3, tokens, g).flatten(3)
        else:
            slope = g.mT @ a[:, None]
            yield self.weight, (slope.mT if self.transposed else slope).flatten(3)

    def total(self, g: Tensor, a: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `slopes`, but summed over rows: [M, R, size], in float64."""
        if self.bias is not None:
            yield self.bias, g.sum((2, 3)).double()
        if self.weight is None:
            return
        if self.embeds:
            tokens = a.flatten(1)[:, None, :, None].expand_as(g.flatten(2, 3))
            total = g.new_zeros(*g.shape[:2], self.inputs, self.outputs)
            yield self.weight, total.scatter_add(2, tokens, g.flatten(2, 3)).flatten(2).double()
            return
        if g.shape[3] > g.shape[4]:  # many positions: a product per row, which copies nothing
            slope = (g.mT @ a[:, None]).sum(2)
        else:
            slope = g.flatten(2, 3).mT @ a.flatten(1, 2)[:, None]
        yield self.weight, (slope.mT if self.transposed else slope).flatten(2).double()

    def squares(self, g: Tensor, a: Tensor, most: int) -> Iterator[tuple[str, Tensor]]:
        """As `slopes`, but squared and summed over rows and over R: [M, size], in float64. Rows are
        computed in blocks of at most `most` numbers."""
        if self.bias is not None:
            yield self.bias, g.sum(3).square().sum((1, 2)).double()
        if self.weight is None:
            return
        if self.embeds:  # positions of the same token are summed before they are squared
            same = (a[..., None] == a[..., None, :]).to(g.dtype)  # [M, B, T, T]
            together = (same[:, None] @ g).square() / same.sum(-1)[:, None, ..., None]
            each = together.sum(1).flatten(1, 2)  # [M, B T, D]
            total = each.new_zeros(len(g), self.inputs, self.outputs)
            place = a.flatten(1)[..., None].expand_as(each)
            yield self.weight, total.scatter_add(1, place, each).flatten(1).double()
            return
        if g.shape[3] == 1:  # one position: the square of g aᵀ is the product of the squares
            found = g[..., 0, :].square().sum(1).mT @ a[..., 0, :].square()  # [M, out, in]
        else:
            rows = max(1, most // (g[:, :, 0, 0].numel() * self.inputs))
            parts = zip(g.split(rows, 2), a.split(rows, 1), strict=True)
            found = torch.stack([(gs.mT @ s[:, None]).square().sum((1, 2)) for gs, s in parts])
            found = found.double().sum(0)
        yield self.weight, (found.mT if self.transposed else found).flatten(1).double()


@dataclass(frozen=True)
class Leaf:
    """A module without factors and without children, whose input is one tensor.

    Parameters
    ----------
    module : Module
        The module.
    names : dict of str to str
        Its uncertain parameters: {name in the module: name in the network}.
    paths : list of str
        The path of the module in the network.
    """

    module: Any
    names: dict[str, str]
    paths: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return next(iter(self.names.values()))

    def slopes(
        self, g: Tensor, a: Tensor, params: Params, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter and its gradient per row, [M, R, B, size].

        Parameters
        ----------
        g : Tensor of shape [R, M, B, *z]
            The gradients at the output of the module.
        a : Tensor of shape [M, B, *a]
            The inputs of the module.
        params, buffers : dict of str to Tensor
            The parameters and buffers of the network, [M, ...]. A buffer that is not in `buffers`
            is taken from the module, and is the same for all members.
        """
        prefix = f"{self.paths[0]}." if self.paths[0] else ""
        own = {leaf: params[name] for leaf, name in self.names.items()}
        leaves = [leaf for leaf, _ in self.module.named_parameters(recurse=False)]
        fixed = {k: params[prefix + k] for k in leaves if prefix + k in params and k not in own}
        kept = [leaf for leaf, _ in self.module.named_buffers(recurse=False)]
        given = {k: buffers[prefix + k] for k in kept if prefix + k in buffers}
        if type(self.module) in _NORMS and a.shape[2] == 1 and g.shape[1:] == a.shape:
            yield from self._of_norm(g.flatten(2, 3), a.flatten(1, 2), given)
            return
        fixed |= given

        def one(own: Params, fixed: Params, a: Tensor, g: Tensor) -> Params:
            made = vjp(lambda p: functional_call(self.module, {**fixed, **p}, (a,)), own)
            slopes: Params = made[1](g.reshape(made[0].shape))[0]
            return slopes

        columns = vmap(one, in_dims=(None, None, None, 0))
        rows = vmap(columns, in_dims=(None, None, 0, 1), out_dims=1)
        found = vmap(rows, in_dims=(0, 0, 0, 1))(own, fixed, a, g)  # [M, R, B, *shape]
        for leaf, name in self.names.items():
            yield name, found[leaf].detach().flatten(3)

    def _of_norm(self, g: Tensor, a: Tensor, buffers: Params) -> Iterator[tuple[str, Tensor]]:
        """The same for y = γ x̂ + β, from g [R, M, B, *z] and a [M, B, *z]: the gradients are the
        sums of g x̂ and of g over the positions that share γ and β."""
        units = {
            leaf: (torch.zeros_like if leaf == "bias" else torch.ones_like)(value)
            for leaf, value in self.module.named_parameters(recurse=False)
        }

        def normalised(a: Tensor, buffers: Params) -> Tensor:
            out: Tensor = functional_call(self.module, {**buffers, **units}, (a,))
            return out

        if len(a) == 1:
            x = normalised(a[0], {k: v[0] for k, v in buffers.items()}).unsqueeze(0)
        else:
            x = vmap(normalised)(a, buffers)
        scaled = len(next(iter(units.values())).shape) if type(self.module) in _OF_FEATURES else 0
        positions = range(3, g.ndim - scaled) if scaled else range(4, g.ndim)
        for leaf, name in self.names.items():
            each = g if leaf == "bias" else g * x.to(g.dtype)
            summed = each.sum(tuple(positions)) if len(positions) else each
            yield name, summed.transpose(0, 1).flatten(3).detach()


_OF_FEATURES = (nn.LayerNorm, nn.RMSNorm)  # γ and β have the shape of the last axes
_NORMS = (
    *_OF_FEATURES, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def unfold(module: Any, a: Tensor) -> Tensor:
    """The patches of a convolution's input [..., C, *pixels], as [T, C · window]. The convolution
    may have one, two or three dimensions."""
    sizes, strides, gaps = module.kernel_size, module.stride, module.dilation
    count = len(sizes)
    a = a.reshape(-1, *a.shape[-count - 1 :])
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, padding, mode=mode)
    for axis, (size, stride, gap) in enumerate(zip(sizes, strides, gaps, strict=True)):
        a = a.unfold(axis + 2, gap * (size - 1) + 1, stride)[..., ::gap]
    a = a.movedim(1, count + 1)  # [N, *pixels, C, *window]
    return a.reshape(-1, math.prod(a.shape[count + 1 :]))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is `Conv1D` of transformers, the linear layer of GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def of(
    model: Model, names: Sequence[str], strict: bool = True
) -> tuple[list[Layer], tuple[str, ...]]:
    """Find the layers with Kronecker factors.

    Weights without factors are scales and shifts of norm layers, parameters of user-defined
    modules, weights of grouped convolutions, and weights that layers of different kinds share.

    Parameters
    ----------
    model : Model
        The network.
    names : sequence of str
        The names of the uncertain weights.
    strict : bool
        Raise an error for any other layer of torch whose weight matrices have no factors.

    Returns
    -------
    tuple of (list of Layer, tuple of str)
        The layers, and the names of the weights without factors.
    """
    called = {id(p): name for name, p in model.net.named_parameters()}
    wanted = set(names)
    found: dict[str, Layer] = {}
    refused: set[str] = set()
    for path, module in model.net.named_modules():
        layer = _layer(module, called, wanted)
        if layer is None:
            continue
        known = found.setdefault(layer.key, layer)
        same = type(known.module) is type(module) and known.names == layer.names
        if not same or (isinstance(module, _CONVOLUTIONS) and known.paths):
            refused |= {*known.names, *layer.names}
        known.paths.append(path)
    layers = [layer for layer in found.values() if not refused & set(layer.names)]
    factored = {name for layer in layers for name in layer.names}
    rest = tuple(name for name in names if name not in factored)
    if strict:
        _check(model, rest, refused)
    return layers, rest


def factored(model: Model, names: Sequence[str]) -> bool:
    """Whether at least 90 % of the named weights have Kronecker factors, and all layers with
    factors are called in a forward pass."""
    try:
        found, rest = of(model, names)
    except MethodError:
        return False
    called = {path for path, _ in model.widths}
    left = model.layout.select(rest).size / model.layout.select(names).size
    return left <= _LEFT and all(called.intersection(layer.paths) for layer in found)


def _layer(module: Any, called: dict[int, str], wanted: set[str]) -> Layer | None:
    kind = next((kind for kind in _FACTORED if isinstance(module, kind)), None)
    kind = type(module) if _is_conv1d(module) else kind
    if kind is None or type(module).forward is not kind.forward or getattr(module, "groups", 1) > 1:
        return None
    own = {leaf: called.get(id(p)) for leaf, p in module.named_parameters(recurse=False)}
    weight, bias = (own[n] if own.get(n) in wanted else None for n in ("weight", "bias"))
    if weight is None and bias is None:
        return None
    if isinstance(module, nn.Embedding):
        return Layer(module, weight, None, module.num_embeddings, module.embedding_dim)
    if _is_conv1d(module):
        return Layer(module, weight, bias, *module.weight.shape)
    outputs = module.weight.shape[0]
    return Layer(module, weight, bias, module.weight[0].numel(), outputs)


_SEVERAL = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag)


def leaves(model: Model, names: Sequence[str]) -> list[Leaf]:
    """The modules without children that take one argument and have some of the named parameters."""
    called = {id(p): name for name, p in model.net.named_parameters()}
    wanted = set(names)
    found: dict[str, Leaf] = {}
    owners: dict[str, list[nn.Module]] = {}
    for path, module in model.net.named_modules():
        own = {leaf: called.get(id(p), "") for leaf, p in module.named_parameters(recurse=False)}
        for name in own.values():
            owners.setdefault(name, []).append(module)
        own = {leaf: name for leaf, name in own.items() if name in wanted}
        single = not isinstance(module, (*_SEVERAL, nn.Embedding)) and _takes_one(module)
        if own and single and not list(module.children()):
            leaf = Leaf(module, own, [path])
            found[leaf.key] = leaf
    # without modules that share a parameter with another module
    return [
        leaf
        for leaf in found.values()
        if all(owners[name] == [leaf.module] for name in leaf.names.values())
    ]


def _takes_one(module: nn.Module) -> bool:
    try:
        given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    needed = [p for p in given if p.default is p.empty]
    return len(needed) == 1 and needed[0].kind == needed[0].POSITIONAL_OR_KEYWORD


def _check(model: Model, rest: Sequence[str], shared: set[str]) -> None:
    owners = {
        name: (path, module)
        for path, module in model.net.named_modules()
        for name in _names_of(path, module)
    }
    for name in rest:
        path, module = owners[name]
        grouped = getattr(module, "groups", 1) > 1 and isinstance(module, _CONVOLUTIONS)
        vector = len(model.layout.select([name]).entries[0].shape) < 2
        if vector or grouped or name in shared or not type(module).__module__.startswith("torch."):
            continue
        raise MethodError(
            f"structure='kronecker': layer {path or 'the network'!r} ({type(module).__name__}) has "
            f"no Kronecker factors for {name!r}; use structure='diagonal' or 'low-rank', a subset "
            "without it (subset='last_layer'), or write it with Linear layers"
        )


def _names_of(path: str, module: nn.Module) -> list[str]:
    prefix = f"{path}." if path else ""
    return [prefix + leaf for leaf, _ in module.named_parameters(recurse=False)]


@dataclass(frozen=True)
class Head:
    """A last layer, with its features at some rows.

    Parameters
    ----------
    layer : Layer
        The last layer.
    layout : Layout
        The layout of its weights.
    f : Tensor of shape [M, B, O]
        The outputs of the network.
    features : Tensor of shape [M, B, inputs]
        The inputs of the layer.
    """

    layer: Layer
    layout: Layout
    f: Tensor
    features: Tensor

    @classmethod
    def of(cls, source: Jacobians, x: Any, shared: bool = True) -> Head | None:
        """Compute the features at rows x, in blocks of rows. None if weights of other layers are
        uncertain too, or if the output of the layer is not that of the network."""
        found = source.passes.by_key
        if len(found) != 1 or len(source.passes.hooked) != 1:
            return None
        layer = next(iter(found.values()))
        if layer.embeds or layer.convolves or set(layer.names) != set(source.layout.names):
            return None
        if layer.outputs != source.outputs or layer.weight is None or source.left(x, shared):
            return None
        outputs, features = [], []
        for rows in source.chunks(tree_flatten(x)[0][0].shape[0 if shared else 1], 1, False):
            at = (rows,) if shared else (slice(None), rows)
            made = source.passes(tree_map(lambda t, at=at: t[at], x), shared)
            a = made.positions(layer.key)
            if a.shape[2] != 1:
                return None
            outputs.append(made.f)
            features.append(a[:, :, 0])
        f = torch.cat(outputs, 1)
        head = cls(layer, source.layout, f, torch.cat(features, 1))
        weights = source.own | {k: v for k, v in source.rest.items() if k not in source.own}
        z = head.pushed({k: v.unsqueeze(1) for k, v in source.own.items()})[:, 0]
        bias = layer.module.bias
        if bias is not None and layer.bias is None:  # the bias is not among the uncertain weights
            names = {id(p): name for name, p in source.model.net.named_parameters()}
            z = z + weights.get(names.get(id(bias), ""), bias.detach()[None]).unsqueeze(1)
        scale = float(f.abs().max()) + float(z.abs().max())
        limit = 1e-9 if f.dtype == torch.float64 else 1e-4
        return head if float((z - f).abs().max()) <= limit * scale else None

    def pushed(self, moved: Params) -> Tensor:
        """Jδ, [M, S, B, O], for directions δ given as tensors [M, S, ...] by name."""
        assert self.layer.weight is not None
        weight = moved[self.layer.weight].to(self.features.dtype)
        weight = weight.mT if self.layer.transposed else weight  # [M, S, out, in]
        found = self.features.unsqueeze(1) @ weight.mT
        if self.layer.bias is not None:
            found = found + moved[self.layer.bias].to(found.dtype).unsqueeze(2)
        return found

    def along(self, delta: Tensor) -> Tensor:
        """Jδ, [M, S, B, O], for flat directions δ [M, S, p]."""
        return self.pushed(self.layout.unflatten(delta))

    def back(self, pulls: Tensor) -> Tensor:
        """Σ_b J_bᵀ v_b, [M, p], for v [M, B, O]."""
        assert self.layer.weight is not None
        pulls = pulls.to(self.features.dtype)
        weight = pulls.mT @ self.features
        named = {self.layer.weight: weight.mT if self.layer.transposed else weight}
        if self.layer.bias is not None:
            named[self.layer.bias] = pulls.sum(1)
        return torch.cat([named[name].flatten(1) for name in self.layout.names], -1)
