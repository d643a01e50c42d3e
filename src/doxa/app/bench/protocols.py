"""How each method is run on the UCI tables: settings fixed beforehand, or chosen on training rows.

Every method has one hidden ReLU layer of 50 units (100 for protein), inputs and targets
standardised on each split's training rows, and all splits in one stacked fit. No setting was
chosen by test rows. "Small" sets have fewer than 2,000 training rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import doxa
from doxa.errors import MethodError
from doxa.predictive import Predictive

SMALL = 2000

# Observation precisions tried for MC dropout, in units of y, as in the code of its paper.
PRECISIONS = {
    "boston_housing": (0.1, 0.15, 0.2), "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75), "kin8nm": (150.0, 200.0, 250.0),
    "naval_propulsion": (30000.0, 40000.0, 50000.0), "power_plant": (0.05, 0.1, 0.15),
    "protein": (0.025, 0.05, 0.075), "wine_quality_red": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}  # fmt: skip
DROPOUT = (0.005, 0.01, 0.05, 0.1)
# Tried for MAP and ensembles: the rate and its schedule, and the prior's width.
RATES = ((0.005, "constant"), (0.01, "cosine"), (0.02, "cosine"))
WIDTHS = (0.3, 1.0)
# Tried for samplers on mini-batches; with friction .1, momentum goes ten times as far.
STEPS = {
    "sgld": (0.003, 0.01, 0.03),
    "psgld": (0.0003, 0.001, 0.003),
    "sghmc": (0.0003, 0.001, 0.003),
}


@dataclass(frozen=True)
class Problem:
    """All rows, and those each split trains on."""

    x: Tensor
    y: Tensor
    train: Sequence[Tensor]
    hidden: int
    seed: int

    @property
    def small(self) -> bool:
        return max(len(rows) for rows in self.train) < SMALL

    def validation(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each split's training rows without their last fifth, and that fifth."""
        cuts = [int(0.8 * len(rows)) for rows in self.train]
        kept = [rows[:cut] for rows, cut in zip(self.train, cuts, strict=True)]
        return kept, [rows[cut:] for rows, cut in zip(self.train, cuts, strict=True)]

    def score(self, posterior: Any, rows: Tensor, samples: int | None = None) -> float:
        """The mean log predictive density of some rows."""
        p = posterior.predict(self.x[rows], samples)
        return float(p.log_prob(self.y[rows]).mean())

    def fit(self, method: Any, outputs: int = 1, **options: Any) -> Any:
        """All splits in one fit; no network where there are no outputs."""
        net = doxa.nets.mlp(self.x.shape[1], outputs, hidden=(self.hidden,)) if outputs else None
        asked: dict[str, Any] = {
            "runs": doxa.Runs(rows=self.train), "schedule": "constant", "validation": None,
        }  # fmt: skip
        asked |= options
        return doxa.fit(
            net, (self.x, self.y), method, seed=self.seed, standardize=True, progress=False, **asked
        )


@dataclass
class Answer:
    """A posterior for each split, and how many samples its predictions take."""

    posteriors: Sequence[Any]
    samples: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def predict(self, split: int, x: Tensor, samples: int | None = None) -> Predictive:
        p: Predictive = self.posteriors[split].predict(x, samples or self.samples)
        return p

    def statuses(self) -> dict[str, int]:
        """How many splits ended how."""
        names = [str(posterior.status) for posterior in self.posteriors]
        return {name: names.count(name) for name in sorted(set(names))}


@dataclass(frozen=True)
class Protocol:
    """What is done, in words that stand under the table, and the doing."""

    words: str
    fit: Callable[[Problem, str], Answer]


def _linear(problem: Problem, _name: str) -> Answer:
    return Answer(list(problem.fit("linear", 0)))


def _heteroscedastic(method: str, members: int) -> Callable[[Problem, str], Answer]:
    """Rate, schedule and prior are one choice for the set, by all splits' validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        kept, held = problem.validation()

        def train(rows: Sequence[Tensor], rate: float, schedule: str, *widths: float) -> Any:
            priors = {"prior": [doxa.Normal(width) for width in widths]}
            return problem.fit(
                method, 2, likelihood="heteroscedastic", members=members, epochs=40, batch_size=32,
                lr=rate, schedule=schedule, runs=doxa.Runs(rows=rows, grid=priors),
            )  # fmt: skip

        validated = dict.fromkeys(itertools.product(RATES, WIDTHS), 0.0)
        for rate in RATES:
            tried = train(kept, *rate, *WIDTHS)
            for posterior, spec in zip(tried, tried.specs, strict=True):
                own = (rate, spec.hyper["prior"].std)
                validated[own] += problem.score(posterior, held[spec.split])
        rate, width = max(validated, key=lambda choice: validated[choice])
        sweep = train(problem.train, *rate, width)
        return Answer(list(sweep), facts={"chosen": {"rate": list(rate), "prior": width}})

    return fit


def _mean_field(problem: Problem, _name: str) -> Answer:
    sweep = problem.fit(
        "mean-field", likelihood="gaussian", epochs=400 if problem.small else 40, batch_size=32,
        lr=0.01, schedule="cosine",
    )  # fmt: skip
    return Answer(list(sweep), samples=1000)


def _laplace(problem: Problem, _name: str) -> Answer:
    """The prior's width is chosen by the evidence, split by split."""
    priors = [doxa.Normal(scale) for scale in (0.1, 0.3, 1.0, 3.0)]
    sweep = problem.fit(
        doxa.Laplace(structure="full"), likelihood="gaussian", schedule="cosine",
        epochs=400 if problem.small else 40, batch_size=32, lr=0.01,
        runs=doxa.Runs(rows=problem.train, grid={"prior": priors}),
    )  # fmt: skip
    best = sweep.select(by="evidence")
    chosen = [hyper["prior"].std for hyper in best.hyper]
    return Answer(list(best), facts={"chosen": {"prior": chosen}})


