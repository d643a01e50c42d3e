"""What a chain's own figures say: its weights beside its functions, its energies, its divergences.

Weights of a network have symmetric modes (units exchanged, signs turned) that chains need not
share, so that weights which disagree are no fault by themselves; a sampler whose energies move
slowly or whose trajectories diverge misses part of the posterior, whatever R-hat says.
"""

from __future__ import annotations

import math

import torch

from doxa.diagnose.advice import any_of, calmer, longer, smaller_steps
from doxa.diagnose.finding import Finding, bad, good, skipped, warning
from doxa.diagnose.patient import Patient
from doxa.mcmc.convergence import APART, LEAST_EBFMI, LEAST_TRANSITIONS, MOST_DIVERGENT
from doxa.posterior import SamplePosterior
from doxa.posterior.chains import LEAST_DRAWS, ess_bulk, rhat

_MOST_WEIGHTS = 1000


def weights(patient: Patient) -> Finding:
    """How far the chains agree weight by weight: a fact to read beside that of the functions."""
    base = patient.base
    if not isinstance(base, SamplePosterior) or not patient.is_chain:
        return skipped("the method runs no chains")
    if base.samples.shape[1] < LEAST_DRAWS:
        return skipped(f"{base.samples.shape[1]} draws a chain are too few to judge")
    size = base.samples.shape[2]
    some = torch.linspace(0, size - 1, min(size, _MOST_WEIGHTS)).long().unique()
    values = base.samples[:, :, some.to(base.samples.device)].detach().cpu()
    if not bool(torch.isfinite(values).all()):
        return bad("some draws hold weights that are not finite", calmer(patient))
    each = rhat(values)
    worst, apart = float(each.max()), float((each > APART).double().mean())
    told = (
        f"R-hat of {len(some)} weights is {worst:.3g} at most, the least effective size "
        f"{float(ess_bulk(values).min()):.0f}"
    )
    if apart == 0:
        return good(f"{told}: the chains agree weight by weight", worst)
    return good(
        f"{told}; {apart:.0%} of them are above {APART}: chains may sit in modes that are mirror "
        "images of each other; what predictions rest on is the check of the functions",
        worst,
    )


def energy(patient: Patient) -> Finding:
    """Divergent transitions and E-BFMI of a Hamiltonian sampler, as its record says."""
    found = patient.posterior.diagnostics
    if "divergences" not in found and "ebfmi" not in found:
        return skipped("the method runs no chains with energies")
    count, share = int(found.get("divergences", 0)), float(found.get("divergent_share", 0.0))
    ratios = [r for r in found.get("ebfmi", []) if math.isfinite(r)]
    lowest = min(ratios, default=math.nan)
    told = f"{count} transitions diverged"
    if ratios:
        told = f"{told}; E-BFMI is {lowest:.2f} at least"
    if share > MOST_DIVERGENT:
        return bad(
            f"{told}: {share:.1%} of trajectories met places that the step size cannot follow, "
            "which the draws then miss",
            any_of(smaller_steps(patient), "other parameters (scaled, non-centred)"),
            share,
        )
    judged = ratios and found.get("transitions", 0) >= LEAST_TRANSITIONS
    if judged and lowest < LEAST_EBFMI:
        return warning(
            f"{told} (below {LEAST_EBFMI}): energies are explored slowly, tails too little",
            any_of(longer(patient), "other parameters"),
            lowest,
        )
    return good(told, lowest if ratios else None)
