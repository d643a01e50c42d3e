"""Can the draws be trusted? Figures of the chains, and a status in plain words.

R-hat must stay below 1.01 for every parameter, as Vehtari et al. (2021) ask, which goes with some
400 effective draws. What the sampler itself worries about (divergences, E-BFMI, acceptance) is in
the status already.
"""

from __future__ import annotations

from doxa.density.draws import Draws
from doxa.posterior import Status
from doxa.posterior.chains import LEAST_DRAWS, ebfmi, finite, moved

MOST_RHAT = 1.01
LEAST_MOVED = 0.05


def judge(draws: Draws) -> None:
    """Fill in diagnostics and status; a status the sampler set is left as it is."""
    table = draws.summary()
    found = draws.diagnostics
    found["moved"] = moved(draws.theta).tolist()
    if draws.count >= LEAST_DRAWS:
        for name in ("rhat", "ess_bulk", "ess_tail"):
            found[name] = dict(zip(table.names, table[name].tolist(), strict=True))
        if "energy" in draws.stats and "ebfmi" not in found:
            found["ebfmi"] = ebfmi(draws.stats["energy"]).tolist()
    if draws.status == "ok":
        draws.record.status = _status(draws)


def _status(draws: Draws) -> Status:
    table, found = draws.summary(), draws.diagnostics
    if not all(bool(finite(value).all()) for value in draws.values()):
        return Status("diverged", "some draws are not finite: is the density proper?")
    still = [k for k, share in enumerate(found["moved"]) if share < LEAST_MOVED]
    if still and draws.count > 1:
        return Status(
            "not-converged",
            f"{len(still)} of {draws.members} chains hardly move (chain {still[0]}: a new place in "
            f"{found['moved'][still[0]]:.1%} of its draws): start elsewhere, or a longer burn_in",
        )
    if draws.count < LEAST_DRAWS:
        return Status("not-converged", f"{draws.count} draws a chain are too few to judge")
    worst = int(table["rhat"].argmax())
    rhat = float(table["rhat"][worst])
    if not rhat <= MOST_RHAT:
        return Status(
            "not-converged",
            f"R-hat of {table.names[worst]} is {rhat:.3g} (above {MOST_RHAT}): the chains disagree "
            "still; more draws and burn_in",
        )
    return draws.status
