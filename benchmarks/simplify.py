"""What the simplification of a recorded step saves.

    python -m benchmarks.simplify [--seconds 10] [--only hmc]

Every step is recorded three times: as it comes from the recorder, after `simplify`, and after
`simplify` and `reuse_memory`, which is what a fit runs. The three run in turns in one process, on
one thread, forwards and backwards (A B C C B A), and a time is the process's own seconds. The table
gives the number of operations of each, the median time of the third in µs, and the first and the
second time divided by the third: medians over the rounds, and ratios of the smallest times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import doxa
from benchmarks.modes import Done, rows
from doxa.driver import loop
from doxa.engine import execute
from doxa.engine.execute import Executor

SIMPLIFY, REUSE_MEMORY = execute.simplify, execute.reuse_memory
VARIANTS: dict[str, tuple[Any, Any]] = {
    "recorded": (lambda module, example: module, lambda module: module),
    "simplify": (SIMPLIFY, lambda module: module),
    "reuse_memory": (SIMPLIFY, REUSE_MEMORY),
}


def fits() -> dict[str, Any]:
    """{name: a function that starts a fit}."""
    small, large = doxa.nets.mlp(8, 1, (50,)), doxa.nets.mlp(784, 1, (400, 400))

    def fit(method: Any, members: int, batch: int = 32, net: Any = small) -> Any:
        options: dict[str, Any] = {"members": members, "progress": False}
        if batch:
            options |= {"batch_size": batch, "steps": 2000}
        return lambda: doxa.fit(net, rows(1000, 8 if net is small else 784), method, **options)

    def sample(method: Any, chains: int) -> Any:
        x, y = (each.double() for each in rows(200, 8))
        label = (y > 0).double().squeeze(1)

        def log_density(p: dict[str, Tensor]) -> Tensor:
            logit = x @ p["w"]
            fit = label * logit - torch.nn.functional.softplus(logit)
            return fit.sum() - 0.5 * p["w"].square().sum()

        return lambda: doxa.sample(
            log_density, {"w": torch.zeros(8)}, method, chains, progress=False
        )

    return {
        "deep-ensemble, M = 5": fit(doxa.DeepEnsemble(), 5),
        "deep-ensemble, M = 10": fit(doxa.DeepEnsemble(), 10),
        "deep-ensemble, M = 1": fit(doxa.DeepEnsemble(), 1),
        "mean-field": fit(doxa.MeanField(), 1),
        "mean-field, M = 5": fit(doxa.MeanField(), 5),
        "ivon": fit(doxa.IVON(), 1),
        "swag": fit(doxa.SWAG(), 1),
        "sgld, M = 4": fit(doxa.SGLD(), 4),
        "sghmc, M = 4": fit(doxa.SGHMC(), 4),
        "hmc leapfrog, M = 4": fit(doxa.HMC(), 4, 0),
        "hmc leapfrog, logistic": sample(doxa.HMC(), 4),
        "nuts leapfrog, logistic": sample(doxa.NUTS(), 4),
        "svgd, K = 10": fit(doxa.SVGD(particles=10), 1),
        "large deep-ensemble, M = 5": fit(doxa.DeepEnsemble(), 5, net=large),
        "large mean-field": fit(doxa.MeanField(), 1, net=large),
        "large ivon": fit(doxa.IVON(), 1, net=large),
        "large sgld, M = 4": fit(doxa.SGLD(), 4, net=large),
        "large svgd, K = 5": fit(doxa.SVGD(particles=5), 1, net=large),
    }


def record(variant: str, step: Any, trial: Any, *rest: Any) -> tuple[Any, list[Any], int]:
    """A recorded step with its arguments, and how many operations it has."""
    nodes: list[int] = []
    simplify, reuse_memory = VARIANTS[variant]

    def counted(module: Any) -> Any:
        found = reuse_memory(module)
        nodes.append(sum(node.op == "call_function" for node in found.graph.nodes))
        return found

    execute.simplify, execute.reuse_memory = simplify, counted
    executor = Executor(step, "traced", *rest)
    state, *others = trial()
    values, _ = executor({k: v.clone() for k, v in state.items()}, *others)
    if executor.mode != "traced":
        raise RuntimeError(f"{variant}: the step could not be recorded")
    return executor, [values, *others], nodes[0]


def measured(name: str, seconds: float) -> Any:
    """In the place of the rule: a line of the table, and an end to the fit."""

    def choose(step: Any, trial: Any, run: Any, steps: int, *rest: Any, **_: Any) -> Any:
        made = [record(variant, step, trial, *rest[:1]) for variant in VARIANTS]

        def chunk(which: int, repeat: int) -> float:
            executor, given, _ = made[which]
            start = time.process_time()
            for _ in range(repeat):
                given[0], _ = executor(*given)
            return (time.process_time() - start) / repeat

        repeat = max(1, int(2e-3 / min(chunk(2, 20) for _ in range(5))))
        times: list[tuple[float, ...]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            there = [chunk(k, repeat) for k in (0, 1, 2)]
            back = [chunk(k, repeat) for k in (2, 1, 0)][::-1]
            times.append(tuple(map(sum, zip(there, back, strict=True))))
        cells = "  ".join(
            f"{statistics.median(t[k] / t[2] for t in times):6.3f}"
            f" ({min(t[k] for t in times) / min(t[2] for t in times):5.3f})"
            for k in (0, 1)
        )
        each = 0.5e6 * statistics.median(t[2] for t in times)
        counts = " ".join(f"{operations:5d}" for *_, operations in made)
        print(f"{name:26} {counts} {each:8.0f} {cells}   {len(times)} rounds", flush=True)
        raise Done

    return choose


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0, help="for each line")
    parser.add_argument("--only", default="", help="lines whose name begins with this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'step':26} {'operations':^17} {'µs':>8} recorded, simplify")
    for name, start in fits().items():
        if name.startswith(options.only):
            loop.choose_executor = execute.choose_executor = measured(name, options.seconds)
            try:
                start()
            except Done:
                continue


if __name__ == "__main__":
    main()
