"""Samplers side by side with NumPyro, BlackJAX, Pyro and posteriors, on one thread of a CPU.

    DOXA_DATA=... python benchmarks/samplers.py --jax PYTHON --pyro PYTHON
        [--rows nuts,steps,chains]

`--jax` is an interpreter with NumPyro and BlackJAX, `--pyro` one with Pyro and posteriors; without
them only doxa runs. Every package runs in a process of its own (`benchmarks/peers`), one after the
other, on the same data, from the same starts, in the same precision, with the same lengths. Its
draws are judged here, all by one function: the smallest bulk effective size and the largest R-hat,
of parameters, or of a network's function at 50 inputs. Rows and their meaning:

nuts: effective draws a second on a 26-parameter linear regression (posteriordb's diamonds, 4
    chains, double precision) and a Bayesian neural net 8-50-1 (512 rows, 8 chains, single
    precision); "sampling" is without burn-in and compilation, "all" counts both.
steps: SGLD and SGHMC against momentum SGD, written by hand and in doxa, and against posteriors.
chains: the cost of a leapfrog step against the number of chains.

Results go to benchmarks/results/samplers.json and .md, the figure to docs/figures/chains.png.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doxa.posterior.chains import ess_bulk, rhat

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import chain_cost  # noqa: E402
import problem  # noqa: E402
import sg_steps  # noqa: E402

Row = dict[str, Any]
PEERS = {"numpyro": "jax", "blackjax": "jax", "pyro": "pyro", "doxa": ""}


def diamonds() -> dict[str, np.ndarray]:
    with np.load(Path(os.environ["DOXA_DATA"], "posteriordb", "diamonds-diamonds.npz")) as rows:
        x, y = rows["data_X"][:, 1:].astype(float), rows["data_Y"].astype(float)
    start = 0.1 * np.random.default_rng(0).uniform(-1, 1, (4, 26)) + np.array([0.0] * 24 + [8, 0])
    return {"x": x - x.mean(0), "y": y, "start": start}


def bnn() -> dict[str, np.ndarray]:
    """A smooth function of eight inputs, with noise of standard deviation 0.5."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, problem.INPUTS))
    y = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.5 * rng.normal(size=512)
    size = problem.HIDDEN * (problem.INPUTS + 2) + 1
    start = rng.uniform(-1, 1, (8, size)) / np.sqrt(problem.INPUTS)
    arrays = {"x": x, "y": y, "start": start, "noise": np.array(0.5)}
    return {k: v.astype(np.float32) for k, v in arrays.items()}


CASES: dict[str, Row] = {
    "diamonds": {"draws": 1000, "burn_in": 500, "double": True, "leapfrog": 12},
    "bnn": {"draws": 500, "burn_in": 500, "double": False, "leapfrog": 60},
}


def judge(name: str, draws: np.ndarray) -> Row:
    """Of [chains, draws, P]."""
    values = torch.tensor(draws).double()
    if name == "bnn":
        x = torch.tensor(np.random.default_rng(1).normal(size=(50, problem.INPUTS)))
        each = torch.func.vmap(lambda u: problem.net(u, x, torch))
        values = each(values.flatten(0, 1)).unflatten(0, values.shape[:2])
    found = {"ess": float(ess_bulk(values).min()), "ess_median": float(ess_bulk(values).median())}
    return found | ({"rhat": float(rhat(values).max())} if len(values) > 1 else {})


