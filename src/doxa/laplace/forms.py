"""Structures in which curvature is summed (`Form`), and the evidence that is computed from them.

A form holds no tensors. Sums are entries of the state with leading axis M: names that begin with
"curvature", and "slope", the gradient of the log-likelihood. A group g is a group of outputs with a
separate noise level; r divides the curvature and slope of a group. `Sums` makes one pass over the
data. For each member it sums the curvature of the uncertain weights, the log-likelihood at θ*, and
the squared residuals of each group of outputs with a learned noise level.

`Scales`: factors τ on the precision of a Gaussian prior, one for all uncertain weights or one per
tensor. "tau" in the state is [M, K], with K = 1 for a shared factor. With a subnetwork, prior and
posterior are over its weights only.

`reestimate`: type-II maximum likelihood on the evidence of a Gaussian at the maximum (MacKay,
1992).

    log p(D) ≈ log p(D | θ*) + log p(θ*) + (p/2) log 2π − ½ log |H|,    H = Σ_g G_g / r_g + τ Λ

r_g scales the noise variance of a group of outputs, τ the prior's precision Λ, with a factor τ_k
for each group k of weights. At the maximum

    r_g = χ²_g / (n_g − γ_g),                     γ_g = tr(H⁻¹ G_g / r_g)
    τ_k = γ_k / [(θ* − m)ᵀ Λ (θ* − m)]_k,         γ_k = p_k − tr[H⁻¹ τΛ]_kk

with γ, by outputs or by weights, the number of well-determined parameters and χ²_g the sum of
squared residuals in units of the noise. Learned noise is not part of the Hessian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows
from doxa.laplace.curvature import (
    Averaged,
    Draws,
    Jacobians,
    Outputs,
    RowGradients,
    gauss_newton,
    output_size,
)
from doxa.linalg import BlockDiagonal, Dense, Diagonal, Embedded, Structure
from doxa.linalg.layout import Layout
from doxa.method import Run, State
from doxa.method.row_sums import added as added_rows
from doxa.method.run import scaled_priors
from doxa.priors import Prior

CHOSEN = "subnetwork"  # which of the uncertain weights have a matrix, [M, s], in the state


@dataclass(frozen=True, eq=False)
class Scales:
    """The assignment of factors τ to p weights.

    sizes: the sizes of the tensors, in the order of the weights; None: one factor for all.
    chosen: the indices of the weights of a subnetwork, [M, s]; None: all weights.
    """

    sizes: tuple[int, ...] | None = None
    chosen: Tensor | None = None

    @classmethod
    def of(cls, run: Run, state: State) -> Scales:
        """The assignment for a state."""
        kind = "shared" if state["tau"].shape[1] == 1 else "layer"
        return cls(_sizes(run, kind), state.get(CHOSEN))

    def each(self, tau: Tensor) -> Tensor:
        """τ of every weight, [M, p], or [M, 1] for a shared factor."""
        if self.sizes is None:
            return tau
        wide = self._wide(tau)
        return wide if self.chosen is None else wide.gather(1, self.chosen)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of [M, p] over the weights of each factor, [M, K]."""
        if self.sizes is None:
            return values.sum(1, keepdim=True)
        if self.chosen is None:
            return torch.stack([part.sum(1) for part in values.split(self.sizes, 1)], 1)
        count = len(self.sizes)
        own = self._wide(torch.arange(count, device=values.device)[None])
        own = own.expand(len(values), -1).gather(1, self.chosen)
        return torch.stack([torch.where(own == k, values, 0.0).sum(1) for k in range(count)], 1)

    def _wide(self, tau: Tensor) -> Tensor:
        assert self.sizes is not None
        return torch.cat(
            [own.expand(-1, n) for own, n in zip(tau.split(1, 1), self.sizes, strict=True)], 1
        )


def initial_scales(run: Run, kind: str) -> Tensor:
    """τ = 1, [M, K]; kind: "shared" or "layer"."""
    sizes = _sizes(run, kind)
    count = 1 if sizes is None else len(sizes)
    return torch.ones(run.size, count, device=run.device, dtype=torch.float64)


