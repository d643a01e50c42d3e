"""Scores of a pool of any size, a block of rows at a time.

Function s is the same at every row, whichever block the row is in: weights and dropout's masks are
functions of the seed, not of the rows. So scores do not depend on the blocks, and the memory in use
is that of one block and of a number a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.data import blocks, free_memory, rows_of
from doxa.decide.acquisition import Acquisition, acquisition, chance
from doxa.errors import DataError, ShapeError
from doxa.likelihoods import Gaussian
from doxa.posterior import Posterior
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
    pool: an array, a tensor or frame, a memory map, a `Dataset`, or a `DataLoader` (in its own
        batches) that does not shuffle; of a dataset's pairs x is taken.
    by: the name of an acquisition, "random", or a function of a predictive that gives [N].
    n: how many functions; one that keeps fewer draws gives all it has.
    seed: which functions; the fit's unless said.
    block: how many rows at a time; a number that fits the memory unless said.
    progress: called with the number of rows done.
    """
    of = acquisition(by) if by != "random" else None
    size = None if block is None else checks.whole("block", block)
    count = kept(posterior, n)
    found: list[Tensor] = []
    done = 0
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


def kept(posterior: Posterior, n: int | None) -> int | None:
    """n draws, or None for all there are where a posterior keeps fewer."""
    if n is None:
        return None
    checks.whole("n", n)
    samples = getattr(posterior, "samples", None)
    if isinstance(samples, Tensor) and samples.shape[0] * samples.shape[1] < n:
        return None
    return n


def block_rows(posterior: Posterior, count: int | None) -> int:
    """A block such that its predictions are neither many nor few."""
    shape = getattr(posterior.model, "output", None)
    outputs = math.prod(shape) if shape and all(isinstance(k, int) for k in shape) else 1
    device = posterior.device
    numbers = _NUMBERS if device.type == "cpu" else min(_ON_DEVICE, free_memory(device) // 256)
    return max(64, numbers // ((count or 100) * max(1, outputs)))


def _checked(scores: Tensor, rows: int) -> Tensor:
    if scores.shape != (rows,):
        raise ShapeError(
            f"an acquisition gives one score a row, [{rows}], not {list(scores.shape)}"
        )
    return scores.detach().cpu()


def joint(posterior: Posterior, x: Any, n: int | None = 100, seed: int | None = None) -> Predictive:
    """Functions at all rows at once, for what looks at several rows together; drawn, where the
    posterior predicts in closed form."""
    p = posterior.predict(x, kept(posterior, n), seed)
    if hasattr(p, "samples"):
        return p
    f = posterior.functions(x, n or 100, seed)  # [S, *p.mean.shape]
    if not p.likelihood.is_normal:
        return Predictive.from_samples(f, p.likelihood)
    noise = p.aleatoric.double().mean(0).sqrt()  # the same at every row
    return Predictive.from_samples(f, Gaussian(noise=noise.tolist()))
