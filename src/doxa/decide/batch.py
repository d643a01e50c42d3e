"""BatchBALD: the k rows whose labels together have the most information about the function.

    I[y_1 … y_k; f] = H[y_1 … y_k] − Σ_i E_s H[y_i | f_s],
    p(y_1 … y_k) = E_s Π_i p(y_i | f_s)

Kirsch, van Amersfoort & Gal (2019): rows are added greedily, which is within 1 − 1/e of the best
set. The joint entropy is a sum over all configurations of the labels of the chosen rows, as long as
there are at most `configurations` of them. Then it is an average over this number of drawn ones,

    H[y_1 … y_k] ≈ mean_m Σ_c −p(c | y^m) log p(y^m, c),     y^m ~ p(y_1 … y_{k−1}).

The gain of a row can only fall as others are chosen (the information is submodular), so its earlier
gain is an upper bound of its gain now. Rows are evaluated in the order of these bounds, in blocks,
until no bound reaches the best gain (Minoux 1978). With drawn configurations, this holds up to
their Monte Carlo error. For numbers with Gaussian noise

    I[y_A; f] = ½ log det(1 + D^(−½) Cov[f_A] D^(−½)),     D the noise,

with the covariance of the draws: one normal in place of the mixture, an upper bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.acquisition import chance, class_probs, scaled_functions
from doxa.errors import DataError
from doxa.noise import generator
from doxa.predictive import Predictive

_BLOCK = 1 << 22  # numbers in a table of configurations × rows × classes, on the CPU
_ON_DEVICE = 1 << 27
_LEAST = 16  # rows in a block


class Batch(NamedTuple):
    """Rows in the order in which they were chosen, and the information of the first i rows."""

    rows: Tensor  # [k]
    scores: Tensor  # [k], I[y_1 … y_i; f] in nats


def batch_bald(
    p: Predictive,
    k: int,
    *,
    configurations: int = 10_000,
    seed: int = 0,
    taken: Tensor | None = None,
) -> Batch:
    """Choose k rows greedily.

    Parameters
    ----------
    p : Predictive
        A predictive with draws; each draw is one function at all rows.
    k : int
        Number of rows.
    configurations : int
        Number of configurations of labels to sum over, or to draw if there are more.
    taken : Tensor [N] of bool, optional
        Rows that are not to be chosen.
    seed : int
        Seed of the drawn configurations and of ties.
    """
    rows = len(p.mean)
    free = torch.ones(rows, dtype=torch.bool) if taken is None else ~taken.cpu()
    if checks.whole("k", k) > int(free.sum()):
        raise DataError(f"k = {k} rows, but only {int(free.sum())} are available")
    if not p.likelihood.classifies:
        return _numbers(p, k, free, seed)
    weights, probs = class_probs(p)
    return _Classes(weights, probs, checks.whole("configurations", configurations), seed).greedy(
        k, free
    )


class _Classes:
    """The greedy search. `table` has p(y_1 … y_i | f_s) for configurations of the chosen rows:
    [configurations, S]."""

    def __init__(self, weights: Tensor, probs: Tensor, most: int, seed: int) -> None:
        self.weights, self.probs, self.most, self.seed = weights, probs, most, seed
        self.table = weights.new_ones(1, len(weights))
        self.drawn = False
        self.noise = torch.einsum("s,snc->n", weights, torch.special.entr(probs))  # E H[y | f]

    def greedy(self, k: int, free: Tensor) -> Batch:
        free = free.to(self.probs.device)
        tie = chance(len(free), self.seed).to(free.device) * 1e-12
        gains = self._gains(torch.arange(len(free), device=free.device))  # I[y_n; f]
        bound = torch.where(free, gains, -torch.inf)
        chosen, worth, total = [], [], torch.zeros_like(gains[0])
        for i in range(k):
            if i > 0:
                bound = self._refresh(bound)
            best = (bound + tie).argmax()
            total = total + bound[best].clamp_min(0.0)
            chosen.append(best)
            worth.append(total)
            if i + 1 < k:
                self._add(best, i)
                bound[best] = -torch.inf
        return Batch(torch.stack(chosen).cpu(), torch.stack(worth).cpu())

    def _refresh(self, bound: Tensor) -> Tensor:
        """The gains of rows now, as far as needed to find the largest; for the other rows their
        earlier gains, which are upper bounds."""
        bound = bound.clone()
        order = bound.argsort(descending=True)
        start, size = 0, self._block()
        best = torch.full_like(bound[0], -torch.inf)
        while start < len(order) and bool(bound[order[start]] > best):
            some = order[start : start + size]
            some = some[torch.isfinite(bound[some])]
            if len(some) == 0:
                break
            bound[some] = self._gains(some)
            best = torch.maximum(best, bound[some].max())
            start += size
        return bound

    def _block(self) -> int:
        numbers = _BLOCK if self.probs.device.type == "cpu" else _ON_DEVICE
        return max(_LEAST, numbers // (len(self.table) * self.probs.shape[2]))

    def _gains(self, rows: Tensor) -> Tensor:
        """H[y_A, y_n] − H[y_A] − E_s H[y_n | f_s] of some rows, [n]."""
        weighted = self.table * self.weights  # [m, S]
        before = weighted.sum(1)  # p(y_A), [m]
        kept = before > 0
        weighted, before = weighted[kept], before[kept]
        added = []
        for some in rows.split(self._block()):
            probs = self.probs[:, some]  # [S, n, C]
            joint = (weighted @ probs.flatten(1)).reshape(-1, *probs.shape[1:])  # [m, n, C]
            if self.drawn:  # −Σ_c p(c | y^m) log p(c | y^m), averaged over m
                share = torch.special.entr(joint / before[:, None, None])
                added.append(share.sum(2).mean(0))
            else:  # H[y_A, y_n] − H[y_A]
                whole = torch.special.entr(joint).sum((0, 2))
                added.append(whole - torch.special.entr(before).sum())
        return torch.cat(added) - self.noise[rows]

    def _add(self, row: Tensor, index: int) -> None:
        """The table with the labels of one more row."""
        probs = self.probs[:, row]  # [S, C]
        if not self.drawn and len(self.table) * probs.shape[1] <= self.most:
            self.table = (self.table[:, None, :] * probs.t()[None]).flatten(0, 1)
            return
        if not self.drawn:
            self.table, self.draw = self._draw_from_table()
            self.drawn = True
        source = generator("batch bald", self.seed, index)
        u = torch.rand(len(self.table), 1, generator=source, dtype=probs.dtype).to(probs.device)
        label = (probs[self.draw].cumsum(1) < u).sum(1).clamp_max(probs.shape[1] - 1)  # [m]
        self.table = self.table * probs.t()[label]

    def _draw_from_table(self) -> tuple[Tensor, Tensor]:
        """Configurations y^m ~ p(y_A) from a whole table, and the draw s of each. The m
        configurations are distributed over the draws by their weights."""
        grid = (torch.arange(self.most, dtype=torch.float64) + 0.5) / self.most
        bounds = self.weights.cpu().cumsum(0)
        draw = torch.searchsorted(bounds, grid).clamp_max(len(bounds) - 1).to(self.table.device)
        source = generator("batch bald", self.seed, "table")
        u = torch.rand(self.most, generator=source, dtype=torch.float64).to(self.table.device)
        cumulative = self.table.t().cumsum(1)  # [S, m], each up to 1
        above = torch.arange(len(bounds), dtype=u.dtype, device=u.device)  # one line of them all
        line = (cumulative / cumulative[:, -1:] + above.unsqueeze(1)).flatten()
        configuration = torch.searchsorted(line, u + draw) - draw * len(self.table)
        return self.table[configuration.clamp(0, len(self.table) - 1)], draw


def _numbers(p: Predictive, k: int, free: Tensor, seed: int) -> Batch:
    """Greedy log-determinants. With z_n = √w f_n/σ_n about its mean, [S, D], and B the inverse of
    1 + Σ_A z_a z_aᵀ, a row adds ½ log det(1 + z_nᵀ B z_n)."""
    z, noise = scaled_functions(p)
    z = (z / noise.sqrt()).transpose(0, 1)  # [N, S, D]
    inverse = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    one = torch.eye(z.shape[2], dtype=z.dtype, device=z.device)
    free = free.to(z.device)
    tie = chance(len(free), seed).to(z) * 1e-12
    chosen, worth, total = [], [], z.new_zeros(())
    for _ in range(k):
        seen = inverse @ z  # B z, [N, S, D]
        gain = 0.5 * torch.logdet(one + z.transpose(1, 2) @ seen)
        best = torch.where(free, gain + tie, -torch.inf).argmax()
        total = total + gain[best]
        chosen.append(best)
        worth.append(total)
        free[best] = False
        own = seen[best]  # Woodbury
        inverse = inverse - own @ torch.linalg.solve(one + z[best].t() @ own, own.t())
    return Batch(torch.stack(chosen).cpu(), torch.stack(worth).cpu())
