"""What every package samples: the same log density of a flat vector, start, lengths and data.

Written once for numpy-like modules (`jax.numpy`, `torch`). The folder that `samplers.py` prepares
holds problem.json (settings) and problem.npz (data, starts [chains, P]); a peer leaves its draws
there as [chains, draws, P] and prints what it measured as one line of JSON.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

INPUTS, HIDDEN = 8, 50


def diamonds(u, data, xp):
    """Linear regression of posteriordb: 24 slopes, intercept, log σ, with its Jacobian."""
    slopes, intercept, log_sigma = u[:24], u[24], u[25]
    sigma = xp.exp(log_sigma)
    z = (data["y"] - intercept - data["x"] @ slopes) / sigma
    value = -0.5 * (z * z).sum() - len(data["y"]) * log_sigma - 0.5 * (slopes * slopes).sum()
    value = value - 2.0 * xp.log1p(((intercept - 8.0) / 10.0) ** 2 / 3.0)
    return value - 2.0 * xp.log1p((sigma / 10.0) ** 2 / 3.0) + log_sigma


def net(u, x, xp):
    """8-50-1 with tanh; the weights lie as torch lays them out."""
    cut = INPUTS * HIDDEN
    first, bias = u[:cut].reshape(HIDDEN, INPUTS), u[cut : cut + HIDDEN]
    last = u[cut + HIDDEN : cut + 2 * HIDDEN]
    return xp.tanh(x @ first.T + bias) @ last + u[cut + 2 * HIDDEN]


def bnn(u, data, xp):
    z = (data["y"] - net(u, data["x"], xp)) / data["noise"]
    return -0.5 * (z * z).sum() - 0.5 * (u * u).sum()


DENSITIES = {"diamonds": diamonds, "bnn": bnn}


def clock():
    """Seconds on the wall, or of this process and its compilers where the machine is shared."""
    if os.environ.get("SAMPLERS_CLOCK") != "cpu":
        return time.perf_counter()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def load():
    """Settings and arrays, from the folder on the command line."""
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "problem.json").read_text())
    with np.load(folder / "problem.npz") as arrays:
        return settings, dict(arrays), folder


def report(folder, draws, **figures):
    np.save(folder / "draws.npy", np.asarray(draws))
    print(json.dumps(figures))
