"""Laplace in function space: the Gaussian process that a linearised network is.

    f ~ GP(f(x; θ*), k),    k(x, x') = J Λ⁻¹ J'ᵀ

conditioned on the training rows, each seen with the noise C⁻¹ that the likelihood has at θ*
(Khan et al. 2019; Immer, Korzepa & Bauer 2021). Variances, draws and evidence are those of the full
matrix over the weights, at the price of one over rows × outputs, so that it is for networks with
more weights than rows. A few of the rows may stand for all (a subset of data): their precision is
multiplied so that the trace of the kernel in units of the noise, which is the sum of its
eigenvalues, is that of all rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows, free_memory
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace.curvature import Jacobians, output_size, unflatten_outputs
from doxa.laplace.dual import Dual, Features
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg.layout import Params
from doxa.method import Run, State
from doxa.model import likelihood_parameters
from doxa.posterior import register_posterior


@register_posterior
class FunctionalPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose covariance is a `Dual`: it keeps training rows."""

    kind = "functional-laplace"

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> FunctionalPosterior:
        shared, model, prefix = cls._shared(tensors, extra), common["model"], "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        own = (model.subset_names, shared["buffers"])
        jacobians = Jacobians(model, tensors["mean"], *own)
        covariance = Dual.restored(jacobians, state, common["inputs"])
        new = cls(**common, **shared, mean=tensors["mean"], covariance=covariance)
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def check(run: Run, rows: int | None, groups: int) -> None:
    """What the form cannot do, before it is tried."""
    if not run.prior.is_gaussian:
        raise MethodError(
            "structure='functional' needs a Gaussian prior, Normal or FanInNormal: a kernel has "
            "the prior's variances"
        )
    if groups > 1:
        raise MethodError(
            "structure='functional' has one learned noise level: use per_output=False, or 'full'"
        )
    count = used(run, rows) * output_size(run.net.output)
    need = 5 * 8 * run.size * count**2  # the kernel, its factors, and room to find them
    if need > 0.8 * free_memory(run.device):
        raise MemoryBudgetError(
            f"{run.size} kernels over {count} rows × outputs take {need / 2**30:.3g} GiB; use "
            "rows=, for the kernel of fewer rows, structure='diagonal', or fewer members at once"
        )


def used(run: Run, rows: int | None) -> int:
    """How many rows the kernel is made of."""
    longest = max(len(run.rows.rows[s]) for s in run.split_of)
    return longest if rows is None else min(rows, longest)


def whole(run: Run, rows: int | None) -> bool:
    """Whether it is made of all rows: else its evidence is no evidence."""
    return used(run, rows) == used(run, None)


def complete(run: Run, state: State, rows: int | None) -> State:
    """The kernel's eigenvalues and vectors, from the state with the diagonal of all rows."""
    if "kernel.values" in state:
        return state
    features = _features(run, state, rows)
    gram = features.gram()
    if not whole(run, rows):
        scale = features.scale.square()[:, None]
        total = (state["curvature"] * scale).sum((1, 2))  # tr ΨΨᵀ of all rows
        more = total / gram.diagonal(dim1=-2, dim2=-1).sum(1)
        gram = gram * more[:, None, None]
        features.root = features.root * more.sqrt()[:, None, None, None]
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    return state | {
        "kernel.values": values.clamp_min(0.0), "kernel.vectors": vectors.contiguous(),
        "kernel.root": features.root,
    }  # fmt: skip


def covariance(run: Run, state: State, rows: int | None) -> Dual:
    """H⁻¹."""
    tau = state["tau"]
    own = (state["kernel.values"], state["kernel.vectors"], tau, torch.ones_like(tau))
    return Dual(_features(run, state, rows), *own)


def _features(run: Run, state: State, rows: int | None) -> Features:
    batch = _chosen(run, rows)
    prior = run.prior.curvature(state["theta"]).expand_as(state["theta"])[:, run.subset_index]
    jacobians = Jacobians(run.net, state["theta"], run.net.subset_names, run.buffers(state))
    root, x = state.get("kernel.root"), batch.x
    if root is None:
        root = _noise_root(run, state, jacobians, batch)
    missing = root.shape[1] - batch_rows(batch)
    if missing:  # some of the members, whose rows are fewer than others': the rest has no weight
        axis = 0 if batch.shared else 1
        last = lambda t: t.narrow(axis, t.shape[axis] - 1, 1)  # noqa: E731
        x = tree_map(lambda t: torch.cat([t, *[last(t)] * missing], axis), x)
    return Features(jacobians, x, batch.shared, root.contiguous(), prior.double().rsqrt())


def _noise_root(run: Run, state: State, jacobians: Jacobians, batch: Batch) -> Tensor:
    """(w C)^½ of each row, [M, m, O, O]."""
    theta: Params = likelihood_parameters(run.layout.unflatten(state["theta"])) | run.constants
    f = unflatten_outputs(jacobians.values(batch.x, batch.shared), run.net.output)
    c = run.likelihood.curvature(f, theta, 1, batch.y).double()
    values, vectors = torch.linalg.eigh((c + c.mT) / 2)
    root = (vectors * values.clamp_min(0.0).sqrt()[..., None, :]) @ vectors.mT
    return root if batch.weight is None else root * batch.weight.double().sqrt()[..., None, None]


def _chosen(run: Run, rows: int | None) -> Batch:
    """The rows that the kernel is made of, evenly over each member's own."""
    data = run.rows
    if rows is not None:
        data = dataclasses.replace(data, rows=[_evenly(own, rows) for own in data.rows])
    return Pass(data, run.split_of).batch(0)


def _evenly(rows: Tensor, count: int) -> Tensor:
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).round().long()]
