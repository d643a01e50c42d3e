"""Deep ensembles: MAP from several starts, averaged.

    p(y | x) = (1/M) Σ_m p(y | x, θ_m)

Lakshminarayanan, Pritzel & Blundell (2017). Members differ in their initial weights and in the
order of their data, so that they end in different modes. The strongest simple baseline; its cost is
M fits, which run as one stacked fit here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from doxa import store
from doxa.ensemble.map import MAP


@store.register("deep-ensemble")
@dataclass(frozen=True)
class DeepEnsemble(MAP):
    """Five MAP fits unless `members` says otherwise."""

    name: ClassVar[str] = "deep-ensemble"
    default_members: ClassVar[int] = 5
