"""Linearised predictions under a Kronecker-factored covariance, without the Jacobian.

In the eigenbasis U ⊗ V of a weight's block, whose variances are D,

    (J Σ Jᵀ)_oo' = Σ_ij D_ij h_oij h_o'ij,    h_o = Σ_t (Uᵀ g_ot)(Vᵀ a_t)ᵀ

With one position, h is an outer product, and the sum over j is taken first: Σ_i g̃_oi g̃_o'i s_i with
s = D (Vᵀa)². A layer at a time is added up, for some rows and outputs at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from doxa.data import free_memory
from doxa.errors import MemoryBudgetError
from doxa.laplace import layers
from doxa.laplace.curvature import Contrast, Jacobians, chunk_bytes
from doxa.laplace.layers import Layer
from doxa.laplace.passes import Pass, Passes
from doxa.linalg import Kronecker, KroneckerBlock, Structure
from doxa.linalg.layout import Params
from doxa.model import Model

_Blocks = dict[str, tuple[KroneckerBlock, Tensor]]  # with its variances [K, size]


class Factored(Jacobians):
    """`Jacobians` whose products with a Kronecker covariance are taken layer by layer."""

    def __init__(
        self, model: Model, mean: Tensor, subset: tuple[str, ...], buffers: Params | None = None
    ) -> None:
        super().__init__(model, mean, subset, buffers)
        found, rest = layers.of(model, subset)
        self.layers = {layer.key: layer for layer in found}
        self.passes = Passes(model, self.own | self.rest, self.buffers, found)
        self.others = Jacobians(model, mean, rest, buffers) if rest else None
        self._like = next(iter(self.own.values()))

    def chunks(self, rows: int) -> Iterator[slice]:
        """Pieces of the rows whose activations and gradients stay small."""
        given, made = self._widths()
        budget = chunk_bytes(self._like.device)
        row = self._bytes * (3 * (given + made) + 6 * self.columns * made)
        if row > free_memory(self._like.device) // 2:
            raise MemoryBudgetError(
                f"activations of one row ({self.members} members, {given + made} numbers each) and "
                f"their gradients take {row / 2**30:.3g} GiB; use subset='last_layer', or fewer "
                "members"
            )
        step = max(1, budget // row)
        if self.others is not None:
            step = min(step, next(self.others.chunks(rows)).stop)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    @property
    def columns(self) -> int:
        """How many outputs are differentiated together."""
        made = self._widths()[1]
        most = chunk_bytes(self._like.device) // (6 * self._bytes * made)
        return max(1, min(self.outputs, most))

    @property
    def _bytes(self) -> int:
        return self.members * self._like.dtype.itemsize

    def _widths(self) -> tuple[int, int]:
        """Numbers that the layers are given (unfolded) and give, for one row."""
        seen: dict[str, int] = {}
        for path, width in self.model.widths:
            seen[path] = seen.get(path, 0) + width
        given = made = 1
        for layer in self.layers.values():
            width = sum(seen.get(path, 0) for path in layer.paths)
            made += width
            given += width // layer.outputs * (1 if layer.embeds else layer.inputs)
        return given, made

    def slopes(self, made: Pass, pulls: Tensor) -> Params:
        """Σ_b Jᵀ v of the layers' weights, {name: [M, g, size]}, for columns v of [M, B, O, g]."""
        found: Params = {}
        for key, g in made.gradients(pulls).items():
            layer, a = self.layers[key], made.inputs[key]  # g is [M, g, B, T, out]
            if layer.bias is not None:
                found[layer.bias] = g.sum((2, 3)).double()
            if layer.weight is None:
                continue
            if layer.embeds:
                tokens = a.flatten(1)[:, None, :, None].expand_as(g.flatten(2, 3))
                total = g.new_zeros(*g.shape[:2], layer.inputs, layer.outputs)
                found[layer.weight] = total.scatter_add(2, tokens, g.flatten(2, 3)).flatten(2)
            else:  # row by row, without a copy
                found[layer.weight] = (g.mT @ a[:, None]).sum(2).flatten(2).double()
        return found

    def variance(
        self, x: Any, covariance: Structure, contrast: Contrast | None = None
    ) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and the variance of each output, or of contrasts."""
        blocks = self._blocks(covariance)
        made = self.passes(x)
        found = []
        for g in self._gradients(made, contrast):
            each = [h.square().sum(-1) for h in self._halves(made, g, blocks)]
            found.append(torch.stack(each).sum(0))
        total = torch.cat(found, -1)
        for j, variance in self._dense(x, blocks):
            j = j if contrast is None else contrast(j)
            total = total + (j.square() * variance[:, None, None]).sum(-1)
        return made.f, total

    def spread(self, x: Any, covariance: Structure) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and J Σ Jᵀ, [K, B, O, O]."""
        blocks = self._blocks(covariance)
        made = self.passes(x)
        need = self._bytes * made.f.shape[1] * self.outputs * 3 * self._widths()[1]
        if need > free_memory(self._like.device) // 2:
            raise MemoryBudgetError(
                f"the covariance between {self.outputs} outputs takes {need / 2**30:.3g} GiB of "
                "gradients; use what needs variances only, or subset='last_layer'"
            )
        pieces = list(self._gradients(made))
        whole = {key: torch.cat([g[key] for g in pieces], 1) for key in pieces[0]}
        total = made.f.new_zeros((*made.f.shape, self.outputs))
        for h in self._halves(made, whole, blocks):
            total += h @ h.mT
        for j, variance in self._dense(x, blocks):
            total += (j * variance[:, None, None]) @ j.mT
        return made.f, total

    def along(self, x: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and Jδ for draws δ [K, S, p]: [K, S, B, O]."""
        moved = self.layout.unflatten(delta)
        made = self.passes(x)
        found = []
        for gradients in self._gradients(made):
            each = [
                part
                for key, g in gradients.items()
                for part in self._layer_along(self.layers[key], made, g, moved)
            ]
            found.append(torch.stack(each).sum(0))
        whole = torch.cat(found, -1)
        if self.others is not None:
            rest = self.others.layout.flatten({n: moved[n] for n in self.others.layout.names})
            whole = whole + torch.einsum("kbop,ksp->ksbo", self.others(x)[1], rest)
        return made.f, whole

    def _gradients(
        self, made: Pass, contrast: Contrast | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """g of every output, some outputs at a time; or of contrasts, which are symmetric."""
        eye = torch.eye(self.outputs, dtype=made.f.dtype, device=made.f.device)
        eye = eye if contrast is None else contrast(eye)
        for own in eye.split(self.columns, 1):
            yield made.gradients(own.expand(*made.f.shape[:2], -1, -1))

    def _blocks(self, covariance: Structure) -> _Blocks:
        assert isinstance(covariance, Kronecker)
        variances = [1.0 / values for values in covariance.precisions()]
        parts = zip(covariance.blocks, variances, strict=True)
        return dict(zip(self.layout.names, parts, strict=True))

    def _dense(self, x: Any, blocks: _Blocks) -> Iterator[tuple[Tensor, Tensor]]:
        """J and the variances of what has no factors, at once."""
        if self.others is not None:
            names = self.others.layout.names
            yield self.others(x)[1], torch.cat([blocks[name][1] for name in names], -1)

    def _halves(
        self, made: Pass, gradients: dict[str, Tensor], blocks: _Blocks
    ) -> Iterator[Tensor]:
        """h √D of each block, [K, B, R, Q], whose products h hᵀ add up to J Σ Jᵀ."""
        for key, g in gradients.items():
            layer, a = self.layers[key], made.inputs[key]
            if layer.bias is not None:
                block, variance = blocks[layer.bias]
                turned = _turned(g.sum(3), block.left) * variance.sqrt()[:, None, None]
                yield turned.transpose(1, 2)
            if layer.weight is None:
                continue
            block, variance = blocks[layer.weight]
            if layer.embeds:
                yield _embedded(a, _turned(g, block.right), variance)
                continue
            spread = variance.reshape(len(variance), layer.outputs, layer.inputs)
            a, g = _turned(a, block.right), _turned(g, block.left)
            if a.shape[2] == 1:
                scale = (a[:, :, 0].square() @ spread.mT).sqrt()  # [K, B, out]
                yield g[:, :, :, 0].transpose(1, 2) * scale[:, :, None]
                continue
            step = max(1, chunk_bytes(a.device) // (2 * self._bytes * g[0, :, :, 0, 0].numel()
                                                     * layer.inputs))  # fmt: skip
            for start in range(0, layer.outputs, step):
                own = slice(start, start + step)
                h = _slopes(g[..., own], a) * spread[:, None, None, own].sqrt()
                yield h.flatten(3)

    def _layer_along(self, layer: Layer, made: Pass, g: Tensor, moved: Params) -> Iterator[Tensor]:
        if layer.weight is not None:
            yield self._weight_along(layer, made, g, moved[layer.weight])
        if layer.bias is not None:
            bias = moved[layer.bias].mT.unsqueeze(1)  # [K, 1, out, S]
            yield (g.sum(3) @ bias).movedim(-1, 1).transpose(2, 3)

    def _weight_along(self, layer: Layer, made: Pass, g: Tensor, delta: Tensor) -> Tensor:
        """Σ_t g_tᵀ Δ_s a_t: [K, S, B, R], with Δ applied first or last, whichever is less work."""
        a, draws = made.inputs[layer.key], delta.shape[1]
        members, outputs, rows, positions = g.shape[:4]
        if layer.embeds:
            place = torch.arange(members, device=a.device)[:, None, None]
            z = delta.transpose(1, 2)[place, a]  # [K, B, T, S, D]
            return _paired(g, z)
        first = positions * draws * (layer.inputs + outputs)
        last = outputs * layer.inputs * (positions + draws)
        if last < first:
            slopes = _slopes(g, a).reshape(members, rows * outputs, -1)
            found = (slopes @ delta.flatten(2).mT).reshape(members, rows, outputs, draws)
            return found.movedim(-1, 1)
        flat = delta.reshape(members, draws * layer.outputs, layer.inputs)
        z = a.flatten(1, 2) @ flat.mT  # [K, B T, S out]
        return _paired(g, z.reshape(members, rows, positions, draws, layer.outputs))


def _turned(rows: Tensor, basis: Tensor | None) -> Tensor:
    """[K, ..., n] in the basis [K, n, n]."""
    if basis is None:
        return rows
    return (rows.flatten(1, -2) @ basis).reshape(rows.shape)


def _slopes(g: Tensor, a: Tensor) -> Tensor:
    """Σ_t g_t a_tᵀ: [K, R, B, T, out] and [K, B, T, in] to [K, B, R, out, in]."""
    members, outputs, rows, positions, out = g.shape
    left = g.movedim(1, 2).transpose(3, 4).reshape(members, rows, outputs * out, positions)
    return (left @ a).reshape(members, rows, outputs, out, -1)


def _paired(g: Tensor, z: Tensor) -> Tensor:
    """Σ_t g_tᵀ z_t: [K, R, B, T, n] and [K, B, T, S, n] to [K, S, B, R]."""
    left = g.transpose(1, 2).flatten(3)  # [K, B, R, T n]
    right = z.movedim(3, 2).flatten(3)  # [K, B, S, T n]
    return (right @ left.mT).transpose(1, 2)


def _embedded(tokens: Tensor, g: Tensor, variance: Tensor) -> Tensor:
    """Positions with one token add up before they are squared: [K, B, R, T n]."""
    members, _, _, positions, size = g.shape
    same = (tokens[..., None] == tokens[..., None, :]).to(g.dtype)  # [K, B, T, T]
    place = torch.arange(members, device=tokens.device)[:, None, None]
    spread = variance.reshape(members, -1, size)[place, tokens]  # [K, B, T, n]
    scale = (spread / same.sum(-1, keepdim=True)).sqrt()
    together = same[:, :, None] @ g.transpose(1, 2) * scale[:, :, None]
    return together.flatten(3) if positions else together.sum(3)