def _sizes(run: Run, kind: str) -> tuple[int, ...] | None:
    return None if kind == "shared" else tuple(run.layout.select(run.net.subset_names).sizes)


def scale_names(run: Run) -> list[str]:
    """The tensors of the subset, in the order of their factors."""
    return [name for name in run.layout.names if name in set(run.net.subset_names)]


def prior_curvature(run: Run, state: State) -> tuple[Tensor, Tensor]:
    """The curvature Λ of the given prior on the subset, [M, p], and (θ − m)ᵀ Λ (θ − m) over the
    weights of each factor, [M, K]."""
    index, theta, scales = run.subset_index, state["theta"], Scales.of(run, state)
    prior = run.prior.curvature(theta).expand_as(theta)[:, index].double()
    away = (theta - run.prior.mean).double()[:, index]
    if scales.chosen is not None:
        prior, away = prior.gather(1, scales.chosen), away.gather(1, scales.chosen)
    return prior, scales.sums(prior * away.square())


def priors_used(run: Run, tau: Tensor) -> list[Prior | dict[str, Prior]]:
    """The Gaussian prior of each member, with its precision times τ [M, K] on the subset; weights
    outside the subset are points and keep the given prior."""
    each = tau.rsqrt().expand(-1, len(scale_names(run)))
    return scaled_priors(run, {name: each[:, k] for k, name in enumerate(scale_names(run))})


def reported_scales(run: Run, tau: Tensor) -> list[float] | list[dict[str, float]]:
    """The prior scale of each member relative to the given one; per tensor where they differ."""
    if tau.shape[1] == 1:
        return [float(own) for own in tau[:, 0].rsqrt()]
    return [dict(zip(scale_names(run), own, strict=True)) for own in tau.rsqrt().tolist()]


def prior_precision(run: Run, state: State) -> Tensor:
    """τΛ, [M, p]."""
    prior, _ = prior_curvature(run, state)
    return Scales.of(run, state).each(state["tau"]) * prior


BOUNDS = (1e-8, 1e8)  # of the factors on noise variance and prior precision
_TINY = 1e-2  # n − γ stays above this share of n, so that noise is not zero if weights exceed rows


def reestimate(
    effective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    rounds: int,
    chi: Tensor,
    count: Tensor,
    quad: Tensor,
    *,
    noise: bool,
    scale: bool,
) -> tuple[Tensor, Tensor]:
    """r [M, g] and τ [M, K] at the fixed point, for given θ*.

    Parameters
    ----------
    effective : callable
        γ of outputs [M, g] and of weights [M, K], as a function of r and τ.
    rounds : int
        The largest number of iterations.
    chi, count : Tensor
        χ² and n, [M, g].
    quad : Tensor
        (θ* − m)ᵀ Λ (θ* − m), [M, K].
    noise, scale : bool
        Whether r and τ are estimated; otherwise they stay 1.
    """
    ratio, tau = torch.ones_like(chi), torch.ones_like(quad)
    for _ in range(rounds):
        gamma, by_weights = effective(ratio, tau)
        new_ratio, new_tau = ratio, tau
        if noise:
            free = torch.maximum(count - gamma, _TINY * count)
            new_ratio = (chi / free).clamp(*BOUNDS)
        if scale:
            new_tau = (by_weights / quad.clamp_min(1e-300)).clamp(*BOUNDS)
        moved = max(float((new_ratio / ratio).log().abs().max()),
                    float((new_tau / tau).log().abs().max()))  # fmt: skip
        ratio, tau = new_ratio, new_tau
        if moved < 1e-13:
            break
    return ratio, tau


NOISE = "likelihood.log_noise"
ROUNDS = 2000  # fixed-point iterations, where they are cheap


def learns_noise(run: Run) -> bool:
    """Whether the run has a learned Gaussian noise level, re-estimated outside the Hessian."""
    return run.likelihood.learns_noise and NOISE in run.layout.slices


def noise_groups(run: Run) -> int:
    """The number of groups of outputs with separate noise levels."""
    return run.layout.select([NOISE]).size if learns_noise(run) else 1


