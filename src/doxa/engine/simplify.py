"""Simplification of a recorded step: constants are computed once, and no-ops are removed.

The trace of a step contains operations of autograd (detach, alias), transposes of transposes, and
arithmetic on constants (1/n, noise that is given in advance). They need not run at each step.

What it saves, by `python -m benchmarks.simplify` on one thread: the time of a step as recorded over
its time as executed, and what of this `reuse_memory` saves.

    8-50-1           deep ensembles of 1, 5, 10      1.21, 1.16, 1.15    1.02
                     mean-field VI, 1 and 5 members  1.24, 1.20          1.02
                     IVON, SWAG                      1.17, 1.21          1.01, 1.02
                     SGLD, SGHMC, 4 members          1.18, 1.20          1.03, 1.05
                     SVGD, 10 particles              1.16                1.01
                     HMC, a leapfrog step            1.05                1.00
    logistic         HMC, NUTS, a leapfrog step      1.28, 1.16          1.01
    784-400-400-1    a deep ensemble of 5            1.02                1.02
                     mean-field VI, IVON             1.08, 1.14          1.03, 1.09
                     SGLD, 4 members                 1.12                1.11
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

_aten = torch.ops.aten
_IDENTITIES = {_aten.detach.default, _aten.alias.default}
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default}
_FILLS = {  # shapes are fixed in a trace
    _aten.ones_like.default, _aten.zeros_like.default, _aten.full.default, _aten.new_full.default,
}  # fmt: skip


def simplify(module: GraphModule, example: list[Tensor]) -> GraphModule:
    """The same function of tensors shaped like `example`, in fewer operations."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
        elif (
            node.target is _aten.t.default and getattr(node.args[0], "target", None) is node.target
        ):
            node.replace_all_uses_with(node.args[0].args[0])
    _transpose_products(module)
    graph.eliminate_dead_code()
    module.recompile()
    constants = _constants(module, example)
    for node, value in constants.items():
        if node.op == "get_attr" or all(user in constants for user in node.users):
            continue
        name = f"_folded_{node.name}"
        module.register_buffer(name, value)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = value
        node.replace_all_uses_with(constant)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def reuse_memory(module: GraphModule) -> GraphModule:
    """Optimisations for a graph that is replayed operation by operation: a + c·b in one pass over
    memory, and sums written into memory that is not read again. New pages cost more than a sum. (A
    compiler does both itself, and needs a graph without in-place operations.)"""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is _aten.add.Tensor and not node.kwargs:
            _fuse_product(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        spent = [argument for argument in node.args if _may_overwrite(argument, node)]
        if spent and spent[0] is node.args[0] and node.target in _IN_PLACE:
            node.target = _IN_PLACE[node.target]
        elif spent and node.target in _WITH_OUT:
            node.target = _WITH_OUT[node.target]
            node.kwargs = {**node.kwargs, "out": spent[0]}
    module.recompile()
    return module


_FRESH = {
    _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.addcmul.default,
    _aten.sqrt.default, _aten.square.default, _aten.exp.default, _aten.clamp.default,
}  # fmt: skip
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor, _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor, _aten.div.Tensor: _aten.div_.Tensor,
    _aten.addcmul.default: _aten.addcmul_.default, _aten.clamp.default: _aten.clamp_.default,
}  # fmt: skip
_WITH_OUT = {
    _aten.addcmul.default: _aten.addcmul.out, _aten.addcdiv.default: _aten.addcdiv.out,
}  # fmt: skip


def _fuse_product(graph: Graph, node: Node) -> None:
    """a + c·b, with c a number or a tensor without axes, as one operation."""
    for base, product in (node.args, node.args[::-1]):
        if not isinstance(product, Node) or product.target is not _aten.mul.Tensor:
            continue
        if len(product.users) != 1 or not (
            _same_shape_and_type(base, node) and _same_shape_and_type(product, node)
        ):
            continue
        left, right = product.args
        with graph.inserting_before(node):
            if isinstance(right, int | float):
                new = graph.call_function(_aten.add.Tensor, (base, left), {"alpha": right})
            elif _axes(right) == 0 and _same_shape_and_type(left, node):
                new = graph.call_function(_aten.addcmul.default, (base, left, right))
            elif _axes(left) == 0 and _same_shape_and_type(right, node):
                new = graph.call_function(_aten.addcmul.default, (base, right, left))
            else:
                continue
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        return


def _axes(value: Any) -> int:
    found = getattr(value, "meta", {}).get("val")
    return found.ndim if isinstance(found, Tensor) and found.is_floating_point() else -1


