"""Kronecker-factored curvature (K-FAC; Martens & Grosse 2015, Ritter, Botev & Barber 2018).

    G_W ≈ B ⊗ A,  G_b ≈ B,  B = Σ_i w_i Σ_t g_it g_itᵀ,  A = Σ_i w_i Σ_t a_it a_itᵀ / Σ_i w_i T

for each layer. There are no correlations between layers, nor between a weight and its bias, which
is a separate block. g are gradients through a square root of the curvature in the outputs, with one
pass per output; no labels are drawn. The positions t of a row (pixels, tokens, calls of a shared
layer) count as separate rows ("expand": Grosse & Martens 2016; Eschenhagen et al. 2023), which also
drops the correlations between positions. A of an embedding is the diagonal of token frequencies.
All this is as in laplace-torch. Weights without factors (scales and shifts of norm layers,
parameters outside of layers) have their exact diagonal.

The prior precision is added to the eigenvalues of B ⊗ A, so it must be one number for each weight
tensor: a Gaussian prior. A block is exact where g or a is the same in all rows and positions: in a
linear network with Gaussian noise, of any number of outputs.

`Factored` computes linearised predictions under such a covariance without the Jacobian. In the
eigenbasis U ⊗ V of the block of a weight, with variances D,

    (J Σ Jᵀ)_oo' = Σ_ij D_ij h_oij h_o'ij,    h_o = Σ_t (Uᵀ g_ot)(Vᵀ a_t)ᵀ

With one position, h is an outer product, and the sum over j is taken first: Σ_i g̃_oi g̃_o'i s_i
with s = D (Vᵀa)². The sum is computed layer by layer, in blocks of rows and outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from doxa.data import free_memory
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import layers
from doxa.laplace.curvature import Contrast, Jacobians, Outputs, RowGradients, chunk_bytes
from doxa.laplace.forms import Effective, Form, Scales, Shares, spectral
from doxa.laplace.layers import Layer
from doxa.laplace.passes import Pass, Passes
from doxa.linalg import Kronecker, KroneckerBlock, Structure
from doxa.linalg.layout import Layout, Params
from doxa.method import Run, State
from doxa.model import Model

_Blocks = dict[str, tuple[KroneckerBlock, Tensor]]  # with its variances [K, size]


class Factored(Jacobians):
    """`Jacobians` whose products with a Kronecker covariance are computed layer by layer."""

    def __init__(
        self, model: Model, mean: Tensor, subset: tuple[str, ...], buffers: Params | None = None
    ) -> None:
        super().__init__(model, mean, subset, buffers)
        found, self.rest_names = layers.of(model, subset)
        self.layers = {layer.key: layer for layer in found}
        self._like = next(iter(self.own.values()))

    @cached_property
    def passes(self) -> Passes:
        single = layers.leaves(self.model, self.rest_names)
        found = list(self.layers.values())
        return Passes(self.model, self.own | self.rest, self.buffers, found, single)

    def gradients(self, x: Any, shared: bool = True) -> RowGradients:
        missed = self.layers.keys() - self.passes.keys(x, shared)
        if missed:
            raise MethodError(
                f"structure='kronecker': the weights {sorted(missed)} are used without a "
                "call of their layer (as in attention), or not used at all; use "
                "structure='diagonal', or a subset without them"
            )
        return super().gradients(x, shared)

    def chunks(self, rows: int, draws: int = 0, kept: bool = True) -> Iterator[slice]:
        """Blocks of rows of limited activations and gradients."""
        given, patches, made = self._widths()
        budget = chunk_bytes(self._like.device)
        together = min(self.columns, draws) if draws else self.columns
        row = self._bytes * (3 * (given + made) + patches + 6 * together * made)
        if row > free_memory(self._like.device) // 2:
            raise MemoryBudgetError(
                f"activations of one row ({self.members} members, {given + made} numbers each) and "
                f"their gradients take {row / 2**30:.3g} GiB; use subset='last_layer', or fewer "
                "members"
            )
        step = max(1, budget // row)
        left = self.members * 8 * (draws or self.outputs) * self.rest_layout.size
        step = min(step, max(1, budget // max(1, left)))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    @cached_property
    def rest_layout(self) -> Layout:
        return self.model.layout.select(self.rest_names)

    @property
    def columns(self) -> int:
        """The number of outputs that are differentiated together."""
        made = self._widths()[2]
        most = chunk_bytes(self._like.device) // (6 * self._bytes * made)
        return max(1, min(self.outputs, most))

    @property
    def _bytes(self) -> int:
        return self.members * self._like.dtype.itemsize

    def _widths(self) -> tuple[int, int, int]:
        """The sizes, for one row, of the inputs of the layers, of the patches of the layer with the
        most, and of the outputs."""
        seen: dict[str, int] = {}
        for path, width in self.model.widths:
            seen[path] = seen.get(path, 0) + width
        given = largest = made = 1
        for layer in self.layers.values():
            width = sum(seen.get(path, 0) for path in layer.paths)
            made += width
            patches = width // layer.outputs * (1 if layer.embeds else layer.inputs)
            given += patches // layer.window
            largest = max(largest, patches)
        return given, largest, made

    def rest_rows(self, found: RowGradients, columns: Tensor) -> Tensor:
        """Gradients of vᵀf of every row for the weights without factors, [M, B, R, q]."""
        return found.rows(columns, self.rest_layout.names)

    def variance(
        self, x: Any, covariance: Structure, contrast: Contrast | None = None
    ) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and the variance of each output, or of contrasts."""
        blocks = self.blocks(covariance)
        found = self.gradients(x)
        parts = []
        for columns in self._columns(found.f, contrast):
            g = found.made.gradients(columns)
            each = [h.square().sum(-1) for h in self._halves(found.made, g, blocks)]
            for j, variance in self._dense(found, columns, blocks):
                each.append((j.square() * variance[:, None, None]).sum(-1))
            parts.append(torch.stack(each).sum(0))
        return found.f, torch.cat(parts, -1)

    def spread(self, x: Any, covariance: Structure) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and J Σ Jᵀ, [K, B, O, O]."""
        blocks = self.blocks(covariance)
        found = self.gradients(x)
        made = found.made
        need = self._bytes * made.f.shape[1] * self.outputs * 3 * self._widths()[2]
        if need > free_memory(self._like.device) // 2:
            raise MemoryBudgetError(
                f"the covariance between {self.outputs} outputs takes {need / 2**30:.3g} GiB of "
                "gradients; use what needs variances only, or subset='last_layer'"
            )
        pieces = [made.gradients(columns) for columns in self._columns(made.f)]
        whole = {key: torch.cat([g[key] for g in pieces], 1) for key in pieces[0]}
        total = made.f.new_zeros((*made.f.shape, self.outputs))
        for h in self._halves(made, whole, blocks):
            total += h @ h.mT
        eye = torch.cat(list(self._columns(made.f)), -1)
        for j, variance in self._dense(found, eye, blocks):
            total += (j * variance[:, None, None]) @ j.mT
        return made.f, total

    def along(self, x: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and Jδ for draws δ [K, S, p]: [K, S, B, O]."""
        pushed = self.pushed(x, delta)
        if pushed is not None:
            return pushed
        moved = self.layout.unflatten(delta)
        found = self.gradients(x)
        made = found.made
        rest = self.rest_layout
        own = rest.flatten({n: moved[n] for n in rest.names}) if rest.names else None
        parts = []
        for columns in self._columns(made.f):
            each = [
                part
                for key, g in made.gradients(columns).items()
                for part in self._layer_along(self.layers[key], made, g, moved)
            ]
            if own is not None:
                each.append(torch.einsum("kbop,ksp->ksbo", self.rest_rows(found, columns), own))
            parts.append(torch.stack(each).sum(0))
        return made.f, torch.cat(parts, -1)

    def _columns(self, f: Tensor, contrast: Contrast | None = None) -> Iterator[Tensor]:
        """Unit vectors of every output, [M, B, O, R], some at a time; or contrasts, which are
        symmetric."""
        eye = torch.eye(self.outputs, dtype=f.dtype, device=f.device)
        eye = eye if contrast is None else contrast(eye)
        for own in eye.split(self.columns, 1):
            yield own.expand(*f.shape[:2], -1, -1)

    def blocks(self, covariance: Structure) -> _Blocks:
        assert isinstance(covariance, Kronecker)
        variances = [1.0 / values for values in covariance.precisions()]
        parts = zip(covariance.blocks, variances, strict=True)
        return dict(zip(self.layout.names, parts, strict=True))

    def _dense(
        self, found: RowGradients, columns: Tensor, blocks: _Blocks
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of J and the variances of the weights without factors."""
        if self.rest_names:
            variances = [blocks[name][1] for name in self.rest_layout.names]
            yield self.rest_rows(found, columns), torch.cat(variances, -1)

    def _halves(
        self, made: Pass, gradients: dict[str, Tensor], blocks: _Blocks
    ) -> Iterator[Tensor]:
        """h √D of each block, [K, B, R, Q], whose products h hᵀ add up to J Σ Jᵀ."""
        for key, g in gradients.items():
            layer, a = self.layers[key], made.positions(key)
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
            left, right = block.left, block.right
            spread = variance.reshape(len(variance), layer.outputs, -1)
            if layer.transposed:
                left, right = right, left
                spread = variance.reshape(len(variance), -1, layer.outputs).mT
            a, g = _turned(a, right), _turned(g, left)
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
        a, draws = made.positions(layer.key), delta.shape[1]
        members, outputs, rows, positions = g.shape[:4]
        if layer.transposed and not layer.embeds:
            delta = delta.mT
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
    """Positions of the same token are summed before they are squared: [K, B, R, T n]."""
    members, _, _, positions, size = g.shape
    same = (tokens[..., None] == tokens[..., None, :]).to(g.dtype)  # [K, B, T, T]
    place = torch.arange(members, device=tokens.device)[:, None, None]
    spread = variance.reshape(members, -1, size)[place, tokens]  # [K, B, T, n]
    scale = (spread / same.sum(-1, keepdim=True)).sqrt()
    together = same[:, :, None] @ g.transpose(1, 2) * scale[:, :, None]
    return together.flatten(3) if positions else together.sum(3)


log = logging.getLogger("doxa")

_REST = "curvature.rest"


@dataclass(frozen=True)
class Factors(Form):
    """A and B of each layer, the number of positions, and the diagonal of weights without factors.

    After the pass over all rows, A is replaced by its eigenvectors, and its eigenvalues are stored
    beside it. So is B, unless the noise levels of several outputs can still change it.
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
            log.info(
                "laplace: %s have no Kronecker factors, their diagonal is used", ", ".join(rest)
            )
            state[_REST] = zeros(groups, run.layout.select(rest).size)
        return state

    def source(self, run: Run, state: State) -> Jacobians:
        return Factored(run.net, state["theta"], run.net.subset_names, run.buffers(state))

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        source, part = cast("Factored", source), outputs.part
        found = source.gradients(part.x, part.shared)
        made = found.made
        root = outputs.root(made.f, square=groups > 1)  # [M, B, O, R]
        new = {}
        for key in made.keys:
            layer = source.layers[key]
            if layer.weight is not None:
                counted, size = _gram(layer, made.positions(key), part.weight)
                new[_a(layer)] = state[_a(layer)] + counted
                new[_count(layer)] = state[_count(layer)] + size
        if source.rest_names:
            new[_REST] = state[_REST].clone()
        for start in range(0, root.shape[-1], source.columns):
            own = slice(start, start + source.columns)
            for key, g in made.gradients(root[..., own]).items():
                name = _b(source.layers[key])
                entry = new.setdefault(name, state[name].clone())
                if groups > 1:
                    entry[:, own] += _products_of(g)
                else:
                    entry[:, 0] += _products_of(g.flatten(1, 2)[:, None])[:, 0]
            if source.rest_names:
                rows = source.rest_rows(found, root[..., own]).double()
                squares = rows.square().sum(1)  # [M, R, q]
                if groups > 1:
                    new[_REST][:, own] += squares
                else:
                    new[_REST] += squares.sum(1, keepdim=True)
        new["slope"] = state["slope"] + found.total(outputs.pulls(made.f, groups))
        return new, made.f

    def shares(
        self,
        run: Run,
        state: State,
        source: Jacobians,
        outputs: Outputs,
        covariance: Structure,
        step: Tensor,
    ) -> Shares:
        """In the eigenbasis of B, with the eigenvalues a of A and the variances v of the block, the
        derivative of log |B ⊗ A + δ| is diag(Σ_j a_j v_ij), and the second one, for the square of
        the entry (i, i') of Δ, −Σ_j a_j² v_ij v_i'j. That of uᵀ(B ⊗ A)u is u A uᵀ."""
        source = cast("Factored", source)
        found = source.gradients(outputs.part.x, outputs.part.shared)
        made, root = found.made, outputs.root(found.f)
        blocks, state = source.blocks(covariance), self.complete(run, state)
        steps = source.layout.unflatten(step)
        zeros = torch.zeros(*found.f.shape[:2], 2, dtype=torch.float64, device=found.f.device)
        total = Shares(zeros, zeros, zeros[..., 0], zeros)
        for key, g in made.gradients(root).items():
            layer = source.layers[key]
            basis = _outer(layer, state, None)[1]
            turned = _turned(g.double(), basis).transpose(1, 2)  # [M, B, 2, T, out]
            first = curved = moved = size = torch.zeros((), dtype=torch.float64, device=g.device)
            if layer.bias is not None:
                variance = blocks[layer.bias][1]
                u = (steps[layer.bias][:, None] @ basis).mT  # [M, out, 1]
                first, size, moved = variance, size + 1.0, u @ u.mT
                curved = variance[:, :, None] * variance[:, None]
            if layer.weight is not None:
                a, variance = state[_values(_a(layer))], blocks[layer.weight][1]
                u = steps[layer.weight].flatten(2)
                wide = variance.reshape(u.shape)
                if layer.transposed:
                    u, wide = u.mT, wide.mT
                u = basis.mT @ (u if layer.embeds else u @ state[_a(layer)])
                scaled = a[:, None] * wide  # [M, out, in]
                first, curved = first + scaled.sum(2), curved + scaled @ scaled.mT
                moved, size = moved + (u * a[:, None]) @ u.mT, size + a.sum(1)[:, None, None]
            squares = turned.square().sum(3)  # [M, B, 2, out]
            shift = ((turned @ moved[:, None, None]) * turned).sum((3, 4))
            second = []
            for own in turned.unbind(1):  # a matrix of each row
                both = own.mT @ own  # [M, 2, out, out]
                second.append(((both[:, 0] - both[:, 1]).square() * curved).sum((1, 2)))
            q = (squares * first[:, None, None]).sum(-1)
            total = total.plus(Shares(q, shift, torch.stack(second, 1), squares.sum(-1) * size))
        if source.rest_names:
            names = source.rest_layout.names
            variance = torch.cat([blocks[name][1] for name in names], -1)
            own = torch.cat([steps[name].flatten(1) for name in names], -1)
            each = source.rest_rows(found, root).double().square()
            total = total.plus(Shares.of_diagonal(each, variance, own))
        return total

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
                left = None if layer.embeds else state[_a(layer)]
                left, right = (left, basis) if layer.transposed else (basis, left)
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
            """The part of each group in the eigenvalues of G, [M, g, p], in layout order."""
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
    """Σ w a aᵀ over rows and positions, [M, in, in] (its diagonal for an embedding), and Σ w T,
    [M]."""
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
    """The parts of the groups in the eigenvalues of B at r, [M, g, out], and its eigenvectors."""
    b, known = state[_b(layer)], _values(_b(layer))
    if known in state:
        return state[known], b[:, 0]
    scaled = b if ratio is None else b / ratio[..., None, None]
    _, basis = _eigen(scaled.sum(1))
    parts = (basis[:, None] * (b @ basis[:, None])).sum(-2)  # diag(Uᵀ B_g U)
    return parts.clamp_min(0.0), basis


def _products(layer: Layer, b: Tensor, a: Tensor) -> Tensor:
    """Eigenvalues of the block, flat in the order of the weight."""
    rows, columns = (a, b) if layer.transposed else (b, a)
    return (rows[:, :, None] * columns[:, None, :]).flatten(1)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, with negative round-off set to zero, and eigenvectors, whose largest entries are
    positive."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values.clamp_min(0.0), torch.where(largest < 0, -vectors, vectors)
