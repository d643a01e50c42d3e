"""Pictures of posteriors and predictions, by matplotlib (the extra `plots`).

    ax = doxa.plot.reliability(posterior.predict(x_test), y_test)
    doxa.plot.functions(posterior, grid, data=(x, y), ax=ax)

Every function takes what it shows, and `ax`, the axes to draw on; without it a new figure is made.
It returns the axes. The numbers are those of `doxa.evaluate`, of the posterior or of its draws: a
function here only draws. `.plot()` of a posterior, a predictive or draws is the one of these that
shows it best.

One style: the demo and the documentation draw with these functions, and the colours of series are
those of the report (`app/report/templates/style.css`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from doxa.density import Draws
from doxa.errors import Unavailable
from doxa.plot.draws import energy, pairs, rank, trace
from doxa.plot.fits import eig, functions, learning_curve, weights
from doxa.plot.predictions import closeness, decomposition, intervals, ood, pit, reliability
from doxa.posterior import Posterior
from doxa.predictive import Predictive

__all__ = [
    "closeness", "decomposition", "eig", "energy", "functions", "intervals", "learning_curve",
    "ood", "pairs", "pit", "rank", "reliability", "trace", "weights",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


def shown(result: Any) -> Callable[..., Any]:
    """The function that shows a result best: `.plot()` of it."""
    if isinstance(result, Predictive):
        return decomposition if result.likelihood.classifies else intervals
    if isinstance(result, Draws):
        return trace
    if isinstance(result, Posterior):
        return learning_curve if result.history.get("loss") else weights
    raise Unavailable(f"there is no one picture of a {type(result).__name__}; see doxa.plot")