def sample(case: Row, arrays: dict[str, np.ndarray], package: str, python: str) -> Row:
    """Let a package do it in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "problem.json").write_text(json.dumps(case))
        np.savez(folder / "problem.npz", **arrays)
        where = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        out = subprocess.run(
            [python, str(HERE / "peers" / f"{package}_nuts.py"), name],
            capture_output=True, text=True, env={**os.environ, **where},
        )  # fmt: skip
        if out.returncode:
            raise RuntimeError(f"{package} failed:\n{out.stderr[-3000:]}")
        row = json.loads(out.stdout.splitlines()[-1])
        row |= judge(case["problem"], np.load(folder / "draws.npy"))
    whole = row["compile"] + row["burn_in"] + row["sampling"]
    return {
        **row, "problem": case["problem"], "mass": case["mass"], "method": case["method"],
        "us_gradient": 1e6 * row["sampling"] / row["gradients"],
        "us_gradient_chain": 1e6 * row["sampling"] / row["chains_gradients"],
        "ess_second": row["ess"] / row["sampling"], "ess_second_all": row["ess"] / whole,
        "ess_second_run": row["ess"] / (row["burn_in"] + row["sampling"]),
    }  # fmt: skip


def nuts(args: argparse.Namespace) -> list[Row]:
    rows = []
    given = {"draws": args.draws, "burn_in": args.burn_in, "seed": args.seed}
    given = {name: value for name, value in given.items() if value is not None}
    common = {"target_accept": 0.8, "max_depth": 10, **given}
    choices = (each.split(",") for each in (args.problems, args.mass, args.packages))
    for name, mass, package in itertools.product(*choices):
        python = getattr(args, PEERS[package]) if PEERS[package] else sys.executable
        if not python:
            continue
        for method in ("nuts", "hmc") if package == "doxa" and args.hmc else ("nuts",):
            case = {**CASES[name], **common, "problem": name, "mass": mass, "method": method}
            arrays = {"diamonds": diamonds, "bnn": bnn}[name]()
            row = sample(case, arrays, package, python)
            rows.append({**row, "clock": args.clock, "settings": case})
            print(show(row), flush=True)
    return rows


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """A run of some packages or problems replaces only theirs."""

    def key(row: Row) -> tuple[str, ...]:
        package = row["package"].split()[0]
        return row["problem"], row["mass"], row["method"], package

    rows = {key(row): row for row in [*old, *new]}
    return [rows[each] for each in sorted(rows)]


def show(row: Row) -> str:
    if "ess_second" not in row:
        return str(row)
    return (
        f"{row['problem']:9} {row['mass']:9} {row['package']:16} {row['method']:5} "
        f"ESS/s {row['ess_second']:8.1f} all {row['ess_second_all']:7.1f} ESS {row['ess']:6.0f} "
        f"R-hat {row.get('rhat', float('nan')):.3f} compile {row['compile']:5.1f} burn-in "
        f"{row['burn_in']:6.1f} sampling {row['sampling']:6.1f} s, {row['gradients']} gradients of "
        f"{row['us_gradient']:.0f} µs"
    )


def markdown(found: dict[str, Any]) -> str:
    """The tables for people."""
    parts = ["# Samplers, side by side\n"]
    for name, part in found.items():
        about = part["about"]
        where = f"{about['machine']}, {about['threads']} thread, {about['clock']} clock"
        parts.append(f"## {name}\n\n`{about['command']}`, {about['date']}, {where}, "
                     f"torch {about['torch']}. {about.get('note', '')}\n")  # fmt: skip
        table = {"nuts": nuts_table, "steps": sg_steps.table, "chains": chain_cost.table}[name]
        parts.append(table(part["rows"]) + "\n")
    return "\n".join(parts)


def nuts_table(rows: list[Row]) -> str:
    lines = [
        "ESS: the smallest bulk effective size, of parameters (diamonds) or of function values at "
        "50 inputs (bnn). A gradient is that of all chains at once; Pyro runs one chain.\n",
        "| problem | mass | package | method | min ESS/s, sampling | with burn-in | with compiling "
        "| R-hat | compile s | burn-in s | sampling s | gradients | µs a gradient | a chain "
        "| clock |",
        "|---" * 15 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['problem']} | {r['mass']} | {r['package']} | {r['method']} | "
            f"{r['ess_second']:.1f} | {r['ess_second_run']:.1f} | {r['ess_second_all']:.1f} | "
            f"{r.get('rhat', float('nan')):.3f} | {r['compile']:.1f} | {r['burn_in']:.1f} | "
            f"{r['sampling']:.1f} | {r['gradients']} | {r['us_gradient']:.0f} | "
            f"{r['us_gradient_chain']:.0f} | {r['clock']} |"
        )
    return "\n".join(lines)


ROWS = {"nuts": nuts, "steps": sg_steps.measure, "chains": chain_cost.measure}


def command() -> str:
    """What was asked for, without the paths of this machine."""
    hidden = {"--jax": "PYTHON", "--pyro": "PYTHON", "--out": "FILE"}
    words = ["python", "benchmarks/samplers.py", *sys.argv[1:]]
    return " ".join(hidden.get(before, word) for before, word in zip(["", *words], words))  # noqa: B905


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="nuts,steps,chains")
    parser.add_argument("--jax", help="an interpreter that has NumPyro and BlackJAX")
    parser.add_argument("--pyro", help="an interpreter that has Pyro and posteriors")
    parser.add_argument("--packages", default="doxa,numpyro,blackjax,pyro")
    parser.add_argument("--problems", default="diamonds,bnn")
    parser.add_argument("--mass", default="dense,diagonal")
    parser.add_argument("--hmc", action="store_true", help="doxa's HMC as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, help="instead of what the problem asks for")
    parser.add_argument("--burn-in", type=int)
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"],
        help="cpu: the processes' own seconds, where others use the machine too",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=HERE / "results" / "samplers.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["SAMPLERS_CLOCK"] = args.clock
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.rows.split(","):
        rows = ROWS[name](args)
        if name == "nuts":
            rows = merged(found.get(name, {}).get("rows", []), rows)
        about = {
            "command": command(), "threads": 1, "clock": args.clock,
            "date": datetime.date.today().isoformat(), "machine": platform.machine(),
            "torch": torch.__version__, "python": platform.python_version(),
        }  # fmt: skip
        found[name] = {"about": about, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
