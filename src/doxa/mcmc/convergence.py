"""Have the chains met? R-hat of the functions, which is what predictions rest on, in plain words.

Weights of a network have symmetric modes that chains need not share; functions do not. So chains
are compared by their functions at some training rows and by the likelihood's own parameters; those
of a bare log density by its parameters. R-hat is rank-normalised and split
(`doxa.posterior.chains`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.likelihoods import Categorical, Heads, Likelihood
from doxa.posterior import SamplePosterior, Status
from doxa.posterior.chains import LEAST_DRAWS, finite, moved, rhat

if TYPE_CHECKING:
    from doxa.method import Run

log = logging.getLogger("doxa")

APART = 1.1  # R-hat
_ROWS = 64
_BLOCK = 1 << 22  # numbers
_STUCK = 0.05  # acceptance, and share of draws at a new place
MOST_DIVERGENT = 0.002  # share of transitions; fewer are named, and no more
LEAST_EBFMI = 0.3
LEAST_TRANSITIONS = 100  # transitions, below which E-BFMI says nothing
_SATURATED = 0.1  # share of transitions


def chain_status(
    posterior: SamplePosterior, run: Run, accept: float, concerns: Sequence[Concern] = ()
) -> None:
    """Fill diagnostics and status; whatever is worth a word is in `diagnostics["warnings"]`."""
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
        words = (
            f"{len(still)} of {members} chains hardly move (chain {still[0]}: a new place in "
            f"{shares[still[0]]:.1%} of its draws): run a longer burn-in, or take another step size"
        )
        found.insert(0, (True, words))
    elif accept < _STUCK:
        words = f"a chain hardly moves: acceptance {accept:.3f}; run a longer burn-in"
        found.insert(0, (True, words))
    elif not apart <= APART:
        words = (
            f"R-hat of the {name} is {apart:.2f} (above {APART}): run longer, with longer "
            "trajectories, or raise the noise"
        )
        found.insert(0, (True, words))
    if found:
        posterior.record.diagnostics["warnings"] = [words for _, words in found]
    if any(serious for serious, _ in found):
        reason = "; ".join(words for _, words in found)
        posterior.record.status = Status("not-converged", reason)
    else:
        for _, words in found:
            log.warning("%s", words)


Concern = tuple[bool, str]  # whether the draws cannot be trusted for it, and the words


def concerns(diagnostics: Mapping[str, Any]) -> list[Concern]:
    """What a sampler's own diagnostics give to worry about."""
    found: list[Concern] = []
    count, share = diagnostics.get("divergences", 0), diagnostics.get("divergent_share", 0.0)
    if count:
        words = (
            f"{count} transitions diverged ({share:.2%}): the density bends faster than the step "
            "size follows, and its narrow parts are missing; raise target_accept, or reparametrise"
        )
        found.append((share > MOST_DIVERGENT, words))
    count, share = diagnostics.get("undefined", 0), diagnostics.get("undefined_share", 0.0)
    if count:
        words = (
            f"the log density was NaN at {count} proposals ({share:.2%}), which were not accepted: "
            "outside its support it must be −inf, and inside a number"
        )
        found.append((share > MOST_DIVERGENT, words))
    ratios = [r for r in diagnostics.get("ebfmi", []) if math.isfinite(r)]
    if ratios and min(ratios) < LEAST_EBFMI and diagnostics["transitions"] >= LEAST_TRANSITIONS:
        words = (
            f"E-BFMI is {min(ratios):.2f} (below {LEAST_EBFMI}): energies are explored slowly, "
            "tails are too short; run longer, or reparametrise"
        )
        found.append((True, words))
    saturated = diagnostics.get("saturated_share", 0.0)
    if saturated > _SATURATED:
        words = (
            f"{saturated:.0%} of the trees reached max_depth before turning: correct but slow; "
            "raise max_depth, or lengthen burn_in"
        )
        found.append((False, words))
    return found


def _functions(posterior: SamplePosterior, run: Run) -> Tensor:
    """Outputs at some training rows and the likelihood's parameters: [S, entries]."""
    rows = run.rows.rows[run.split_of[0]][:_ROWS]
    x, _ = run.rows.take(rows, torch.tensor(run.run_of[0]))
    (draws,) = posterior.groups(None, 0)
    with torch.no_grad():
        f = posterior._evaluate(draws, x)
    own = [v.reshape(len(v), -1) for v in draws.theta().values()]
    return torch.cat([*_compared(f, run.likelihood), *own], 1)


def _compared(f: Any, likelihood: Likelihood) -> list[Tensor]:
    """[S, n] a head. Logits up to the shift that all classes share: no prediction sees it, and
    only the prior pins it, so that chains may differ in it without harm."""
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    return [
        (own.log_softmax(2) if isinstance(head, Categorical) else own).flatten(1)
        for own, head in zip(tree_flatten(f)[0], heads, strict=True)
    ]
