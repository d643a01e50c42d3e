"""Kronecker-factored curvature (K-FAC; Martens & Grosse 2015, Ritter, Botev & Barber 2018).

    G_W ≈ B ⊗ A,  G_b ≈ B,  B = Σ_i w_i Σ_t g_it g_itᵀ,  A = Σ_i w_i Σ_t a_it a_itᵀ / Σ_i w_i T

for each layer, and nothing between layers, nor between a weight and its bias, which is a block of
its own. g are gradients through a root of the outputs' curvature, one pass an output: no label is
drawn. Positions t of a row (pixels, tokens, calls of a shared layer) count as if they were rows
("expand": Grosse & Martens 2016; Eschenhagen et al. 2023), which also drops what lies between them.
An embedding's A is the diagonal of its tokens' shares. All this is as in laplace-torch. What has no
factors (scales and shifts of norm layers, a module's own parameters) has its exact diagonal.

The prior's precision is added to the eigenvalues of B ⊗ A, so it must be one number for each weight
tensor: a Gaussian prior. A block is exact where g or a is the same in all rows and positions: in a
linear network with Gaussian noise, of any number of outputs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.laplace import layers
from doxa.laplace.curvature import Jacobians
from doxa.laplace.factored import Factored
from doxa.laplace.forms import Effective, Form, spectral
from doxa.laplace.layers import Layer
from doxa.laplace.outputs import Outputs
from doxa.laplace.scales import Scales
from doxa.linalg import Kronecker, KroneckerBlock, Structure
from doxa.method import Run, State

log = logging.getLogger("doxa")

_REST = "curvature.rest"


@dataclass(frozen=True)
class Factors(Form):
    """A and B of each layer, the number of positions, and the diagonal of what has no factors.

    When all rows are in, A becomes its eigenvectors, with its eigenvalues beside it; B too, unless
    noise levels of several outputs can still change it.
    """

    def empty(self, run: Run, groups: int) -> State:
        if not run.prior.is_gaussian:
            raise MethodError(
                "structure='kronecker' needs a prior with one precision for each weight tensor: "
                "use Normal or FanInNormal, or structure='full' or 'diagonal'"
            )
        found, rest = layers.of(run.net, run.net.subset_names)
        zeros = lambda *s: torch.zeros(run.size, *s, device=run.device, dtype=torch.float64)  # noqa: E731
        state: State = {}
        for layer in found:
            if layer.weight is not None:
                shape = (layer.inputs,) * (1 if layer.embeds else 2)
                state |= {_a(layer): zeros(*shape), _count(layer): zeros()}
            state[_b(layer)] = zeros(groups, layer.outputs, layer.outputs)
        if rest:
            log.info("laplace: %s without Kronecker factors: their diagonal", ", ".join(rest))
            state[_REST] = zeros(groups, run.layout.select(rest).size)
        return state

    def source(self, run: Run, state: State) -> Jacobians:
        return Factored(run.net, state["theta"], run.net.subset_names, run.buffers(state))

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        source, part = cast("Factored", source), outputs.part
        made = source.passes(part.x, part.shared)
        root = outputs.root(made.f, square=groups > 1)  # [M, B, O, R]
        new = {}
        for key, a in made.inputs.items():
            layer = source.layers[key]
            if layer.weight is not None:
                counted, size = _gram(layer, a, part.weight)
                new[_a(layer)] = state[_a(layer)] + counted
                new[_count(layer)] = state[_count(layer)] + size
        for start in range(0, root.shape[-1], source.columns):
            own = slice(start, start + source.columns)
            for key, g in made.gradients(root[..., own]).items():
                name = _b(source.layers[key])
                entry = new.setdefault(name, state[name].clone())
                if groups > 1:
                    entry[:, own] += _products_of(g)
                else:
                    entry[:, 0] += _products_of(g.flatten(1, 2)[:, None])[:, 0]
        pulls = outputs.pulls(made.f, groups)
        slopes = source.slopes(made, pulls)
        if source.others is not None:
            j = source.others(part.x, part.shared)[1].double()
            squares = (root.mT @ j).square().sum(1)  # [M, R, p]
            new[_REST] = state[_REST] + (squares if groups > 1 else squares.sum(1, keepdim=True))
            own_slope = pulls.flatten(1, 2).mT @ j.flatten(1, 2)
            slopes |= {n: own_slope[..., s] for n, s in source.others.layout.slices.items()}
        ordered = torch.cat([slopes[name] for name in source.layout.names], -1)
        new["slope"] = state["slope"] + ordered
        return new, made.f

    def complete(self, run: Run, state: State) -> State:
        new = dict(state)
        for layer in layers.of(run.net, run.net.subset_names)[0]:
            if layer.weight is not None and _values(_a(layer)) not in state:
                total = state[_a(layer)]
                count = state[_count(layer)].clamp_min(1e-300)
                mean = total / count.reshape(-1, *(1,) * (total.ndim - 1))
                if layer.embeds:
                    new[_values(_a(layer))] = mean
                else:
                    new[_values(_a(layer))], new[_a(layer)] = _eigen(mean)
            b = state[_b(layer)]
            if b.shape[1] == 1 and _values(_b(layer)) not in state:
                values, vectors = _eigen(b[:, 0])
                new |= {_values(_b(layer)): values[:, None], _b(layer): vectors[:, None]}
        return new

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        state = self.complete(run, state)
        found, rest = layers.of(run.net, run.net.subset_names)
        layout = run.layout.select(run.net.subset_names)
        blocks: dict[str, KroneckerBlock] = {}
        for layer in found:
            values, basis = _outer(layer, state, None)
            b = values.sum(1)
            if layer.bias is not None:
                blocks[layer.bias] = KroneckerBlock(b, basis)
            if layer.weight is not None:
                curvature = _products(layer, b, state[_values(_a(layer))])
                left, right = (None, basis) if layer.embeds else (basis, state[_a(layer)])
                blocks[layer.weight] = KroneckerBlock(curvature, left, right)
        if rest:
            left_over = run.layout.select(rest)
            total = state[_REST].sum(1)
            blocks |= {n: KroneckerBlock(total[:, left_over.slices[n]]) for n in left_over.names}
        delta = torch.stack([prior[:, layout.slices[n].start] for n in layout.names], 1)
        return Kronecker(tuple(blocks[n] for n in layout.names), torch.ones_like(delta), delta)

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        state = self.complete(run, state)
        found, rest = layers.of(run.net, run.net.subset_names)
        layout = run.layout.select(run.net.subset_names)

        def values(ratio: Tensor | None) -> Tensor:
            """Each group's part of the eigenvalues of G, [M, g, p], in the order of the layout."""
            parts: dict[str, Tensor] = {}
            for layer in found:
                b, _ = _outer(layer, state, ratio)
                if layer.bias is not None:
                    parts[layer.bias] = b
                if layer.weight is not None:
                    a = state[_values(_a(layer))][:, None].expand(-1, b.shape[1], -1)
                    together = _products(layer, b.flatten(0, 1), a.flatten(0, 1))
                    parts[layer.weight] = together.reshape(*b.shape[:2], -1)
            if rest:
                left_over = run.layout.select(rest)
                parts |= {n: state[_REST][..., left_over.slices[n]] for n in left_over.names}
            return torch.cat([parts[n] for n in layout.names], -1)

        several = state[_b(found[0])].shape[1] > 1 if found else False
        if not several:
            return spectral(values(None), prior, scales), 2000
        return lambda ratio, tau: spectral(values(ratio), prior, scales)(ratio, tau), 100

    def divided(self, state: State, ratio: Tensor) -> State:
        new = {}
        for name, entry in state.items():
            scaled = name.startswith("curvature.B.") or name == _REST
            if scaled and f"{name}.values" not in state:
                new[name] = entry / ratio.reshape(*ratio.shape, *(1,) * (entry.ndim - 2))
        return new

    def bytes(self, run: Run, groups: int) -> int:
        found, _ = layers.of(run.net, run.net.subset_names)
        numbers = len(run.subset_index)
        for layer in found:
            numbers += groups * layer.outputs**2 + layer.inputs ** (1 if layer.embeds else 2)
        return 3 * 8 * run.size * numbers

    def product(self, run: Run) -> float | None:
        found, _ = layers.of(run.net, run.net.subset_names)
        sizes = [max(layer.outputs, 0 if layer.embeds else layer.inputs) for layer in found]
        widest = max(sizes, default=1)
        return float(run.size * widest**2 * max(widest, run.settings.batch_size))