def _mc_dropout(problem: Problem, name: str) -> Answer:
    """p and the noise from a grid, by the last fifth of each training split; then all of it."""
    method = doxa.MCDropout(insert="all")
    noises = [doxa.Gaussian(noise=tau**-0.5) for tau in PRECISIONS[name]]
    length = {"epochs": 4000, "lr": 0.001, "batch_size": 128, "schedule": "constant"}
    if not problem.small:
        length = {"epochs": 40, "lr": 0.005, "batch_size": 32, "schedule": "cosine"}
    common: dict[str, Any] = {"likelihood": noises[0], "prior": doxa.Normal(100.0), **length}
    kept, held = problem.validation()
    grid = {"p": DROPOUT, "likelihood": noises}
    tried = problem.fit(method, runs=doxa.Runs(rows=kept, grid=grid), **common)
    masks = 1000 if problem.small else 200
    best: dict[int, tuple[float, dict[str, Any]]] = {}
    for posterior, spec in zip(tried, tried.specs, strict=True):
        value = problem.score(posterior, held[spec.split], masks)
        if spec.split not in best or value > best[spec.split][0]:
            best[spec.split] = (value, dict(spec.hyper))
    chosen = {field: [best[r][1][field] for r in range(len(held))] for field in grid}
    again = doxa.Runs(rows=problem.train, per_split=chosen)
    sweep = problem.fit(method, runs=again, **common)
    facts = {"p": chosen["p"], "precision": [own.noise**-2 for own in chosen["likelihood"]]}
    return Answer(list(sweep), samples=10_000, facts={"chosen": facts})


def _hmc(problem: Problem, _name: str) -> Answer:
    small = problem.small
    method = doxa.HMC(
        draws=500 if small else 100, burn_in=500 if small else 200, leapfrog=30 if small else 20
    )
    sweep = problem.fit(method, likelihood="gaussian", members=2 if small else 1)
    return Answer(list(sweep))


def _nuts(problem: Problem, _name: str) -> Answer:
    if not problem.small:
        raise MethodError(f"NUTS on all rows is run on sets below {SMALL} training rows")
    method = doxa.NUTS(draws=200, burn_in=300, max_depth=7)
    return Answer(list(problem.fit(method, likelihood="gaussian", members=2)))


