"""`sample`: draws from a log density over a dict of tensors.

The density is checked, transformed to unconstrained space (`doxa.density.transforms`), and passed
to the driver and the methods that also sample networks, as a run without a network and without
rows.

Start (`parse_init`, `free_starts`, `spread`). `init` is checked and transformed; one start is
spread over the chains.

Checks of the density (`check_density`, `check_gradient`), before the first step. It must accept the
dict and return a real scalar, the same one at each call. Its gradient must be the gradient of its
value: with `detach`, `.item()` or a conversion to numpy, a gradient is missing or wrong.

Status (`set_status`). R-hat must be below 1.01 for every parameter, as Vehtari et al. (2021)
recommend; this corresponds to about 400 effective draws. The sampler's own warnings (divergences,
E-BFMI, acceptance) are in the status before that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa import checks, likelihoods, store
from doxa.data import Data, NoData, as_tensor
from doxa.density.density import Density, Written
from doxa.density.draws import Draws
from doxa.density.estimates import Estimated
from doxa.density.transforms import Real, Transform, transform
from doxa.driver.finish import run_fit
from doxa.driver.loop import Progress
from doxa.driver.runs import RunSpec
from doxa.driver.setup import member_ids
from doxa.engine import Engine, fall_back_to_loop
from doxa.engine.engine import Count, default_modes, threads_for
from doxa.errors import (
    DataError,
    DoxaError,
    MethodError,
    ModelError,
    NumericalError,
    ShapeError,
    did_you_mean,
)
from doxa.linalg.layout import Layout, Params
from doxa.method import Callback, FitSettings, Method, Run, as_method
from doxa.method.method import keywords, require
from doxa.model.model import LogDensity
from doxa.noise import Noise
from doxa.optim import Optimizer
from doxa.optim import optimizer as find_optimizer
from doxa.posterior import Posterior, SamplePosterior, Status
from doxa.posterior.chains import LEAST_DRAWS, ebfmi, finite, moved
from doxa.priors import bind

log = logging.getLogger("doxa")

_HALVINGS = 12


def parse_init(init: Any, members: int, dtype: torch.dtype, device: Any) -> list[Params]:
    """One start, or one per chain: dicts of finite floating tensors of equal shapes."""
    many = isinstance(init, Sequence) and not isinstance(init, str)
    starts = [_start(each, dtype, device) for each in (init if many else [init])]
    if many and len(starts) != members:
        raise ShapeError(
            f"init has {len(starts)} starts for {members} chains; pass one dict per chain, or a "
            "single dict: all chains then start near it"
        )
    shapes = [{k: tuple(v.shape) for k, v in start.items()} for start in starts]
    for m, own in enumerate(shapes):
        if own != shapes[0]:
            raise ShapeError(f"init {m} has shapes {own}, but init 0 has {shapes[0]}")
    return starts


def _start(init: Any, dtype: torch.dtype, device: Any) -> Params:
    if not isinstance(init, Mapping):
        raise DataError(
            f"init must be a dict of tensors, one for each parameter (or a list of such dicts, one "
            f"per chain), not {type(init).__name__}"
        )
    if not init:
        raise DataError("init is empty: it must hold a value for every parameter")
    values = {}
    for name, value in init.items():
        if not isinstance(name, str):
            raise DataError(f"the names in init must be strings, not {name!r}")
        value = as_tensor(value, f"init {name!r}")
        if value.dtype == torch.bool:
            raise DataError(f"init {name!r} is boolean; only continuous parameters can be sampled")
        if value.numel() == 0:
            raise DataError(f"init {name!r} is empty, of shape {list(value.shape)}")
        value = value.to(device, dtype)
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"init {name!r} holds NaN or infinite values")
        values[name] = value
    return values


def parse_constraints(constraints: Any, start: Params) -> dict[str, Transform]:
    """A transform for every parameter."""
    given = dict(constraints or {})
    for name in given:
        if name not in start:
            raise MethodError(
                f"there is a constraint on {name!r}, which is not in init"
                f"{did_you_mean(str(name), start)}"
            )
    return {name: transform(given[name]) if name in given else Real() for name in start}


def free_starts(density: Density, starts: Sequence[Params]) -> Tensor:
    """The starts as unconstrained vectors, [S, P]; an error where one violates its constraint."""
    for start in starts:
        for name, value in start.items():
            own = density.transforms[name]
            if not own.holds(value):
                raise DataError(
                    f"init {name!r} lies outside its constraint {own!r}: it must be {own.says}"
                )
    return torch.stack([density.free(start) for start in starts])


def spread(
    density: Density, centre: Tensor, jitter: float, seed: int, ids: Sequence[int]
) -> Tensor:
    """Starts [M, P], uniform within ±jitter of the centre [P] in unconstrained space.

    Where the density of a start is not finite, its distance from the centre is halved, repeatedly.
    """
    noise = Noise(seed, "start", list(ids), centre.device, centre.dtype)
    away = jitter * (2 * noise.uniform((len(centre),)) - 1)  # [M, P]
    starts = centre + away
    for m in range(len(starts)):
        for _ in range(_HALVINGS):
            if _finite(density, starts[m]):
                break
            away[m] /= 2
            starts[m] = centre + away[m]
        else:
            log.warning(
                "chain %d starts at init itself: the density is 0 at all points tried near it",
                ids[m],
            )
            starts[m] = centre
    return starts


def _finite(density: Density, flat: Tensor) -> bool:
    with torch.enable_grad():
        theta = flat.detach().unsqueeze(0).requires_grad_()
        value = density(theta)
        (grad,) = torch.autograd.grad(value.sum(), theta)
    return bool(torch.isfinite(value).all() and torch.isfinite(grad).all())


def check_value(value: Tensor, what: str) -> None:
    """Raise where the log density ([] or [1]) at a start is not finite."""
    number = float(value.detach())
    if number == -torch.inf:
        raise NumericalError(
            f"{what} lies outside the support: the log density there is −inf; start where it is "
            "finite, or set the bounds of the parameters with constraints={...}"
        )
    if not torch.isfinite(value).all():
        raise NumericalError(f"the log density is {number} at {what}; start where it is finite")


def check_density(density: Density, start: Params) -> None:
    """Check the density at one start, in natural space: a scalar, finite, differentiable,
    deterministic."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    with torch.enable_grad():
        value = _call(density, leaves)
        _check_scalar(value)
        check_value(value.detach(), "the start")
        _check_reaches(value, leaves)
    with torch.no_grad():
        again = _call(density, start)
    first, second = float(value.detach()), float(again)
    if first != second:
        raise ModelError(
            f"the log density is random: it returned {first!r} and then {second!r} at the "
            "same point; draw its random numbers once, outside the function"
        )


