"""Speed, compared with a hand-written loop in the same run.

    python -m benchmarks.speed [--rows training,single,prediction,gpu-mlp,gpu-resnet,growth]

CPU rows use one thread. Times are medians of repeated calls; what counts is the ratio within a row,
because absolute times vary on shared machines. `--jax PYTHON` adds a JAX scan of the same step,
run by another interpreter. Results go to benchmarks/results/speed.json, the figure beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import doxa

HERE = Path(__file__).parent
Row = dict[str, Any]


def data(n: int, inputs: int, device: str = "cpu", classes: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, inputs, generator=g)
    y = torch.randint(classes, (n,), generator=g) if classes else x.sum(1, keepdim=True)
    return x.to(device), y.to(device)


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], repeats: int = 5, device: str = "cpu") -> float:
    """The median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def side_by_side(calls: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Median times of several calls, taken in turns so that a slow moment hits them all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def loop_step(
    nets: list[nn.Module], x: Tensor, y: Tensor, batch: int, classify: bool, fused: bool = True
) -> Callable[[], None]:
    """One training step of every net, one after the other, as one would write it by hand."""
    adams = [torch.optim.Adam(net.parameters(), lr=0.005, fused=fused) for net in nets]
    loss = nn.CrossEntropyLoss() if classify else nn.MSELoss()

    def step() -> None:
        for net, adam in zip(nets, adams, strict=True):
            rows = torch.randint(len(x), (batch,), device=x.device)
            value = loss(net(x[rows]), y[rows])
            adam.zero_grad()
            value.backward()
            adam.step()

    return step


def doxa_step(
    net: nn.Module, x: Tensor, y: Tensor, members: int, batch: int, engine: str, steps: int,
    likelihood: Any, **options: Any,
) -> float:  # fmt: skip
    """Seconds per step of `fit`: the median over the intervals between its progress ticks, after
    the first ones, so that setting up and compiling do not count, and everything else does."""
    ticks: list[tuple[int, float]] = []

    def tick(step: int, _info: Any) -> None:
        sync(x.device.type)
        ticks.append((step, time.perf_counter()))

    doxa.fit(
        net, (x, y), "map", members=members, steps=steps, batch_size=batch, engine=engine,
        likelihood=likelihood, progress=False, schedule="constant", callbacks=[tick],
        **options,
    )  # fmt: skip
    pairs = list(itertools.pairwise(ticks))
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def training(jax: str | None) -> list[Row]:
    """The UCI net 9-50-1, batches of 32: stacked members against a loop over members."""
    x, y = data(455, 9)
    rows = []
    for members in (10, 100):
        nets = [doxa.nets.mlp(9, 1) for _ in range(members)]
        row: Row = {"work": "training 9-50-1, B=32", "members": members}
        row["loop"] = seconds(loop_step(nets, x, y, 32, False), 5 if members > 10 else 20)
        for mode in ("eager", "traced", "compiled"):
            row[mode] = doxa_step(
                nets[0], x, y, members, 32, f"stack:{mode}", 600, doxa.Gaussian(1.0)
            )
        if jax:
            out = subprocess.run(
                [jax, str(HERE / "peers" / "jax_steps.py"), str(members)],
                capture_output=True,
                text=True,
                check=True,
            )
            row["jax"] = float(out.stdout.split()[-1])
        rows.append(row)
    return rows


def single(_: str | None) -> list[Row]:
    """One member against a hand-written loop: the overhead of doxa."""
    x, y = data(455, 9)
    net = doxa.nets.mlp(9, 1)
    row: Row = {"work": "MAP, one member, 9-50-1, B=32", "members": 1}
    row["loop"] = seconds(_many(loop_step([net], x, y, 32, False), 200), 5) / 200
    for mode in ("eager", "traced"):
        row[mode] = doxa_step(net, x, y, 1, 32, f"loop:{mode}", 1500, doxa.Gaussian(1.0))
    row["auto"] = doxa_step(net, x, y, 1, 32, "auto", 1500, doxa.Gaussian(1.0))
    return [row]


def _many(call: Callable[[], None], times: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def prediction(_: str | None) -> list[Row]:
    """100 samples at N rows: `predict` against a loop over samples; dropout reuses its trunk."""
    rows = []
    nets: dict[str, nn.Module] = {
        "9-50-1": doxa.nets.mlp(9, 1),
        "9-200-200-200-1": doxa.nets.mlp(9, 1, hidden=(200, 200, 200)),
    }
    x, y = data(10_000, 9)
    for name, net in nets.items():
        posterior = doxa.fit(net, (x[:100], y[:100]), "map", members=100, steps=5, progress=False)
        draws = posterior.draw()
        members = [{k: v[s] for k, v in draws.items() if "likelihood" not in k} for s in range(100)]
        for n in (1, 32, 1000, 10_000):
            part = x[:n]

            def loop(part: Tensor = part, net: nn.Module = net, members: Any = members) -> Tensor:
                with torch.no_grad():
                    each = [torch.func.functional_call(net, p, (part,)) for p in members]
                    return torch.stack(each).mean(0)

            ours = lambda p=posterior, part=part: p.predict(part).mean  # noqa: E731
            row: Row = {"work": f"prediction {name}, S=100", "rows": n}
            rows.append(row | side_by_side({"loop": loop, "predict": ours}))
    late = nn.Sequential(
        nn.Linear(9, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 50), nn.ReLU(),
        nn.Dropout(0.1), nn.Linear(50, 1),
    )  # fmt: skip
    posterior = doxa.fit(late, (x[:100], y[:100]), "mc-dropout", steps=5, progress=False)
    late.train()
    for n in (32, 1000):

        def masks(part: Tensor = x[:n]) -> Tensor:
            with torch.no_grad():
                return torch.stack([late(part) for _ in range(100)]).mean(0)

        ours = lambda part=x[:n]: posterior.predict(part).mean  # noqa: E731
        row = {"work": "prediction, dropout before the last layer, S=100", "rows": n}
        rows.append(row | side_by_side({"loop": masks, "predict": ours}))
    return rows


def gpu_mlp(_: str | None) -> list[Row]:
    """16 MLPs 3072-400-400-10, B=128, on a GPU."""
    x, y = data(4096, 3072, "cuda", 10)
    nets = [doxa.nets.mlp(3072, 10, hidden=(400, 400)).cuda() for _ in range(16)]
    return [_gpu("16 MLPs 3072-400-400-10", nets, x, y, 128, 200)]


def gpu_small(_: str | None) -> list[Row]:
    """Ten members of the small MLP on a GPU: the time is that of kernel launches."""
    x, y = data(4096, 9, "cuda")
    nets = [doxa.nets.mlp(9, 1).cuda() for _ in range(10)]
    return [_gpu("10 MLPs 9-50-1", nets, x, y, 32, 500, classify=False)]


def gpu_resnet(_: str | None) -> list[Row]:
    """ResNet-20 with GroupNorm, B=128, on a GPU: ten and eight members."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 3, 32, 32, generator=g).cuda()
    y = torch.randint(10, (2048,), generator=g).cuda()
    rows = []
    for members in (8, 10):
        nets = [doxa.nets.resnet20().cuda() for _ in range(members)]
        rows.append(_gpu(f"{members} ResNet-20 (GroupNorm)", nets, x, y, 128, 40))
    return rows


def _gpu(
    work: str, nets: list[nn.Module], x: Tensor, y: Tensor, batch: int, steps: int,
    classify: bool = True,
) -> Row:  # fmt: skip
    row: Row = {"work": work, "members": len(nets)}
    row["loop"] = seconds(_many(loop_step(nets, x, y, batch, classify), 3), 3, "cuda") / 3
    likelihood = "categorical" if classify else doxa.Gaussian(1.0)
    for engine in (
        "loop:eager",
        "loop:graph",
        "stack:eager",
        "stack:graph",
        "stack:compiled-graph",
    ):
        row[engine] = doxa_step(nets[0], x, y, len(nets), batch, engine, steps, likelihood)
    for engine in ("stack:graph", "stack:compiled-graph"):
        row[f"{engine}, tf32"] = doxa_step(
            nets[0], x, y, len(nets), batch, engine, steps, likelihood, precision="tf32"
        )
    fit = doxa.fit(nets[0], (x, y), "map", members=len(nets), steps=120, batch_size=batch,
                   likelihood=likelihood, progress=False)  # fmt: skip
    row["chosen"] = f"{fit.diagnostics['engine']}:{fit.diagnostics['mode']}"
    return row


def growth(_: str | None) -> list[Row]:
    """How cost grows with members M, samples S and rows N."""
    x, y = data(10_000, 9)
    net = doxa.nets.mlp(9, 1)
    rows: list[Row] = []
    for members in (1, 2, 5, 10, 20, 50, 100, 200):
        engine = "stack:eager" if members > 1 else "loop:eager"
        cost = doxa_step(net, x[:455], y[:455], members, 32, engine, 200, doxa.Gaussian(1.0))
        rows.append({"work": "step", "axis": "M", "at": members, "seconds": cost})
    posterior = doxa.fit(net, (x[:100], y[:100]), "map", members=1000, steps=3, progress=False)
    for samples in (1, 10, 100, 1000):
        cost = seconds(lambda s=samples: posterior.predict(x[:100], n=s).mean, 5)
        rows.append({"work": "predict, N=100", "axis": "S", "at": samples, "seconds": cost})
    for n in (1, 10, 100, 1000, 10_000):
        cost = seconds(lambda n=n: posterior.predict(x[:n], n=100).mean, 5)
        rows.append({"work": "predict, S=100", "axis": "N", "at": n, "seconds": cost})
    return rows


def draw_growth(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), constrained_layout=True)
    titles = {"M": "training step", "S": "prediction at 100 rows", "N": "prediction, 100 samples"}
    names = {"M": "members", "S": "samples", "N": "rows"}
    for ax, axis in zip(axes, "MSN", strict=True):
        points = [(r["at"], r["seconds"] * 1e3) for r in rows if r.get("axis") == axis]
        at, cost = zip(*points, strict=True)
        ax.loglog(at, cost, "o-", color="#2a6f97", label="measured")
        ax.loglog(
            at, [cost[0] * a / at[0] for a in at], "--", color="#999999", label="proportional"
        )
        ax.set(title=titles[axis], xlabel=names[axis], ylabel="ms")
        ax.grid(alpha=0.3, which="both")
        ax.legend(frameon=False)
    figure.savefig(path, dpi=150)


ROWS: dict[str, Callable[[str | None], list[Row]]] = {
    "training": training, "single": single, "prediction": prediction, "gpu-small": gpu_small,
    "gpu-mlp": gpu_mlp, "gpu-resnet": gpu_resnet, "growth": growth,
}  # fmt: skip


def show(row: Row) -> str:
    if "axis" in row:
        return f"{row['work']:18s} {row['axis']} = {row['at']:6d}: {row['seconds'] * 1e3:9.3f} ms"
    size = f"M={row['members']}" if "members" in row else f"N={row['rows']}"
    times = {k: v for k, v in row.items() if isinstance(v, float)}
    cells = [f"{k} {v * 1e6:,.0f} µs ({times['loop'] / v:.1f}×)" for k, v in times.items()]
    return f"{row['work']} {size}: " + ", ".join(cells) + f"  {row.get('chosen', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cpu = "training,single,prediction,growth"
    gpu = ",gpu-small,gpu-mlp,gpu-resnet" if torch.cuda.is_available() else ""
    parser.add_argument("--rows", default=cpu + gpu)
    parser.add_argument("--jax", help="an interpreter that has JAX, for the peer column")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "speed.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.rows.split(","):
        rows = ROWS[name](arguments.jax)
        for row in rows:
            print(show(row), flush=True)
        machine = torch.cuda.get_device_name() if name.startswith("gpu") else platform.machine()
        found[name] = {"rows": rows, "torch": torch.__version__, "machine": machine, "threads": 1}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1))
        if name == "growth":
            draw_growth(rows, arguments.out.parent / "growth.png")


if __name__ == "__main__":
    main()
