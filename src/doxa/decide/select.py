"""Scores of a pool, and the choice of k rows to label: the best scores, or a diverse batch.

    top       the k largest scores; ties by the seed
    power     k draws without replacement, with probability ∝ score^β; scores are ≥ 0
    softmax   … ∝ exp(β score)
    softrank  … ∝ rank^(−β)
    coreset   of the 10 k largest scores, the k that cover them best: the farthest row from those
              chosen is next (greedy k-centre)

Stochastic batches: Kirsch, Farquhar, Atighehchian, Jesson, Branchaud-Charron & Gal (2023), by
Gumbel noise on the logarithms. Core-sets: Sener & Savarese (2018), on given features or, without
them, on the predictions of the draws. BatchBALD (`by="batch_bald"`) uses all k labels jointly.

A pool of any size is scored in blocks of rows. Function s is the same in every block: weights and
dropout masks are functions of the seed, not of the rows. So scores do not depend on the blocks, and
the memory in use is that of one block and of one number per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import checks
from doxa.data import as_tensor, as_tensors, blocks, free_memory, reorder_columns, rows_of
from doxa.data.rows import RowsByWindow
from doxa.decide.acquisition import Acquisition, acquisition, chance
from doxa.decide.batch import batch_bald
from doxa.errors import DataError, MethodError, ShapeError
from doxa.likelihoods import Gaussian
from doxa.noise import generator
from doxa.posterior import Posterior, SamplePosterior
from doxa.predictive import Predictive

_NUMBERS = 1 << 22  # samples × rows × outputs of a block, on the CPU
_ON_DEVICE = 1 << 26


def score(
    posterior: Posterior,
    pool: Any,
    by: str | Acquisition = "bald",
    *,
    n: int | None = 100,
    seed: int | None = None,
    block: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """One score for each row of the pool, [N], on the CPU.

    Parameters
    ----------
    posterior : Posterior
        The posterior that predicts.
    pool : Stream, array_like, DataFrame, Dataset or DataLoader
        An array, a tensor or frame, a memory map, a `Dataset`, a `DataLoader` (in its own batches)
        that does not shuffle, or rows that are read by windows (`doxa.data.read_parquet`). Of the
        pairs of a dataset x is used.
    by : str or callable, default "bald"
        The name of an acquisition, "random", or a function of a predictive that returns [N].
    n : int, optional
        Number of functions. A posterior that keeps fewer draws uses all of them.
    seed : int, optional
        Seed of the functions. The default is that of the fit.
    block : int, optional
        Number of rows at a time. The default fits the memory.
    progress : callable, optional
        Called with the number of rows done.

    Returns
    -------
    Tensor [N]
        The scores.
    """
    of = acquisition(by) if by != "random" else None
    size = None if block is None else checks.whole("block", block)
    count = kept(posterior, n)
    found: list[Tensor] = []
    done = 0
    if isinstance(pool, RowsByWindow):
        pool = reorder_columns(pool, posterior.columns, "the pool")
    for x in blocks(pool, size or block_rows(posterior, count)):
        p = posterior.predict(x, count, seed) if of is not None else None
        rows = rows_of(x, "the pool")
        found.append(torch.zeros(rows) if of is None or p is None else _checked(of(p), rows))
        done += rows
        if progress is not None:
            progress(done)
    if not found:
        raise DataError("the pool is empty: it has no rows to score")
    if of is None:
        return chance(done, posterior.record.seed if seed is None else seed)
    return torch.cat(found)


class TopRows(NamedTuple):
    """The rows of a pool with the best scores, the best first.

    Attributes
    ----------
    rows : Tensor of shape [k]
        Their numbers.
    scores : Tensor of shape [k]
    x : Tensor, or a tree of tensors
        Their inputs.
    """

    rows: Tensor
    scores: Tensor
    x: Any


def top_rows(
    posterior: Posterior,
    pool: Any,
    k: int,
    by: str | Acquisition = "bald",
    *,
    n: int | None = 100,
    seed: int | None = None,
    block: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TopRows:
    """The k rows of a pool with the largest scores, in one pass over the pool.

    It is for pools whose scores do not fit in memory: that of one block and of k rows is used. Of
    rows with equal scores those that come first are chosen.

    Parameters
    ----------
    posterior : Posterior
        The posterior that predicts.
    pool : Stream, array_like, DataFrame, Dataset or DataLoader
        As in `score`.
    k : int
        The number of rows.
    by : str or callable, default "bald"
        As in `score`, but not "random".
    n, seed, block, progress
        As in `score`.

    Returns
    -------
    TopRows
        The numbers, scores and inputs of the rows.
    """
    of, count = acquisition(by), kept(posterior, n)
    checks.whole("k", k)
    size = block_rows(posterior, count) if block is None else checks.whole("block", block)
    best: TopRows | None = None
    done = 0
    if isinstance(pool, RowsByWindow):
        pool = reorder_columns(pool, posterior.columns, "the pool")
    for given in blocks(pool, size):
        x = as_tensors(posterior.read(given), "the pool")
        rows = rows_of(x, "the pool")
        scores = _checked(of(posterior.predict(given, count, seed)), rows).double()
        bad = ~torch.isfinite(scores)
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise DataError(f"the score of row {done + row} is {float(scores[row])}")
        numbers = torch.arange(done, done + rows)
        if best is not None:
            numbers, scores = torch.cat([best.rows, numbers]), torch.cat([best.scores, scores])
            x = tree_map(lambda a, b: torch.cat([a, b]), best.x, x)
        top = scores.argsort(descending=True, stable=True)[:k]
        best = TopRows(numbers[top], scores[top], tree_map(lambda t: t[top], x))  # noqa: B023
        done += rows
        if progress is not None:
            progress(done)
    if best is None:
        raise DataError("the pool is empty: it has no rows to score")
    if len(best.rows) < k:
        raise DataError(f"k = {k} rows, but the pool has only {len(best.rows)}")
    return best


def kept(posterior: Posterior, n: int | None) -> int | None:
    """n draws, or None for all there are where a posterior keeps fewer."""
    if n is None:
        return None
    checks.whole("n", n)
    if isinstance(posterior, SamplePosterior):
        members, draws, _ = posterior.samples.shape
        return None if members * draws < n else n
    return n


def block_rows(posterior: Posterior, count: int | None) -> int:
    """A block such that its predictions are neither many nor few."""
    shape = None if posterior.model is None else posterior.model.output
    outputs = math.prod(shape) if shape and all(isinstance(k, int) for k in shape) else 1
    device = posterior.device
    numbers = _NUMBERS if device.type == "cpu" else min(_ON_DEVICE, free_memory(device) // 256)
    return max(64, numbers // ((count or 100) * max(1, outputs)))


def _checked(scores: Tensor, rows: int) -> Tensor:
    if scores.shape != (rows,):
        raise ShapeError(
            f"an acquisition must return one score per row, [{rows}], not {list(scores.shape)}"
        )
    return scores.detach().cpu()


def joint(posterior: Posterior, x: Any, n: int | None = 100, seed: int | None = None) -> Predictive:
    """Functions at all rows at once, for what looks at several rows together; drawn, where the
    posterior predicts in closed form."""
    p = posterior.predict(x, kept(posterior, n), seed)
    if p.has_samples:
        return p
    f = posterior.functions(x, n or 100, seed)  # [S, *p.mean.shape]
    if not p.likelihood.is_normal:
        return Predictive.from_samples(f, p.likelihood)
    noise = p.aleatoric.double().mean(0).sqrt()  # the same at every row
    return Predictive.from_samples(f, Gaussian(noise=noise.tolist()))


DIVERSITY = ("top", "power", "softmax", "softrank", "coreset")
_CANDIDATES = 10  # for each row that a core-set chooses
_ROUNDING = 1e-6  # an information of zero may be this far below it


def select(
    p: Predictive | Tensor,
    k: int,
    by: str | Acquisition = "bald",
    *,
    diversity: str = "top",
    beta: float = 1.0,
    features: Any = None,
    taken: Any = None,
    seed: int = 0,
) -> Tensor:
    """Choose k rows of a pool to label.

    Parameters
    ----------
    p : Predictive or Tensor
        Predictions at the rows of the pool, or their scores [N] (from `decide.score`).
    k : int
        Number of rows.
    by : str or callable, default "bald"
        The name of an acquisition, "random", "batch_bald", or a function of p that returns [N].
    diversity : {"top", "power", "softmax", "softrank", "coreset"}, default "top"
        How a batch is chosen, see the module. Not used with "batch_bald". "power" needs scores that
        are not negative. The entropy of a number may be negative: use "softmax" or "softrank".
    beta : float, default 1
        Greediness of the stochastic choices: 0 is uniform; large values choose the top.
    features : array_like [N, …], optional
        Features for a core-set, for example `posterior.features(x)`.
    taken : array_like, optional
        Rows that are not to be chosen: a mask [N], or row numbers.
    seed : int, default 0
        Seed of ties and of stochastic choices.

    Returns
    -------
    Tensor [k]
        Row numbers, the best first.

    Examples
    --------
    >>> import torch
    >>> select(torch.tensor([0.1, 0.7, 0.3]), 2).tolist()
    [1, 2]
    """
    if diversity not in DIVERSITY:
        raise MethodError(f"diversity is one of {', '.join(DIVERSITY)}, not {diversity!r}")
    rows = len(p) if isinstance(p, Tensor) else len(p.mean)
    used = _mask(taken, rows)
    k, free = checks.whole("k", k), int((~used).sum())
    if free == 0:
        raise DataError("the pool is empty: every row has been taken")
    if k > free:
        raise DataError(f"k = {k} rows, but only {free} are available")
    if by in ("batch_bald", "batch-bald") and isinstance(p, Predictive):
        return batch_bald(p, k, seed=seed, taken=used).rows
    scores = _scores(p, by, seed).double().cpu()
    if scores.shape != (rows,):
        raise ShapeError(
            f"an acquisition must return one score per row, [{rows}], not {list(scores.shape)}"
        )
    bad = ~torch.isfinite(scores) & ~used
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise DataError(f"the score of row {row} is {float(scores[row])}: nothing can be chosen")
    ranked = _ranked(scores, used, seed)
    if diversity == "coreset":
        near = ranked[: min(free, _CANDIDATES * k)]
        return near[_centres(_embedded(p, features, near), k)]
    if diversity == "top":
        return ranked[:k]
    if diversity == "power" and float(scores[ranked[free - 1]]) < -_ROUNDING:
        row = int(ranked[free - 1])
        raise MethodError(
            f"diversity='power' draws in proportion to score^beta, and the score of row {row} is "
            f"{float(scores[row]):.3g}: use 'softmax' or 'softrank', which take scores of any sign"
        )
    noisy = _logits(scores[ranked[:free]], diversity, checks.positive("beta", beta))
    return ranked[(noisy + _gumbel(free, seed)).argsort(descending=True)[:k]]


def _mask(taken: Any, rows: int) -> Tensor:
    if taken is None:
        return torch.zeros(rows, dtype=torch.bool)
    given = as_tensor(taken, "taken").cpu()
    if given.dtype == torch.bool:
        if given.shape != (rows,):
            raise ShapeError(f"taken has shape {list(given.shape)}, the pool {rows} rows")
        return given
    outside = given[(given < 0) | (given >= rows)]
    if outside.numel():
        raise DataError(f"taken names row {int(outside[0])}; rows are 0 … {rows - 1}")
    return torch.zeros(rows, dtype=torch.bool).index_fill(0, given.long(), True)


def _scores(p: Predictive | Tensor, by: str | Acquisition, seed: int) -> Tensor:
    if by == "random":
        return chance(len(p) if isinstance(p, Tensor) else len(p.mean), seed)
    if isinstance(p, Tensor):
        return p
    return acquisition(by)(p)


def _ranked(scores: Tensor, used: Tensor, seed: int) -> Tensor:
    """All rows by falling score, those in use last; equal ones in an order drawn by the seed."""
    shuffled = chance(len(scores), seed).argsort()
    order = torch.where(used, -torch.inf, scores)[shuffled].argsort(descending=True, stable=True)
    return shuffled[order]


def _logits(ranked: Tensor, diversity: str, beta: float) -> Tensor:
    """What each row's noise is added to; the scores fall."""
    if diversity == "softmax":
        return beta * ranked
    if diversity == "softrank":
        return -beta * torch.arange(1, len(ranked) + 1, dtype=ranked.dtype).log()
    return beta * ranked.clamp_min(1e-30).log()