def check_gradient(density: Density, starts: Tensor) -> None:
    """Compare the gradient along a random direction with central differences, in double precision.

    At a kink, or for a stiff density, the differences can be wrong at one start. So only a gradient
    that is wrong at every start is an error.
    """
    if starts.dtype != torch.float64:
        return
    direction = Noise(0, "gradient check", [0], starts.device, starts.dtype).normal(
        (starts.shape[1],)
    )[0]
    if all(_wrong(density, theta, direction) for theta in starts):
        raise ModelError(
            "the gradient of the log density does not agree with finite differences of its value: "
            "a part of it is hidden from autograd; look for detach, .item(), .data, torch.no_grad, "
            "numpy or rounding"
        )


def _call(density: Density, values: Params) -> Tensor:
    try:
        return density.one(values)
    except DoxaError:
        raise
    except Exception as error:  # whatever the user's density raises
        dtype = next(iter(values.values())).dtype
        raise ModelError(
            f"the log density fails at the start: {type(error).__name__}: {error} (parameters are "
            f"{dtype}; convert data of another type, or pass dtype=)"
        ) from error


def _check_scalar(value: object) -> None:
    if not isinstance(value, Tensor):
        raise ModelError(
            f"the log density must return a tensor computed from the parameters, not "
            f"{type(value).__name__}: remove .item(), float() and numpy"
        )
    if value.shape != ():
        raise ShapeError(
            f"the log density must return a scalar for one chain, got the shape "
            f"{list(value.shape)}: sum over the rows"
        )
    if not value.is_floating_point():
        raise ModelError(f"the log density must be a real number, got {value.dtype}")


