"""Cost of a step in eager, recorded and compiled mode, beside its counted work.

    python -m benchmarks.modes [--compiled]

The rule of `doxa.engine.execute` is fitted to this table: a compiled step saves about 4 µs for each
operation and 0.3 ns for each number written, beside a recorded one. Processor time of one thread,
medians; µs, and in brackets the seconds that preparing the mode took. Others on the machine make
all of it slower, by up to twice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import doxa
from doxa.driver import loop
from doxa.engine import execute
from doxa.engine.engine import Count
from doxa.engine.execute import Executor, State


class Done(Exception):
    """A step has been timed; the fit is not of interest."""


def rows(n: int, inputs: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def residual(width: int) -> nn.Module:
    """A net that has no batched form."""

    class Residual(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.normalize(super().forward(x), dim=-1)

    return nn.Sequential(nn.Linear(8, width), Residual(width, width), nn.Linear(width, 1))


def fits() -> dict[str, tuple[nn.Module, int, Any, dict[str, Any]]]:
    """{name: (network, inputs, method, options)}."""
    small, middle = doxa.nets.mlp(8, 1, (50,)), doxa.nets.mlp(8, 1, (50, 50))
    large = doxa.nets.mlp(784, 1, (400, 400))
    found: dict[str, tuple[nn.Module, int, Any, dict[str, Any]]] = {}
    for name, net, inputs in (("50", small, 8), ("50-50", middle, 8), ("400-400", large, 784)):
        for members, size in ((1, 32), (10, 32), (1, 500)):
            options = {"members": members, "batch_size": size}
            found[f"{members} × {name}, B = {size}"] = net, inputs, doxa.DeepEnsemble(), options
    for method in (doxa.SGLD(), doxa.MeanField(), doxa.MCDropout(), doxa.HMC(), doxa.NUTS()):
        found[f"{method.name}, 4 × 50"] = small, 8, method, {"members": 4, "batch_size": 100}
    found["10 × residual"] = residual(50), 8, doxa.DeepEnsemble(), {"members": 10, "batch_size": 32}
    return found


def seconds(executor: Executor, trial: execute.Trial) -> tuple[float, float]:
    """Of preparing the mode, and of a step."""
    state, *rest = trial()
    values: Any = {k: v.clone() for k, v in state.items()}
    call: Any = executor
    began = time.process_time()
    values, _ = call(values, *rest)
    prepared, times = time.process_time() - began, []
    while sum(times) < 0.2 or len(times) < 5:
        start = time.process_time()
        values, _ = call(values, *rest)
        times.append(time.process_time() - start)
    return prepared, statistics.median(times)


def timed(modes: list[str], name: str) -> Any:
    """In the place of the rule: a line of the table, and an end to the fit."""

    def choose(step: Any, trial: execute.Trial, run: Any, steps: int, *rest: Any, **_: Any) -> Any:
        saved = execute.saved(step, trial)
        copy = _copied(*trial())
        with Count() as count:
            step(*copy)
        cells = []
        for mode in modes:
            executor = Executor(step, mode, *rest[:1])
            prepared, each = seconds(executor, trial)
            cells.append(f"{1e6 * each:9.0f} ({prepared:4.1f})" if executor.mode == mode else "-")
        counted = f"{count.operations:5d} {count.numbers:10.2g} {1e6 * saved:10.0f}"
        print(f"{name:24} {counted} {'  '.join(cells)}", flush=True)
        raise Done

    return choose


def _copied(state: State, *rest: Any) -> tuple[Any, ...]:
    return {k: v.clone() for k, v in state.items()}, *rest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true", help="takes some seconds per line")
    modes = ["eager", "traced", *(["compiled"] if parser.parse_args().compiled else [])]
    torch.set_num_threads(1)
    print(f"{'fit':24} {'ops':>5} {'numbers':>10} {'µs to save':>10} {'  '.join(modes)}")
    for name, (net, inputs, method, options) in fits().items():
        loop.choose_executor = execute.choose_executor = timed(modes, name)
        try:
            doxa.fit(net, rows(1000, inputs), method, steps=600, progress=False, **options)
        except Done:
            continue


if __name__ == "__main__":
    main()
