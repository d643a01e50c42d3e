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

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows, free_memory
from doxa.errors import MemoryBudgetError, MethodError, StoreError
from doxa.laplace import links
from doxa.laplace.curvature import Jacobians, output_size
from doxa.laplace.dual import Dual, Features
from doxa.laplace.forms import Effective, Form, Matrix, spectral
from doxa.laplace.outputs import Averaged, Outputs
from doxa.laplace.posterior import LaplacePosterior
from doxa.laplace.scales import Scales
from doxa.laplace.statistics import some_rows
from doxa.method import Run, State
from doxa.model import likelihood_parameters
from doxa.posterior import register_posterior


@register_posterior
class FunctionalPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose covariance is a `Dual`: it keeps training rows."""

    kind = "functional-laplace"

    def check_restored(self) -> None:
        super().check_restored()
        dual: Any = self.covariance
        k, p = dual.shape
        q = dual.values.shape[-1]
        want = {"values": (k, q), "vectors": (k, q, q), "tau": (k,), "heat": (k,), "scale": (k, p)}
        state = dual.state()
        for name, shape in want.items():
            if state[name].shape != shape:
                raise StoreError(f"{name} is {list(state[name].shape)}, not {list(shape)}")
        features = dual.features
        rows = len(features.x) if isinstance(features.x, Tensor) and features.shared else None
        outputs = features.root.shape[-1]
        if features.root.shape != (k, rows or features.root.shape[1], outputs, outputs):
            raise StoreError(f"root is {list(features.root.shape)}")
        if rows is not None and list(features.x.shape[1:]) != list(self.inputs or ()):
            raise StoreError(f"rows of {list(features.x.shape)}, not of {self.inputs}")
        if features.count != q:
            raise StoreError(f"{features.count} features for {q} directions")

    def _check_covariance(self) -> None:
        """A draw would need every row's Jacobian: the shapes are checked instead."""

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> FunctionalPosterior:
        shared, model, prefix = cls._shared(tensors, extra), common["model"], "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        own = (model.subset_names, shared["buffers"])
        at = tensors.get("at")
        jacobians = Jacobians(model, tensors["mean"] if at is None else at, *own)
        covariance = Dual.restored(jacobians, state, common["inputs"])
        common = common | {"method": links.as_saved(common["method"], extra)}
        new = cls(**common, **shared, mean=tensors["mean"], covariance=covariance, at=at)
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def check(run: Run, need: int, groups: int) -> None:
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
    if need > 0.8 * free_memory(run.device):
        raise MemoryBudgetError(
            f"{run.size} kernels over all rows × outputs that they are made of take "
            f"{need / 2**30:.3g} GiB; use rows=, for the kernel of fewer rows, "
            "structure='diagonal', or fewer members at once"
        )


