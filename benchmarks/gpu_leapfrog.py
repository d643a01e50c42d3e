"""A leapfrog step of a Bayesian neural net 8-50-1 with 512 rows: doxa and JAX, side by side.

    python -m benchmarks.gpu_leapfrog [--device cuda] [--chains 8,256] [--steps 20]

doxa runs `--steps` leapfrog steps per call, captured as a CUDA graph, compiled, or both (on a CPU:
recorded, compiled); JAX scans over as many inside one jitted function. Each package runs in a
process of its own under this interpreter; one that is not installed is skipped. Prints one line of
JSON per package, with microseconds per step: the best and the median of repeated calls, and the
seconds it took to prepare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NOISE, INPUTS, HIDDEN, ROWS, SIZE, EPSILON = 0.5, 8, 50, 512, 501, 1e-3


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
    return x, np.sin(x[:, :1]).astype(np.float32)


def timed(call: Callable[[], Any], steps: int, repeats: int) -> dict[str, float]:
    """Microseconds per step; `call` waits until the device is done."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) / steps * 1e6)
    return {"best": min(times), "median": statistics.median(times)}


def doxa_steps(
    device: str, chains: int, steps: int, repeats: int, modes: tuple[str, ...] = ()
) -> dict[str, Any]:
    from dataclasses import dataclass

    import torch
    from torch import nn

    import doxa
    from doxa.engine.execute import Executor
    from doxa.mcmc.kernel import Point, leapfrog

    class Found(Exception):
        pass

    @dataclass(frozen=True)
    class Probe(doxa.HMC):
        """Hands out what a sampler is given."""

        def init(self, run: Any) -> Any:
            raise Found(run)

    x, y = (torch.tensor(v, device=device) for v in data())
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).to(device)
    try:
        doxa.fit(net, (x, y), Probe(), members=chains, likelihood=doxa.Gaussian(NOISE),
                 prior=doxa.Normal(1.0), progress=False, engine="stack")  # fmt: skip
    except Found as found:
        run = found.args[0]
    batch, theta = run.all_rows(), run.start()
    density = Probe().density(run, run.init_network(), batch)
    metric, step = torch.ones_like(theta), torch.full_like(theta[:, :1], EPSILON)

    def move(state: Any, batch: Any, t: Any, rate: Any, owned: bool = False) -> Any:
        return leapfrog(density, Point(**state), metric, step, steps)._asdict(), {}

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    nothing = torch.zeros((), device=device)
    found = {}
    usual = ("graph", "compiled-graph") if device == "cuda" else ("traced", "compiled")
    for mode in modes or usual:
        value, grad = density(theta)
        start = Point(theta, torch.zeros_like(theta), value, grad)._asdict()
        executor, began = Executor(move, mode), time.perf_counter()
        state = executor(start, batch, nothing, nothing)[0]
        wait()
        prepared = time.perf_counter() - began

        def call(executor: Executor = executor, state: Any = state) -> None:
            for _ in range(10):
                state = executor(state, batch, nothing, nothing)[0]
            wait()

        times = timed(call, 10 * steps, repeats)
        found[executor.mode] = {**times, "prepare": prepared}
    return {"package": f"doxa {doxa.__version__}, torch {torch.__version__}", "modes": found}


def jax_steps(device: str, chains: int, steps: int, repeats: int) -> dict[str, Any]:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )
    import jax
    import jax.numpy as jnp

    x, y = map(jnp.asarray, data())
    cut = INPUTS * HIDDEN

    def log_density(u: Any) -> Any:
        hidden = jnp.tanh(x @ u[:cut].reshape(HIDDEN, INPUTS).T + u[cut : cut + HIDDEN])
        z = (y[:, 0] - hidden @ u[cut + HIDDEN : -1] - u[-1]) / NOISE
        return -0.5 * (z * z).sum() - 0.5 * (u * u).sum()

    density = jax.vmap(jax.value_and_grad(log_density))

    def step(carry: Any, _: Any) -> Any:
        theta, momentum, grad, _value = carry
        momentum = momentum + 0.5 * EPSILON * grad
        theta = theta + EPSILON * momentum
        value, grad = density(theta)
        return (theta, momentum + 0.5 * EPSILON * grad, grad, value), None

    @jax.jit
    def move(carry: Any) -> Any:
        return jax.lax.scan(step, carry, None, length=10 * steps)[0]

    theta = 0.3 * jax.random.normal(jax.random.PRNGKey(0), (chains, SIZE))
    value, grad = density(theta)
    carry = (theta, jnp.zeros_like(theta), grad, value)
    began = time.perf_counter()
    jax.block_until_ready(move(carry))
    prepared = time.perf_counter() - began
    times = timed(lambda: jax.block_until_ready(move(carry)), 10 * steps, repeats)
    return {"package": f"jax {jax.__version__}", "device": str(jax.devices()[0]),
            "modes": {"scan": {**times, "prepare": prepared}}}  # fmt: skip


PACKAGES = {"doxa": doxa_steps, "jax": jax_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--chains", default="8,256")
    parser.add_argument("--steps", type=int, default=20, help="leapfrog steps a call")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--package", choices=list(PACKAGES), help="this one, in this process")
    parser.add_argument("--jax", default=sys.executable, help="the interpreter that has JAX")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.package:
        for chains in map(int, args.chains.split(",")):
            found = PACKAGES[args.package](args.device, chains, args.steps, args.repeats)
            print(json.dumps({"device": args.device, "chains": chains, **found}), flush=True)
        return
    passed = sys.argv[1:]
    for package, python in (("doxa", sys.executable), ("jax", args.jax)):
        out = subprocess.run([python, __file__, *passed, "--package", package])
        if out.returncode:
            print(json.dumps({"package": package, "failed": out.returncode}), flush=True)


if __name__ == "__main__":
    main()
