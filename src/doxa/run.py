"""What a method sees of a fit: the stacked members, and how gradients are computed.

`Run` knows the model, the data's size, the prior and the engine; `Clock` gives time, the learning
rate and noise. A `State` is a dict of tensors with leading axis M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Data, NoRows, Pass
from doxa.engine import Engine
from doxa.errors import MethodError
from doxa.layout import Layout, Params
from doxa.likelihoods import Likelihood
from doxa.model import Model, likelihood_parameters
from doxa.noise import Noise
from doxa.optim import Adam, Optimizer
from doxa.priors import BoundPrior

if TYPE_CHECKING:
    from doxa.method import Method


State = dict[str, Tensor]


Info = dict[str, Tensor]


@dataclass
class Clock:
    """Where a stage stands. Everything that changes from step to step is a tensor, so that a step
    can be traced, compiled or captured."""

    t: Tensor  # [], the step within the stage
    rate: Tensor  # [] or [M, 1], the learning rate now
    steps: int
    source: Noise
    owned: bool = False  # the state's tensors may be overwritten: nobody else holds them
    calls: int = 0

    def noise(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape]; each call within a step gets its own."""
        self.calls += 1
        return self.source.normal(shape, self.t, self.calls)

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in (0, 1], [M, *shape]."""
        self.calls += 1
        return self.source.uniform(shape, self.t, self.calls)


@dataclass
class Run:
    """What a method sees of a fit: M = runs × members rows, advanced together."""

    model: Model | None
    likelihood: Likelihood
    layout: Layout
    prior: BoundPrior
    data: Data  # None where a bare log density is sampled: there are no rows
    engine: Engine
    members: list[int]  # member id of each row
    run_of: list[int]  # run of each row
    seeds: list[int]  # seed of each row
    n: Tensor  # [M], the sum of weights
    device: torch.device
    dtype: torch.dtype
    hyper: dict[str, Tensor] = field(default_factory=dict)  # {field: [M]}, where runs differ
    constants: Params = field(default_factory=dict)  # fixed likelihood parameters, [M, ...]
    optimizer: Optimizer = field(default_factory=Adam)
    rate: float = 1e-2
    epoch_steps: int = 1
    batch_size: int = 1
    initial: Tensor | None = None  # [M, P]
    inputs: Any = None  # the shape of one row of x
    density: Callable[[Tensor], Tensor] | None = None  # a bare log density, [M, P] to [M]
    likelihoods: list[Likelihood] = field(default_factory=list)  # of each run, where they differ
    _index: Tensor | None = None
    _where: slice | Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    def __post_init__(self) -> None:
        self.per_example = -1.0 / self.n  # [M]: from an objective to the loss that is minimised
        same = bool((self.n == self.n[0]).all())
        self._same_n = float(self.n[0]) if same else None

    def descent(self, grad: Tensor) -> Tensor:
        """−grad/n: the gradient of the loss, [M, P]."""
        if self._same_n is not None:  # a number is read faster than a column
            return grad * (-1.0 / self._same_n)
        return grad * self.per_example.unsqueeze(1)

    @property
    def net(self) -> Model:
        if self.density is not None:
            raise MethodError(
                "this method needs a network and data; a bare log density can be sampled with "
                "methods that only ask for its value and gradient: hmc, nuts, metropolis"
            )
        if self.model is None:
            raise AssertionError("this method brings its own functions and has no network")
        return self.model

    def field(self, method: Method, name: str) -> Tensor:
        """A hyper-parameter as [M]: the grid's values where there is a grid."""
        if name in self.hyper:
            return self.hyper[name]
        value = float(getattr(method, name))
        return torch.full((self.size,), value, device=self.device, dtype=self.dtype)

    def noise(self, purpose: str) -> Noise:
        keys = [f"{seed}/{member}" for seed, member in zip(self.seeds, self.members, strict=True)]
        return Noise(0, purpose, keys, self.device, self.dtype)

    def start(self) -> Tensor:
        """Initial parameters, [M, P]."""
        assert self.initial is not None
        return self.initial.clone()

    def rows(self, size: int | None = None) -> Pass | NoRows:
        """Every row in order, `size` at a time, or all of them as one batch."""
        if self.data is None:
            return NoRows(self.size, self.device, self.dtype)
        return Pass(self.data, self.run_of, size)

    def subset_index(self) -> Tensor:
        """Positions of the uncertain parameters in the flat vector."""
        if self._index is None:
            self._index = self.layout.index(self.net.subset_names).to(self.device)
        return self._index

    def subset_where(self) -> slice | Tensor:
        """The same as a slice where they lie together, which costs no copies."""
        if self._where is None:
            spans = [self.layout.slices[name] for name in self.net.subset_names]
            start, stop = spans[0].start, spans[-1].stop  # plain numbers: a step is being traced
            together = stop - start == sum(span.stop - span.start for span in spans)
            self._where = slice(start, stop) if together else self.subset_index()
        return self._where

    def common(self, method: Method) -> dict[str, Any]:
        """What every posterior of this run is given (one run only)."""
        r = self.run_of[0]
        return {
            "model": self.model, "method": method,
            "likelihood": self.likelihoods[r] if self.likelihoods else self.likelihood,
            "scales": None if self.data is None else self.data.scales[r], "inputs": self.inputs,
        }  # fmt: skip

    def shared(self, state: State) -> dict[str, Any]:
        """What weight posteriors keep besides weights: fixed noise, BatchNorm buffers, and who
        their members are."""
        constants = {k: v[0] for k, v in self.constants.items()}
        return {"constants": constants, "buffers": self.buffers(state), "ids": list(self.members)}

    def units_log_jacobian(self) -> Tensor:
        """log |d fitted / dy| of each member's rows: densities are reported in units of y. [M]"""
        each = []
        for m, r in enumerate(self.run_of):
            scale = self.data.scales[r].y_scale
            if scale is None:
                each.append(0.0)
                continue
            event = self.data.y[0].numel()
            logs = torch.as_tensor(scale).double().log()
            each.append(-float(self.n[m]) * float(logs.sum()) * (event / max(1, logs.numel())))
        return torch.tensor(each, dtype=torch.float64, device=self.device)

    def part(self, rows: slice) -> Run:
        """The same run for some of its members."""
        own = lambda tree: {k: v[rows] for k, v in tree.items()}  # noqa: E731
        prior = self.prior[rows] if self.prior.stacked else self.prior
        return replace(
            self, members=self.members[rows], run_of=self.run_of[rows], seeds=self.seeds[rows],
            n=self.n[rows], hyper=own(self.hyper), constants=own(self.constants), prior=prior,
            initial=None if self.initial is None else self.initial[rows],
        )  # fmt: skip

    def buffers(self, state: State) -> Params:
        """Each member's own copy of the buffers that training changes."""
        prefix = "buffer."
        return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

    def init_buffers(self) -> State:
        if self.density is not None:
            return {}
        model = self.net
        return {
            f"buffer.{name}": model.fixed[name].expand(self.size, *model.fixed[name].shape).clone()
            for name in model.tracked
        }

    def log_likelihood(
        self,
        flat: Tensor,
        batch: Batch,
        members: slice = slice(None),
        *,
        masks: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Tensor:
        """(rows/B) Σ_batch w_i log p(y_i | θ_m) for each member: [M]."""
        params = self.layout.unflatten(flat)
        f = self.engine.forward(
            self.net, params, batch.x, shared=batch.shared, masks=masks, buffers=buffers,
            training=training,
        )  # fmt: skip
        constants = self.constants
        if members != slice(None):
            constants = {k: v[members] for k, v in constants.items()}
        theta = likelihood_parameters(params) | constants
        each = self.likelihood.log_prob(f, batch.y, theta, lead=1)  # [M, B]
        if batch.weight is not None:
            each = each * batch.weight
        return each.sum(-1) * batch.scale

    def grad(
        self,
        flat: Tensor,
        batch: Batch,
        *,
        masks: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The log-likelihood of each member and its gradient: [M], [M, P]."""

        def value(theta: Tensor, part: slice) -> Tensor:
            if theta.shape[0] == flat.shape[0]:  # all members: nothing to cut
                return self.log_likelihood(
                    theta, batch, masks=masks, buffers=buffers, training=training
                )
            own = lambda tree: None if tree is None else {k: v[part] for k, v in tree.items()}  # noqa: E731
            return self.log_likelihood(
                theta, batch.members(part), part, masks=own(masks), buffers=own(buffers),
                training=training,
            )  # fmt: skip

        return self.differentiate(value, flat)

    def joint(self, flat: Tensor, batch: Batch | None, state: State) -> tuple[Tensor, Tensor]:
        """log p(θ, D) of each member and its gradient, [M] and [M, P]: what samplers target. Of a
        bare log density it is that density; buffers (BatchNorm) are those in the state."""
        if self.density is not None:
            return self.differentiate(lambda theta, _: self.density(theta), flat)  # type: ignore[misc]
        assert batch is not None
        fit, grad = self.grad(flat, batch, buffers=self.buffers(state) or None)
        return fit + self.prior.log_prob(flat), grad + self.prior.score(flat)

    def value(self, flat: Tensor, batch: Batch, state: State) -> Tensor:
        """log p(θ, D) of each member alone, [M]: for proposals that ask for no gradient."""
        parts = []
        with torch.no_grad():
            for part in self.engine.chunks(flat.shape[0]):
                if self.density is not None:
                    parts.append(self.density(flat[part]))
                    continue
                buffers = {k: v[part] for k, v in self.buffers(state).items()} or None
                rows = batch.members(part)
                parts.append(self.log_likelihood(flat[part], rows, part, buffers=buffers))
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
            return value if self.density is not None else value + self.prior.log_prob(flat)

    def differentiate(
        self, fn: Callable[[Tensor, slice], Tensor], flat: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Value [M] and gradient [M, P] of a function of some members' rows, chunk by chunk."""
        values, grads = [], []
        for part in self.engine.chunks(flat.shape[0]):
            with torch.enable_grad():
                whole = part.stop - part.start == flat.shape[0]
                theta = (flat if whole else flat[part]).detach().requires_grad_()
                value = fn(theta, part)
                (grad,) = torch.autograd.grad(value, theta, torch.ones_like(value))
            values.append(value.detach())
            grads.append(grad)
        if len(values) == 1:
            return values[0], grads[0]
        return torch.cat(values), torch.cat(grads)

    def dropout_masks(self, clock: Clock, rows: int) -> dict[str, Tensor] | None:
        """Training masks for the net's own dropout layers, [M, rows, ...], scaled by 1/(1 − p)."""
        model = self.net
        masks = {}
        for name, shape in model.sites.items():
            p = model._site(name).p
            if p > 0:
                kept = clock.uniform(rows, *shape) > p
                masks[name] = kept.to(self.dtype) / (1.0 - p)
        return masks or None


def batch_rows(batch: Batch) -> int:
    leaf = batch.x
    while not isinstance(leaf, Tensor):
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    return int(leaf.shape[0 if batch.shared else 1])


def slice_state(state: State, part: slice) -> State:
    return tree_map(lambda v: v[part], state)