@dataclass(frozen=True)
class Kernel(Form):
    """ΨΨᵀ over some rows × outputs; of all rows, the diagonal over weights, which has its trace.

    rows: how many rows the kernel is made of; None: all. kind: of the curvature in the outputs.
    """

    rows: int | None = None
    kind: str = "ggn"
    diagonal: ClassVar[Matrix] = Matrix(diagonal=True)

    def empty(self, run: Run, groups: int) -> State:
        return self.diagonal.empty(run, groups)

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        return self.diagonal.add(source, state, outputs, groups)

    def complete(self, run: Run, state: State) -> State:
        """With the kernel's eigenvalues and vectors, under τ = 1."""
        if "curvature.values" in state:
            return state
        features = self._features(run, state)
        gram = features.gram()
        if not self.whole(run):
            total = (state["curvature"] * features.scale.square()[:, None]).sum((1, 2))
            more = total / gram.diagonal(dim1=-2, dim2=-1).sum(1)
            gram = gram * more[:, None, None]
            features.root = features.root * more.sqrt()[:, None, None, None]
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        return state | {
            "curvature.values": values.clamp_min(0.0), "curvature.vectors": vectors.contiguous(),
            "curvature.root": features.root,
        }  # fmt: skip

    @property
    def averages(self) -> bool:
        """Draws are at all rows."""
        return self.rows is None

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        batch = Pass(run.rows, run.split_of).batch(0)
        return {"curvature.root": self._root(run, state, batch, away)}

    def covariance(self, run: Run, state: State, prior: Tensor) -> Dual:
        tau = state["tau"][:, 0]
        own = (state["curvature.values"], state["curvature.vectors"], tau, torch.ones_like(tau))
        return Dual(self._features(run, state), *own)

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        values = state["curvature.values"]  # those of G in the basis where Λ is 1
        floor = state["tau"] * torch.ones_like(values)
        return spectral(values.unsqueeze(1), floor, scales), self.diagonal.rounds

    def divided(self, state: State, ratio: Tensor) -> State:
        new = self.diagonal.divided(state, ratio)
        if "curvature.values" in state:
            new["curvature.values"] = state["curvature.values"] / ratio
            new["curvature.root"] = state["curvature.root"] / ratio.sqrt()[..., None, None]
        return new

    def bytes(self, run: Run, groups: int) -> int:
        """Of the kernel, its factors, and room to find them."""
        count = self._used(run) * output_size(run.net.output)
        return 5 * 8 * run.size * count**2

    def product(self, run: Run) -> float | None:
        count = self._used(run) * output_size(run.net.output)
        return float(run.size * count**2 * max(count, len(run.subset_index)))

    def whole(self, run: Run) -> bool:
        return self.rows is None or self.rows >= _longest(run)

    def _used(self, run: Run) -> int:
        return _longest(run) if self.rows is None else min(self.rows, _longest(run))

    def _features(self, run: Run, state: State) -> Features:
        batch = self._chosen(run)
        prior = run.prior.curvature(state["theta"]).expand_as(state["theta"])[:, run.subset_index]
        jacobians, x = self.source(run, state), batch.x
        root = state.get("curvature.root")
        if root is None:
            root = self._root(run, state, batch)
        missing = root.shape[1] - batch_rows(batch)
        if missing:  # some of the members, whose rows are fewer than others': no weight is there
            axis = 0 if batch.shared else 1
            last = lambda t: t.narrow(axis, t.shape[axis] - 1, 1)  # noqa: E731
            x = tree_map(lambda t: torch.cat([t, *[last(t)] * missing], axis), x)
        return Features(jacobians, x, batch.shared, root.contiguous(), prior.double().rsqrt())

    def _root(self, run: Run, state: State, batch: Batch, away: Tensor | None = None) -> Tensor:
        """C^½ at some rows, [M, m, O, O]; of C averaged over outputs f + d, where d is given."""
        theta = likelihood_parameters(run.layout.unflatten(state["theta"])) | run.constants
        outputs = Outputs(run.likelihood, theta, batch, run.net.output, self.kind)
        outputs = outputs if away is None else Averaged(outputs, away)
        return outputs.root(_values(self.source(run, state), batch), square=True).mT

    def _chosen(self, run: Run) -> Batch:
        """The rows that the kernel is made of, evenly over each member's own."""
        data = run.rows
        if self.rows is not None:
            data = replace(data, rows=[_evenly(own, self.rows) for own in data.rows])
        return Pass(data, run.split_of).batch(0)


def _values(jacobians: Jacobians, batch: Batch) -> Tensor:
    """f at all rows, [M, m, O]."""
    parts = [some_rows(batch, rows) for rows in jacobians.chunks(batch_rows(batch))]
    return torch.cat([jacobians(part.x, part.shared)[0] for part in parts], 1)


def _longest(run: Run) -> int:
    return max(len(run.rows.rows[s]) for s in run.split_of)


def _evenly(rows: Tensor, count: int) -> Tensor:
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).round().long()]
