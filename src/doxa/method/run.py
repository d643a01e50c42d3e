"""What a method sees of a fit: where it starts, its rows, log-likelihoods and gradients.

A `State` is a dict of tensors with leading axis M; `Clock` gives time, the learning rate and noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.data import Ask, Batch, Data, Feed, NoData, NoRows, Pass, batch_rows, source
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import Params
from doxa.method.clock import Clock, NoClock, State, network_part
from doxa.method.members import Members
from doxa.method.objectives import (
    Known,
    Objective,
    differentiated,
    joined,
    target,
)
from doxa.model import likelihood_parameters
from doxa.model.problem import LogDensity

if TYPE_CHECKING:
    from doxa.method import Method

log = logging.getLogger("doxa")

AT_REST = NoClock()


class Trained(NamedTuple):
    """The log-likelihood of a batch in training: its value [M], the state entries that the pass
    changed (BatchNorm and other buffers), the terms that layers gave, {name: [M, ...]}, and the
    outputs f."""

    value: Tensor
    changed: State
    terms: Params
    f: Any


@dataclass(frozen=True, eq=False)
class Run(Members):
    """What a method sees of a fit, and how it computes with it."""

    def start(self) -> Tensor:
        """Initial weights, [M, P]; of particles, each its own, or all as the network was given."""
        if self.particle_of and self.settings.fresh:
            return self.net.fresh(self.starts)
        return self.initial.clone()

    def init_network(self) -> State:
        """All that a network starts with: weights, trainables of its layers, and each member's own
        copy of the buffers that training changes."""
        state, model = {"theta": self.start()}, self.problem.model
        if model is None:
            return state
        if model.layers.entries:
            state["layers"] = model.fresh_layers(self.starts)
        for name in model.tracked:
            value = model.fixed[name]
            state[f"buffer.{name}"] = value.expand(self.size, *value.shape).clone()
        return state

    def say_frozen(self, name: str) -> None:
        """A method that never trains the network says that its buffers stay as they were given."""
        if self.problem.batch_norm:
            log.warning("%s: BatchNorm is frozen at the network's own statistics", name)
        model = self.problem.model
        if model is not None and model.written:
            names = ", ".join(model.written[:5])
            log.warning("%s: these buffers stay as the network was given: %s", name, names)

    def init_modules(self, given: bool = False) -> State:
        """A flat row [M, P] for each module that the method brought, new for each member, or as
        they were given."""
        return {
            name: module.given().expand(self.size, -1).clone() if given
            else module.fresh(self.starts)
            for name, module in self.problem.modules.items()
        }  # fmt: skip

    def buffers(self, state: State) -> Params:
        prefix = "buffer."
        return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}

    def call(self, name: str, params: State, *args: Any, dims: Any = 0) -> Any:
        """A module that the method brought, with each member's trainables in `params`; `dims` says
        which arguments have the member axis: 0, or None for those that all members share."""
        return self.engine.call(self.problem.modules[name], params[name], *args, dims=dims)

    def open(self, rows: Any, stage: str, steps: int | None = None) -> Feed:
        """Batches for a stage of so many steps: see `doxa.data.sources`."""
        if isinstance(self.data, NoData):
            return NoRows(self.size, self.device, self.dtype)
        ask = Ask(self.data, self.split_of, self.keys, self.settings.batch_size, stage, steps)
        return source(rows).open(ask)

    def all_rows(self) -> Batch:
        """Every row as one batch."""
        return self.open("all", "").batch(0)

    def passes(self, size: int = 4096) -> Pass:
        """Every row once, `size` at a time."""
        return Pass(self.rows, self.split_of, size)

    def common(self, method: Method) -> dict[str, Any]:
        """What every posterior of this run is given (one run only)."""
        r = self.run_of[0]
        scales = self.data.scales[r] if isinstance(self.data, Data) else None
        return {
            "model": self.problem.model, "method": method,
            "likelihood": self.likelihoods[r] if self.likelihoods else self.likelihood,
            "scales": scales, "inputs": self.inputs, "ids": list(self.members),
        }  # fmt: skip

    def shared(self, state: State) -> dict[str, Any]:
        """What weight posteriors keep besides weights: fixed noise, BatchNorm buffers, what layers
        brought."""
        constants = {k: v[0] for k, v in self.constants.items()}
        return {
            "constants": constants, "buffers": self.buffers(state), "layers": state.get("layers"),
        }  # fmt: skip

    def units_log_jacobian(self) -> Tensor:
        """log |d fitted / dy| of each member's rows: densities are reported in units of y. [M]"""
        each = []
        for m, r in enumerate(self.run_of):
            scale = self.rows.scales[r].y_scale
            if scale is None:
                each.append(0.0)
                continue
            event = self.rows.y[0].numel()
            logs = torch.as_tensor(scale).double().log()
            each.append(-float(self.n[m]) * float(logs.sum()) * (event / max(1, logs.numel())))
        return torch.tensor(each, dtype=torch.float64, device=self.device)

    def _applied(
        self, theta: Tensor, batch: Batch, params: State, buffers: Params, training: bool,
        who: Sequence[str] | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """log p(y_i | θ_m) of each row, [M, B], and the pass itself."""
        weights = self.layout.unflatten(theta)
        own = self.net.layers.unflatten(params["layers"]) if "layers" in params else {}
        applied = self.engine.apply(
            self.net, {**weights, **own}, batch.x, shared=batch.shared,
            buffers={**self.buffers(params), **buffers}, training=training,
            who=who,
        )  # fmt: skip
        return self._each(applied.f, weights, batch), applied

    def _each(self, f: Tensor, weights: Params, batch: Batch) -> Tensor:
        given = likelihood_parameters(weights) | self.constants
        if batch.points is None:
            return self.likelihood.log_prob(f, batch.y, given, lead=1)
        return _of_points(self.likelihood, f, batch, given)

    def outputs(self, theta: Tensor, x: Any, params: State, shared: bool = True) -> Tensor:
        """f at any inputs, [M, N, ...], with dropout off and BatchNorm's statistics as they are in
        `params`; `shared` inputs have no member axis."""
        weights = self.layout.unflatten(theta)
        own = self.net.layers.unflatten(params["layers"]) if "layers" in params else {}
        buffers = self.buffers(params)
        return self.engine.apply(self.net, {**weights, **own}, x, shared=shared, buffers=buffers).f

    def log_likelihoods_of(self, f: Tensor, theta: Tensor, batch: Batch) -> Tensor:
        """log p(y | f) of each row, [M, B], of given outputs [M, B, ...]; the likelihood's own
        parameters are those among the weights θ."""
        return self._each(f, self.layout.unflatten(theta), batch)

    def total(self, each: Tensor, batch: Batch) -> Tensor:
        """(rows/B) Σ w_i of what each row of a batch has, [M, B] to [M]."""
        return _summed(each, batch)

    def log_likelihood(self, theta: Tensor, batch: Batch, params: State | None = None) -> Tensor:
        """(rows/B) Σ_batch w_i log p(y_i | θ_m) for each member, [M]: dropout is off, BatchNorm's
        statistics and what layers brought are those in `params`."""
        return _summed(self.log_likelihoods(theta, batch, params), batch)

    def log_likelihoods(self, theta: Tensor, batch: Batch, params: State | None = None) -> Tensor:
        """The same of each row by itself, without weights and scale, [M, B]."""
        return self._applied(theta, batch, params or {}, {}, False)[0]

    def train(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock | None, **buffers: Tensor
    ) -> Trained:
        """The log-likelihood with the network in training: its layers draw their noise from the
        clock (None: they do not), and BatchNorm learns. `buffers` are further ones that layers
        are given."""
        noise: Params = {}
        if clock is not None and self.net.sites:
            noise = self.layer_noise(clock, batch_rows(batch))
        training = clock is not None or bool(self.net.tracked)
        who = self._who(params, batch, clock) if training and self.net.draws else None
        each, applied = self._applied(theta, batch, params, {**noise, **buffers}, training, who)
        changed = {f"buffer.{k}": v.detach() for k, v in applied.buffers.items()}
        return Trained(_summed(each, batch), changed, applied.terms, applied.f)

    def _who(self, params: State, batch: Batch, clock: Clock | None) -> list[str]:
        """A name for each member at this step, for what a network draws by itself. It must not
        depend on rounding, which differs with the number of members: without a clock it is made of
        what the buffers have counted and of the first row."""
        if clock is not None:
            numbers = clock.uniform(1).tolist()
        else:
            counts = [v for v in self.buffers(params).values() if not v.is_floating_point()]
            first = lambda t, m: t[0] if batch.shared else t[m, 0]  # noqa: E731
            rows = tree_flatten(batch.x)[0]
            numbers = [
                [v[m].tolist() for v in counts] + [first(t, m).tolist() for t in rows]
                for m in range(self.size)
            ]
        return [f"{key}/{own}" for key, own in zip(self.keys, numbers, strict=True)]

    def batch_statistics(self, theta: Tensor, params: State, batch: Batch) -> State:
        """What BatchNorm's buffers would be if this batch were all there is, {name: [M, ...]}."""
        shares = {f"buffer.{k}": share for k, share in self.net.momenta.items()}
        before = {k: torch.zeros_like(params[k]) for k in shares}
        fit = self.train(theta, {**params, **before}, batch, None)
        own = {k: fit.changed[k] for k in shares}
        return {k: v if not v.is_floating_point() else v / shares[k] for k, v in own.items()}

    def masked_log_likelihood(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock, **buffers: Tensor
    ) -> Tensor:
        """The log-likelihood with layers' noise but BatchNorm frozen, [M]."""
        noise = self.layer_noise(clock, batch_rows(batch))
        return _summed(self._applied(theta, batch, params, {**noise, **buffers}, False)[0], batch)

    def layer_noise(self, clock: Clock, rows: int) -> Params:
        """The noise that layers take in training, a draw a row: {buffer: [M, rows, ...]}."""
        return {
            name: clock.rows(site.kind, *site.drawn(rows))
            for name, site in self.net.sites.items()
            if site.use != "prediction"
        }

    def density(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock | None, training: bool
    ) -> tuple[Any, ...]:
        """log p(θ, D) as an objective; of a bare log density, that density."""
        if isinstance(self.problem, LogDensity):
            return self.problem.function(theta), {}
        if not training:
            return self.log_likelihood(theta, batch, params), {}, self.known_prior(theta)
        fit = self.train(theta, params, batch, clock)
        return fit.value, fit.changed, self.known_prior(theta)

    def known_prior(self, theta: Tensor, name: str = "theta") -> Known:
        """log p(θ), whose gradient is known."""
        at = theta.detach()
        return Known(self.prior.log_prob(at), {name: lambda grad: self.prior.add_score(grad, at)})

    def value_and_grad(
        self,
        objective: Objective,
        params: State,
        batch: Batch,
        clock: Clock,
        over: Sequence[str] = ("theta",),
    ) -> tuple[Tensor, State, State]:
        """An objective's value [M], its gradient with respect to each name, and the state entries
        that it changed; of all members at once or of some at a time, as the engine says."""
        parts = list(self.engine.chunks(self.size))
        if len(parts) == 1:
            return differentiated(self, objective, params, batch, clock, over)
        each = []
        for part in parts:
            own = {k: v[part] for k, v in params.items()}
            at = clock.part(part)
            rows = batch.members(part)
            each.append(differentiated(self.part(part), objective, own, rows, at, over))
        clock._calls[:] = at._calls
        values, grads, changed = zip(*each, strict=True)
        return torch.cat(values), joined(grads), joined(changed)

    def joint(self, theta: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        """log p(θ, D) of each member and its gradient, [M] and [M, P]: what samplers target, with
        dropout off and BatchNorm frozen."""
        params = {"theta": theta, **network_part(state)}
        value, grads, _ = self.value_and_grad(target, params, batch, AT_REST)
        return value, grads["theta"]

    def value(self, theta: Tensor, batch: Batch, state: State) -> Tensor:
        """log p(θ, D) of each member alone, [M]: for proposals that ask for no gradient."""
        params = {"theta": theta, **network_part(state)}
        each = []
        with torch.no_grad():
            for part in self.engine.chunks(self.size):
                own = {k: v[part] for k, v in params.items()}
                value, _, *known = target(self.part(part), own, batch.members(part), AT_REST)
                each.append(value + known[0].value if known else value)
        return each[0] if len(each) == 1 else torch.cat(each)


def _of_points(likelihood: Likelihood, f: Tensor, batch: Batch, given: Params) -> Tensor:
    """Σ log p(y | f) over the points of each task that are to be predicted, [M, B]."""
    assert batch.points is not None
    y = batch.y.expand(len(f), *batch.y.shape) if batch.shared else batch.y
    given = {k: v[:, 0] if v.ndim == 3 else v for k, v in given.items()}  # the same at all points
    each = {k: v.unsqueeze(1).expand(-1, f.shape[1], *v.shape[1:]) for k, v in given.items()}
    return (likelihood.log_prob(f, y, each, lead=2) * batch.points).sum(-1)


def _summed(each: Tensor, batch: Batch) -> Tensor:
    """(rows/B) Σ w_i v_i, [M], of a value for each row of a batch, [M, B]."""
    if batch.weight is not None:
        each = each * batch.weight
    return each.sum(-1) * batch.scale
