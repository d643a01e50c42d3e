"""`sample`: from a log density over a dict of tensors to draws from it.

The density is checked, freed of its constraints (`transforms`) and handed to the same driver and
the same methods that sample networks: a run without a network and without rows.
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
from typing import Any

import torch
from torch import Tensor

from doxa import checks, likelihoods, store
from doxa.data import NoData
from doxa.density.check import check_density, check_gradient
from doxa.density.density import Density, Written
from doxa.density.draws import Draws
from doxa.density.start import check_value, free_starts, parse_constraints, parse_init, spread
from doxa.density.verdict import judge
from doxa.driver import Callback, Options
from doxa.driver.finish import launch
from doxa.driver.members import member_ids
from doxa.driver.runs import RunSpec
from doxa.engine import Engine, works
from doxa.engine.threads import default_modes, threads_for
from doxa.engine.work import Count
from doxa.errors import MethodError, NumericalError
from doxa.linalg.layout import Layout
from doxa.method import Method, Run, as_method
from doxa.method.keywords import keywords
from doxa.method.memory import require
from doxa.model.problem import LogDensity
from doxa.posterior import SamplePosterior
from doxa.priors import bind

log = logging.getLogger("doxa")


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
) -> Draws:
    """Draw from a log density, which need not be normalised.

    Parameters
    ----------
    log_density: takes a dict of tensors, one chain's parameters in natural space, and returns a
        scalar tensor that autograd can differentiate. Write it for one chain: all chains are
        evaluated at once through vmap, or one after the other where vmap refuses (data-dependent
        Python), with a line in the log. Where it raises ValueError, ArithmeticError or
        LinAlgError after the start (a distribution that refuses its parameters, a failed
        Cholesky), the density is taken as 0 and `diagnostics["raised"]` counts it.
    init: {name: value}, a start; every chain starts within ±`jitter` of it in free space. Or a
        list of such dicts, one a chain, taken as they are.
    method: a name or a method object with its settings (draws, burn_in, …): NUTS, HMC, Metropolis.
    members: how many chains, or the list of their ids.
    constraints: {name: "positive" | "unit" | "simplex" | "ordered" | … or a transform such as
        `doxa.transforms.Interval(0, 10)`}; the rest is free. The Jacobian is taken care of.
    dtype: what is computed in; double precision unless stats otherwise.
    device: default: that of the tensors in init.
    seed, progress, checkpoint, checkpoint_every, draws_budget, callbacks, engine: as in `fit`.

    Returns
    -------
    `Draws`: draws[name] is [members, draws, *shape] in natural space, with status, diagnostics,
    summary(), to_arviz(), save().
    """
    began = time.monotonic()
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
    options = Options(
        schedule="constant", callbacks=checks.functions("callbacks", callbacks),
        checkpoint_seconds=checks.seconds("checkpoint_every", checkpoint_every),
        draws_budget=checks.budget("draws_budget", draws_budget),
        progress=sys.stderr.isatty() if progress is None else progress,
    )  # fmt: skip
    chosen, values = _engine(run, density, engine)
    run = replace(run, engine=chosen)
    if checkpoint is not None:
        options.fingerprint = _fingerprint(run, density, method, values)
    specs = [RunSpec(seed=seed)]
    (posterior,), result = launch(run, method, options, specs, checkpoint, began)
    if not isinstance(posterior, SamplePosterior) or result.kept is None:
        raise MethodError(f"{method.name} keeps no draws; sample with nuts, hmc or metropolis")
    if not result.kept:
        why = posterior.status.reason if posterior.status == "diverged" else result.stopped
        raise NumericalError(f"{method.name} ended before its first draw: {why}")
    draws = Draws(posterior.samples, shapes, density.transforms, method, posterior.record)
    if density.refused:
        draws.diagnostics["raised"] = density.refused
    judge(draws)
    return draws


def _jitter(value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else checks.positive("jitter", value)


def _device(init: Any) -> torch.device:
    first = init[0] if isinstance(init, Sequence) and len(init) else init
    tensors = (
        [v for v in first.values() if isinstance(v, Tensor)] if isinstance(first, dict) else []
    )
    return tensors[0].device if tensors else torch.device("cpu")


def _starts(density: Density, given: list[Any], jitter: float, seed: int, ids: list[int]) -> Tensor:
    """[M, P], where the density and its gradient are finite."""
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
    return Run(
        LogDensity(density, density.layout), likelihoods.likelihood("gaussian"),
        NoData(starts.device, starts.dtype), Engine(), members=ids, run_of=[0] * count,
        split_of=[0] * count, seeds=[seed] * count,
        n=torch.ones(count, device=starts.device, dtype=starts.dtype),
        prior=bind(None, Layout(())), initial=starts,
    )  # fmt: skip


def _engine(run: Run, density: Density, engine: str | Engine) -> tuple[Engine, Tensor]:
    """All chains at once if that works and gives what each chain gives alone; the values [M]."""
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
            raise ValueError("its shape is not that of one chain at a time")
        if engine.kind == "stack" and not torch.allclose(value, alone, rtol=loose, atol=loose):
            raise ValueError("its value differs from that of one chain at a time")

    density.apart = False
    found = works(chosen, trial)
    density.apart = True
    if found.kind == "loop" and chosen.kind == "stack":
        log.warning(
            "the log density runs one chain at a time; for speed write it without .item(), "
            "without `if` on tensors and without in-place updates"
        )
    return replace(found, product=count.largest), alone


def _fingerprint(run: Run, density: Density, method: Method, values: Tensor) -> str:
    """Tells one run from another; a density is stats by its values at the starts."""
    facts = {
        "method": store.encode(method), "members": list(run.members), "seeds": list(run.seeds),
        "dtype": str(run.dtype), "shapes": {k: list(v) for k, v in density.shapes.items()},
        "transforms": store.encode(density.transforms),
        "values": [f"{v:.6g}" for v in values.tolist()],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(run.start().cpu().double().numpy().tobytes())
    return digest.hexdigest()