def _gumbel(rows: int, seed: int) -> Tensor:
    u = torch.rand(rows, generator=generator("gumbel", seed), dtype=torch.float64)
    return -(-u.clamp_min(1e-300).log()).log()


def _embedded(p: Predictive | Tensor, features: Any, rows: Tensor) -> Tensor:
    if features is not None:
        given = as_tensor(features, "features")
        if len(given) != len(p if isinstance(p, Tensor) else p.mean):
            raise ShapeError(f"features has {len(given)} rows, which are not those of the pool")
        return given[rows.to(given.device)].flatten(1).double()
    if isinstance(p, Tensor):
        raise MethodError("a core-set of scores needs features=, such as posterior.features(x)")
    draws = p.samples[:, rows.to(p.mean.device)].double()  # [S, n, ...]
    if p.likelihood.classifies:
        draws = draws.sigmoid() if draws.ndim == 2 else draws.softmax(2)
    return draws.transpose(0, 1).flatten(1)


def _centres(points: Tensor, k: int) -> Tensor:
    """Greedy k-centre: the first point, then always the one farthest from those chosen."""
    chosen = [torch.zeros((), dtype=torch.long, device=points.device)]
    near = (points - points[0]).square().sum(1)
    for _ in range(k - 1):
        near = near.scatter(0, torch.stack(chosen), -1.0)
        chosen.append(near.argmax())
        near = torch.minimum(near, (points - points[chosen[-1]]).square().sum(1))
    return torch.stack(chosen).cpu()
