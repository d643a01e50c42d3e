"""What tells one fit from another, so that a checkpoint is only gone on from by the same fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_flatten

from doxa import store
from doxa.driver.options import Options
from doxa.driver.runs import RunSpec
from doxa.errors import StoreError
from doxa.method import Method, Run
from doxa.model import Model
from doxa.optim import schedule as schedule_shape


def fingerprint(run: Run, method: Method, options: Options, specs: Sequence[RunSpec]) -> str:
    """Tells one fit from another: what would make a checkpoint meaningless if it differed."""
    data = run.rows
    digest = hashlib.sha256()
    facts = {
        "method": store.encode(method), "steps": run.steps, "batch": run.settings.batch_size,
        "schedule": schedule_shape(options.schedule, 64).tolist(), "rate": run.settings.rate,
        "optimizer": repr(run.settings.optimizer), "patience": options.patience,
        "likelihood": _recipe(run.likelihood), "model": _beliefs(run.problem.model),
        "members": list(run.members), "seeds": list(run.seeds), "dtype": str(run.dtype),
        "grid": [repr(dict(spec.hyper)) for spec in specs],
        "layout": [[e.name, list(e.shape)] for e in run.layout.entries],
        "rows": [len(r) for r in data.rows], "total": data.total,
    }  # fmt: skip
    if run.engine.half:
        facts["precision"] = "bfloat16"
    digest.update(json.dumps(facts, sort_keys=True).encode())
    leaves = tree_flatten((data.x, data.y))[0]
    leaves += [t for t in (data.weight, run.initial) if t is not None]
    fixed = {} if run.problem.model is None else run.net.fixed
    leaves += [t.flatten() for t in fixed.values()]
    for leaf in leaves:
        part = leaf[:: max(1, leaf.shape[0] // 1024)].detach().cpu().contiguous()
        digest.update(part.double().numpy().tobytes())
    for rows in data.rows:
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def _beliefs(model: Model | None) -> Any:
    """What of a model the layout does not say."""
    if model is None:
        return None
    named = [] if model.named is None else [model.named]
    return [_recipe(model.prior), list(model.subset_names), *named]


def _recipe(value: Any) -> Any:
    """A likelihood or prior as JSON; one of the user's own that cannot be stored, by its name."""
    try:
        return store.encode(value)
    except StoreError:
        return type(value).__qualname__