def _check_reaches(value: Tensor, leaves: Params) -> None:
    if not value.requires_grad:
        raise ModelError(
            "the log density has no gradient: it does not depend on the parameters, or detach, "
            ".item(), torch.no_grad or numpy hide them from autograd"
        )
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        if grad is None:
            raise ModelError(
                f"the log density does not depend on {name!r} in a way that can be differentiated: "
                "use it, remove it from init, or look for detach and numpy"
            )
        if not bool(torch.isfinite(grad).all()):
            raise NumericalError(
                f"the gradient of the log density with respect to {name!r} is not finite at the "
                "start"
            )


def _wrong(density: Density, theta: Tensor, direction: Tensor) -> bool:
    with torch.enable_grad():
        leaf = theta.detach().unsqueeze(0).requires_grad_()
        total = density(leaf)
        (grad,) = torch.autograd.grad(total.sum(), leaf)
    value = abs(float(total.detach()))
    slope = float((grad[0] * direction).sum())
    with torch.no_grad():

        def difference(h: float) -> float:
            up, down = (density((theta + s * h * direction).unsqueeze(0)) for s in (1.0, -1.0))
            return float(up - down) / (2 * h)

        coarse, fine = difference(2e-5), difference(1e-5)
    rounding = 1e-15 * (value + 1.0) / 1e-5
    error = abs(coarse - fine) + rounding + 1e-5 * (abs(fine) + abs(slope))
    return abs(fine - slope) > 20 * error


MOST_RHAT = 1.01
LEAST_MOVED = 0.05


def set_status(draws: Draws) -> None:
    """Fill in diagnostics and status; a status that the sampler has set is kept."""
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
            f"{len(still)} of {draws.members} chains hardly move (chain {still[0]}: a new value in "
            f"{found['moved'][still[0]]:.1%} of its draws): use another start, or a longer burn_in",
        )
    if draws.count < LEAST_DRAWS:
        return Status("not-converged", f"{draws.count} draws per chain are too few for R-hat")
    worst = int(table["rhat"].argmax())
    rhat = float(table["rhat"][worst])
    if not rhat <= MOST_RHAT:
        return Status(
            "not-converged",
            f"R-hat of {table.names[worst]} is {rhat:.3g} (above {MOST_RHAT}): the chains still "
            "disagree; use more draws and burn_in",
        )
    return draws.status


@keywords()
@default_modes(train=True)
@threads_for(0.0)
def sample(
    log_density: Written,
    init: Any,
    method: str | Method | type[Method] = "nuts",
    members: int | Sequence[int] = 4,
    *,
    constraints: Mapping[str, Any] | None = None,
    seed: int = 0,
    jitter: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    draws_budget: int | None = None,
    callbacks: Sequence[Callback] = (),
    engine: str | Engine = "auto",
    batch_size: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    schedule: Any = "constant",
    optimizer: str | Optimizer = "adam",
) -> Draws:
    """Draw from a log density, which need not be normalised.

    Parameters
    ----------
    log_density : callable
        A function of a dict of tensors, the parameters of one chain in natural space. It returns a
        scalar tensor that autograd can differentiate. For methods on mini-batches, it may be a
        `doxa.density.RowSum` or a `doxa.density.GradientNoise`. Write it for one chain: all chains
        are evaluated at once with vmap. Where vmap fails (data-dependent Python), they are
        evaluated one after the other, and the log reports it. Where the function raises ValueError,
        ArithmeticError or LinAlgError after the start (invalid parameters of a distribution, a
        failed Cholesky), the density counts as 0, and `diagnostics["raised"]` counts the cases.
    init : dict, or list of dict
        {name: value}, one start: every chain starts within ±`jitter` of it in unconstrained space.
        Or a list of such dicts, one per chain, which are used without jitter.
    method : str or Method
        A name, or a method object with its settings (draws, burn_in, …): NUTS, HMC, MALA,
        Metropolis, or a method on mini-batches such as SGLD.
    members : int or sequence of int
        The number of chains, or the list of their ids.
    constraints : dict, optional
        {name: "positive" | "unit" | "simplex" | "ordered" | … or a transform such as
        `doxa.transforms.Interval(0, 10)`}. Other parameters are unconstrained. The Jacobian of the
        transform is included.
    seed : int
        As in `fit`.
    jitter : float
        Half of the width of the starts around `init`, in unconstrained space.
    dtype : torch.dtype
        The floating type of all computations; double precision by default.
    device : torch.device or str, optional
        Default: the device of the tensors in `init`.
    progress, checkpoint, checkpoint_every, draws_budget, callbacks, engine
        As in `fit`.
    batch_size : int, optional
        Rows per step of methods on mini-batches, if the density is a `doxa.density.RowSum`.
    steps : int, optional
        The number of steps of methods that optimise (SVGD, MAP, the optimum of constant SGD).
        Default: the method's.
    lr : float, optional
        The learning rate, 0.01 by default. A method with a `step_size` of None uses it, over the
        number of rows if there are rows.
    schedule, optimizer
        As in `fit`; the rate is constant by default.

    Returns
    -------
    Draws
        draws[name] is [members, draws, *shape] in natural space, with status, diagnostics,
        summary(), to_arviz() and save(). The draws of SVGD are its particles, with the status
        "not-evaluated". `transitions` gives the path of a method that keeps no draws, such as MAP.
    """
    began = time.monotonic()
    sampling = prepare(
        log_density, init, method, members, constraints=constraints, seed=seed, jitter=jitter,
        dtype=dtype, device=device, engine=engine, batch_size=batch_size, steps=steps, lr=lr,
        schedule=schedule, optimizer=optimizer,
        settings=FitSettings(
            callbacks=checks.functions("callbacks", callbacks),
            checkpoint_seconds=checks.seconds("checkpoint_every", checkpoint_every),
            draws_budget=checks.budget("draws_budget", draws_budget),
            progress=sys.stderr.isatty() if progress is None else progress,
        ),
    )  # fmt: skip
    digest = "" if checkpoint is None else _fingerprint(sampling)
    specs = [RunSpec(seed=seed)]
    (posterior,), result = run_fit(sampling.run, sampling.method, specs, began, checkpoint, digest)
    return sampling.draws(posterior, result)


