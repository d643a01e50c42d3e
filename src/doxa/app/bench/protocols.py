"""How each method is run on the UCI tables: settings fixed beforehand, or chosen on training rows.

No setting was chosen by test rows. A row of the table has the name of a method, or its own name
where one method is there in several forms. A method that has no protocol here runs with its own
settings. By family: points and ensembles, closed forms, variational methods, functional methods,
MCMC.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

import doxa
from doxa.app.bench.uci import SMALL, Answer, Fit, Grid, Problem, Protocol, best, described, only
from doxa.errors import MethodError

# Points and sets of points: MAP, ensembles of every kind, and Gaussians around the path of SGD. All
# have a network with two outputs, a mean and a noise level, as deep ensembles have in their paper,
# and 40 epochs for each network that is averaged; rate and prior are chosen as those of MAP are.

# Tried for all of them: the rate and its schedule, and the prior's width.
_RATES = ((0.005, "constant"), (0.01, "cosine"), (0.02, "cosine"))
_PRIOR_WIDTHS = (0.3, 1.0)
_BATCH = 32


def _heads(
    method: Any | Callable[[Problem], Any],
    members: int = 1,
    epochs: int = 40,
    batch: int = _BATCH,
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

        priors = {"prior": [doxa.Normal(width) for width in _PRIOR_WIDTHS]}
        rate, point = best(problem, train, _RATES, priors, samples)
        facts = {"chosen": {"rate": list(rate), **described(point)}}
        return Answer(list(train(problem.train, rate, only(point))), samples, facts)

    return fit


def _swag(problem: Problem) -> Any:
    """Half of the epochs to train, half for the trajectory, a point at the end of each."""
    return doxa.SWAG(average=0.5, cycle=max(1, 4 * problem.rows // 5 // _BATCH))


_BY_ALL = (
    "the rate (.005 constant, .01 or .02 decaying) and the prior, N(0, .3²) or N(0, 1), by the "
    "last fifth of the training splits, refitted on all"
)
_HEADS = f"heteroscedastic head, 40 epochs, B = 32; {_BY_ALL}"

_POINTS = {
    "map": Protocol(f"one member; {_HEADS}", _heads("map")),
    "deep-ensemble": Protocol(f"five members; {_HEADS}", _heads("deep-ensemble", 5)),
    "adversarial-ensemble": Protocol(
        f"deep-ensemble with rows moved by .01 of each input's range; five members; {_HEADS}",
        _heads(doxa.DeepEnsemble(adversarial=0.01), 5),
        "deep-ensemble",
    ),
    "bootstrap": Protocol(
        f"five members, each under Dirichlet weights of the rows; {_HEADS}", _heads("bootstrap", 5)
    ),
    "snapshot": Protocol(
        f"five cycles of 40 epochs of one network; heteroscedastic head, B = 32; {_BY_ALL}, the "
        "schedule being the cycles' own",
        _heads(doxa.SnapshotEnsemble(snapshots=5), epochs=200),
    ),
    "batch-ensemble": Protocol(
        "four components, 160 epochs in batches of 128 of which each has a quarter: as many steps "
        f"and rows a component as MAP; heteroscedastic head; {_BY_ALL}",
        _heads(doxa.BatchEnsemble(components=4), epochs=160, batch=128),
    ),
    "swa": Protocol(
        f"80 epochs, the mean of the last half; heteroscedastic head, B = 32; {_BY_ALL}; the mean "
        "is of points at half that rate",
        _heads(doxa.SWA(average=0.5), epochs=80),
    ),
    "swag": Protocol(
        "40 epochs of training and 40 of trajectory at half its rate, a point an epoch, rank 20; "
        f"heteroscedastic head, B = 32; {_BY_ALL}; 300 samples",
        _heads(_swag, epochs=80, samples=300),
    ),
    "multiswag": Protocol(
        "swag from five starts: 40 epochs of training and 40 of trajectory, a point an epoch, rank "
        f"20; heteroscedastic head, B = 32; {_BY_ALL}; 300 samples",
        _heads(_swag, 5, epochs=80, samples=300),
        "swag",
    ),
}

# What has a closed form, or has one at a maximum: linear models, Gaussian processes, Laplace.


def _linear(problem: Problem, _name: str) -> Answer:
    return Answer(list(problem.fit("linear", 0)))


def _gp(problem: Problem, _name: str) -> Answer:
    if not problem.small:
        raise MethodError(f"an exact GP costs N³: it is run on sets below {SMALL} training rows")
    return Answer(list(problem.fit(doxa.GP(ard=True), 0, steps=100)))


def _wide(name: str, depths: tuple[int, ...]) -> Fit:
    """An infinitely wide network; its depth by the evidence, split by split."""

    def fit(problem: Problem, _name: str) -> Answer:
        if not problem.small:
            raise MethodError(f"{name} costs N³: it is run on sets below {SMALL} training rows")
        tried = [list(problem.fit(doxa.get_method(name)(depth=depth), 0)) for depth in depths]
        if len(depths) == 1:
            return Answer(tried[0])
        likeliest = [max(range(len(depths)), key=lambda i: own[i].log_evidence)
                     for own in zip(*tried, strict=True)]  # fmt: skip
        chosen = {"depth": [depths[i] for i in likeliest]}
        return Answer([tried[i][r] for r, i in enumerate(likeliest)], facts={"chosen": chosen})

    return fit


def _inducing(method: Any) -> Fit:
    """On all sets: a step does not see how many rows there are."""

    def fit(problem: Problem, _name: str) -> Answer:
        return Answer(list(problem.fit(method(), 0, steps=3000, batch_size=500, schedule="cosine")))

    return fit


def _laplace(subset: str = "all", **settings: Any) -> Fit:
    """The prior's width is chosen by the evidence, split by split."""

    def fit(problem: Problem, _name: str) -> Answer:
        priors = [doxa.Normal(scale) for scale in (0.1, 0.3, 1.0, 3.0)]
        sweep = problem.fit(
            doxa.Laplace(**settings), likelihood="gaussian", schedule="cosine", subset=subset,
            epochs=400 if problem.small else 40, batch_size=32, lr=0.01,
            runs=doxa.Runs(rows=problem.train, grid={"prior": priors}),
        )  # fmt: skip
        selected = sweep.select(by="evidence")
        chosen = [hyper["prior"].std for hyper in selected.hyper]
        return Answer(list(selected), facts={"chosen": {"prior": chosen}})

    return fit


