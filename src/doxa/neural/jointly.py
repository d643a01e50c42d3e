"""Several points of a task together: draws and densities, where `predict` has them one by one.

    log p(y_T | x_T, C) = Σ_j log N(y_j; μ(x_j, C, y_<j), σ²)    autoregressive, in the rows' order
    log p(y_T | x_T, C) = log E_z Π_j N(y_j; μ(x_j, C, z), σ²)   latent, over draws of z given C

and points that are independent given the context where a method has neither.
Members are an equal mixture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import as_tensor, cast, check_finite
from doxa.errors import ShapeError, Unavailable
from doxa.noise import Noise

if TYPE_CHECKING:
    from doxa.neural.posterior import NeuralPosterior


def joint_log_prob(posterior: NeuralPosterior, x: Any, y: Any, n: int, seed: int) -> Tensor:
    """log p of all targets of a task together, [tasks]: y [N, outputs] at rows x, or
    [tasks, N, outputs] of tasks given as a dict."""
    task = posterior._task(x)
    y = as_tensor(y, "y")
    check_finite(y, "y")
    wanted = (*task["target_x"].shape[:-1], posterior.outputs)
    if y.numel() != math.prod(wanted):
        raise ShapeError(f"y must be {list(wanted)}, of every target; it is {list(y.shape)}")
    y = cast(y.reshape(wanted), posterior.device, posterior.dtype)
    if getattr(posterior.method, "mode", "") == "autoregressive":
        given = cast(posterior.scales.y(y, posterior.dtype), posterior.device, posterior.dtype)
        f = posterior._call(task, *in_order(posterior, task, given))
    else:
        f = torch.cat(list(posterior._blocks(task, n, seed)), 2)  # [S, tasks, N, 2·O]
    shape = (*f.shape[:-1], posterior.outputs)
    each = posterior.likelihood.log_prob(f, y.expand(shape), {}, lead=2)
    together = (each * task["targets"]).sum(-1)  # [S, tasks]
    return torch.logsumexp(together, 0) - math.log(len(together))


def in_order(
    posterior: NeuralPosterior, task: dict[str, Tensor], y: Tensor
) -> tuple[Tensor, Tensor]:
    """What an autoregressive network is given besides a task: y, and each target's place in the
    order of the rows, both for every member."""
    shape = (posterior.members, *task["target_x"].shape[:-1])
    rank = torch.arange(shape[-1], device=posterior.device, dtype=posterior.dtype)
    return y.expand(*shape, -1), rank.expand(shape)


def drawn_in_turn(posterior: NeuralPosterior, x: Any, n: int, seed: int) -> Tensor:
    """Draws by the chain rule: y_1, then y_2 given it…; [n, N, outputs]. Draws lie on the axis
    of tasks."""
    task = posterior._task(x)
    if len(task["context"]) != 1:
        raise Unavailable("an autoregressive tnp draws functions of one task at a time")
    most, rows = max(posterior.split(n)), task["target_x"].shape[1]
    task = {name: t.expand(most, *t.shape[1:]) for name, t in task.items()}
    keys = [f"{i}/{j}" for i in posterior.ids for j in range(most)]
    noise = Noise(seed, "latent", keys, posterior.device, posterior.dtype)
    eps = noise.normal((rows, posterior.outputs)).unflatten(0, (posterior.members, most))
    likelihood = posterior.base_likelihood
    y = torch.zeros_like(eps)
    _, rank = in_order(posterior, task, y)
    for j in range(rows):
        f = posterior._call(task, y, rank)[..., j, :]  # [K, S, 2·O]
        std = likelihood.variance(f, {}, 1).sqrt()
        y[:, :, j] = likelihood.mean(f, {}, 1) + std * eps[:, :, j]
    drawn = torch.cat([y[k, :c] for k, c in enumerate(posterior.split(n))])
    return posterior.likelihood.location(torch.cat([drawn, torch.zeros_like(drawn)], -1), 1)