def _a(layer: Layer) -> str:
    return f"curvature.A.{layer.key}"


def _b(layer: Layer) -> str:
    return f"curvature.B.{layer.key}"


def _count(layer: Layer) -> str:
    return f"curvature.count.{layer.key}"


def _values(name: str) -> str:
    return f"{name}.values"


def _gram(layer: Layer, a: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ w a aᵀ over rows and positions, [M, in, in], or an embedding's diagonal; Σ w T, [M]."""
    members, rows, positions = a.shape[:3]
    scale = torch.ones((members, rows), dtype=torch.float64, device=a.device)
    scale = scale if weight is None else scale * weight
    each = scale[..., None].expand(-1, -1, positions).flatten(1)  # [M, B T]
    if layer.embeds:
        tokens = a.flatten(1)
        if layer.module.padding_idx is not None:
            each = each * (tokens != layer.module.padding_idx)
        counts = each.new_zeros(members, layer.inputs).scatter_add_(1, tokens, each)
        return counts, each.sum(1)
    flat = a.flatten(1, 2)
    scaled = flat if weight is None else flat * each[..., None].to(flat.dtype)
    return scaled.mT @ flat, each.sum(1)


def _products_of(g: Tensor) -> Tensor:
    """Σ g gᵀ over rows and positions: [M, R, B, T, out] to [M, R, out, out]."""
    if g.shape[-2] > g.shape[-1]:  # many positions: row by row, without a copy
        return (g.mT @ g).sum(2)
    rows = g.flatten(2, 3)
    return rows.mT @ rows


def _outer(layer: Layer, state: State, ratio: Tensor | None) -> tuple[Tensor, Tensor]:
    """The groups' parts of B's eigenvalues at r, [M, g, out], and its eigenvectors."""
    b, known = state[_b(layer)], _values(_b(layer))
    if known in state:
        return state[known], b[:, 0]
    scaled = b if ratio is None else b / ratio[..., None, None]
    _, basis = _eigen(scaled.sum(1))
    parts = (basis[:, None] * (b @ basis[:, None])).sum(-2)  # diag(Uᵀ B_g U)
    return parts.clamp_min(0.0), basis


def _products(layer: Layer, b: Tensor, a: Tensor) -> Tensor:
    """Eigenvalues of the block, flat in the order of the weight."""
    rows, columns = (a, b) if layer.embeds else (b, a)
    return (rows[:, :, None] * columns[:, None, :]).flatten(1)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, of which round-off makes none negative, and eigenvectors, whose largest entries
    are positive."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values.clamp_min(0.0), torch.where(largest < 0, -vectors, vectors)
