"""`fit`: from a network, data and a method to a posterior.

This module puts the pieces together: it checks and places the data, expands runs and members into
one stacked axis, chooses the engine, drives the method's stages and records what happened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader

from doxa import checks, likelihoods, store
from doxa.data import (
    Batches, Data, Standardisation, as_tensor, cast, check_finite, free_memory, parse, rows_of, standardise,
)  # fmt: skip
from doxa.driver import Callback, Driver, Options, Progressed
from doxa.engine import Engine, choose, works
from doxa.errors import DataError, DoxaError, MethodError, ModelError, ShapeError, StoreError
from doxa.layout import Layout, Params
from doxa.likelihoods import Likelihood
from doxa.method import Method, Run, slice_state
from doxa.model import Model, Subset
from doxa.noise import generator
from doxa.optim import Optimizer, optimizer as find_optimizer, schedule as schedule_shape
from doxa.posterior import Posterior, Status
from doxa.priors import BoundPrior, bind, stack_bound
from doxa.registry import get_method
from doxa.runs import Runs, RunSpec, Sweep

log = logging.getLogger("doxa")


def fit(
    model: Model | nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    likelihood: Any = None,
    prior: Any = None,
    subset: Subset | None = None,
    members: int | Sequence[int] | None = None,
    runs: Runs | None = None,
    seed: int = 0,
    init: str = "fresh",
    validation: Any = None,
    patience: int = 10,
    standardize: bool = False,
    sample_weight: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    schedule: Any = "cosine",
    optimizer: str | Optimizer = "adam",
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    progress: bool | None = None,
    engine: str | Engine = "auto",
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Fit a Bayesian model.

    Parameters
    ----------
    model: a `Model`, an `nn.Module`, or None for methods that bring their own functions.
    data: (x, y) as arrays or tensors, a map-style `Dataset`, or a `DataLoader` over one.
    method: a name (see `doxa.methods()`) or a method object with its settings.
    likelihood, prior, subset: as in `Model`, when `model` is a plain network.
    members: how many are averaged in prediction, or the list of their ids; the method's default.
    runs: splits, grids and seeds to fit side by side; the result is then a `Sweep`.
    init: "fresh" re-initialises the network for every member, "given" starts from its weights.
    validation: a share of the rows, or a pair (x, y); used for early stopping (after `patience`
        validations without gain) and for `posterior.validation`.
    standardize: scale float inputs and continuous targets; predictions are in the units of y.
    sample_weight: one nonnegative weight a row; n is then their sum.
    steps or epochs: how long to optimise; methods that sample have their own lengths.
    lr, schedule, optimizer: "constant", "cosine" or "linear" (or a function of the share done).
    checkpoint: a folder; a fit that finds its own checkpoint there goes on from it.
    checkpoint_every: seconds between checkpoints.
    progress: show a bar; default: when standard error is a terminal.
    engine: "auto", or "stack" / "loop", with ":eager", ":traced", ":compiled", ":graph".
    callbacks: f(step, info), called now and then; one that returns True stops the run.

    Returns
    -------
    A `Posterior`, or a `Sweep` of them when `runs` is given.
    """
    began = time.monotonic()
    method = _method(method)
    specs = (runs or Runs()).expand(seed)
    believed = _model(model, method, likelihood, prior, subset)
    noise_model = believed.likelihood if believed else likelihoods.likelihood(likelihood or "gaussian")  # fmt: skip
    if method.regression_only and not noise_model.is_normal:
        raise MethodError(
            f"{method.name} is for regression with Gaussian noise, not {noise_model.name}"
        )
    if believed is not None:
        believed = method.prepare(believed)
        device = checks.place(device or believed.device)
        dtype = checks.floating(dtype or believed.dtype)
        believed = believed.to(device, dtype)
    device = checks.place(device or "cpu")
    dtype = None if dtype is None else checks.floating(dtype)
    if batch_size is None and isinstance(data, DataLoader):
        batch_size = data.batch_size
    held, likelihood_output, inputs = _data(
        data,
        believed,
        noise_model,
        specs,
        validation,
        standardize,
        sample_weight,
        device,
        dtype,
        seed,
    )
    ids = _member_ids(members, method)
    run = _stack(believed, method, noise_model, held, specs, ids, likelihood_output, init, inputs)
    run.optimizer = find_optimizer(optimizer)
    run.rate = method.default_rate if lr is None else checks.positive("lr", lr)
    options = Options(
        steps=0, batch_size=_batch_size(batch_size, method, held), seed=seed, schedule=schedule,
        patience=checks.whole("patience", patience), checkpoint_seconds=checkpoint_every,
        callbacks=callbacks,
        progress=sys.stderr.isatty() if progress is None else progress,
    )  # fmt: skip
    run.batch_size = options.batch_size
    run.epoch_steps = max(1, max(len(r) for r in held.rows) // options.batch_size)
    options.steps = _steps(steps, epochs, method, run.epoch_steps)
    _choose_engine(run, engine, options)
    if checkpoint is not None:
        options.checkpoint = store.Checkpoints(checkpoint)
        options.fingerprint = _fingerprint(run, method, options, specs)
    result = Driver(run, method, options).drive()
    posteriors = _finish(run, method, result, specs, len(ids), time.monotonic() - began)
    return posteriors[0] if runs is None else Sweep(posteriors, specs)


def _method(spec: str | Method | type[Method]) -> Method:
    if isinstance(spec, str):
        return get_method(spec)()
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")


def _model(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None
) -> Model | None:
    if model is None:
        if method.needs_network:
            raise ModelError(
                f"{method.name} needs a network; only linear and process methods do not"
            )
        return None
    if isinstance(model, Model):
        if likelihood is not None or prior is not None or subset is not None:
            raise ModelError("the Model already has likelihood, prior and subset; set them there")
        return model
    return Model(model, likelihood or "gaussian", prior, subset or "all")


def _data(
    data: Any, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, sample_weight: Any, device: torch.device,
    dtype: torch.dtype | None, seed: int,
) -> tuple[Data, Any, Any]:  # fmt: skip
    """Checked, standardised rows on the device; the network's output shape; x's row shape."""
    x, y, source = parse(data)
    total = len(source) if source is not None else rows_of(x, "x")
    if total == 0:
        raise DataError("x has no rows (N = 0)")
    if source is None and rows_of(y, "y") != total:
        raise ShapeError(f"x has {total} rows and y {rows_of(y, 'y')}")
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    check_finite(x, "x", dtype=dtype)
    check_finite(y, "y", dtype=dtype)
    inputs = tree_map(lambda t: list(t.shape[1:]), x)
    if model is not None:
        model.build(tree_map(lambda t: cast(t[:1], device, dtype), x))
        output = model.output
    else:
        shape = tuple(y.shape[1:]) if isinstance(y, Tensor) else ()
        output = shape or (1,)
    prepare = lambda y: likelihood.prepare_targets(y, output)  # noqa: E731
    y = prepare(y)
    if likelihood.classifies and source is None:
        _check_classes(y, likelihood)
    rows = [_rows(spec.rows, total) for spec in specs]
    held_out: list[Tensor] | None = None
    if validation is not None:
        x, y, rows, held_out = _validation(x, y, rows, validation, source, prepare, seed)
    extent = rows_of(x, "x") if source is None else total
    scales = [Standardisation()] * len(specs)
    if standardize:
        if source is not None:
            raise DataError(
                "standardize=True needs the rows at hand; scale a streamed Dataset itself"
            )
        scales = standardise(x, y, rows, likelihood.scales_targets)
    banked = standardize and len(specs) > 1
    lazy = source is None and not _resident(x, y, len(specs) if banked else 1, device)
    banked = banked and not lazy
    if source is None and not lazy:
        put = lambda tree: tree_map(lambda t: cast(t, device, dtype), tree)  # noqa: E731
        xs, ys = [put(s.x(x, dtype)) for s in scales], [put(s.y(y, dtype)) for s in scales]
        x = tree_map(lambda *t: torch.cat(t), *xs) if banked else xs[0]
        y = tree_map(lambda *t: torch.cat(t), *ys) if banked else ys[0]
    weight = _weights(sample_weight, total, extent, device, dtype)
    held = Data(
        x, y, rows, scales, device, dtype, extent, held_out, weight, banked, lazy, source, prepare
    )
    return held, output, inputs


def _resident(x: Any, y: Any, copies: int, device: torch.device) -> bool:
    """Whether the rows take less than a quarter of what is free on the device, and so move there."""
    size = copies * sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
    if size < free_memory(device) // 4:
        return True
    log.info("the data (%.3g GiB) stays where it is and is read by the batch", size / 2**30)
    return False


def _check_classes(y: Any, likelihood: Likelihood) -> None:
    ignored = getattr(likelihood, "ignore_index", None)
    for leaf in tree_flatten(y)[0]:
        seen = leaf.unique()
        if ignored is not None:
            seen = seen[seen != ignored]
        if len(seen) < 2:
            raise DataError(
                f"y holds one class only ({seen.tolist()}): there is nothing to tell apart"
            )


def _rows(rows: Tensor | None, total: int) -> Tensor:
    if rows is None:
        return torch.arange(total)
    if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= total:
        raise DataError(f"a run's rows must be a non-empty list of numbers in 0 … {total - 1}")
    return rows.cpu()


def _validation(
    x: Any, y: Any, rows: list[Tensor], validation: Any, source: Any, prepare: Any, seed: int
) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """Rows held out of each run: a random share, or rows appended from a given pair."""
    if isinstance(validation, int | float | str):
        validation = checks.positive("validation", validation)
        kept, held = [], []
        for index in rows:
            count = round(float(validation) * len(index))
            if not 0 < count < len(index):
                raise DataError(
                    f"validation={validation} of {len(index)} rows leaves {len(index) - count} to "
                    f"train on and {count} to validate on"
                )
            order = torch.randperm(len(index), generator=generator("validation", seed))
            kept.append(index[order[count:].sort().values])
            held.append(index[order[:count].sort().values])
        return x, y, kept, held
    if source is not None:
        raise DataError("validation as a pair needs data as a pair; pass a share instead")
    vx, vy, _ = parse(validation)
    start, count = rows_of(x, "x"), rows_of(vx, "validation x")
    if count == 0 or rows_of(vy, "validation y") != count:
        raise ShapeError(f"validation x has {count} rows and y {rows_of(vy, 'validation y')}")
    given, fitted = ([tuple(t.shape[1:]) for t in tree_flatten(v)[0]] for v in (vx, x))
    if given != fitted:
        raise ShapeError(f"validation x has rows of shape {given}, but x has {fitted}")
    check_finite(vx, "validation x")
    check_finite(vy, "validation y")
    vy = prepare(vy)
    x = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), x, vx)
    y = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), y, vy)
    return x, y, rows, [torch.arange(start, start + count)] * len(rows)


