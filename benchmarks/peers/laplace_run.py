"""One task of `laplace_speed.py` with one package, in a process of its own.

    python laplace_run.py {doxa,laplace-torch} {fit,predict} OUTPUTS IMAGES [DEVICE]

Prints processor and wall-clock seconds, the least of three where the device is a GPU, and the peak
of memory in MiB: above that of the imports, or what torch took of the GPU.
"fit" is Kronecker factors of IMAGES at given weights (and, in doxa, all that a fit checks around
it); "predict" is mean and covariance over outputs of the linearised predictive at IMAGES, after
factors from a few; "variance" is without covariances, as Gaussian noise needs.
"""

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def lenet(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip


def images(count: int, outputs: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 28, 28, generator=g), torch.arange(count) % outputs


class Doxa:
    def __init__(self, device: str) -> None:
        self.device = device

    def fit(self, x: Tensor, y: Tensor, outputs: int) -> None:
        import doxa
        from doxa.laplace import status

        status.evaluation_rows = lambda run: None  # type: ignore[assignment]  # no predictions yet
        model = doxa.Model(lenet(outputs), "categorical", doxa.Normal(1.0))
        method = doxa.Laplace("kronecker", train=False, mean_correction=False)
        self.posterior: Any = doxa.fit(
            model, (x, y), method, init="given", validation=None, batch_size=250,
            device=self.device,
        )  # fmt: skip

    def predict(self, x: Tensor) -> None:
        source = self.posterior.jacobians()
        for rows in source.chunks(len(x)):
            source.spread(x[rows], self.posterior.covariance)

    def variance(self, x: Tensor) -> None:
        source = self.posterior.jacobians()
        for rows in source.chunks(len(x)):
            source.variance(x[rows], self.posterior.covariance)


class LaplaceTorch:
    def __init__(self, device: str) -> None:
        self.device = device

    def fit(self, x: Tensor, y: Tensor, outputs: int) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        from laplace import Laplace  # type: ignore[import-not-found]

        self.fitted = Laplace(
            lenet(outputs).to(self.device), "classification", subset_of_weights="all",
            hessian_structure="kron", prior_precision=1.0,
        )  # fmt: skip
        self.fitted.fit(DataLoader(TensorDataset(x, y), batch_size=250))
        self.fitted.log_marginal_likelihood()

    def predict(self, x: Tensor) -> None:
        for rows in x.split(50):
            self.fitted._glm_predictive_distribution(rows)


def peak(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(call: Callable[[], None], device: str) -> dict[str, float]:
    each = []
    for _ in range(1 if device == "cpu" else 3):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        each.append({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})
    return min(each, key=lambda one: one["wall"])


def main() -> None:
    package, task, outputs, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    device = sys.argv[5] if len(sys.argv) > 5 else "cpu"
    torch.set_num_threads(1)
    run: Any = Doxa(device) if package == "doxa" else LaplaceTorch(device)
    importlib.import_module("doxa.laplace.laplace" if package == "doxa" else "laplace")
    before = peak(device)
    x, y = (t.to(device) for t in images(count, outputs))
    few = [t.to(device) for t in images(200 if outputs < 100 else 5, outputs)]
    run.fit(*few, outputs)  # imports, and kernels that are chosen once
    if task == "fit":
        row = timed(lambda: run.fit(x, y, outputs), device)
    else:
        getattr(run, task)(x[:2])
        row = timed(lambda: getattr(run, task)(x), device)
    sys.stdout.write(json.dumps({**row, "mib": peak(device) - before}) + "\n")


if __name__ == "__main__":
    main()