def _stochastic(name: str, *rates: float) -> Callable[[Problem, str], Answer]:
    """A sampler on mini-batches; the rate is one choice for the set, by validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        epoch = max(len(rows) for rows in problem.train) // 32
        method = _sampler(name, epoch * (400 if problem.small else 40))

        def train(rows: Sequence[Tensor], *tried: float) -> Any:
            runs = doxa.Runs(rows=rows, grid={"lr": list(tried)})
            return problem.fit(
                method, likelihood="gaussian", members=2, batch_size=32, runs=runs,
                epochs=400 if problem.small else 40,
            )  # fmt: skip

        kept, held = problem.validation()
        validated = dict.fromkeys(rates, 0.0)
        if len(rates) > 1:
            tried = train(kept, *rates)
            for posterior, spec in zip(tried, tried.specs, strict=True):
                validated[spec.hyper["lr"]] += _if_stable(problem, posterior, held[spec.split])
        rate = max(validated, key=lambda choice: validated[choice])
        return Answer(list(train(problem.train, rate)), facts={"chosen": {"rate": rate}})

    return fit


def _if_stable(problem: Problem, posterior: Any, rows: Tensor) -> float:
    """The score of a chain none of whose draws ran away: one with an infinite noise has no weight
    in the density of a mixture, and so no say in its score, but there is no variance then."""
    score = problem.score(posterior, rows)
    spread = posterior.predict(problem.x[rows]).std
    return score if math.isfinite(score) and bool(spread.isfinite().all()) else -math.inf


def _sampler(name: str, steps: int) -> Any:
    """100 draws of each chain from the last quarter of so many steps, or from four cycles."""
    if name == "cyclical":
        return doxa.CyclicalSGMCMC(thin=max(1, steps // 500))
    thin = max(1, steps // 400)
    burn_in = 500 if name == "constant-sgd" else steps - 100 * thin  # it has an optimum to start at
    return doxa.get_method(name)(draws=100, thin=thin, burn_in=burn_in)


def _not_for_networks(problem: Problem, _name: str) -> Answer:
    raise MethodError("a random walk does not mix in the hundreds of dimensions of a network")


def _gp(problem: Problem, _name: str) -> Answer:
    if not problem.small:
        raise MethodError(f"an exact GP costs N³: it is run on sets below {SMALL} training rows")
    return Answer(list(problem.fit(doxa.GP(ard=True), 0, steps=100)))


def _as_it_comes(name: str) -> Callable[[Problem, str], Answer]:
    """A method of which nothing is said here: its own settings, as long as mean-field."""

    def fit(problem: Problem, _name: str) -> Answer:
        if not doxa.get_method(name).needs_network:
            return Answer(list(problem.fit(name, 0)))
        sweep = problem.fit(
            name, likelihood="gaussian", epochs=400 if problem.small else 40, batch_size=32,
            lr=0.01, schedule="cosine",
        )  # fmt: skip
        return Answer(list(sweep))

    return fit


_HEADS = (
    "heteroscedastic head, 40 epochs, B = 32; the rate (.005 constant, .01 or .02 decaying) and "
    "the prior, N(0, .3²) or N(0, 1), by the last fifth of the training splits, refitted on all"
)

PROTOCOLS: dict[str, Protocol] = {
    "linear": Protocol("linear in the inputs; noise and prior width by evidence", _linear),
    "map": Protocol(
        f"one member; {_HEADS}",
        _heteroscedastic("map", 1),
    ),
    "deep-ensemble": Protocol(
        f"five members; {_HEADS}",
        _heteroscedastic("deep-ensemble", 5),
    ),
    "laplace": Protocol(
        "full Gauss–Newton, linearised; N(0, s²) prior with s of {.1, .3, 1, 3} by evidence; 400 "
        "epochs (40 on large sets), B = 32, rate .01 decaying",
        _laplace,
    ),
    "mean-field": Protocol(
        "N(0, 1) prior, T = 1, 400 epochs (40 on large sets), B = 32, rate .01 decaying, 1,000 "
        "samples",
        _mean_field,
    ),
    "gp": Protocol(
        "exact, RBF kernel with a lengthscale an input, by evidence; small sets only", _gp
    ),
    "hmc": Protocol(
        "N(0, 1) prior; small sets two chains, 500 + 500 transitions of 30 steps; large sets one, "
        "200 + 100 of 20: too short to converge there",
        _hmc,
    ),
    "mc-dropout": Protocol(
        "masks on inputs and hidden units; p of {.005, .01, .05, .1} and one of three noise "
        "levels by the last fifth of each training split, refitted on all of it; 4,000 epochs, "
        "B = 128, rate .001 (large sets: 40 epochs, B = 32, rate .005 decaying, which validation "
        "rows preferred); 10,000 masks",
        _mc_dropout,
    ),
    "nuts": Protocol(
        "N(0, 1) prior; two chains, 300 + 200 transitions, trees of at most 2^7; small sets only",
        _nuts,
    ),
    **{
        name: Protocol(
            "two chains, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, 100 draws from the "
            f"last quarter; the rate of {{{', '.join(f'{rate:g}' for rate in rates)}}} by the last "
            "fifth of the training splits, refitted on all",
            _stochastic(name, *rates),
        )
        for name, rates in STEPS.items()
    },
    "cyclical": Protocol(
        "two chains of SGLD, N(0, 1) prior, four cycles, 400 epochs in all (40 on large sets), "
        "B = 32; the rate of {0.003, 0.01, 0.03} by the last fifth of the training splits, "
        "refitted on all",
        _stochastic("cyclical", 0.003, 0.01, 0.03),
    ),
    "constant-sgd": Protocol(
        "two chains, N(0, 1) prior, 400 epochs (40 on large sets) to the optimum, B = 32; then 100 "
        "draws over a quarter as many steps at the optimal rate, or at one over the curvature",
        _stochastic("constant-sgd", 0.01),
    ),
    **{
        name: Protocol(
            "not run: a random walk does not mix in a network's weights", _not_for_networks
        )
        for name in ("metropolis", "minibatch-mh")
    },
}
PROTOCOLS |= {
    row.name: Protocol(
        "its own settings, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, rate .01 decaying",
        _as_it_comes(row.name),
    )
    for row in doxa.methods()
    if "regression" in row.tasks and row.name not in PROTOCOLS
}
