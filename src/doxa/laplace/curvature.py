"""Curvature of the log-likelihood in a network's weights, from per-example Jacobians.

    G = Σ_i w_i J_iᵀ C_i J_i,    J_i = ∂f(x_i)/∂θ,    C_i = E_y[−∂² log p(y | f_i)/∂f²]

This is the generalised Gauss–Newton matrix. It is positive semi-definite, and it is the exact
Hessian if f is linear in θ. With a root C = R Rᵀ, G = Σ_i w_i (R_iᵀJ_i)ᵀ(R_iᵀJ_i), and the rows of
RᵀJ are gradients of vᵀf for the columns v of R.

**Jacobians.** `Jacobians` computes J for all members and rows at once, by `torch.func.vmap`, with
one backward pass per output. Sampled curvature needs vᵀJ per row, for a few columns v only.
`RowGradients` computes it from passes with hooks (`passes.py`), with one backward pass per column
for all rows of a batch. If a network does not run under `vmap`, hooks give J too, provided that
they see all uncertain weights. Otherwise J is computed one row at a time. Products Jδ with fewer
directions than outputs are forward-mode derivatives.

**Kinds.** The curvature C of −log p(y | f) in the outputs f (`Outputs`) has three kinds:

ggn: C = E_y[−∂² log p(y | f)/∂f²], the Fisher information, also called type-2 Fisher.
sampled: a mean over k draws, C ≈ (1/k) Σ_d s_d s_dᵀ, with s = Rv, C = RRᵀ and random signs v. It is
unbiased. Draws are independent at every output (every pixel), so no matrix over outputs is needed.
The score of a label ŷ drawn from p(y | f) has the same covariance (Kunstner, Balles & Hennig 2019).
But if the network is almost certain, this score is nearly always close to zero, and rarely large.
Rv has about the same size in every draw (`Likelihood.curvature_draw`).
fisher: C = s sᵀ with s = ∂ log p(y | f)/∂f at the observed y: the empirical Fisher, of rank one.
It is not the curvature: if the model fits a row perfectly, s is zero whatever the curvature is
(Kunstner, Balles & Hennig 2019).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, free_memory
from doxa.errors import MemoryBudgetError
from doxa.laplace import layers
from doxa.laplace.layers import Head
from doxa.likelihoods import Likelihood
from doxa.linalg import Structure
from doxa.linalg.layout import Layout, Params
from doxa.model import Model
from doxa.noise import Noise

if TYPE_CHECKING:
    from doxa.laplace.passes import Passes

log = logging.getLogger("doxa")

_JITTER = 1e-13  # relative to the diagonal, for softmax, which has a direction without curvature
_NUMBERS = 1 << 24  # entries of C per block, over rows and draws
_FLAT = 1e-6  # relative to the largest entry: a smaller last column of a root is round-off


def output_size(output: Any) -> int:
    """The number of outputs per row, over all heads."""
    return sum(math.prod(shape) for shape in output_shapes(output))


def flatten_outputs(f: Any, lead: int) -> Tensor:
    """Reshape outputs [*lead, N, *output], or a tuple with one tensor per head, to [*lead, N, O].
    `lead` is the number of leading axes."""
    heads = list(f) if isinstance(f, list | tuple) else [f]
    flat = [head.reshape(*head.shape[: lead + 1], -1) for head in heads]
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def unflatten_outputs(flat: Tensor, output: Any) -> Any:
    """Reshape flat outputs [..., O] to the network's shape, a tuple if it has several heads."""
    shapes = output_shapes(output)
    parts = flat.split([math.prod(shape) for shape in shapes], -1)
    heads = tuple(
        part.reshape(flat.shape[:-1] + shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return heads if _has_heads(output) else heads[0]


def _has_heads(output: Any) -> bool:
    return bool(output) and isinstance(output[0], tuple)


def output_shapes(output: Any) -> list[tuple[int, ...]]:
    """The shapes of one row's outputs, one per head."""
    return [tuple(shape) for shape in output] if _has_heads(output) else [tuple(output)]


class Draws(NamedTuple):
    """The random draws of sampled curvature. The noise of a row depends on its place among all
    rows, not on the batch.

    Parameters
    ----------
    noise : Noise
        The random numbers.
    number : int
        k, the number of draws per row.
    first : int
        The number of rows before the first row of this batch.
    """

    noise: Noise
    number: int
    first: int = 0

    def after(self, rows: int) -> Draws:
        return self._replace(first=self.first + rows)

    def signs(self, rows: int, outputs: int, draw: int) -> Tensor:
        """Random signs ±1 for draw number `draw`, [M, rows, outputs]."""
        device = self.noise.device
        steps = torch.arange(self.first, self.first + rows, device=device, dtype=torch.int32)
        return self.noise.signs((outputs,), steps, draw).transpose(0, 1)


class Outputs:
    """The likelihood of some rows as a function of flat outputs [M, B, O].

    Parameters
    ----------
    likelihood : Likelihood
        The likelihood.
    theta : dict of str to Tensor
        Its parameters.
    part : Batch
        The rows, with targets and weights.
    shape : tuple
        The output shape of one row.
    kind : str
        "ggn", "fisher" or "sampled".
    draws : Draws, optional
        The draws of sampled curvature.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        theta: Params,
        part: Batch,
        shape: Any,
        kind: str,
        draws: Draws | None = None,
    ) -> None:
        self.likelihood, self.theta, self.part, self.kind = likelihood, theta, part, kind
        self.shape, self.draws = shape, draws

    def times(self, draws: int) -> Outputs:
        """The same rows, repeated for `draws` draws of the outputs of every member."""
        part = self.part.expand_particles(draws)
        return Outputs(self.likelihood, self.theta, part, self.shape, self.kind)

    def shaped(self, flat: Tensor) -> Any:
        return unflatten_outputs(flat, self.shape)

    def log_prob(self, flat: Tensor) -> Tensor:
        """log p(y | f) per row, [M, B]."""
        return self.likelihood.log_prob(self.shaped(flat), self.part.y, self.theta, 1)

    def matrix(self, flat: Tensor) -> Tensor:
        """C, [M, B, O, O]."""
        if self.kind == "fisher":
            score = self.score(flat)
            return score[..., None] * score[..., None, :]
        return self.likelihood.curvature(self.shaped(flat), self.theta, 1, self.part.y)

    def root(self, flat: Tensor, square: bool = False) -> Tensor:
        """R with w C = R Rᵀ, [M, B, O, R], where w is the weight of the row. It is in float64, or
        in the type of f if C is sampled. Without `square`, a last column that is zero up to
        rounding is dropped."""
        if self.draws is not None:
            return self._drawn(flat)
        root = self._root(flat.double())
        size = float(root.abs().max())
        if not square and root.shape[-1] > 1 and float(root[..., -1].abs().max()) < _FLAT * size:
            root = root[..., :-1]  # saves one backward pass
        if self.part.weight is not None:
            root = root * self.part.weight.double().sqrt()[..., None, None]
        return root

    def _root(self, flat: Tensor) -> Tensor:
        if self.kind == "fisher":
            return self.score(flat)[..., None]
        c = self.matrix(flat).double()
        diagonal = c.diagonal(dim1=-2, dim2=-1)
        lifted = c + torch.diag_embed(_JITTER * diagonal + torch.finfo(c.dtype).tiny)
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(lifted)
        if failed.any():
            values, vectors = torch.linalg.eigh(c)
            return vectors * values.clamp_min(0.0).sqrt()[..., None, :]
        return factor

    def _drawn(self, flat: Tensor) -> Tensor:
        """The root of sampled curvature: one column per draw, divided by √k."""
        assert self.draws is not None
        count, size = self.draws.number, flat.shape[-1]
        columns = []
        for d in range(count):
            signs = self.shaped(self.draws.signs(flat.shape[1], size, d).to(flat.dtype))
            f = self.shaped(self._at(flat, d))
            columns.append(self.likelihood.curvature_draw(f, self.theta, signs, 1, self.part.y))
        root = torch.stack(columns, -1) * count**-0.5
        if self.part.weight is not None:
            root = root * self.part.weight.to(root.dtype).sqrt()[..., None, None]
        return root

    def _at(self, flat: Tensor, draw: int) -> Tensor:
        """The outputs at which draw number `draw` is made."""
        return flat

    def pulls(self, flat: Tensor, groups: int) -> Tensor:
        """w ∂ log p(y | f)/∂f with one column per group of outputs, [M, B, O, g], in float64."""
        score = self.score(flat).double()
        if self.part.weight is not None:
            score = score * self.part.weight.double()[..., None]
        return score[..., None] if groups == 1 else torch.diag_embed(score)

    def score(self, flat: Tensor) -> Tensor:
        """∂ log p(y | f)/∂f, [M, B, O]."""
        with torch.enable_grad():
            leaf = flat.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_prob(leaf).sum(), leaf)
        return slope

    def squares(self, flat: Tensor, groups: int) -> Tensor:
        """Σ w (y − f)² / σ² per group of outputs, [M, g]. The likelihood must be Gaussian."""
        log_noise = self.theta["log_noise"].double()
        each = flatten_outputs((self.part.y - self.shaped(flat)).double().square(), 1)  # [M, B, O]
        if self.part.weight is not None:
            each = each * self.part.weight.double()[..., None]
        squares = each.sum(1) if groups > 1 else each.sum((1, 2)).unsqueeze(1)
        return squares * (-2.0 * log_noise.reshape(len(flat), groups)).exp()


class Averaged(Outputs):
    """`Outputs` whose curvature is the mean of that at f + d, over draws d [M, S, B, O]."""

    def __init__(self, own: Outputs, away: Tensor) -> None:
        super().__init__(own.likelihood, own.theta, own.part, own.shape, own.kind, own.draws)
        self.away = away

    def _at(self, flat: Tensor, draw: int) -> Tensor:
        """f + d, with a different d for each row and draw."""
        assert self.draws is not None
        draws, rows = self.away.shape[1:3]
        step = max(1, draws // self.draws.number)
        index = torch.arange(rows, device=flat.device) + self.draws.first + draw * step
        own = index.remainder(draws)[None, None, :, None].expand(len(flat), 1, -1, flat.shape[-1])
        return flat + self.away.gather(1, own)[:, 0].to(flat.dtype)

    def matrix(self, flat: Tensor) -> Tensor:
        members, draws, rows, size = self.away.shape
        together = max(1, _NUMBERS // (members * rows * size**2))
        total = flat.new_zeros(members, rows, size, size)
        for some in self.away.split(together, 1):
            count = some.shape[1]
            drawn = (flat.unsqueeze(1) + some.to(flat.dtype)).flatten(0, 1)
            each = self.times(count).matrix(drawn)
            total += each.unflatten(0, (members, count)).sum(1)
        return total / draws


@dataclass
class _Known:
    plans: dict[Any, Any] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


_KNOWN: WeakKeyDictionary[Model, _Known] = WeakKeyDictionary()


def known(model: Model) -> _Known:
    """The cached facts about a network: `plans`, how rows of each shape are run, and `refused`, the
    ways of computing that it does not support."""
    return _KNOWN.setdefault(model, _Known())


def refused(
    model: Model, what: str, error: Exception, cost: str, level: int = logging.WARNING
) -> None:
    """Log, once per network and per `what`, that it does not run under vmap.

    Parameters
    ----------
    model : Model
        The network.
    what : str
        What was tried. It is added to the set `refused` of the network.
    error : Exception
        The error that vmap raised.
    cost : str
        What is done instead, as text.
    level : int
        The level of the log message.
    """
    seen = known(model).refused
    if what not in seen:
        seen.add(what)
        first = (str(error).splitlines() or [""])[0][:120]
        log.log(level, "curvature: the network does not run under vmap (%s); %s", first, cost)


Contrast = Callable[[Tensor], Tensor]  # a linear map of outputs, [..., O, n] to the same, in place

_CHUNK_BYTES = {"cpu": 64 << 20}  # bytes of the Jacobian per block; also of other devices


def chunk_bytes(device: torch.device) -> int:
    """The largest number of bytes per block of rows: an eighth of a GPU's memory, or a constant.
    Results do not depend on the memory that is free."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 8
    return _CHUNK_BYTES["cpu"]


class Jacobians:
    """Outputs and Jacobians of all members at given rows.

    Parameters
    ----------
    model : Model
        The network.
    mean : Tensor of shape [M, P]
        Flat parameters.
    subset : tuple of str
        The names of the parameters in J. The others are constants.
    buffers : dict of str to Tensor, optional
        The buffers of each member. BatchNorm uses its running statistics.
    """

    def __init__(
        self, model: Model, mean: Tensor, subset: tuple[str, ...], buffers: Params | None = None
    ) -> None:
        params = model.layout.unflatten(mean.detach())
        weights = {k: v for k, v in params.items() if not k.startswith("likelihood.")}
        self.model = model
        self.members = mean.shape[0]
        self.layout: Layout = model.layout.select(subset)
        self.own = {k: v for k, v in weights.items() if k in self.layout.slices}
        self.rest = {k: v for k, v in weights.items() if k not in self.layout.slices}
        self.buffers = dict(buffers or {})
        self.outputs = output_size(model.output)

    @property
    def rowwise(self) -> bool:
        """Whether rows are computed one at a time."""
        return "rows" in known(self.model).refused

    def chunks(self, rows: int, draws: int = 0, kept: bool = True) -> Iterator[slice]:
        """Blocks of rows of limited memory.

        Parameters
        ----------
        rows : int
            The number of rows.
        draws : int
            The number of gradients per row. 0: the whole Jacobian.
        kept : bool
            Whether the gradients per row are kept, and not only summed. Used with `draws` only.
        """
        like = next(iter(self.own.values()))
        if draws:
            step = self._rows_at_once(like, draws, kept)
            for start in range(0, rows, step):
                yield slice(start, min(start + step, rows))
            return
        row = self.members * self.outputs * self.layout.size * 8
        if row > free_memory(like.device) // 4:
            raise MemoryBudgetError(
                f"the Jacobian of one row ({self.members} members × {self.outputs} outputs × "
                f"{self.layout.size} weights) takes {row / 2**30:.3g} GiB; use "
                "subset='last_layer', fewer members, or another method"
            )
        step = max(1, chunk_bytes(like.device) // row)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def chunks_along(self, rows: int, directions: int) -> Iterator[slice]:
        """Blocks of rows for `along`. If J is not formed, their size is limited by activations."""
        if directions < self.outputs and "forward" not in known(self.model).refused:
            return self.chunks(rows, 1, False)
        return self.chunks(rows)

    def _rows_at_once(self, like: Tensor, draws: int, kept: bool) -> int:
        made = sum(width for _, width in self.model.widths)
        row = self.members * like.element_size() * (3 * made + 2 * draws * made)
        row += self.members * 8 * draws * self.layout.size * kept
        return max(1, chunk_bytes(like.device) // row)

    @cached_property
    def passes(self) -> Passes:
        """Passes with hooks on all modules whose gradients per row can be computed."""
        from doxa.laplace.passes import Passes  # imported here: it imports this module

        found, rest = layers.of(self.model, self.layout.names, strict=False)
        single = layers.leaves(self.model, rest)
        return Passes(self.model, self.own | self.rest, self.buffers, found, single)

    def left(self, x: Any, shared: bool = True) -> list[str]:
        """The names of weights that hooks do not see, in the order of the layout."""
        seen = self.passes.names(x, shared)
        return [name for name in self.layout.names if name not in seen]

    def gradients(self, x: Any, shared: bool = True) -> RowGradients:
        """Run a pass of some rows, from which gradients per row are computed for any columns."""
        return RowGradients(self, x, shared)

    def member(self, k: int) -> Jacobians:
        """The Jacobians of member k alone."""
        own = copy.copy(self)
        own.members = 1
        pick = lambda tree: {name: v[k : k + 1] for name, v in tree.items()}  # noqa: E731
        own.own, own.rest, own.buffers = pick(self.own), pick(self.rest), pick(self.buffers)
        return own

    def __call__(self, x: Any, shared: bool = True) -> tuple[Tensor, Tensor]:
        """f [M, B, O] and J [M, B, O, p]. With `shared=False`, x has a leading member axis."""
        if "jacobian" not in known(self.model).refused:
            try:
                return self._vectorised(x, shared)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                self._refused(error, x, shared)
        if self.rowwise:
            return self._one_by_one(x, shared)
        made = self.gradients(x, shared)
        eye = torch.eye(self.outputs, dtype=made.f.dtype, device=made.f.device)
        return made.f, made.rows(eye.expand(*made.f.shape[:2], -1, -1))

    def _refused(self, error: Exception, x: Any, shared: bool) -> None:
        """Record that J cannot be computed under vmap. Rows then run together if hooks see all
        weights, and otherwise one at a time."""
        count = _first(x).shape[0 if shared else 1]
        plan = self.passes.plan(x, shared)
        if (plan.mode == "rows" and count > 1) or self.left(x, shared):
            passes = self.members * count
            cost = f"one row at a time: {passes} passes and {passes * self.outputs} gradients for "
            known(self.model).refused.add("rows")
            refused(self.model, "jacobian", error, f"{cost}{count} rows")
        else:
            cost = f"hooks on its layers instead, {self.outputs} backward passes per batch"
            refused(self.model, "jacobian", error, cost, logging.INFO)

    def variance(
        self, x: Any, covariance: Structure, contrast: Contrast | None = None
    ) -> tuple[Tensor, Tensor]:
        """f [K, B, O], and the variance of each output of f + Jδ with δ ~ N(0, Σ). With `contrast`,
        the variance of the contrasts of these outputs."""
        f, j = self(x)
        return f, covariance.quad(j if contrast is None else contrast(j))

    def spread(self, x: Any, covariance: Structure) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and J Σ Jᵀ, [K, B, O, O]."""
        f, j = self(x)
        return f, covariance.outer(j)

    def along(self, x: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [K, B, O], and Jδ [K, S, B, O] for draws δ [K, S, p]."""
        pushed = self.pushed(x, delta)
        if pushed is not None:
            return pushed
        f, j = self(x)
        return f, torch.einsum("kbop,ksp->ksbo", j, delta)

    def pushed(self, x: Any, delta: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `along`, but without J: from the features of a last layer, or by one forward-mode
        derivative per direction. None if J is cheaper, because there are at least as many
        directions as outputs, or if an operation has no forward-mode derivative."""
        seen = known(self.model).refused
        few = delta.shape[1] < self.outputs
        head = Head.of(self, x) if few or "jacobian" in seen else None
        if head is not None:
            return head.f, head.along(delta)
        if not few or "forward" in seen:
            return None
        moved = self.layout.unflatten(delta.to(next(iter(self.own.values())).dtype))
        moved |= _without_padding(self.model, moved)
        values, pushed = [], []
        try:
            for k in range(self.members):
                own, rest, buffers = (_pick(t, k) for t in (self.own, self.rest, self.buffers))
                each = []
                for s in range(delta.shape[1]):
                    at = outputs_of(self.model, rest, buffers, x)
                    found = jvp(at, (own,), ({n: v[k, s] for n, v in moved.items()},))
                    each.append(found[1].detach())
                values.append(found[0].detach())
                pushed.append(torch.stack(each))
        except (RuntimeError, NotImplementedError):
            seen.add("forward")
            next(self.chunks(1))  # raises an error where J of one row is too large
            return None
        return torch.stack(values), torch.stack(pushed)

    def pulled(self, names: list[str], x: Any, shared: bool, columns: Tensor) -> Params:
        """Gradients of vᵀf per row for the named weights, {name: [M, R, B, size]}, for columns v of
        [M, B, O, R]. They are computed through the whole network, without hooks."""
        own = {name: self.own[name] for name in names}
        rest = self.rest | {k: v for k, v in self.own.items() if k not in own}

        def one(own: Params, rest: Params, buffers: Params, x: Any, v: Tensor) -> Params:
            made = vjp(lambda p: self._row(p, rest, buffers, x)[0], own)
            pull, columns = made[1], v.to(made[0].dtype)
            slopes: Params = vmap(lambda column: pull(column)[0], in_dims=1)(columns)
            return slopes  # [R, *shape]

        if "rows" not in known(self.model).refused:
            try:
                rows = vmap(one, in_dims=(None, None, None, 0, 0), randomness="error")
                place = (0, 0, 0, None if shared else 0, 0)
                found = vmap(rows, place, randomness="error")(own, rest, self.buffers, x, columns)
                return {k: v.detach().flatten(3).transpose(1, 2) for k, v in found.items()}
            except (RuntimeError, NotImplementedError, ValueError) as error:
                count = columns.shape[0] * columns.shape[1]
                cost = f"one row at a time for {', '.join(names)}: {count} passes and "
                refused(self.model, "rows", error, f"{cost}{count * columns.shape[3]} gradients")
        members, count = columns.shape[:2]
        each: dict[str, list[Tensor]] = {name: [] for name in names}
        for m in range(members):
            leaf = {k: v.clone().requires_grad_() for k, v in _pick(own, m).items()}
            for b in range(count):
                row = tree_map(lambda t, m=m, b=b: t[b] if shared else t[m, b], x)
                with torch.enable_grad():
                    f, _ = self._row(leaf, _pick(rest, m), _pick(self.buffers, m), row)
                    values = (f[:, None] * columns[m, b].to(f.dtype)).sum(0)  # [R]
                    layout = self.layout.select(names)
                    slopes = torch.stack([_slope(value, leaf, layout) for value in values])
                for name in names:
                    each[name].append(slopes[:, layout.slices[name]])
        stacked = {k: torch.stack(v).unflatten(0, (members, count)) for k, v in each.items()}
        return {k: v.transpose(1, 2) for k, v in stacked.items()}

    def _row(self, own: Params, rest: Params, buffers: Params, x: Any) -> tuple[Tensor, Tensor]:
        """f [O] of one member at one row, twice: jacrev differentiates the first and returns the
        second."""
        row = tree_map(lambda t: t.unsqueeze(0), x)
        f = flatten_outputs(self.model.forward({**rest, **own}, row, buffers=buffers), 0)[0]
        return f, f

    def _vectorised(self, x: Any, shared: bool) -> tuple[Tensor, Tensor]:
        one = jacrev(self._row, has_aux=True)
        rows = vmap(one, in_dims=(None, None, None, 0), randomness="error")
        members = vmap(rows, in_dims=(0, 0, 0, None if shared else 0), randomness="error")
        jacobian, f = members(self.own, self.rest, self.buffers, x)
        parts = [jacobian[name].flatten(3) for name in self.layout.names]  # [M, B, O, size]
        return f.detach(), torch.cat(parts, -1).detach()

    def _one_by_one(self, x: Any, shared: bool) -> tuple[Tensor, Tensor]:
        values, slopes = [], []
        for m in range(self.members):
            pick = lambda tree, m=m: {k: v[m] for k, v in tree.items()}  # noqa: E731
            own = {k: v.clone().requires_grad_() for k, v in pick(self.own).items()}
            rows = x if shared else tree_map(lambda t, m=m: t[m], x)
            count = _first(rows).shape[0]
            for b in range(count):
                at = tree_map(lambda t, b=b: t[b], rows)
                with torch.enable_grad():
                    f, _ = self._row(own, pick(self.rest), pick(self.buffers), at)
                    slopes.append(torch.stack([_slope(value, own, self.layout) for value in f]))
                values.append(f.detach())
        shape = (self.members, len(values) // self.members, self.outputs)
        return (
            torch.stack(values).reshape(shape),
            torch.stack(slopes).reshape(*shape, self.layout.size),
        )


class RowGradients:
    """A pass of some rows: f [M, B, O], and the gradients of vᵀf per row for columns v of
    [M, B, O, R]."""

    def __init__(self, source: Jacobians, x: Any, shared: bool) -> None:
        self.source, self.x, self.shared = source, x, shared
        self.made = source.passes(x, shared)
        self.f = self.made.f
        self.names = source.left(x, shared)

    def rows(self, columns: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """The gradients per row, [M, B, R, p]. With `names`, only those of these weights, none of
        which may have Kronecker factors."""
        found = dict(self.made.slopes(columns, names is None)) | self._left(columns)
        wanted = self.source.layout.names if names is None else names
        return torch.cat([found[name] for name in wanted], -1).transpose(1, 2)

    def total(self, columns: Tensor) -> Tensor:
        """The gradients summed over rows, [M, R, p], in float64."""
        found = dict(self.made.totals(columns))
        found |= {name: slope.sum(2).double() for name, slope in self._left(columns).items()}
        return torch.cat([found[name] for name in self.source.layout.names], -1)

    def squares(self, columns: Tensor) -> Tensor:
        """The squared gradients summed over rows and columns, [M, p], in float64."""
        most = chunk_bytes(columns.device) // 8
        found = dict(self.made.squares(columns, most))
        left = self._left(columns)
        found |= {name: slope.square().sum((1, 2)).double() for name, slope in left.items()}
        return torch.cat([found[name] for name in self.source.layout.names], -1)

    def _left(self, columns: Tensor) -> Params:
        return self.source.pulled(self.names, self.x, self.shared, columns) if self.names else {}


def outputs_of(model: Model, rest: Params, buffers: Params, x: Any) -> Callable[[Params], Tensor]:
    """f [B, O] of one member as a function of its uncertain weights."""
    return lambda own: flatten_outputs(model.forward({**rest, **own}, x, buffers=buffers), 0)


def _without_padding(model: Model, moved: Params) -> Params:
    """The directions of embeddings, set to zero at the padding token. Backward passes give its
    vector no gradient, but forward-mode derivatives do not exclude it."""
    names = {id(p): name for name, p in model.net.named_parameters()}
    new: Params = {}
    for module in model.net.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            name = names.get(id(module.weight), "")
            if name in moved:
                new[name] = moved[name].clone()
                new[name][..., module.padding_idx, :] = 0.0
    return new


def _pick(tree: Params, k: int) -> Params:
    return {name: value[k] for name, value in tree.items()}


def _slope(value: Tensor, own: Mapping[str, Tensor], layout: Layout) -> Tensor:
    grads = torch.autograd.grad(value, list(own.values()), retain_graph=True, allow_unused=True)
    named = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(own.items(), grads, strict=True)
    }
    return layout.flatten(named)


def _first(tree: Any) -> Tensor:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def gauss_newton(
    jacobian: Tensor, curvature: Tensor, weight: Tensor | None, diagonal: bool
) -> Tensor:
    """Σ_b w_b J_bᵀ C_b J_b over the rows of a batch.

    The product is computed in float64 for any dtype of the network. Rounded Jacobians still give a
    positive semi-definite matrix, but rounded products may not.

    Parameters
    ----------
    jacobian : Tensor of shape [M, B, O, p]
        J.
    curvature : Tensor of shape [M, B, O, O]
        C.
    weight : Tensor or None
        The weights w of the rows.
    diagonal : bool
        Whether only the diagonal is computed.

    Returns
    -------
    Tensor of shape [M, p, p] or [M, p]
        The matrix or its diagonal, in float64.
    """
    j = jacobian.double()  # [M, B, O, p]
    cj = curvature.double() @ j
    if weight is not None:
        cj = cj * weight.double()[..., None, None]
    if diagonal:
        return (cj * j).sum((1, 2))
    return cj.flatten(1, 2).mT @ j.flatten(1, 2)
