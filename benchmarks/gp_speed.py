"""The exact GP beside scikit-learn's and gpytorch's, on a CPU, one thread by default.

    python -m benchmarks.gp_speed DATA [--rows 1000 5000] [--sets kin8nm power_plant concrete]
        [--packages doxa scikit-learn gpytorch] [--out benchmarks/results] [--minutes 60]

DATA is a folder of data sets with X and y. Every fit runs in a process of its own, one after the
other, on the same standardised rows, with an RBF kernel that has a lengthscale per column, a
variance and a noise, from each package's own start: scikit-learn's L-BFGS-B without restarts,
gpytorch by 200 steps of Adam at rate 0.1. Processor seconds count: they depend little on who else
is on the machine. "evidence" is log p(y) of the standardised targets at what was found; "test" the
mean log-likelihood of up to 1,000 other rows; "mib" the process's largest memory, of which
"mib_before" were taken before the fit, and "mib_announced" the estimate of doxa. Results:
gp_speed.json and gp_speed.md. `--rows 10000 --sets protein --packages doxa --threads 8` is the
largest meant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Found = dict[str, Any]
BLAS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def standardised(path: Path, rows: int) -> Rows:
    """x, y to fit and x, y to test, in units of the rows that are fitted."""
    stored = np.load(path)
    x, y = stored["X"].astype(float), stored["y"].astype(float)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:rows], order[rows : rows + 1000]
    x = (x - x[train].mean(0)) / x[train].std(0)
    y = (y - y[train].mean()) / y[train].std()
    return x[train], y[train], x[test], y[test]


def normal(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> float:
    score = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return float(score.mean()) if len(y) else math.nan


def by_doxa(data: Rows) -> Found:
    import torch

    import doxa
    from doxa.function.gp import announce

    x, y, x_test, y_test = (torch.from_numpy(part) for part in data)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    doxa.fit(None, (x[:10], y[:10]), "gp", progress=False)  # what is imported then
    announced = announce(len(x), 1, "gp", torch.device("cpu")) / 2**20
    began, clock = time.process_time(), time.perf_counter()
    method = doxa.GP(refine=int(os.environ.get("REFINE", "100")))
    posterior = doxa.fit(None, (x, y[:, None]), method, progress=False)
    taken, wall = time.process_time() - began, time.perf_counter() - clock
    score = posterior.predict(x_test).log_prob(y_test[:, None]).mean() if len(x_test) else math.nan
    found = {"cpu": taken, "evidence": posterior.log_evidence, "test": float(score)}
    return found | {"seconds": wall, "mib_announced": announced, "status": str(posterior.status)}


def by_sklearn(data: Rows) -> Found:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, y, x_test, y_test = data
    kernel = ConstantKernel(1.0) * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    began = time.process_time()
    peer = GaussianProcessRegressor(kernel).fit(x, y)
    taken = time.process_time() - began
    score = normal(y_test, *peer.predict(x_test, return_std=True)) if len(x_test) else math.nan
    return {"cpu": taken, "evidence": peer.log_marginal_likelihood_value_, "test": score}


def by_gpytorch(data: Rows) -> Found:
    import gpytorch
    import torch

    torch.set_num_threads(1)
    x, y, x_test, y_test = (torch.from_numpy(part) for part in data)

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1])
            self.kernel = gpytorch.kernels.ScaleKernel(base)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Exact(likelihood).double()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gpytorch.settings.fast_computations(False, False, False):
        began = time.process_time()
        for _ in range(200):
            optimizer.zero_grad()
            loss = -evidence(model(x), y)
            loss.backward()
            optimizer.step()
        taken = time.process_time() - began
        reached = -float(loss.detach()) * len(x)
        model.eval(), likelihood.eval()
        with torch.no_grad():
            found = likelihood(model(x_test)) if len(x_test) else None
    if found is None:
        return {"cpu": taken, "evidence": reached, "test": math.nan}
    score = normal(y_test.numpy(), found.mean.numpy(), found.variance.sqrt().numpy())
    return {"cpu": taken, "evidence": reached, "test": score}


PACKAGES: dict[str, Callable[[Rows], Found]] = {
    "doxa": by_doxa, "scikit-learn": by_sklearn, "gpytorch": by_gpytorch,
}  # fmt: skip


def measured(package: str, path: Path, rows: int) -> Found:
    data = standardised(path, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = PACKAGES[package](data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"mib": peak / 1024, "mib_before": before / 1024}


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "# Exact GP, a lengthscale a column", "",
        f"One thread, {platform.machine()}; processor seconds.", "",
        "`python -m benchmarks.gp_speed DATA`",
        "", "| set | rows | package | s | evidence | test log-likelihood | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in found:
        what = f"| {r['set']} | {r['rows']} | {r['package']} |"
        if "failed" in r:
            lines.append(f"{what} {r['failed']} | | | |")
            continue
        numbers = f"{r['cpu']:.1f} | {r['evidence']:.3f} | {r['test']:.3f} | {r['mib']:.0f}"
        lines.append(
            f"{what} {numbers} |".replace("-", "−").replace("scikit−learn", "scikit-learn")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--sets", nargs="+", default=["kin8nm", "power_plant", "concrete"])
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--refine", type=int, default=100, help="evaluations, doxa's own option")
    parser.add_argument("--threads", type=int, default=1, help="of doxa; scikit-learn's BLAS, too")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--one", action="store_true", help="one fit, in this process")
    given = parser.parse_args()
    if given.one:
        path = given.data / f"{given.sets[0]}.npz"
        sys.stdout.write(json.dumps(measured(given.packages[0], path, given.rows[0])) + "\n")
        return
    end, found = time.monotonic() + 60 * given.minutes, []
    for rows in given.rows:
        for name in given.sets:
            for package in given.packages:
                if len(np.load(given.data / f"{name}.npz")["y"]) < rows:
                    continue
                asked = [sys.executable, "-W", "ignore", __file__, str(given.data), "--one",
                         "--rows", str(rows), "--sets", name, "--packages", package]  # fmt: skip
                row: dict[str, Any] = {"set": name, "rows": rows, "package": package}
                try:
                    out = subprocess.run(
                        asked, capture_output=True, text=True, check=True,
                        timeout=max(1.0, end - time.monotonic()),
                        env={**os.environ, **dict.fromkeys(BLAS, str(given.threads)),
                             "REFINE": str(given.refine)},
                    )  # fmt: skip
                    row |= json.loads(out.stdout.splitlines()[-1])
                except subprocess.TimeoutExpired:
                    row["failed"] = "no time left"
                except subprocess.CalledProcessError as error:
                    row["failed"] = error.stderr.strip().splitlines()[-1]
                found.append(row)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gp_speed.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "gp_speed.md").write_text(table(found))


if __name__ == "__main__":
    main()
