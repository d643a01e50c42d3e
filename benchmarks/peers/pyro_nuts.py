"""Pyro's NUTS, one chain: Pyro runs chains one after the other (or in processes), so that its
effective draws per second are those of one chain. See `samplers.py`."""

import problem
import pyro
import torch
from pyro.infer import MCMC, NUTS

torch.set_num_threads(1)
settings, arrays, folder = problem.load()
kind = torch.float64 if settings["double"] else torch.float32
torch.set_default_dtype(kind)
data = {k: torch.as_tensor(v, dtype=kind) for k, v in arrays.items()}
density = problem.DENSITIES[settings["problem"]]
calls, marks = [0], []


def potential(params):
    calls[0] += 1
    return -density(params["u"], data, torch)


def hook(kernel, params, stage, i):
    if stage == "Sample" and not marks:
        marks.extend((problem.clock(), calls[0]))


pyro.set_rng_seed(settings["seed"])
kernel = NUTS(
    potential_fn=potential, full_mass=settings["mass"] == "dense",
    target_accept_prob=settings["target_accept"], max_tree_depth=settings["max_depth"],
)  # fmt: skip
mcmc = MCMC(
    kernel, num_samples=settings["draws"], warmup_steps=settings["burn_in"], hook_fn=hook,
    initial_params={"u": data["start"][0].clone()}, disable_progbar=True,
)  # fmt: skip
began = problem.clock()
mcmc.run()
ended = problem.clock()
problem.report(
    folder, mcmc.get_samples(group_by_chain=True)["u"].numpy(), package=f"pyro {pyro.__version__}",
    compile=0.0, burn_in=marks[0] - began, sampling=ended - marks[0],
    gradients=calls[0] - marks[1], chains_gradients=calls[0] - marks[1],
)  # fmt: skip