@dataclass(frozen=True)
class Sums:
    """The sums of a pass: curvature of one kind ("ggn", "sampled", "fisher", "hessian") in one
    form; `draws` are those of a row, for sampled curvature."""

    form: Form
    kind: str = "ggn"
    draws: int = 0

    def learns_noise(self, run: Run) -> bool:
        """Whether noise is re-estimated. The empirical Fisher does not scale with the noise as G
        does, and a Hessian does not separate groups of outputs."""
        kinds = ("ggn", "sampled", "hessian") if noise_groups(run) == 1 else ("ggn",)
        return learns_noise(run) and self.kind in kinds

    def groups(self, run: Run) -> int:
        return noise_groups(run) if self.learns_noise(run) else 1

    def empty(self, run: Run) -> State:
        groups = self.groups(run)
        zeros = lambda *s: torch.zeros(run.size, *s, device=run.device, dtype=torch.float64)  # noqa: E731
        slope = zeros(groups, len(run.subset_index))
        new = self.form.empty(run, groups) | {"chi": zeros(groups), "fit": zeros(), "slope": slope}
        return new | ({"seen": zeros()} if self.draws else {})  # the number of rows

    @property
    def averages(self) -> bool:
        """Whether the curvature can be averaged over several outputs."""
        return self.kind in ("ggn", "sampled") and self.form.averages

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        """The state with the curvature of all rows averaged over outputs f + d, d [M, S, B, O]."""
        bare = {k: v for k, v in state.items() if not k.startswith("curvature")}
        batch = Pass(run.rows, run.split_of).batch(0)
        made = self.add(run, bare | self.empty(run), batch, away)
        sums = {k: v for k, v in made.items() if k.startswith("curvature")}
        return self.form.complete(run, bare | sums | self.form.averaged(run, bare, away))

    def add(self, run: Run, state: State, batch: Batch, away: Tensor | None = None) -> State:
        """The state with the curvature, squared residuals and log-likelihood of some rows added.
        With d [M, S, B, O], the curvature is averaged over outputs f + d."""
        if away is not None or not self.form.adds:
            return self._add(run, state, batch, away)

        def step(state: State, where: slice, rows: Batch) -> State:
            if self.draws:  # the draws of a row depend on its number
                state = {**state, "seen": seen + where.start}
            return self._add(run, state, rows)

        seen = state.get("seen", run.n.new_zeros(()))
        names = [name for name in self.empty(run) if name != "seen"]
        new = added_rows(run, batch, state, names, step)
        return {**new, "seen": seen + batch_rows(batch)} if self.draws else new

    def _add(self, run: Run, state: State, batch: Batch, away: Tensor | None = None) -> State:
        new = dict(state)
        theta = run.likelihood_theta(state["theta"])
        groups = self.groups(run)
        source = self.form.source(run, state)
        draws = None
        if self.draws:
            draws = Draws(run.noise("curvature"), self.draws, int(state["seen"][0]))
            new["seen"] = state["seen"] + batch_rows(batch)
        for rows in source.chunks(batch_rows(batch), self.draws, self.form.kept):
            part = some_rows(batch, rows)
            own = None if draws is None else draws.after(rows.start)
            outputs = Outputs(run.likelihood, theta, part, run.net.output, self.kind, own)
            outputs = outputs if away is None else Averaged(outputs, away[:, :, rows])
            sums, flat = self.form.add(source, new, outputs, groups)
            fit = outputs.log_prob(flat).double()
            if part.weight is not None:
                fit = fit * part.weight
            new |= sums
            new["fit"] = new["fit"] + fit.sum(1)
            if self.learns_noise(run):
                new["chi"] = new["chi"] + outputs.squares(flat, groups)
        return new

    def settle(self, run: Run, state: State, scale: bool, most: int = ROUNDS) -> State:
        """The state with learned noise, and the prior scale if `scale`, at the type-II maximum for
        θ*, or after the largest number of rounds."""
        state = self.form.complete(run, state)
        prior, quad = prior_curvature(run, state)
        tau, groups, scales = state["tau"], self.groups(run), Scales.of(run, state)
        outputs = output_size(run.net.output) // groups  # in each group
        count = run.n.double()[:, None].expand(-1, groups) * outputs
        noise = self.learns_noise(run)
        ratio, rescale = torch.ones_like(state["chi"]), torch.ones_like(tau)
        if noise or scale:
            found, rounds = self.form.effective(run, state, scales.each(tau) * prior, scales)
            ratio, rescale = reestimate(
                found, min(rounds, most), state["chi"], count, tau * quad, noise=noise, scale=scale
            )
        new = {**state, "tau": (tau * rescale).clamp(*BOUNDS)}  # also after several re-estimations
        if noise:
            theta = state["theta"].clone()
            theta[:, run.layout.slices[NOISE]] += 0.5 * ratio.log().to(theta.dtype)
            change = count * ratio.log() + state["chi"] * (1 / ratio - 1)
            new |= {
                **self.form.divided(state, ratio),
                "theta": theta,
                "chi": state["chi"] / ratio,
                "slope": state["slope"] / ratio[..., None],
                "fit": state["fit"] - 0.5 * change.sum(1),
            }
        return new

    def determined(self, run: Run, state: State, heat: Tensor) -> float:
        """T γ/n, for noise and a prior scale that were estimated with another form."""
        new, batches = state | self.empty(run), run.passes(max(4096, run.pass_rows))
        for t in range(batches.count):
            new = self.add(run, new, batches.batch(t))
        new = self.form.complete(run, new)
        spread = self.form.covariance(run, new, prior_precision(run, state))
        return determined(run, new, spread.scaled(heat.double()), heat)