_AS_LAPLACE = (
    "linearised; N(0, s²) prior with s of {.1, .3, 1, 3} by evidence; 400 epochs (40 on large "
    "sets), B = 32, rate .01 decaying"
)

_AS_SPARSE = (
    "100 inducing points, RBF kernels with a lengthscale an input, on the bound; 3,000 steps, "
    "B = 500, rate .02 decaying"
)

_EXACT = {
    "linear": Protocol("linear in the inputs; noise and prior width by evidence", _linear),
    "gp": Protocol(
        "exact, RBF kernel with a lengthscale an input, by evidence; small sets only", _gp
    ),
    "nngp": Protocol(
        "exact, ReLU; σ_w, σ_b, noise and one, two or three hidden layers by evidence; small sets "
        "only",
        _wide("nngp", (1, 2, 3)),
    ),
    "ntk": Protocol(
        "the ensemble after training, ReLU, two hidden layers, σ_w, σ_b and noise by the evidence "
        "of a GP with its kernel; small sets only",
        _wide("ntk", (2,)),
    ),
    "sparse-gp": Protocol(f"sparse, {_AS_SPARSE}", _inducing(lambda: doxa.SparseGP())),
    "deep-gp": Protocol(f"two layers, {_AS_SPARSE}", _inducing(lambda: doxa.DeepGP())),
    "deep-gp-3": Protocol(
        f"three layers, {_AS_SPARSE}", _inducing(lambda: doxa.DeepGP(layers=3)), "deep-gp"
    ),
}
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "laplace-kronecker": ("Kronecker-factored Gauss–Newton", {"structure": "kronecker"}),
    "laplace-low-rank": ("50 eigenpairs of the Gauss–Newton", {"structure": "low-rank"}),
    "laplace-diagonal": ("diagonal of the Gauss–Newton", {"structure": "diagonal"}),
    "laplace-fisher": ("full empirical Fisher", {"structure": "full", "curvature": "fisher"}),
    "laplace-last-layer": (
        "full Gauss–Newton of the last layer", {"structure": "full", "subset": "last_layer"}
    ),
}  # fmt: skip
_LAPLACE = {
    "laplace": Protocol(f"full Gauss–Newton, {_AS_LAPLACE}", _laplace(structure="full")),
    **{
        name: Protocol(f"{form}, {_AS_LAPLACE}", _laplace(**settings), "laplace")
        for name, (form, settings) in _FORMS.items()
    },
}

# Variational methods, with one Gaussian noise level: learned, and for dropout from a grid. Rates
# and the width that q starts with are chosen by validation rows. A q that starts narrow has not
# widened to the end when the steps are used up: its bound is lower than that of one that started
# wide, and on some sets it predicts better.

