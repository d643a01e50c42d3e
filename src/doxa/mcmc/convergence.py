"""Convergence of MCMC: R-hat of the network's functions, and the status of a posterior.

The posterior of a network's weights has symmetric modes, and different chains may be in different
modes. The functions of the network have no such symmetry, and predictions depend on the functions
only. So chains are compared by the outputs of the network at some training rows, and by the
parameters of the likelihood. The chains of a plain log density are compared by its parameters.
R-hat is rank-normalised and split (`doxa.posterior.chains`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.likelihoods import Heads, Likelihood
from doxa.posterior import SamplePosterior, Status
from doxa.posterior.chains import LEAST_DRAWS, finite, moved, rhat

if TYPE_CHECKING:
    from doxa.method import Run

log = logging.getLogger("doxa")

APART = 1.1  # R-hat above which chains have not converged
_ROWS = 64
_BLOCK = 1 << 22  # numbers per block
_STUCK = 0.05  # smallest acceptance rate, and smallest share of draws with a new value
MOST_DIVERGENT = 0.002  # largest share of divergent transitions that is only a warning
LEAST_EBFMI = 0.3
LEAST_TRANSITIONS = 100  # E-BFMI is not evaluated for fewer transitions
_SATURATED = 0.1  # largest share of transitions that reach the largest depth


def chain_status(
    posterior: SamplePosterior, run: Run, accept: float, concerns: Sequence[Concern] = ()
) -> None:
    """Set the diagnostics and the status of a posterior from its chains.

    Parameters
    ----------
    posterior : SamplePosterior
        The posterior. All messages are added to its `diagnostics["warnings"]`.
    run : Run
        The run.
    accept : float
        The smallest acceptance rate of the chains.
    concerns : sequence of Concern
        Further findings of the sampler.
    """
    members, draws = posterior.samples.shape[:2]
    name = run.problem.compared
    if name == "parameters":
        f = posterior.samples
    else:
        f = _functions(posterior, run).reshape(members, draws, -1)
    if not finite(f).all():
        posterior.record.status = Status("diverged", "some draws give non-finite functions")
        return
    found = list(concerns)
    apart = math.inf
    if draws >= LEAST_DRAWS:
        width = max(1, _BLOCK // (members * draws))  # entries at a time
        apart = max(float(rhat(part).max()) for part in f.split(width, 2))
        posterior.record.diagnostics[f"rhat_{name}"] = apart
    shares = moved(posterior.samples).tolist() if draws > 1 else []
    still = [k for k, share in enumerate(shares) if share < _STUCK]
    if still:
        message = (
            f"{len(still)} of {members} chains hardly move (chain {still[0]}: a new value in "
            f"{shares[still[0]]:.1%} of its draws): run a longer burn-in, or use another step size"
        )
        found.insert(0, (True, message))
    elif accept < _STUCK:
        message = f"a chain hardly moves: acceptance {accept:.3f}; run a longer burn-in"
        found.insert(0, (True, message))
    elif not apart <= APART:
        message = (
            f"R-hat of the {name} is {apart:.2f} (above {APART}): run longer, with longer "
            "trajectories, or raise the noise"
        )
        found.insert(0, (True, message))
    if found:
        posterior.record.diagnostics["warnings"] = [message for _, message in found]
    if any(serious for serious, _ in found):
        reason = "; ".join(message for _, message in found)
        posterior.record.status = Status("not-converged", reason)
    else:
        for _, message in found:
            log.warning("%s", message)


Concern = tuple[bool, str]  # (whether the draws are unreliable, message)


def concerns(diagnostics: Mapping[str, Any]) -> list[Concern]:
    """The findings that follow from the diagnostics of a sampler."""
    found: list[Concern] = []
    count, share = diagnostics.get("divergences", 0), diagnostics.get("divergent_share", 0.0)
    if count:
        message = (
            f"{count} transitions diverged ({share:.2%}): the step size is too large for the "
            "curvature of the density, and its narrow regions are missing; raise target_accept, or "
            "reparametrise"
        )
        found.append((share > MOST_DIVERGENT, message))
    count, share = diagnostics.get("undefined", 0), diagnostics.get("undefined_share", 0.0)
    if count:
        message = (
            f"the log density was NaN at {count} proposals ({share:.2%}), which were not accepted: "
            "it must be −inf outside its support, and finite inside"
        )
        found.append((share > MOST_DIVERGENT, message))
    ratios = [r for r in diagnostics.get("ebfmi", []) if math.isfinite(r)]
    if ratios and min(ratios) < LEAST_EBFMI and diagnostics["transitions"] >= LEAST_TRANSITIONS:
        message = (
            f"E-BFMI is {min(ratios):.2f} (below {LEAST_EBFMI}): the sampler explores energies "
            "slowly, and tails are too short; run longer, or reparametrise"
        )
        found.append((True, message))
    saturated = diagnostics.get("saturated_share", 0.0)
    if saturated > _SATURATED:
        message = (
            f"{saturated:.0%} of the trees reached max_depth before turning: correct but slow; "
            "raise max_depth, or lengthen burn_in"
        )
        found.append((False, message))
    return found


def _functions(posterior: SamplePosterior, run: Run) -> Tensor:
    """Outputs at some training rows and the likelihood's parameters: [S, entries]."""
    rows = run.rows.rows[run.split_of[0]][:_ROWS]
    x, _ = run.rows.take(rows, torch.tensor(run.run_of[0]))
    (draws,) = posterior.groups(None, 0)
    with torch.no_grad():
        f = posterior.evaluate(draws, x)
    own = [v.reshape(len(v), -1) for v in draws.theta().values()]
    return torch.cat([*_compared(f, run.likelihood), *own], 1)


def _compared(f: Any, likelihood: Likelihood) -> list[Tensor]:
    """The outputs that are compared between chains, [S, n] per head.

    Logits are replaced by log probabilities, without the shift that is common to the logits of all
    classes. Predictions do not depend on this shift, and only the prior determines it, so that
    chains may differ in it without harm.
    """
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    return [
        (own.log_softmax(2) if head.class_axis else own).flatten(1)
        for own, head in zip(tree_flatten(f)[0], heads, strict=True)
    ]
