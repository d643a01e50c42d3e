"""How each method is run on the UCI tables: settings fixed beforehand, or chosen on training rows.

No setting was chosen by test rows. A row of the table has a method's name, or, where the method is
there in several forms, a name of its own. A method of which nothing is said here runs as it comes.
"""

from __future__ import annotations

import doxa
from doxa.app.bench.protocols.chains import FULL, STOCHASTIC
from doxa.app.bench.protocols.closed_form import EXACT, LAPLACE
from doxa.app.bench.protocols.functional import FUNCTIONAL
from doxa.app.bench.protocols.points import POINTS
from doxa.app.bench.protocols.problem import SMALL, Answer, Fit, Problem, Protocol
from doxa.app.bench.protocols.variational import VARIATIONAL

__all__ = ["PROTOCOLS", "SMALL", "Answer", "Problem", "Protocol"]


def _as_it_comes(name: str) -> Fit:
    """A method of which nothing is said here: its own settings, for 400 epochs."""

    def fit(problem: Problem, _name: str) -> Answer:
        if not doxa.get_method(name).needs_network:
            return Answer(list(problem.fit(name, 0)))
        sweep = problem.fit(
            name, likelihood="gaussian", epochs=400 if problem.small else 40, batch_size=32,
            lr=0.01, schedule="cosine",
        )  # fmt: skip
        return Answer(list(sweep))

    return fit


PROTOCOLS: dict[str, Protocol] = {
    **EXACT, **POINTS, **LAPLACE, **VARIATIONAL, **FUNCTIONAL, **FULL, **STOCHASTIC
}  # fmt: skip
PROTOCOLS |= {
    row.name: Protocol(
        "its own settings, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, rate .01 decaying",
        _as_it_comes(row.name),
    )
    for row in doxa.methods()
    if "regression" in row.tasks and row.name not in PROTOCOLS
}
