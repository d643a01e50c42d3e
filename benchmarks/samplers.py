"""Samplers side by side with NumPyro, BlackJAX, Pyro and posteriors, on one thread of a CPU.

    DOXA_DATA=... python -m benchmarks.samplers --jax PYTHON --pyro PYTHON
        [--rows nuts,steps,chains] [--device cuda]

`--jax` is an interpreter with NumPyro and BlackJAX, `--pyro` one with Pyro and posteriors; without
them only doxa runs. Every package runs in a process of its own (`benchmarks/peers`), one after the
other, on the same data, from the same starts, in the same precision, with the same lengths. Its
draws are evaluated here, all by one function: the smallest bulk effective size and the largest
R-hat, of parameters, or of a network's function at 50 inputs. Rows and their meaning:

nuts: effective draws per second on a 26-parameter linear regression (posteriordb's diamonds, 4
    chains, double precision) and a Bayesian neural net 8-50-1 (512 rows, 8 chains, single
    precision); "sampling" is without burn-in and compilation, "all" counts both.
steps: SGLD and SGHMC against momentum SGD, written by hand and in doxa, and against posteriors;
    on --device.
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
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from benchmarks.peers import problem
from doxa.posterior.chains import ess_bulk, rhat

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
PEERS = {"numpyro": "jax", "blackjax": "jax", "pyro": "pyro", "doxa": ""}
SIZES = {"8-50-50-1": 32, "8-96-96-1": 32, "784-400-400-10": 128}  # the net, and its batch
STEPS = {"8-50-50-1": 3000, "8-96-96-1": 3000, "784-400-400-10": 2000}
CHAINS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIGURE = HERE.parent / "docs" / "figures" / "chains.png"
LEAPFROG = 20


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


def evaluated(name: str, draws: np.ndarray) -> Row:
    """Of [chains, draws, P]."""
    values = torch.tensor(draws).double()
    if name == "bnn":
        x = torch.tensor(np.random.default_rng(1).normal(size=(50, problem.INPUTS)))
        each = torch.func.vmap(lambda u: problem.net(u, x, torch))
        values = each(values.flatten(0, 1)).unflatten(0, values.shape[:2])
    found = {"ess": float(ess_bulk(values).min()), "ess_median": float(ess_bulk(values).median())}
    return found | ({"rhat": float(rhat(values).max())} if len(values) > 1 else {})


def sample(case: Row, arrays: dict[str, np.ndarray], package: str, python: str) -> Row:
    """Run a package in a process of its own."""
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
        row |= evaluated(case["problem"], np.load(folder / "draws.npy"))
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
        table = {"nuts": nuts_table, "steps": steps_table, "chains": chains_table}[name]
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


def network(name: str) -> nn.Module:
    inputs, *hidden, outputs = map(int, name.split("-"))
    return doxa.nets.mlp(inputs, outputs, hidden=tuple(hidden))


def data(name: str) -> tuple[Tensor, Tensor]:
    inputs, *_, outputs = map(int, name.split("-"))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2048, inputs, generator=g)
    return x, x[:, :outputs].clone() if outputs > 1 else x.sum(1, keepdim=True)


def by_hand(name: str, device: str = "cpu") -> float:
    """u ← μu + ∇loss, θ ← θ − η u, as one would write it."""
    net, (x, y), size = network(name), data(name), SIZES[name]
    net, x, y = net.to(device), x.to(device), y.to(device)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-5, momentum=0.9)
    order = torch.randint(len(x), (STEPS[name], size), device=device)
    marks = []
    for t, index in enumerate(order):
        if t % (len(order) // 10) == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(problem.clock())
        loss = 0.5 * (net(x[index]) - y[index]).square().sum(1).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    return statistics.median(b - a for a, b in itertools.pairwise(marks)) / (len(order) // 10)


def fitted(name: str, method: Any, device: str = "cpu", **options: Any) -> float:
    """Seconds per step of a fit: the median between its progress ticks, without the first ones."""
    net, (x, y) = network(name), data(name)
    marks: list[tuple[int, float]] = []
    doxa.fit(
        net, (x, y), method, members=1, steps=STEPS[name], batch_size=SIZES[name], lr=1e-5,
        likelihood=doxa.Gaussian(1.0), progress=False, schedule="constant", device=device,
        callbacks=[lambda t, _: marks.append((t, problem.clock())) or None], **options,
    )  # fmt: skip
    pairs = list(itertools.pairwise(marks))[2:]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def steps(args: argparse.Namespace) -> list[Row]:
    """Momentum SGD is timed twice: as a loop written by hand, and as a fit of doxa, with which
    the samplers share everything but their update."""
    found, where = [], args.device
    for name in SIZES:
        lengths = {"burn_in": STEPS[name] - 100, "draws": 10, "thin": 10}
        tries: list[dict[str, float]] = []
        for _ in range(3):  # in turns, so that a slow moment hits them all
            tries.append({
                "by hand": by_hand(name, where),
                "sgd": fitted(name, "map", where, optimizer="sgd"),
                "sgld": fitted(name, doxa.SGLD(**lengths), where),
                "sghmc": fitted(name, doxa.SGHMC(**lengths), where),
            } | (posteriors_steps(name, args.pyro) if args.pyro else {}))  # fmt: skip
        times = {key: statistics.median(each[key] for each in tries) for key in tries[0]}
        size = sum(p.numel() for p in network(name).parameters())
        row = {"net": name, "weights": size, "batch": SIZES[name], "seconds": times}
        print(show_steps(row), flush=True)
        found.append(row)
    return found


def posteriors_steps(name: str, python: str) -> dict[str, float]:
    script = HERE / "peers" / "posteriors_steps.py"
    out = subprocess.run(
        [python, str(script), name, str(SIZES[name]), str(STEPS[name])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(out.stdout.splitlines()[-1])


def show_steps(row: Row) -> str:
    base = row["seconds"]["by hand"]
    cells = [f"{k} {v * 1e6:.0f} µs ({v / base:.2f})" for k, v in row["seconds"].items()]
    return f"{row['net']}, {row['weights']} weights: " + ", ".join(cells)


def steps_table(found: list[Row]) -> str:
    names = list(found[0]["seconds"])
    lines = [
        "µs a step of one chain, and how many times that of momentum SGD written by hand.\n",
        "| net | weights | batch | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|",
    ]  # fmt: skip
    for row in found:
        base = row["seconds"]["by hand"]
        cells = [f"{v * 1e6:.0f} ({v / base:.2f})" for v in row["seconds"].values()]
        lines.append(f"| {row['net']} | {row['weights']} | {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def leapfrog_seconds(chains: int, mode: str) -> float:
    """A leapfrog step of all chains: the median between ticks of a fit by HMC."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=g)
    y = x[:, :1].sin() + 0.5 * torch.randn(512, 1, generator=g)
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    marks: list[tuple[int, float]] = []
    draws = 40 if chains < 64 else 20
    doxa.fit(
        net, (x, y), doxa.HMC(draws=draws, burn_in=draws, leapfrog=LEAPFROG), members=chains,
        likelihood=doxa.Gaussian(0.5), prior=doxa.Normal(1.0), engine=f"stack:{mode}",
        progress=False, callbacks=[lambda t, _: marks.append((t, problem.clock())) or None],
    )  # fmt: skip
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]
    return statistics.median(pairs[2:]) / LEAPFROG