def _weights(
    sample_weight: Any, total: int, extent: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if sample_weight is None:
        return None
    weight = as_tensor(sample_weight, "sample_weight").to(device, dtype)
    if weight.shape != (total,):
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}, expected ({total},)")
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(f"sample_weight is {weight[row].item()} at row {row}; weights are finite and nonnegative")  # fmt: skip
    return torch.cat([weight, weight.new_ones(extent - total)])


def _member_ids(members: int | Sequence[int] | None, method: Method) -> list[int]:
    if members is None:
        return list(range(method.default_members))
    if not isinstance(members, Iterable):
        return list(range(checks.whole("members", members)))
    ids = [checks.whole("a member's id", m, least=0) for m in members]
    if not ids or len(set(ids)) != len(ids):
        raise MethodError(f"members must be a positive number or distinct ids, not {members!r}")
    return ids


def _stack(
    model: Model | None, method: Method, likelihood: Likelihood, data: Data,
    specs: Sequence[RunSpec], ids: list[int], output: Any, init: str, inputs: Any,
) -> Run:  # fmt: skip
    """Runs × members as one axis M."""
    count = len(ids)
    run_of = [r for r in range(len(specs)) for _ in ids]
    members = [m for _ in specs for m in ids]
    seeds = [spec.seed for spec in specs for _ in ids]
    layout = model.layout if model is not None else Layout(())
    if method.needs_network and all(name.startswith("likelihood.") for name in layout.names):
        raise ModelError("the network has no trainable parameter: requires_grad is False on all")
    totals = data.total_weight(run_of)
    if bool((totals <= 0).any()):
        raise DataError("the sample weights of a run's rows are all zero: nothing is left to fit")
    if model is not None and model.batch_norm:
        _say_batch_norm(model)
    hyper, priors = _hyper(method, specs, count, data)
    bound = _bound_prior(model, layout, priors, count).to(data.device, data.dtype)
    run = Run(
        model, likelihood, layout, bound, data, Engine(), members, run_of, seeds,
        totals, data.device, data.dtype, hyper,
        _constants(likelihood, output, data, run_of), inputs=inputs,
    )  # fmt: skip
    if model is not None:
        run.initial = _initial(model, run, init)
    return run