class Sampling(NamedTuple):
    """A call of `sample`, read and checked: the run of a method, and the density."""

    run: Run
    method: Method
    density: Density
    values: Tensor  # log densities at the starts

    def draws(self, posterior: Posterior, result: Progress) -> Draws:
        """The draws of what the driver has done."""
        name = self.method.name
        points = result.kept is None and self.method.width == 1
        if not isinstance(posterior, SamplePosterior) or points:
            path = "; doxa.transitions gives the path of its steps" if points else ""
            raise MethodError(f"{name} keeps no draws; sample with nuts, hmc or metropolis{path}")
        if result.kept is not None and not result.kept:
            why = posterior.status.reason if posterior.status == "diverged" else result.stopped
            raise NumericalError(f"{name} ended before its first draw: {why}")
        density = self.density
        draws = Draws(
            posterior.samples, density.shapes, density.transforms, self.method, posterior.record
        )
        if density.refused:
            draws.diagnostics["raised"] = density.refused
        if result.kept is None and draws.status == "ok":
            draws.record.status = Status(
                "not-evaluated",
                f"{name} gives particles, which are no chain: R-hat and effective sizes do not "
                "apply to them",
            )
            return draws
        set_status(draws)
        return draws


def prepare(
    log_density: Written, init: Any, method: str | Method | type[Method],
    members: int | Sequence[int], *, constraints: Mapping[str, Any] | None, seed: int,
    jitter: float, dtype: torch.dtype, device: torch.device | str | None, engine: str | Engine,
    batch_size: int | None, steps: int | None, lr: float | None, schedule: Any,
    optimizer: str | Optimizer, settings: FitSettings,
) -> Sampling:  # fmt: skip
    """Read and check the arguments of `sample`, and choose the engine."""
    method = as_method(method)
    ids = member_ids(members, method)
    seed, dtype = checks.seed("seed", seed), checks.floating(dtype)
    place = checks.place(_device(init) if device is None else device)
    if not callable(log_density):
        raise MethodError(f"log_density must be a function of a dict, not {log_density!r}")
    given = parse_init(init, len(ids), dtype, place)
    shapes = {name: tuple(value.shape) for name, value in given[0].items()}
    density = Density(log_density, shapes, parse_constraints(constraints, given[0]))
    free = sum(math.prod(shape) for shape in shapes.values())
    need = int(method.copies * len(ids) * free * torch.finfo(dtype).bits / 8)
    require(
        need, place, f"{method.name} with {len(ids)} chains of {free:,} numbers", "fewer chains"
    )
    starts = _starts(density, given, _jitter(jitter), seed, ids)
    run = _run(density, starts, ids, seed)
    rows = run.rows.total if run.data.has_rows else 1
    size = method.default_batch if batch_size is None else checks.whole("batch_size", batch_size)
    settings = replace(
        settings, schedule=schedule, optimizer=find_optimizer(optimizer), fresh=method.width == 1,
        spread=jitter or 1.0,
        steps=method.default_steps if steps is None else checks.whole("steps", steps),
        rate=settings.rate if lr is None else checks.positive("lr", lr),
        batch_size=min(size, rows), epoch_steps=max(1, rows // min(size, rows)),
    )  # fmt: skip
    run = replace(run, settings=settings)
    chosen, values = _engine(run, density, engine)
    return Sampling(replace(run, engine=chosen), method, density, values)


def _jitter(value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else checks.positive("jitter", value)


def _device(init: Any) -> torch.device:
    first = init[0] if isinstance(init, Sequence) and len(init) else init
    tensors = (
        [v for v in first.values() if isinstance(v, Tensor)] if isinstance(first, dict) else []
    )
    return tensors[0].device if tensors else torch.device("cpu")


def _starts(density: Density, given: list[Any], jitter: float, seed: int, ids: list[int]) -> Tensor:
    """Starts in unconstrained space, [M, P]; density and gradient are checked there."""
    free = free_starts(density, given)
    check_density(density, given[0])
    if len(given) == 1 and len(ids) > 1:
        starts = spread(density, free[0], jitter, seed, ids)
    else:
        starts = free
        with torch.no_grad():
            for m, theta in enumerate(starts):
                check_value(density(theta.unsqueeze(0)), f"the start of chain {m}")
    check_gradient(density, starts)
    density.refused = 0
    return starts


def _run(density: Density, starts: Tensor, ids: list[int], seed: int) -> Run:
    count = len(ids)
    data: Data | NoData = NoData(starts.device, starts.dtype)
    if isinstance(density.log_density, Estimated):
        data = density.log_density.data(density.layout, starts.device, starts.dtype)
    n = data.total if isinstance(data, Data) else 1
    return Run(
        LogDensity(density, density.layout, density.estimated),
        likelihoods.likelihood("gaussian"), data, Engine(), members=ids, run_of=[0] * count,
        split_of=[0] * count, seeds=[seed] * count,
        n=torch.full((count,), float(n), device=starts.device, dtype=starts.dtype),
        prior=bind(None, Layout(())), initial=starts,
    )  # fmt: skip


def _engine(run: Run, density: Density, engine: str | Engine) -> tuple[Engine, Tensor]:
    """The engine, and the log densities at the starts [M].

    All chains run at once where that works and gives the same values as one chain at a time.
    """
    chosen = Engine("stack", None, reason="all chains at once, vmap")
    if engine != "auto":
        chosen = Engine.parse(engine)
    with torch.no_grad():
        alone = torch.cat([density(theta.unsqueeze(0)) for theta in run.start()])

    count = Count()

    def trial(engine: Engine) -> None:
        with count:
            value, grad = replace(run, engine=engine).joint(run.start(), run.all_rows(), {})
        loose = 1e-3 if run.dtype.itemsize < 8 else 1e-8
        if value.shape != alone.shape or grad.shape != run.start().shape:
            raise ValueError("its shape differs from that of one chain at a time")
        if engine.kind == "stack" and not torch.allclose(value, alone, rtol=loose, atol=loose):
            raise ValueError("its value differs from that of one chain at a time")

    density.apart = False
    found = fall_back_to_loop(chosen, trial)
    density.apart = True
    if found.kind == "loop" and chosen.kind == "stack":
        log.warning(
            "the log density runs one chain at a time; for speed write it without .item(), "
            "without `if` on tensors and without in-place updates"
        )
    return replace(found, product=count.largest), alone


def _fingerprint(sampling: Sampling) -> str:
    """A digest that identifies the run; a density is identified by its values at the starts."""
    run, method, density, values = sampling
    facts = {
        "method": store.encode(method), "members": list(run.members), "seeds": list(run.seeds),
        "dtype": str(run.dtype), "shapes": {k: list(v) for k, v in density.shapes.items()},
        "transforms": store.encode(density.transforms),
        "values": [f"{v:.6g}" for v in values.tolist()],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(run.start().cpu().double().numpy().tobytes())
    return digest.hexdigest()
