"""A prior's scale by rows that were held out, from the evidence's outwards.

Of half decades of the precision, the nearest that predicts held-out rows as well as the best, to a
standard error (Breiman et al. 1984). At the last of them H is the prior's alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from doxa.data.weights import weighted_mean
from doxa.laplace import verdict
from doxa.laplace.posterior import LaplacePosterior
from doxa.laplace.statistics import Sums
from doxa.method import Run, State

log = logging.getLogger("doxa")

# times the evidence's, nearest first
_PRECISIONS = tuple(10 ** (k / 2) for k in sorted(range(-2, 9), key=abs))


@dataclass(frozen=True)
class HeldOut:
    """Chooses one member's scale.

    sums: by which learned noise is settled under each. posterior: of a run and a state. if_better:
    only where θ* alone predicts the rows better. trained: they stopped training, at a good θ*.
    """

    sums: Sums
    posterior: Callable[[Run, State], LaplacePosterior]
    if_better: bool
    trained: bool

    def chosen(self, run: Run, state: State) -> tuple[State, str]:
        """The state under that scale, and who chose it: "evidence" or "validation"."""
        rows = verdict.judged(run)
        assert rows is not None and rows.held_out  # one member has one part
        if self.if_better:
            below = verdict.below_its_maximum(self.posterior(run, state), rows)
            if not below.beyond(below.much if self.trained else 0.0):
                return state, "evidence"
        tried, scores = [], []
        for factor in _PRECISIONS:  # learned noise is at its type-II maximum under each
            scaled = {**state, "tau": factor * state["tau"]}
            tried.append(self.sums.settle(run, scaled, scale=False))
            scores.append(verdict.log_scores(self.posterior(run, tried[-1]), rows))
        best = max(scores, key=lambda each: float(weighted_mean(each, rows.weight)))
        behind = [verdict.beyond_chance(best - each, rows.weight, errors=1.0) for each in scores]
        chosen = tried[behind.index(False)]
        scale, before = (float(s["tau"].log().mean().mul(-0.5).exp()) for s in (chosen, state))
        log.info("laplace: prior scale %.3g by held-out rows (%.3g by evidence)", scale, before)
        return chosen, "validation"