def _say_batch_norm(model: Model) -> None:
    if model.tracked:
        log.info("the network has BatchNorm: each member keeps running statistics of its own")
    else:
        log.warning(
            "the network has BatchNorm without running statistics: a prediction depends on the "
            "rows it is made with"
        )


def _initial(model: Model, run: Run, init: str) -> Tensor:
    if init == "given":
        return model.given().expand(run.size, -1).clone()
    if init != "fresh":
        raise MethodError(f"init must be 'fresh' or 'given', not {init!r}")
    pairs = list(zip(run.seeds, run.members, strict=True))
    distinct = {pair: model.fresh(pair[0], [pair[1]])[0] for pair in dict.fromkeys(pairs)}
    return torch.stack([distinct[pair] for pair in pairs])


def _hyper(
    method: Method, specs: Sequence[RunSpec], count: int, data: Data
) -> tuple[dict[str, Tensor], list[Any] | None]:
    """Hyper-parameters that differ between runs, [M] each; priors are handed over as objects."""
    fields = sorted({name for spec in specs for name in spec.hyper})
    known = {*method.settings(), "lr", "prior"}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise MethodError(f"grid over unknown fields {unknown}; {method.name} has {sorted(known)}")
    if method.per_run is not None:
        common = set(method.settings()) - set(method.per_run)
        if common & set(fields):
            raise MethodError(
                f"{sorted(common & set(fields))} cannot differ between the runs of one fit of "
                f"{method.name}; a grid may vary {sorted(known - common)}: fit once for each value"
            )
    hyper = {}
    for name in fields:
        if name == "prior":
            continue
        try:
            values = [float(spec.hyper[name]) for spec in specs for _ in range(count)]
        except (TypeError, ValueError) as error:
            raise MethodError(f"a grid stacks numbers only; {name} has {error}") from error
        for value in {spec.hyper[name] for spec in specs}:
            if name == "lr":
                checks.positive("lr", value)
            else:
                replace(method, **{name: value})  # the method's own checks
        hyper[name] = torch.tensor(values, device=data.device, dtype=data.dtype)
    priors = [spec.hyper["prior"] for spec in specs] if "prior" in fields else None
    return hyper, priors


