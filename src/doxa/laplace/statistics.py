"""What Laplace adds up over the data, and what it re-estimates from it, on stacked states.

One pass gives, for each member, the curvature of the uncertain weights, the log-likelihood at θ*,
and the squared residuals of each group of outputs that has a learned noise level of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, batch_rows
from doxa.laplace.curvature import (
    Jacobians,
    flatten_outputs,
    gauss_newton,
    output_size,
    unflatten_outputs,
)
from doxa.laplace.evidence import reestimate
from doxa.likelihoods import Gaussian
from doxa.linalg import Structure
from doxa.linalg.layout import Params
from doxa.method import Run, State
from doxa.method.scaled_priors import scaled_priors
from doxa.model import likelihood_parameters
from doxa.priors import Prior

_NOISE = "likelihood.log_noise"


def learns_noise(run: Run) -> bool:
    """A Gaussian noise level that is re-estimated outside the Hessian."""
    return isinstance(run.likelihood, Gaussian) and _NOISE in run.layout.slices


def noise_groups(run: Run) -> int:
    """How many groups of outputs have a noise level of their own."""
    return run.layout.select([_NOISE]).size if learns_noise(run) else 1


def empty(run: Run, diagonal: bool) -> State:
    size, groups = len(run.subset_index), noise_groups(run)
    shape = (size,) if diagonal else (size, size)
    zeros = lambda *s: torch.zeros(run.size, *s, device=run.device, dtype=torch.float64)  # noqa: E731
    return {"curvature": zeros(groups, *shape), "chi": zeros(groups), "fit": zeros()}


def add(run: Run, state: State, batch: Batch, diagonal: bool) -> State:
    """The state with some rows' curvature, squared residuals and log-likelihood."""
    new = dict(state)
    theta = likelihood_parameters(run.layout.unflatten(state["theta"])) | run.constants
    groups = noise_groups(run)
    jacobians = Jacobians(run.net, state["theta"], run.net.subset_names, run.buffers(state))
    for rows in jacobians.chunks(batch_rows(batch)):
        part = _rows(batch, rows)
        flat, j = jacobians(part.x, part.shared)
        f = unflatten_outputs(flat, run.net.output)
        c = run.likelihood.curvature(f, theta, 1, part.y)
        if groups == 1:
            each = [gauss_newton(j, c, part.weight, diagonal)]
        else:  # every output has its own noise level
            one = [slice(o, o + 1) for o in range(groups)]
            each = [gauss_newton(j[:, :, o], c[:, :, o, o], part.weight, diagonal) for o in one]
        fit = run.likelihood.log_prob(f, part.y, theta, 1).double()
        if part.weight is not None:
            fit = fit * part.weight
        new["curvature"] = new["curvature"] + torch.stack(each, 1)
        new["fit"] = new["fit"] + fit.sum(1)
        if learns_noise(run):
            new["chi"] = new["chi"] + _chi(f, part, theta, groups)
    return new


def _chi(f: Tensor, batch: Batch, theta: Params, groups: int) -> Tensor:
    """Σ w (y − f)² / σ² for each group of outputs: [M, g]."""
    log_noise = theta["log_noise"].double()
    each = flatten_outputs((batch.y - f).double().square(), 1)  # [M, B, O]
    if batch.weight is not None:
        each = each * batch.weight.double()[..., None]
    squares = each.sum(1) if groups > 1 else each.sum((1, 2)).unsqueeze(1)
    return squares * (-2.0 * log_noise.reshape(len(f), groups)).exp()


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, for all members."""
    at = (rows,) if batch.shared else (slice(None), rows)
    weight = None if batch.weight is None else batch.weight[..., rows]
    pick = lambda tree: tree_map(lambda t: t[at], tree)  # noqa: E731
    return Batch(pick(batch.x), pick(batch.y), batch.scale, weight, batch.shared)


def prior_curvature(run: Run, theta: Tensor) -> tuple[Tensor, Tensor]:
    """The curvature Λ of the subset's prior, [M, p], and (θ − m)ᵀ Λ (θ − m), [M]."""
    index = run.subset_index
    prior = run.prior.curvature(theta).expand_as(theta)[:, index].double()
    away = (theta - run.prior.mean).double()[:, index]
    return prior, (prior * away.square()).sum(1)


def optimism(run: Run, state: State, spread: Structure, heat: Tensor) -> float:
    """T γ/2n: how far, a row, the log-likelihood's mean over N(θ*, T H⁻¹) lies below its maximum.

    γ = tr(H⁻¹ G) = p − tr(H⁻¹ τΛ). `spread` is T H⁻¹, `heat` T [M]; the mean of the members."""
    prior, _ = prior_curvature(run, state["theta"])
    bound = (state["tau"][:, None] * prior * spread.diagonal().double()).sum(1)
    return float(((heat.double() * spread.size - bound) / (2.0 * run.n.double())).mean())


def priors_used(run: Run, tau: Tensor) -> list[Prior | dict[str, Prior]]:
    """Each member's Gaussian prior with its precision times τ [M] on the subset; weights outside it
    are points under the prior as it was."""
    return scaled_priors(run, dict.fromkeys(run.net.subset_names, tau.rsqrt()))


def settle(run: Run, state: State, scale: bool) -> State:
    """Learned noise, and the prior's scale where asked, at their type-II maximum for θ*."""
    prior, quad = prior_curvature(run, state["theta"])
    tau, groups = state["tau"], noise_groups(run)
    outputs = output_size(run.net.output) // groups  # in each group
    count = run.n.double()[:, None].expand(-1, groups) * outputs
    ratio, rescale = reestimate(
        state["curvature"], state["chi"], count, tau[:, None] * prior, tau * quad,
        noise=learns_noise(run), scale=scale, gaussian=run.prior.is_gaussian,
    )  # fmt: skip
    new = {**state, "tau": tau * rescale}
    if learns_noise(run):
        theta = state["theta"].clone()
        theta[:, run.layout.slices[_NOISE]] += 0.5 * ratio.log().to(theta.dtype)
        trail = (1,) * (state["curvature"].ndim - 2)
        change = count * ratio.log() + state["chi"] * (1 / ratio - 1)
        new |= {
            "theta": theta,
            "curvature": state["curvature"] / ratio.reshape(*ratio.shape, *trail),
            "chi": state["chi"] / ratio,
            "fit": state["fit"] - 0.5 * change.sum(1),
        }
    return new
