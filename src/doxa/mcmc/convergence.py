"""Have the chains met? Split R-hat of the functions, which is what predictions rest on.

    R̂² = (W (L−1)/L + B/L) / W    over 2K half-chains of length L   (Gelman et al., 2013)

Weights of a network have symmetric modes that chains need not share; functions do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.likelihoods import Categorical, Heads, Likelihood
from doxa.posterior import SamplePosterior, Status

if TYPE_CHECKING:
    from doxa.method import Run


def split_rhat(values: Tensor) -> Tensor:
    """values [K chains, T draws, ...] to R-hat of each remaining entry."""
    draws = values.shape[1]
    half = draws // 2
    parts = torch.cat([values[:, :half], values[:, draws - half :]]).double()  # [2K, L, ...]
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0) * half
    ratio = (within * (half - 1) + between) / (half * within)
    return torch.where(within > 0, ratio, torch.where(between > 0, torch.inf, 1.0)).sqrt()


def chain_status(posterior: SamplePosterior, run: Run, accept: float) -> None:
    """Fill diagnostics and status from the chains' functions at some training rows."""
    members, draws = posterior.samples.shape[:2]
    rows = run.data.rows[run.run_of[0]][:64]
    x, _ = run.data.take(rows, torch.tensor(run.run_of[0]))
    with torch.no_grad():
        f = posterior._evaluate(posterior.groups(None, 0)[0], x)
    f = torch.cat(_compared(f, run.likelihood), 1).reshape(members, draws, -1)
    if not torch.isfinite(f).all():
        posterior.record.status = Status("diverged", "some draws give non-finite functions")
        return
    status: dict[str, Any] = {}
    if draws >= 4:
        status["rhat_functions"] = float(split_rhat(f).max())
    posterior.record.diagnostics |= status
    rhat = status.get("rhat_functions", float("inf"))
    if accept < 0.05:
        reason = f"a chain hardly moves: acceptance {accept:.3f}; run a longer burn-in"
        posterior.record.status = Status("not-converged", reason)
    elif rhat > 1.1:
        reason = (
            f"R-hat of the functions is {rhat:.2f} (above 1.1): run longer, with more leapfrog "
            "steps, or raise the noise"
        )
        posterior.record.status = Status("not-converged", reason)


def _compared(f: Any, likelihood: Likelihood) -> list[Tensor]:
    """[S, n] a head. Logits up to the shift that all classes share: no prediction sees it, and
    only the prior pins it, so that chains may differ in it without harm."""
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    return [
        (own.log_softmax(2) if isinstance(head, Categorical) else own).flatten(1)
        for own, head in zip(tree_flatten(f)[0], heads, strict=True)
    ]