def _bound_prior(
    model: Model | None, layout: Layout, priors: list[Any] | None, count: int
) -> BoundPrior:
    if priors is not None:
        return stack_bound([bind(prior, layout) for prior in priors for _ in range(count)])
    return bind(model.prior if model is not None else None, layout)


def _constants(likelihood: Likelihood, output: Any, data: Data, run_of: list[int]) -> Params:
    """Fixed likelihood parameters of each member, in fitted units."""
    each = [likelihood.constants(output, data.scales[r].y_scale) for r in run_of]
    return {
        name: torch.stack([c[name].to(data.device, data.dtype) for c in each]) for name in each[0]
    }


def _batch_size(asked: int | None, method: Method, data: Data) -> int:
    asked = None if asked is None else checks.whole("batch_size", asked)
    return max(1, min(asked or method.default_batch, max(len(r) for r in data.rows)))


def _steps(steps: int | None, epochs: float | None, method: Method, epoch: int) -> int:
    if steps is not None and epochs is not None:
        raise MethodError("give steps or epochs, not both")
    if steps is not None:
        return checks.whole("steps", steps)
    if epochs is not None:
        return math.ceil(checks.positive("epochs", epochs) * epoch)
    return method.default_steps


def _choose_engine(run: Run, engine: str | Engine, options: Options) -> None:
    if run.model is None:
        run.engine = Engine("loop", reason="the method brings its own functions")
        options.mode = "eager"
        return
    if engine == "auto":
        chosen = choose(run.model, run.size, run.device)
    else:
        chosen = Engine.parse(engine)
        options.mode = chosen.mode
    rows = Batches(run.data, run.run_of, run.members, min(options.batch_size, 8), 0, "trial")

    def trial(engine: Engine) -> None:
        run.engine = engine
        buffers = run.buffers(run.init_buffers()) or None
        run.grad(run.start(), rows.batch(0), buffers=buffers, training=True)

    try:
        run.engine = works(chosen, trial)
    except DoxaError:
        raise
    except Exception as error:  # whatever the user's forward raises
        raise ModelError(f"the network fails in training, on {rows.size} rows: {error}") from error
    log.info("engine: %s (%s)", run.engine.kind, run.engine.reason)