def _same_shape_and_type(value: Any, node: Node) -> bool:
    """Whether a value has the shape and the type of the result of a node."""
    own, other = getattr(value, "meta", {}).get("val"), node.meta.get("val")
    if not isinstance(own, Tensor) or not isinstance(other, Tensor):
        return False
    return own.shape == other.shape and own.dtype == other.dtype and own.is_floating_point()


def _may_overwrite(source: Any, node: Node) -> bool:
    """Whether a node may overwrite an argument: new memory that no other node reads."""
    made = {*_FRESH, *_IN_PLACE.values(), *_WITH_OUT.values()}
    if not isinstance(source, Node) or source.target not in made:
        return False
    return len(source.users) == 1 and _same_shape_and_type(source, node)


def expand_products(module: GraphModule) -> GraphModule:
    """Matrix products with an axis of length 1 as elementwise products and sums, and fused
    additions as separate additions. A compiler for GPUs can fuse these with their neighbours, but
    not the product of a library. (On a CPU the library is faster.)"""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or node.kwargs:
            continue
        *added, left, right = node.args
        with graph.inserting_before(node):
            value = _expanded(graph, left, right)
            for other in added:
                value = graph.call_function(_aten.add.Tensor, (value, other))
        node.replace_all_uses_with(value)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _expanded(graph: Graph, left: Node, right: Node) -> Node:
    (m, terms), n = left.meta["val"].shape[-2:], right.meta["val"].shape[-1]
    call = graph.call_function
    if terms == 1:
        return call(_aten.mul.Tensor, (left, right))
    if n == 1:
        row = call(_aten.transpose.int, (right, -2, -1))
        return call(_aten.sum.dim_IntList, (call(_aten.mul.Tensor, (left, row)), [-1], True))
    if m == 1:
        column = call(_aten.transpose.int, (left, -2, -1))
        return call(_aten.sum.dim_IntList, (call(_aten.mul.Tensor, (column, right)), [-2], True))
    matrices = left.meta["val"].ndim == 2
    return call(_aten.mm.default if matrices else _aten.bmm.default, (left, right))


def _transpose_products(module: GraphModule) -> None:
    """(A Vᵀ)ᵀ = V Aᵀ where V has fewer rows than A: a handful of chains, many rows of data.

    vmap of a matrix times each chain's vector gives the left side, which on a CPU takes up to six
    times as long.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not _aten.mm.default or not all(map(_transposes, node.users)):
            continue
        left, right = node.args
        shape = getattr(node.meta.get("val"), "shape", None)
        if shape is None or shape[1] >= shape[0] or not _transposes(right):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(_aten.t.default, (left,))
            product = graph.call_function(_aten.mm.default, (right.args[0], turned))
        for user in list(node.users):
            user.replace_all_uses_with(product)


def _transposes(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    swaps: Any = node.args[1:]
    return node.target is _aten.t.default or (
        node.target is _aten.permute.default and list(swaps[0]) == [1, 0]
    )


def _constants(module: GraphModule, example: list[Tensor]) -> dict[Node, Any]:
    """The nodes whose values do not depend on the inputs."""
    found: dict[Node, Any] = {}
    if any(_writes_to_unknown(node) for node in module.graph.nodes):
        return found
    changing = {value for node in module.graph.nodes for value in overwritten(node)}

    class Run(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            fixed = n.op == "get_attr" or (
                n.op == "call_function"
                and isinstance(value, Tensor)
                and not (_mutates(n) or n in changing)
                and (n.target in _FILLS or _all_in(n.all_input_nodes, found))
            )
            if fixed:
                found[n] = value
            return value

    with torch.no_grad():
        Run(module).run(*(t.clone() for t in example))
    return found


def _all_in(nodes: list[Node], found: dict[Node, Any]) -> bool:
    return bool(nodes) and all(node in found for node in nodes)


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _writes_to_unknown(node: Node) -> bool:
    """Whether a node overwrites memory that a constant could share: anything except arguments and
    new results of operations. Constant folding would then not be safe."""
    return not all(
        source.op == "placeholder" or _own_memory(source) for source in overwritten(node)
    )


def _own_memory(node: Node) -> bool:
    """Whether the result of a node is new memory, and not a view."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(each.alias_info is None for each in schema.returns)


def overwritten(node: Node) -> set[Node]:
    """The nodes that an operation overwrites."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    held: set[Node] = set()
    for argument, value in _named(node, schema):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = value if isinstance(value, list | tuple) else [value]
            held |= {each for each in found if isinstance(each, Node)}
    return held


def _named(node: Node, schema: Any) -> list[tuple[Any, Any]]:
    """The arguments of an operation's schema, with their values."""
    given = list(zip(schema.arguments, node.args, strict=False))
    rest = schema.arguments[len(node.args) :]
    return given + [(each, node.kwargs[each.name]) for each in rest if each.name in node.kwargs]
