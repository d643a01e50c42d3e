"""Nested Monte Carlo of 15 designs, 10,000 × 100 draws: ours beside pyro.contrib.oed.

    python -m benchmarks.eig_speed                # ours, and the table
    python -m benchmarks.eig_speed --peer         # in an environment with pyro-ppl 1.9
    python -m benchmarks.eig_speed --device cuda  # ours alone, and a hundred times the draws

One thread, processor time, the best of several runs; on a GPU wall time, until it has finished. The
working-memory experiment has two outcomes, so that ours evaluates contrasts once per outcome; the
same model with a number as its outcome is timed too, where nothing can be saved that way. Rows go
to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "eig_speed.json"
OUTER, INNER = 10_000, 100


def best(call: Callable[[], Any], runs: int, device: str = "cpu") -> float:
    times = []
    clock = time.process_time if device == "cpu" else time.perf_counter
    for _ in range(runs):
        began = clock()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return min(times)


def ours(device: str) -> dict[str, float]:
    from torch.distributions import Normal

    from doxa.decide import eig
    from doxa.decide.design import Experiment, working_memory

    span = working_memory(dtype=torch.float32)
    number = Experiment(
        Normal(7.0, 2.0), lambda t, d: Normal(t - d, 1.0, validate_args=False), space=span.space
    )
    asked: dict[str, Any] = {"outer": OUTER, "inner": INNER, "device": device}
    found = {
        "two outcomes": best(lambda: eig(span, None, "nmc", **asked), 40, device),
        "a number": best(lambda: eig(number, None, "nmc", **asked), 5, device),
    }
    if device != "cpu":
        asked |= {"outer": 10 * OUTER, "inner": 10 * INNER}
        for name, experiment in (("two outcomes", span), ("a number", number)):
            took = best(lambda e=experiment: eig(e, None, "nmc", **asked), 3, device)
            found[f"{name}, 100 times the draws"] = took
    return found


def peer() -> dict[str, float]:
    import pyro
    import pyro.distributions as dist
    from pyro.contrib.oed.eig import nmc_eig

    def model(outcome: Callable[..., Any]) -> Callable[..., Any]:
        def sampled(length: Any) -> Any:
            with pyro.plate_stack("designs", length.shape):
                theta = pyro.sample("theta", dist.Normal(7.0, 2.0))
                return pyro.sample("y", outcome(theta - length))

        return sampled

    lengths = torch.arange(1, 16).float()
    kinds = {
        "two outcomes": lambda x: dist.Bernoulli(logits=x),
        "a number": lambda x: dist.Normal(x, 1.0),
    }
    return {
        name: best(lambda f=f: nmc_eig(model(f), lengths, "y", "theta", N=OUTER, M=INNER), 5)
        for name, f in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    own = "doxa" if asked.device == "cpu" else f"doxa, {asked.device}"
    found["pyro" if asked.peer else own] = peer() if asked.peer else ours(asked.device)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, ms in found.get(own, {}).items():
        other = found.get("pyro", {}).get(name, float("nan"))
        print(
            f"{name:36} doxa {1e3 * ms:7.1f} ms   pyro {1e3 * other:7.1f} ms   {other / ms:5.1f}×"
        )


if __name__ == "__main__":
    main()