# Observation precisions tried for MC dropout, in units of y, as in the code of its paper.
_PRECISIONS = {
    "boston_housing": (0.1, 0.15, 0.2), "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75), "kin8nm": (150.0, 200.0, 250.0),
    "naval_propulsion": (30000.0, 40000.0, 50000.0), "power_plant": (0.05, 0.1, 0.15),
    "protein": (0.025, 0.05, 0.075), "wine_quality_red": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}  # fmt: skip
_DROPOUT = (0.005, 0.01, 0.05, 0.1)
_Length = Mapping[str, Any]


def _dropout(
    method: Any, grid: Grid, masks: int, small: _Length, large: _Length, **common: Any
) -> Fit:
    """A point of the grid and one of the noise levels for each split, by the last fifth of its
    training rows; then all of them."""

    def fit(problem: Problem, name: str) -> Answer:
        noises = [doxa.Gaussian(noise=tau**-0.5) for tau in _PRECISIONS[name]]
        options = {"likelihood": noises[0], **common, **(small if problem.small else large)}
        kept, held = problem.validation()
        every = {**grid, "likelihood": noises}
        tried = problem.fit(method, runs=doxa.Runs(rows=kept, grid=every), **options)
        few = 1000 if problem.small else 200
        found: dict[int, tuple[float, dict[str, Any]]] = {}
        for posterior, spec in zip(tried, tried.specs, strict=True):
            value = problem.score(posterior, held[spec.split], few)
            if spec.split not in found or value > found[spec.split][0]:
                found[spec.split] = (value, dict(spec.hyper))
        chosen = {field: [found[r][1][field] for r in range(len(held))] for field in every}
        sweep = problem.fit(method, runs=doxa.Runs(rows=problem.train, per_split=chosen), **options)
        points = [described({f: chosen[f][r] for f in grid}) for r in range(len(held))]
        chosen_values = {field: [point[field] for point in points] for field in grid}
        chosen_values["precision"] = [own.noise**-2 for own in chosen["likelihood"]]
        return Answer(list(sweep), masks, {"chosen": chosen_values, **_learned(sweep)})

    return fit


def _learned(sweep: Any) -> dict[str, Any]:
    """What concrete dropout found, layer by layer."""
    own = [posterior.record.diagnostics.get("p") for posterior in sweep]
    if own[0] is None:
        return {}
    return {"p": {site: [float(p[site][0]) for p in own] for site in own[0]}}


