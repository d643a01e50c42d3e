"""Points and sets of points: MAP, ensembles of every kind, and Gaussians around SGD's path.

All have a network with two outputs, a mean and a noise level, as deep ensembles have in their
paper, and 40 epochs for each network that is averaged; rate and prior are chosen as MAP's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import doxa
from doxa.app.bench.protocols.problem import (
    Answer,
    Fit,
    Grid,
    Problem,
    Protocol,
    best,
    only,
    said,
)

# Tried for all of them: the rate and its schedule, and the prior's width.
RATES = ((0.005, "constant"), (0.01, "cosine"), (0.02, "cosine"))
WIDTHS = (0.3, 1.0)
BATCH = 32


def heads(
    method: Any | Callable[[Problem], Any],
    members: int = 1,
    epochs: int = 40,
    batch: int = BATCH,
    samples: int | None = None,
) -> Fit:
    """Rate, schedule and prior are one choice for the set, by all splits' validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        made = method(problem) if callable(method) else method

        def train(rows: Sequence[Tensor], rate: Any, grid: Grid) -> Any:
            return problem.fit(
                made, 2, likelihood="heteroscedastic", members=members, epochs=epochs,
                batch_size=batch, lr=rate[0], schedule=rate[1],
                runs=doxa.Runs(rows=rows, grid=grid),
            )  # fmt: skip

        priors = {"prior": [doxa.Normal(width) for width in WIDTHS]}
        rate, point = best(problem, train, RATES, priors, samples)
        facts = {"chosen": {"rate": list(rate), **said(point)}}
        return Answer(list(train(problem.train, rate, only(point))), samples, facts)

    return fit


def _swag(problem: Problem) -> Any:
    """Half of the epochs to train, half for the trajectory, a point at the end of each."""
    return doxa.SWAG(share=0.5, cycle=max(1, 4 * problem.rows // 5 // BATCH))


_CHOSEN = (
    "the rate (.005 constant, .01 or .02 decaying) and the prior, N(0, .3²) or N(0, 1), by the "
    "last fifth of the training splits, refitted on all"
)
_HEADS = f"heteroscedastic head, 40 epochs, B = 32; {_CHOSEN}"

POINTS = {
    "map": Protocol(f"one member; {_HEADS}", heads("map")),
    "deep-ensemble": Protocol(f"five members; {_HEADS}", heads("deep-ensemble", 5)),
    "adversarial-ensemble": Protocol(
        f"deep-ensemble with rows moved by .01 of each input's range; five members; {_HEADS}",
        heads(doxa.DeepEnsemble(adversarial=0.01), 5),
        "deep-ensemble",
    ),
    "bootstrap": Protocol(
        f"five members, each under Dirichlet weights of the rows; {_HEADS}", heads("bootstrap", 5)
    ),
    "snapshot": Protocol(
        f"five cycles of 40 epochs of one network; heteroscedastic head, B = 32; {_CHOSEN}, the "
        "schedule being the cycles' own",
        heads(doxa.SnapshotEnsemble(size=5), epochs=200),
    ),
    "batch-ensemble": Protocol(
        "four components, 160 epochs in batches of 128 of which each has a quarter: as many steps "
        f"and rows a component as MAP; heteroscedastic head; {_CHOSEN}",
        heads(doxa.BatchEnsemble(size=4), epochs=160, batch=128),
    ),
    "swa": Protocol(
        f"80 epochs, the mean of the last half; heteroscedastic head, B = 32; {_CHOSEN}; the mean "
        "is of points at half that rate",
        heads(doxa.SWA(share=0.5), epochs=80),
    ),
    "swag": Protocol(
        "40 epochs of training and 40 of trajectory at half its rate, a point an epoch, rank 20; "
        f"heteroscedastic head, B = 32; {_CHOSEN}; 300 samples",
        heads(_swag, epochs=80, samples=300),
    ),
    "multiswag": Protocol(
        "swag from five starts: 40 epochs of training and 40 of trajectory, a point an epoch, rank "
        f"20; heteroscedastic head, B = 32; {_CHOSEN}; 300 samples",
        heads(_swag, 5, epochs=80, samples=300),
        "swag",
    ),
}