def some_rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, for all members."""
    at = (rows,) if batch.shared else (slice(None), rows)
    weight = None if batch.weight is None else batch.weight[..., rows]
    pick = lambda tree: tree_map(lambda t: t[at], tree)  # noqa: E731
    return Batch(pick(batch.x), pick(batch.y), batch.scale, weight, batch.shared)


def determined(run: Run, state: State, spread: Structure, heat: Tensor) -> float:
    """T γ/n, the number of well-determined parameters per row, averaged over the members.

    γ = tr(H⁻¹ G) = p − tr(H⁻¹ τΛ); `spread` is T H⁻¹, and `heat` is T [M].
    """
    spread = spread.inner if isinstance(spread, Embedded) else spread
    bound = (prior_precision(run, state) * spread.diagonal().double()).sum(1)
    return float(((heat.double() * spread.size - bound) / run.n.double()).mean())


# γ of outputs [M, g] and of weights [M, K], as a function of r [M, g] and τ [M, K]
Effective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_WORK = 1e9  # largest number of multiplications for the inverses of one member


class Shares(NamedTuple):
    """What rows and two draws contribute to the first and second order of a sampled Ĥ.

    log_det: gᵀH⁻¹g, [M, B, 2].
    step: (gᵀu)², with the step u to the maximum, [M, B, 2].
    second: tr(H⁻¹ΔH⁻¹Δ) with the difference Δ of the draws, [M, B].
    trace: gᵀg, [M, B, 2].
    """

    log_det: Tensor
    step: Tensor
    second: Tensor
    trace: Tensor

    @classmethod
    def of_diagonal(cls, squares: Tensor, variance: Tensor, step: Tensor) -> Shares:
        """Those of a diagonal, from g² [M, B, 2, p]."""
        scaled = squares * variance[:, None, None]
        second = (scaled[..., 0, :] - scaled[..., 1, :]).square().sum(-1)
        moved = (squares * step[:, None, None].square()).sum(-1)
        return cls(scaled.sum(-1), moved, second, squares.sum(-1))

    def plus(self, other: Shares) -> Shares:
        return Shares(*(a + b for a, b in zip(self, other, strict=True)))


class Form(ABC):
    """A structure of the curvature: full, block-diagonal, diagonal, Kronecker-factored or
    low-rank."""

    adds: ClassVar[bool] = True  # the sums of two sets of rows can be added

    @property
    def kept(self) -> bool:
        """Whether the gradients of single rows are held, for all weights at once."""
        return True

    @abstractmethod
    def empty(self, run: Run, groups: int) -> State:
        """Sums over no rows."""

    @abstractmethod
    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        """The state with some rows added to the sums and the slope [M, g, p], and the outputs f
        [M, B, O]."""

    @abstractmethod
    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        """H⁻¹ with τΛ [M, p] added."""

    @abstractmethod
    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        """γ as a function of r and τ, which multiplies τΛ [M, p], and how many rounds of it are
        worth their price."""

    @abstractmethod
    def bytes(self, run: Run, groups: int) -> int:
        """What sums, copies and factors take at once."""

    def product(self, run: Run) -> float | None:
        """Multiplications in the largest product; None where the network's are larger."""
        return None

    def whole(self, run: Run) -> bool:
        """Whether it is made of all rows: that of a part has no evidence."""
        return True

    @property
    def averages(self) -> bool:
        """Whether it can be made of curvature averaged over outputs."""
        return True

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        """What it keeps beside sums of averages, over outputs f + d by d [M, S, B, O]."""
        return {}

    def source(self, run: Run, state: State) -> Jacobians:
        return Jacobians(run.net, state["theta"], run.net.subset_names, run.buffers(state))

    def shares(
        self,
        run: Run,
        state: State,
        source: Jacobians,
        outputs: Outputs,
        covariance: Structure,
        step: Tensor,
    ) -> Shares:
        """How some rows with two draws of sampled curvature move log |H| and the evidence; `step`
        is H⁻¹ ∇ log p(θ*, D), [M, p]."""
        found = source.gradients(outputs.part.x, outputs.part.shared)
        rows = found.rows(outputs.root(found.f)).double()  # [M, B, 2, p]
        solved = covariance.matmul(rows.movedim(0, 2)).movedim(2, 0)
        parts = []
        for index in self.correlated(source):
            g, v = (t[..., index] for t in (rows, solved))
            both = g @ v.mT  # [M, B, 2, 2]
            q = both.diagonal(dim1=-2, dim2=-1)
            moved = (g * step[:, None, None, index]).sum(-1).square()
            second = q.square().sum(-1) - 2.0 * both[..., 0, 1].square()
            parts.append(Shares(q, moved, second, g.square().sum(-1)))
        return Shares(*(torch.stack(each).sum(0) for each in zip(*parts, strict=True)))

    def correlated(self, source: Jacobians) -> list[Any]:
        """The sets of weights within which the structure has correlations."""
        return [slice(None)]

    def complete(self, run: Run, state: State) -> State:
        """What is worked out once, when all rows are in."""
        return state

    def divided(self, state: State, ratio: Tensor) -> State:
        """Curvature over r [M, g]."""
        entry = state["curvature"]
        return {"curvature": entry / ratio.reshape(*ratio.shape, *(1,) * (entry.ndim - 2))}