def _gaussian_noise(
    method: Any, grid: Grid, pieces: int = 1, small: int = 400, large: int = 40, samples: int = 1000
) -> Fit:
    """So many epochs in batches of 32 for each of the pieces that a batch is cut into; one point
    of the grid for the set, by validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        epochs = pieces * (small if problem.small else large)

        def train(rows: Sequence[Tensor], _one: None, grid: Grid) -> Any:
            return problem.fit(
                method, likelihood="gaussian", epochs=epochs, batch_size=32 * pieces,
                schedule="cosine", runs=doxa.Runs(rows=rows, grid=grid),
            )  # fmt: skip

        _, point = best(problem, train, (None,), grid, 200, 5)
        sweep = train(problem.train, None, only(point))
        return Answer(list(sweep), samples, {"chosen": described(point), "method": str(method)})

    return fit


_CHOSEN = "by the last fifth of the first five training splits, refitted on all"
_LENGTH = "400 epochs (40 on large sets), B = 32"

_VARIATIONAL = {
    "mean-field": Protocol(
        "N(0, 1) prior, T = 1, four draws a step, 400 epochs (80 on large sets), B = 32; the rate, "
        f".01 or .03 decaying, and the first width, .001, .01 or .05, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.MeanField(samples=4, estimator="weights"), large=80,
            grid={"lr": (0.01, 0.03), "initial_std": (0.001, 0.01, 0.05)},
        ),
    ),
    "low-rank-vi": Protocol(
        f"rank 10, N(0, 1) prior, T = 1, four draws a step, {_LENGTH}; the rate, .01 or .03 "
        f"decaying, and the first width, .001 or .01, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.LowRankVI(samples=4), grid={"lr": (0.01, 0.03), "initial_std": (0.001, 0.01)}
        ),
    ),
    "last-layer-vi": Protocol(
        f"features learned on the same bound, {_LENGTH}; the rate, .01 or .03 decaying, and the "
        f"prior, N(0, .3²) or N(0, 1), {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.LastLayerVI(),
            grid={"lr": (0.01, 0.03), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "flow-vi": Protocol(
        "a spline flow over the last layer, features learned on the same bound, 400 epochs (80 on "
        "large sets), B = 128; the rate, .01 or .03 decaying, and the prior, N(0, .3²) or N(0, 1), "
        f"{_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            "flow-vi", pieces=4, small=100, large=20,
            grid={"lr": (0.01, 0.03), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "mnf": Protocol(
        "N(0, 1) prior, first width .001, 800 epochs (80 on large sets), B = 128: a step costs as "
        f"much as five of mean-field's; the rate, .01 or .03 decaying, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.MNF(initial_std=0.001), grid={"lr": (0.01, 0.03)}, pieces=4, small=200, large=20
        ),
    ),
    "rank1": Protocol(
        "four components, factors N(1, .3²), four times as many epochs in batches of 128, of which "
        "each component has a quarter; the rate, .003 or .01 decaying, and the prior of the "
        f"weights, N(0, .3²) or N(0, 1), {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.Rank1(), pieces=4,
            grid={"lr": (0.003, 0.01), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "ivon": Protocol(
        f"N(0, 1) prior, T = 1, β₂ = 1 − 4/steps, four draws a step, {_LENGTH}; the rate, .1 or .3 "
        f"decaying, and the first curvature, 1 or 10, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.IVON(samples=4), grid={"lr": (0.1, 0.3), "initial_curvature": (1.0, 10.0)}
        ),
    ),
    "mc-dropout": Protocol(
        "masks on inputs and hidden units; p of {.005, .01, .05, .1} and one of three noise "
        "levels by the last fifth of each training split, refitted on all of it; 4,000 epochs, "
        "B = 128, rate .001 (large sets: 40 epochs, B = 32, rate .005 decaying, which validation "
        "rows preferred); 10,000 masks",
        _dropout(
            doxa.MCDropout(insert="all"), {"p": _DROPOUT}, 10_000,
            {"epochs": 4000, "lr": 0.001, "batch_size": 128, "schedule": "constant"},
            {"epochs": 40, "lr": 0.005, "batch_size": 32, "schedule": "cosine"},
            prior=doxa.Normal(100.0),
        ),
    ),
    "concrete-dropout": Protocol(
        "masks on inputs and hidden units; the prior, N(0, s²) with s of .2, .5, 1 or 10, and one "
        "of the noise levels of MC dropout by the last fifth of each training split, refitted on "
        "all of it; 1,600 epochs (160 on large sets), B = 128, rate .01 decaying; 1,000 masks",
        _dropout(
            doxa.ConcreteDropout(insert="all"),
            {"prior": tuple(doxa.Normal(s) for s in (0.2, 0.5, 1.0, 10.0))}, 1000,
            *({"epochs": n, "lr": 0.01, "batch_size": 128, "schedule": "cosine"}
              for n in (1600, 160)),
        ),
    ),
}  # fmt: skip

# Functional methods, with one Gaussian noise level that is learned. Lengths, rates and first widths
# are chosen by validation rows.

_NOISES = ("training", "evidence")


def _functional(
    methods: Sequence[Any],
    epochs: Sequence[int],
    grid: Grid,
    batch: int,
    samples: int | None,
    **network: Any,
) -> Fit:
    """One of some methods, of some lengths (a tenth on large sets), with or without rows held out,
    and of the points of the grid for the set."""

    def fit(problem: Problem, _name: str) -> Answer:
        def train(rows: Sequence[Tensor], one: tuple[Any, int, float | None], grid: Grid) -> Any:
            method, length, share = one
            return problem.fit(
                method, likelihood="gaussian", epochs=length if problem.small else length / 10,
                batch_size=batch, schedule="cosine", runs=doxa.Runs(rows=rows, grid=grid),
                validation=share, **network,
            )  # fmt: skip

        tried = list(itertools.product(methods, epochs, (None, 0.1)))
        one, point = best(problem, train, tried, grid, samples and 200, 5)
        sweep = train(problem.train, one, only(point))
        noise = one[0].settings().get("noise_from", "training")
        chosen = {"noise": noise, "epochs": one[1], "held_out": one[2], **described(point)}
        return Answer(list(sweep), samples, {"chosen": chosen})

    return fit


_HELD = "no rows held out, or a tenth for early stopping and the noise"

_FUNCTIONAL = {
    "fbnn": Protocol(
        "a GP prior, RBF with a lengthscale an input, fitted to mini-batches; 16 functions a step "
        "at 20 rows and 20 points, B = 64; 100 or 300 epochs (a tenth on large sets), noise "
        "learned with the weights or by the kernel's evidence, the rate, .01 or .03 decaying, and "
        f"{_HELD}: {_CHOSEN}; 1,000 samples",
        _functional(
            [
                doxa.FunctionalVI(samples=16, measured_rows=20, noise_from=noise)
                for noise in _NOISES
            ],
            (100, 300),
            {"lr": (0.01, 0.03)},
            64,
            1000,
        ),
    ),
    "vip": Protocol(
        "20 functions of the network, whose prior is learned, α = ½, B = 32; 50 or 200 epochs (a "
        "tenth on large sets), a start at .1 or .03 of N(0, 1), the rate, .003 or .01 decaying, "
        f"and {_HELD}: {_CHOSEN}; closed form",
        _functional(
            [doxa.ImplicitProcess()],
            (50, 200),
            {"initial_scale": (0.1, 0.03), "lr": (0.003, 0.01)},
            32,
            None,
        ),
    ),
    "vip-deep": Protocol(
        "as vip, on the paper's network: two hidden layers of 10 tanh units; 400 epochs, a "
        f"start at .3, .1 or .03: {_CHOSEN}",
        _functional(
            [doxa.ImplicitProcess()],
            (400,),
            {"initial_scale": (0.3, 0.1, 0.03), "lr": (0.003, 0.01)},
            32,
            None,
            hidden=(10, 10),
            activation="tanh",
        ),
        "vip",
    ),
}

# MCMC: on all rows, or on mini-batches.

# Tried for samplers on mini-batches; with friction .1, momentum goes ten times as far.
_STEP_SIZES = {
    "sgld": (0.003, 0.01, 0.03),
    "psgld": (0.0003, 0.001, 0.003),
    "sghmc": (0.0003, 0.001, 0.003),
}


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


def _stochastic(name: str, *rates: float) -> Fit:
    """A sampler on mini-batches; the rate is one choice for the set, by validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        epochs = 400 if problem.small else 40
        method = _sampler(name, problem.rows // 32 * epochs)

        def train(rows: Sequence[Tensor], _one: None, grid: Grid) -> Any:
            return problem.fit(
                method, likelihood="gaussian", members=2, batch_size=32, epochs=epochs,
                runs=doxa.Runs(rows=rows, grid=grid),
            )  # fmt: skip

        point = {"lr": rates[0]}
        if len(rates) > 1:
            _, point = best(problem, train, (None,), {"lr": rates})
        posteriors = list(train(problem.train, None, only(point)))
        return Answer(posteriors, facts={"chosen": {"rate": point["lr"]}})

    return fit


def _sampler(name: str, steps: int) -> Any:
    """100 draws of each chain from the last quarter of so many steps, or from four cycles."""
    if name == "cyclical":
        return doxa.CyclicalSGMCMC(thin=max(1, steps // 500))
    thin = max(1, steps // 400)
    burn_in = 500 if name == "constant-sgd" else steps - 100 * thin  # it has an optimum to start at
    return doxa.get_method(name)(draws=100, thin=thin, burn_in=burn_in)


def _not_for_networks(problem: Problem, _name: str) -> Answer:
    raise MethodError("a random walk does not mix in the hundreds of dimensions of a network")


_FULL = {
    "hmc": Protocol(
        "N(0, 1) prior; small sets two chains, 500 + 500 transitions of 30 steps; large sets one, "
        "200 + 100 of 20: too short to converge there",
        _hmc,
    ),
    "nuts": Protocol(
        "N(0, 1) prior; two chains, 300 + 200 transitions, trees of at most 2^7; small sets only",
        _nuts,
    ),
}
_STOCHASTIC = {
    **{
        name: Protocol(
            "two chains, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, 100 draws from the "
            f"last quarter; the rate of {{{', '.join(f'{rate:g}' for rate in rates)}}} by the last "
            "fifth of the training splits, refitted on all",
            _stochastic(name, *rates),
        )
        for name, rates in _STEP_SIZES.items()
    },
    "functional-prior": Protocol(
        "two chains of SGHMC; the prior is tuned to an RBF process of variance 1 and lengthscale "
        "√(2D) first, by the energy distance; else as sghmc",
        _stochastic("functional-prior", *_STEP_SIZES["sghmc"]),
    ),
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


def _default(name: str) -> Fit:
    """A method without a protocol here: its own settings, for 400 epochs."""

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
    **_EXACT, **_POINTS, **_LAPLACE, **_VARIATIONAL, **_FUNCTIONAL, **_FULL, **_STOCHASTIC
}  # fmt: skip
PROTOCOLS |= {
    row.name: Protocol(
        "its own settings, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, rate .01 decaying",
        _default(row.name),
    )
    for row in doxa.methods()
    if "regression" in row.tasks and row.name not in PROTOCOLS
}