def _fingerprint(run: Run, method: Method, options: Options, specs: Sequence[RunSpec]) -> str:
    """Tells one fit from another: what would make a checkpoint meaningless if it differed."""
    digest = hashlib.sha256()
    facts = {
        "method": store.encode(method), "steps": options.steps, "batch": options.batch_size,
        "schedule": schedule_shape(options.schedule, 64).tolist(), "rate": run.rate,
        "optimizer": repr(run.optimizer), "patience": options.patience,
        "likelihood": _recipe(run.likelihood), "model": _beliefs(run.model),
        "members": run.members, "seeds": run.seeds, "dtype": str(run.dtype),
        "grid": [repr(dict(spec.hyper)) for spec in specs],
        "layout": [[e.name, list(e.shape)] for e in run.layout.entries],
        "rows": [len(r) for r in run.data.rows], "total": run.data.total,
    }  # fmt: skip
    digest.update(json.dumps(facts, sort_keys=True).encode())
    leaves = tree_flatten((run.data.x, run.data.y))[0]
    leaves += [t for t in (run.data.weight, run.initial) if t is not None]
    for leaf in leaves:
        part = leaf[:: max(1, leaf.shape[0] // 1024)].detach().cpu().contiguous()
        digest.update(part.double().numpy().tobytes())
    for rows in run.data.rows:
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def _beliefs(model: Model | None) -> Any:
    """What of a model the layout does not say."""
    return None if model is None else [_recipe(model.prior), list(model.subset_names)]


def _recipe(value: Any) -> Any:
    """A likelihood or prior as JSON; one of the user's own that cannot be stored, by its name."""
    try:
        return store.encode(value)
    except StoreError:
        return type(value).__qualname__


def _finish(
    run: Run,
    method: Method,
    result: Progressed,
    specs: Sequence[RunSpec],
    count: int,
    seconds: float,
) -> list[Posterior]:
    posteriors = []
    for r, spec in enumerate(specs):
        rows = slice(r * count, (r + 1) * count)
        part = run.part(rows)
        kept = torch.stack([k[rows] for k in result.kept]) if result.kept else None
        posterior = method.finish(part, slice_state(result.state, rows), kept)
        record = posterior.record
        record.seed = spec.seed
        record.history = _history(result.history, rows)
        record.diagnostics |= {
            "engine": run.engine.kind, "mode": result.mode, "engine_reason": run.engine.reason,
            "seconds": seconds, "steps": result.done, "rows": len(run.data.rows[r]),
        }  # fmt: skip
        if spec.hyper:
            record.metadata["hyper"] = {k: repr(v) for k, v in spec.hyper.items()}
        _judge(posterior, result, rows)
        if run.data.validation is not None:
            record.validation = _validation_score(posterior, run, r)
        posteriors.append(posterior)
    return posteriors


def _history(history: dict[str, list[Any]], rows: slice) -> dict[str, Any]:
    """The record of one run's members."""
    plain = {k: list(v) for k, v in history.items() if k in ("step", "stage")}
    series = {
        k: [[t, v[rows]] for t, v in values] for k, values in history.items() if k not in plain
    }
    return plain | series


def _judge(posterior: Posterior, result: Progressed, rows: slice) -> None:
    """Say so when members broke down, or the loss ended far above where it began."""
    gone = {m - rows.start: t for m, t in result.diverged.items() if rows.start <= m < rows.stop}
    if gone:
        first = min(gone.values())
        reason = (
            f"{len(gone)} of {rows.stop - rows.start} members became non-finite, the first by step "
            f"{first}; their last finite state is used; try a smaller learning rate"
        )
        posterior.record.status = Status("diverged", reason)
        return
    losses = posterior.record.history.get("loss")
    if losses and posterior.record.status == "ok":
        start, end = max(losses[0][1]), max(losses[-1][1])
        best = min(max(v) for _, v in losses)
        if end > start + 1.0 and end > best + 10.0:
            posterior.record.status = Status(
                "diverged",
                f"the loss rose from {start:.3g} to {end:.3g}; try a smaller learning rate",
            )
    if result.stopped and posterior.record.status == "ok":
        posterior.record.status = Status("stopped", result.stopped)


def _validation_score(posterior: Posterior, run: Run, r: int) -> float:
    """Mean log predictive of the held-out rows, in the units of y."""
    x, y = run.data.held_out(r)
    scales = run.data.scales[r].to(run.device, torch.float64)
    if scales.x_loc is not None:
        x = tree_map(
            lambda t, loc, scale: t.double() * scale + loc if t.is_floating_point() else t,
            x, scales.x_loc, scales.x_scale,
        )  # fmt: skip
    if scales.y_loc is not None:
        y = y.double() * scales.y_scale + scales.y_loc
    return float(posterior.predict(x).log_prob(y).mean())
