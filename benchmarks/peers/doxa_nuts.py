"""doxa's NUTS and HMC under the same protocol as its peers. See `samplers.py`."""

import os
import tempfile
from collections import Counter

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # compiling counts in full
import problem
import torch
from torch import nn

import doxa
from doxa.driver import Driver
from doxa.engine.execute import Executor

seconds: Counter[str] = Counter()


def timed(owner, name, label):
    """Adds up what a method of doxa's takes."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        began = problem.clock()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[label(*args)] += problem.clock() - began

    setattr(owner, name, call)


timed(Executor, "_prepare", lambda *_: "compile")
timed(Driver, "_run_stage", lambda driver, number, stage, *_: stage.name)


def diamonds(settings, data, method):
    def log_density(p):
        z = (data["y"] - p["intercept"] - data["x"] @ p["slopes"]) / p["sigma"]
        value = -0.5 * z.square().sum() - len(z) * p["sigma"].log()
        value = value - 0.5 * p["slopes"].square().sum()
        value = value - 2.0 * torch.log1p(((p["intercept"] - 8.0) / 10.0) ** 2 / 3.0)
        return value - 2.0 * torch.log1p((p["sigma"] / 10.0) ** 2 / 3.0)

    starts = [{"slopes": u[:24], "intercept": u[24], "sigma": u[25].exp()} for u in data["start"]]
    draws = doxa.sample(
        log_density, starts, method, len(starts), constraints={"sigma": "positive"},
        seed=settings["seed"], progress=False,
    )  # fmt: skip
    return draws.theta, draws


def bnn(settings, data, method):
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    posterior = doxa.fit(
        net, (data["x"], data["y"][:, None]), method, members=len(data["start"]),
        likelihood=doxa.Gaussian(float(data["noise"])), prior=doxa.Normal(1.0),
        seed=settings["seed"], progress=False,
    )  # fmt: skip
    return posterior.samples, posterior


def main():
    settings, arrays, folder = problem.load()
    torch.set_num_threads(1)
    kind = torch.float64 if settings["double"] else torch.float32
    data = {k: torch.as_tensor(v, dtype=kind) for k, v in arrays.items()}
    lengths = {k: settings[k] for k in ("draws", "burn_in", "target_accept")}
    lengths["mass"] = "full" if settings["mass"] == "dense" else "diagonal"
    if settings["method"] == "hmc":
        method = doxa.HMC(**lengths, leapfrog=settings["leapfrog"])
    else:
        method = doxa.NUTS(**lengths, max_depth=settings["max_depth"])
    began = problem.clock()
    draws, found = {"diamonds": diamonds, "bnn": bnn}[settings["problem"]](settings, data, method)
    total = problem.clock() - began
    steps = found.record.stats["leapfrogs"]
    problem.report(
        folder, draws, package=f"doxa {doxa.__version__}", compile=seconds["compile"],
        burn_in=seconds["burn-in"] - seconds["compile"], sampling=seconds["sample"],
        gradients=int(steps.max(0).values.sum()), chains_gradients=int(steps.sum()),
        everything=total, mode=found.diagnostics["mode"], status=str(found.status),
        reason=found.status.reason,
    )  # fmt: skip


if __name__ == "__main__":
    main()