def chains(args: argparse.Namespace) -> list[Row]:
    """What a leapfrog step costs against the number of chains, and the figure of it."""
    rows = []
    for count in CHAINS:
        row: Row = {"chains": count}
        row |= {mode: leapfrog_seconds(count, mode) for mode in ("eager", "compiled")}
        rows.append(row)
        print(row, flush=True)
    draw_chains(rows)
    return rows


def draw_chains(rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at = [row["chains"] for row in rows]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for mode, colour in (("eager", "#c1666b"), ("compiled", "#2a6f97")):
        cost = [row[mode] * 1e3 for row in rows]
        axes[0].loglog(at, cost, "o-", color=colour, label=mode)
        axes[1].loglog(at, [1e3 * c / n for c, n in zip(cost, at, strict=True)], "o-",
                       color=colour, label=mode)  # fmt: skip
    alone = rows[0]["compiled"] * 1e3
    axes[0].loglog(at, [alone * n for n in at], "--", color="#999999", label="proportional")
    axes[0].set(title="all chains", ylabel="ms a leapfrog step")
    axes[1].set(title="each chain", ylabel="µs a leapfrog step and chain")
    for ax in axes:
        ax.set(xlabel="chains", xticks=at, xticklabels=at)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def chains_table(rows: list[Row]) -> str:
    lines = [
        "µs a leapfrog step of the net 8-50-1, 512 rows, of all chains together and of each.\n",
        "| chains | eager | compiled | compiled, a chain |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        each = row["compiled"] / row["chains"]
        lines.append(f"| {row['chains']} | {row['eager'] * 1e6:.0f} | {row['compiled'] * 1e6:.0f} "
                     f"| {each * 1e6:.0f} |")  # fmt: skip
    return "\n".join(lines)


ROWS = {"nuts": nuts, "steps": steps, "chains": chains}


def command() -> str:
    """The options of the run, without the paths of this machine."""
    hidden = {"--jax": "PYTHON", "--pyro": "PYTHON", "--out": "FILE"}
    parts = ["python", "-m", "benchmarks.samplers", *sys.argv[1:]]
    return " ".join(hidden.get(before, word) for before, word in zip(["", *parts], parts))  # noqa: B905


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="nuts,steps,chains")
    parser.add_argument("--jax", help="an interpreter that has NumPyro and BlackJAX")
    parser.add_argument("--pyro", help="an interpreter that has Pyro and posteriors")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of `steps`")
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