def spectral(values: Tensor, floor: Tensor, scales: Scales) -> Effective:
    """γ_g = Σ_j (v_gj/r_g) / (Σ_g v_gj/r_g + τ_j l_j) from v [M, g, p] and l [M, p].

    γ_k is the sum over g for the weights j with factor k.
    """

    def effective(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        each = values / ratio[..., None]
        share = each / (each.sum(1, keepdim=True) + (scales.each(tau) * floor)[:, None])
        gamma = share.sum(-1)
        if tau.shape[1] == 1:
            return gamma, gamma.sum(1, keepdim=True)
        return gamma, scales.sums(share.sum(1))

    return effective


def slope(state: State, j: Tensor, flat: Tensor, outputs: Outputs, groups: int) -> State:
    """Add Σ w Jᵀ ∂ log p/∂f of some rows to the slope of each group, with J [M, B, O, p]."""
    pulls = outputs.pulls(flat, groups).flatten(1, 2)  # [M, B O, g]
    return {"slope": state["slope"] + pulls.mT @ j.double().flatten(1, 2)}


def drawn(source: Jacobians, state: State, outputs: Outputs) -> tuple[RowGradients, Tensor, State]:
    """A pass of some rows, its draws as columns [M, B, O, k], and the slope with these rows."""
    found = source.gradients(outputs.part.x, outputs.part.shared)
    total = found.total(outputs.pulls(found.f, 1))
    return found, outputs.root(found.f), {"slope": state["slope"] + total}


def added(
    state: State, j: Tensor, flat: Tensor, outputs: Outputs, groups: int, diagonal: bool
) -> State:
    """Add Σ w JᵀCJ of some rows, or its diagonal, for each group, with J [M, B, O, p]."""
    made = of_groups(j, outputs.matrix(flat), outputs.part.weight, groups, diagonal)
    return {"curvature": state["curvature"] + made}


def of_groups(j: Tensor, c: Tensor, weight: Tensor | None, groups: int, diagonal: bool) -> Tensor:
    """Σ w JᵀCJ for each group of outputs, [M, g, p, p], or its diagonal, [M, g, p]."""
    if groups == 1:
        return gauss_newton(j, c, weight, diagonal).unsqueeze(1)
    # every output has its own noise level
    own = [(j[:, :, o : o + 1], c[:, :, o : o + 1, o : o + 1]) for o in range(groups)]
    return torch.stack([gauss_newton(*one, weight, diagonal) for one in own], 1)


@dataclass(frozen=True)
class Matrix(Form):
    """All of G [M, g, p, p], or its diagonal [M, g, p]."""

    diagonal: bool
    rounds: ClassVar[int] = 2000

    def empty(self, run: Run, groups: int) -> State:
        size = len(run.subset_index)
        shape = (size,) if self.diagonal else (size, size)
        zeros = torch.zeros(run.size, groups, *shape, device=run.device, dtype=torch.float64)
        return {"curvature": zeros}

    @property
    def kept(self) -> bool:
        return not self.diagonal

    def shares(
        self,
        run: Run,
        state: State,
        source: Jacobians,
        outputs: Outputs,
        covariance: Structure,
        step: Tensor,
    ) -> Shares:
        if not self.diagonal:
            return super().shares(run, state, source, outputs, covariance, step)
        found = source.gradients(outputs.part.x, outputs.part.shared)
        each = found.rows(outputs.root(found.f)).double().square()  # [M, B, 2, p]
        return Shares.of_diagonal(each, covariance.diagonal(), step)

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        if outputs.draws is not None:
            found, root, sums = drawn(source, state, outputs)
            if self.diagonal:
                made = found.squares(root)
            else:
                rows = found.rows(root).flatten(1, 2).double()
                made = rows.mT @ rows
            return sums | {"curvature": state["curvature"] + made[:, None]}, found.f
        flat, j = source(outputs.part.x, outputs.part.shared)
        sums = added(state, j, flat, outputs, groups, self.diagonal)
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        total = state["curvature"].sum(1)
        if self.diagonal:
            return Diagonal(1.0 / (total + prior))
        return Dense.from_precision(_symmetric(total + torch.diag_embed(prior)))

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        curvature = state["curvature"]
        if self.diagonal:
            return spectral(curvature, prior, scales), self.rounds
        if curvature.shape[1] == 1 and scales.sizes is None and run.prior.is_gaussian:
            # in the basis where Λ is the identity and G diagonal, a round is cheap
            root = prior.rsqrt()
            whitened = root[:, :, None] * curvature[:, 0] * root[:, None, :]
            values = torch.linalg.eigvalsh(_symmetric(whitened)).clamp_min(0.0)[:, None]
            return spectral(values, torch.ones_like(prior), scales), self.rounds

        def dense(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
            each = curvature / ratio[..., None, None]
            h = _symmetric(each.sum(1) + torch.diag_embed(scales.each(tau) * prior))
            share = (torch.linalg.inv(h).unsqueeze(1) * each).sum(-1)  # [M, g, p]
            return share.sum(-1), scales.sums(share.sum(1))

        return dense, max(10, min(100, int(_WORK / prior.shape[1] ** 3)))

    def bytes(self, run: Run, groups: int) -> int:
        size = len(run.subset_index)
        return 3 * 8 * run.size * groups * (size if self.diagonal else size**2)

    def product(self, run: Run) -> float | None:
        """Multiplications of JᵀCJ, or of its factorisation."""
        if self.diagonal:
            return None
        size, rows = len(run.subset_index), run.settings.batch_size * output_size(run.net.output)
        return float(run.size * size**2 * max(size, rows))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


@dataclass(frozen=True)
class Blocks(Form):
    """The blocks of G of single layers, {"curvature.LAYER": [M, g, s, s]}: a weight is correlated
    with the other weights and biases of its layer only."""

    def parts(self, layout: Layout) -> dict[str, Tensor]:
        """The positions of each layer's parameters in the layout, by state entry."""
        found: dict[str, list[str]] = {}
        for name in layout.names:
            found.setdefault(f"curvature.{name.rpartition('.')[0]}", []).append(name)
        return {key: layout.index(names) for key, names in found.items()}

    def correlated(self, source: Jacobians) -> list[Any]:
        return list(self.parts(source.layout).values())

    def _parts(self, run: Run) -> dict[str, Tensor]:
        own = self.parts(run.layout.select(run.net.subset_names))
        return {key: index.to(run.device) for key, index in own.items()}

    def empty(self, run: Run, groups: int) -> State:
        zeros = lambda n: torch.zeros(run.size, groups, n, n, device=run.device).double()  # noqa: E731
        return {key: zeros(len(index)) for key, index in self._parts(run).items()}

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        if outputs.draws is not None:
            found, root, sums = drawn(source, state, outputs)
            rows = found.rows(root).flatten(1, 2).double()
            for key, index in self.parts(source.layout).items():
                own = rows[..., index]
                sums[key] = state[key] + (own.mT @ own)[:, None]
            return sums, found.f
        flat, j = source(outputs.part.x, outputs.part.shared)
        c, weight = outputs.matrix(flat), outputs.part.weight
        sums = {
            key: state[key] + of_groups(j[..., index], c, weight, groups, diagonal=False)
            for key, index in self.parts(source.layout).items()
        }
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        parts = self._parts(run)
        each = [
            _symmetric(state[key].sum(1) + torch.diag_embed(prior[:, index]))
            for key, index in parts.items()
        ]
        return BlockDiagonal.from_precisions(each, list(parts.values()))

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        parts = self._parts(run)
        if (
            scales.sizes is None
            and run.prior.is_gaussian
            and state[next(iter(parts))].shape[1] == 1
        ):
            values = torch.empty_like(prior)
            for key, index in parts.items():
                root = prior[:, index].rsqrt()
                white = root[:, :, None] * state[key][:, 0] * root[:, None]
                values[:, index] = torch.linalg.eigvalsh(_symmetric(white)).clamp_min(0.0)
            return spectral(values[:, None], torch.ones_like(prior), scales), Matrix.rounds

        def blocks(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
            floor = scales.each(tau) * prior
            share = floor.new_empty(len(floor), ratio.shape[1], floor.shape[1])  # [M, g, p]
            for key, index in parts.items():
                each = state[key] / ratio[..., None, None]
                h = _symmetric(each.sum(1) + torch.diag_embed(floor[:, index]))
                share[..., index] = (torch.linalg.inv(h).unsqueeze(1) * each).sum(-1)
            return share.sum(-1), scales.sums(share.sum(1))

        price = sum(len(index) ** 3 for index in parts.values())
        return blocks, max(10, min(100, int(_WORK / price)))

    def divided(self, state: State, ratio: Tensor) -> State:
        own = {k: v for k, v in state.items() if k.startswith("curvature.")}
        return {k: v / ratio[..., None, None] for k, v in own.items()}

    def bytes(self, run: Run, groups: int) -> int:
        sizes = [len(index) for index in self._parts(run).values()]
        return 3 * 8 * run.size * groups * sum(size**2 for size in sizes)

    def product(self, run: Run) -> float | None:
        largest = max(len(index) for index in self._parts(run).values())
        rows = run.settings.batch_size * output_size(run.net.output)
        return float(run.size * largest**2 * max(largest, rows))
