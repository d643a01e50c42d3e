"""Which engine a fit runs on: as asked for, or by the rule, tried on a few rows."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import torch

from doxa.data import Batches
from doxa.engine import Engine, choose, works
from doxa.engine.threads import undecided
from doxa.engine.work import Count
from doxa.errors import DoxaError, ModelError
from doxa.method import Clock, Method, Run, log_joint
from doxa.model.problem import Network

log = logging.getLogger("doxa")


def try_engine(run: Run, asked: str | Engine, method: Method, half: bool = False) -> Engine:
    """As asked for, or by the rule; the loop where stacking fails."""
    own, width = not isinstance(run.problem, Network), method.width_on(run.problem)
    if asked != "auto":
        chosen = Engine.parse(asked)
    elif own and method.modules_stack and run.size > 1:
        return Engine("stack", None, reason="the method's own modules run on stacked weights")
    elif own:
        return Engine("loop", reason="the method brings its own functions")
    else:
        chosen = choose(run.net, run.size * width, run.device)
    if own:
        return chosen
    chosen = replace(chosen, half=half)
    wide = run.times(width) if width > 1 else run
    size = min(run.settings.batch_size, 8)
    rows = Batches(run.rows, wide.split_of, wide.keys, size, "trial", most=1)
    batch = rows.batch(0)
    zero = torch.zeros((), device=run.device)
    clock = Clock(zero, zero, 1, wide.noise("trial"))
    state = wide.init_network()
    count = Count()

    def trial(tried: Engine) -> None:
        with count if undecided() else nullcontext():
            replace(wide, engine=tried).value_and_grad(log_joint, state, batch, clock)

    try:
        chosen = works(chosen, trial)
    except DoxaError:
        raise
    except Exception as error:  # whatever the user's forward raises
        raise ModelError(f"the network fails in training, on {rows.size} rows: {error}") from error
    log.info("engine: %s (%s)", chosen.kind, chosen.reason)
    return replace(chosen, product=count.largest / rows.size)
