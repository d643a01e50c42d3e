"""Same seed, same bits: every method, fitted in fresh processes, on an idle machine and a busy one.

    python -m benchmarks.bits [--processes 3] [--only NAME ...]
    python -m benchmarks.bits --against CHECKOUT       the code of another checkout beside this one

Each process fits every case, starting at another one, and prints a hash of what the posterior holds
and predicts; half of the processes run beside two busy loops. torch's threads and the networks' own
weights are what they happen to be. A table of the cases; exit status 1 where two hashes differ.
With `--against`, one process runs the cases with the code of each checkout, one thread each. Each
checkout runs its own copy of this script, because names of settings may differ; cases of one copy
only are not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from short import short

Fitted = tuple[str, dict[str, Tensor]]  # how it was executed, and what it came to


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sin().sum(1, keepdim=True)


def fitted(method: Any, bare: bool = False, classes: bool = False, **options: Any) -> Fitted:
    """A fit to a hundred rows, of a network or of what the method brings."""
    x, y = rows()
    if classes:
        y = (y[:, 0] > 0).long() + (y[:, 0] > 1).long()
        options["likelihood"] = "categorical"
    net = None if bare else doxa.nets.mlp(4, 3 if classes else 1, (20,))
    settings = {"steps": 60, "batch_size": 16, "progress": False} | options
    posterior = doxa.fit(net, (x, y), method, **settings)
    p = posterior.predict(x)
    answer = {"probs": p.probs} if classes else {"mean": p.mean, "variance": p.variance}
    return str(posterior.diagnostics["mode"]), posterior.tensors() | answer


def learned(method: Any) -> Fitted:
    """A fit to twenty tasks of five points, given ten rows of a new one."""
    x, y = rows()
    tasks = doxa.data.Tasks(zip(x[:, :1].split(5), y.split(5), strict=True))
    posterior = doxa.fit(None, tasks, method, steps=60, progress=False)
    p = posterior.condition(x[:10, :1], y[:10]).predict(x[:, :1])
    answer = {"mean": p.mean, "variance": p.variance}
    return str(posterior.diagnostics["mode"]), posterior.tensors() | answer


def sampled() -> Fitted:
    draws = doxa.sample(
        lambda p: -0.5 * (p["a"].square().sum() / p["s"] ** 2) - p["s"],
        {"a": torch.zeros(3), "s": torch.tensor(1.0)}, doxa.NUTS(draws=60, burn_in=60), 2,
        constraints={"s": "positive"}, progress=False,
    )  # fmt: skip
    return str(draws.diagnostics["mode"]), {"theta": draws.theta}


def cases() -> dict[str, Callable[[], Fitted]]:
    """Every method at its shortest; those that take steps for long enough to be recorded; one that
    is compiled."""
    found: dict[str, Callable[[], Fitted]] = {}
    for row in doxa.methods():
        try:
            method = short(row.name)
            if row.tasks == ("tasks",):
                found[row.name] = partial(learned, method)
            else:
                bare = row.family == "process"
                found[row.name] = partial(fitted, method, bare=bare)
                if "classification" in row.tasks:
                    found[f"{row.name}, classes"] = partial(fitted, method, bare, classes=True)
        except doxa.errors.MissingExtra:
            continue
    chain = {"draws": 20, "burn_in": 600, "thin": 2}
    longer = [
        doxa.MAP(), doxa.DeepEnsemble(), doxa.SWA(), doxa.SVGD(particles=4), doxa.MCDropout(),
        doxa.MeanField(), doxa.Laplace(structure="diagonal"), doxa.SGLD(**chain),
        doxa.SGHMC(**chain), doxa.PSGLD(**chain), doxa.HMC(draws=60, burn_in=60, leapfrog=10),
        doxa.NUTS(draws=40, burn_in=60, mass="full", max_depth=4),
    ]  # fmt: skip
    for method in longer:
        found[f"{method.name}, 600 steps"] = partial(fitted, method, steps=600)
    found["linear, no network"] = partial(fitted, doxa.BayesianLinear("fourier"), bare=True)
    found["map, large products"] = wide
    found["sample"] = sampled
    found["hmc, compiled"] = partial(fitted, doxa.HMC(draws=1000, burn_in=1000, leapfrog=20))
    return found


def wide() -> Fitted:
    """Products that are shared among threads."""
    net = doxa.nets.mlp(4, 1, (1500, 1500))
    posterior = doxa.fit(net, rows(), "map", steps=5, batch_size=100, progress=False)
    p = posterior.predict(rows()[0])
    return str(posterior.diagnostics["mode"]), posterior.tensors() | {"mean": p.mean}


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def work(first: int, only: list[str]) -> None:
    """In a process of its own: a line a case."""
    todo = {name: case for name, case in cases().items() if not only or name in only}
    names = list(todo)
    for k in range(len(names)):
        name = names[(first + k) % len(names)]
        mode, tensors = todo[name]()
        print(name, mode, digest(tensors), sep="\t", flush=True)


@contextmanager
def load(loops: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def process(
    first: int, only: list[str], checkout: Path | None = None
) -> dict[str, tuple[str, str]]:
    """{case: (mode, hash)}; nothing that was compiled before is used again."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        script = Path(__file__).resolve()
        if checkout is not None:
            env |= {"PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
            script = checkout.resolve() / "benchmarks" / "bits.py"  # its names of settings
        command = [sys.executable, str(script), "--first", str(first), "--only", *only]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {name: (mode, value) for name, mode, value in lines}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=3, help="idle, and as many under load")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--first", type=int, help="be one of the processes")
    parser.add_argument("--against", type=Path, help="another checkout, whose bits are compared")
    args = parser.parse_args()
    if args.first is not None:
        work(args.first, args.only)
        return 0
    found = []
    if args.against is not None:
        here = Path(__file__).resolve().parents[1]
        found = [process(0, args.only, checkout) for checkout in (args.against, here)]
        args.processes = 0
    for k in range(2 * args.processes):
        with load(2 * (k % 2)):
            found.append(process(7 * k, args.only))
    differ = 0
    common = [name for name in found[0] if all(name in one for one in found)]
    for name in common:
        seen = sorted({one[name] for one in found})
        differ += len(seen) > 1
        print(f"{name:28}", *(f"{mode:9} {value}" for mode, value in seen))
    under = "one for each checkout" if args.against else "half of them under load"
    print(f"{len(common)} cases, {len(found)} processes, {under}: {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
