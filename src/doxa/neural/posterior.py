"""The posterior of a trained neural process: predictions for a task, given its context.

`condition(x, y)` adds rows to the context and returns a posterior of the same kind; `predict` and
`functions` then predict at any x. A batch of tasks, each with its own context, is predicted by
passing the padded inputs of the network (`Tasks.padded`): point j of task i is row i·N + j of the
result.

`predict` treats the points of a task separately. Joint draws and densities are

    log p(y_T | x_T, C) = Σ_j log N(y_j; μ(x_j, C, y_<j), σ²)    autoregressive, in the rows' order
    log p(y_T | x_T, C) = log E_z Π_j N(y_j; μ(x_j, C, z), σ²)   latent, over draws of z given C

For a method that is neither, points are independent given the context. Members are an equal
mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from doxa.data import Standardisation, as_tensor, cast, check_finite, rows_of
from doxa.engine import Engine
from doxa.errors import DataError, ShapeError, StoreError, Unavailable
from doxa.model.functional import Functional, made_small
from doxa.neural.blocks import Task, spanned
from doxa.noise import Noise, drawing
from doxa.posterior import Posterior, register_posterior
from doxa.predictive import Moments, Predictive

_ROWS = 4096  # targets per block, if each is predicted by itself


def points_scales(scales: Standardisation | None) -> Standardisation:
    """The scales of points of tasks, from the scales of padded tasks."""
    if scales is None or scales.x_loc is None:
        return Standardisation()
    y = (None if v is None else v.reshape(-1) for v in (scales.y_loc, scales.y_scale))
    return Standardisation(scales.x_loc["target_x"], scales.x_scale["target_x"], *y)


@register_posterior
class NeuralPosterior(Posterior):
    """An equal mixture over members, each a network from a context to predictions.

    Parameters
    ----------
    net : Functional
        The network as a function of flat weights [K, P], which are `weights`.
    outputs : int
        Number of targets per point.
    context_x, context_y : Tensor
        The context of the task, [n, D] and [n, outputs] in fitted units.
    """

    kind = "neural-process"

    def __init__(
        self,
        *args: Any,
        net: Functional,
        weights: Tensor,
        outputs: int,
        context_x: Tensor | None = None,
        context_y: Tensor | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.net, self.weights, self.outputs = net, weights.detach(), outputs
        self.context_x, self.context_y = context_x, context_y

    def check_restored(self) -> None:
        super().check_restored()
        known = (self.context_x, self.context_y)
        if (known[0] is None) != (known[1] is None):
            raise StoreError("a context has x and y")
        if self.context_x is not None and self.context_y is not None:
            rows = len(self.context_x)
            if self.context_y.shape != (rows, self.outputs) or self.context_x.ndim != 2:
                raise StoreError(f"a context of {list(self.context_x.shape)} rows does not fit")
            self.check_two_rows()

    @property
    def members(self) -> int:
        return len(self.weights)

    @property
    def context(self) -> int:
        """The number of rows of the context."""
        return 0 if self.context_x is None else len(self.context_x)

    def _reference(self) -> Tensor:
        return self.weights

    def _condition(self, x: Any, y: Any) -> NeuralPosterior:
        """The same networks with these rows added to the context."""
        x, y = self._column(self.check_inputs(x)), as_tensor(y, "y")
        check_finite(y, "y")
        y = y.unsqueeze(-1) if y.ndim == 1 else y
        if y.ndim != 2 or len(y) != rows_of(x, "x") or y.shape[1] != self.outputs:
            raise ShapeError(
                f"the context has x of {rows_of(x, 'x')} rows and y of shape {list(y.shape)}: y "
                f"must be [{rows_of(x, 'x')}, {self.outputs}]"
            )
        y = cast(self.scales.y(y, self.dtype), self.device, self.dtype)
        if self.context_x is not None and self.context_y is not None:
            x, y = torch.cat([self.context_x, x]), torch.cat([self.context_y, y])
        new = NeuralPosterior(
            self.model, self.method, self.base_likelihood, self.scales, self.inputs, self.ids,
            net=self.net, weights=self.weights, outputs=self.outputs, context_x=x, context_y=y,
        )  # fmt: skip
        new.record = deepcopy(self.record)
        return new

    def _scalar_with(self, y: Any) -> bool | tuple[bool, ...]:
        """Tasks have no common shape of y: the shape of the first context is used."""
        if self.context_x is not None:
            return self.scalar_targets
        return self.outputs == 1 and as_tensor(y, "y").ndim == 1

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """Each row by itself given the context: one Gaussian per member, or for np and anp a
        mixture over n functions (100 by default)."""
        seed = self.sampling(n, seed, keep)
        task, n = self._task(x), 100 if n is None else n
        if keep == "samples" or len(task["context"]) > 1:
            return Predictive(self._outputs(task, n, seed), self.likelihood)
        parts = []
        for block in self._blocks(task, n, seed):
            moments = Moments(self.likelihood)
            moments.update(block.flatten(1, 2), {})
            parts.append(moments.result())
        return Predictive.concat(parts) if len(parts) > 1 else parts[0]

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws of whole functions at x, [n, N, outputs], in units of y: by the latent variable,
        point by point for an autoregressive tnp, or else the means of the members in turn."""
        seed = self.sampling(n, seed, "samples")
        if self.method.autoregressive:
            return drawn_in_turn(self, x, n, seed)
        f = self.likelihood.location(self._outputs(self._task(x), n, seed), 1)
        if self.method.latent:
            return f
        return torch.cat([f[k].expand(c, *f.shape[1:]) for k, c in enumerate(self.split(n))])

    def joint_log_prob(self, x: Any, y: Any, n: int = 100, seed: int | None = None) -> Tensor:
        """The joint log density of targets given the context.

        Parameters
        ----------
        x : array-like or dict
            Rows of one task, or a dict of padded tasks.
        y : array-like
            The targets of all rows.
        n : int, optional
            The number of functions for np and anp.
        seed : int
            The random seed of these functions.

        Returns
        -------
        Tensor
            log p of all rows together, [1]; for a dict of tasks, of all targets of each task,
            [tasks].
        """
        return joint_log_prob(self, x, y, n, self.sampling(n, seed, "samples"))

    def _task(self, x: Any) -> dict[str, Tensor]:
        """The inputs of the network: one task, or the tasks in x. Masks mark the points that
        count."""
        if isinstance(x, dict):
            return self._given(x)
        x = self._column(self.check_inputs(x)).unsqueeze(0)  # [1, T, D]
        if self.context_x is None or self.context_y is None:
            raise DataError(
                "there is no context: a neural process predicts a task from some of its points; "
                "posterior.condition(x, y) takes them"
            )
        context = self.context_x.unsqueeze(0)
        return {
            "context_x": context, "context_y": self.context_y.unsqueeze(0),
            "context": torch.ones_like(context[..., 0]), "target_x": x,
            "targets": torch.ones_like(x[..., 0]),
        }  # fmt: skip

    def _given(self, x: dict[str, Any]) -> dict[str, Tensor]:
        needs = ("context_x", "context_y", "context", "target_x")
        missing = [name for name in needs if name not in x]
        if missing:
            raise DataError(f"tasks to predict have {', '.join(needs)}; {missing} is not there")
        given = {name: as_tensor(value, name) for name, value in x.items()}
        for name, value in given.items():
            check_finite(value, name)
        if bool((given["context"].sum(-1) < 1).any()):
            raise DataError("a task has no context: each needs one point at least")
        given.setdefault("targets", torch.ones_like(given["target_x"][..., 0]))
        for name in ("context_x", "target_x"):
            given[name] = self.scales.x(given[name], self.dtype)
        given["context_y"] = self.scales.y(given["context_y"], self.dtype)
        return {name: cast(value, self.device, self.dtype) for name, value in given.items()}

    def _outputs(self, task: dict[str, Tensor], n: int, seed: int) -> Tensor:
        """The outputs [S, tasks·targets, 2·outputs] for each drawn function, or for each member."""
        return torch.cat(list(self._blocks(task, n, seed)), 2).flatten(1, 2)

    def _blocks(self, task: dict[str, Tensor], n: int, seed: int) -> Iterator[Tensor]:
        """The same in blocks of targets, [S, tasks, targets, 2·outputs]."""
        fixed = self._fixed(task)
        if not self.method.latent:
            yield from (self._call(part, *fixed) for part in self._tiles(task, not fixed))
            return
        counts = self.split(n)
        eps = self._latent_noise(counts, seed, len(task["context"]))
        for part in self._tiles(task):
            f = self._call(part, eps).f.transpose(1, 2)  # [K, S, B, T, 2·O]
            yield torch.cat([f[k, :c] for k, c in enumerate(counts)])

    def _latent_noise(self, counts: Sequence[int], seed: int, tasks: int) -> Tensor:
        """[K, tasks, S, L], the same for every task: draw i is the same function in all tasks."""
        most, size = max(counts), self.method.width
        keys = [f"{i}/{j}" for i in self.ids for j in range(most)]
        noise = Noise(seed, "latent", keys, self.device, self.dtype).normal((size,))
        return noise.reshape(self.members, 1, most, size).expand(-1, tasks, -1, -1)

    def _fixed(self, task: Task) -> tuple[Any, ...]:
        both = torch.cat([task["context_x"], task["target_x"]], -2)
        mask = torch.cat([task["context"], task["targets"]], -1)
        return tuple(self.method.fixed(*spanned(both, mask)))

    def _tiles(self, task: dict[str, Tensor], apart: bool = True) -> list[dict[str, Tensor]]:
        """Blocks of targets, if each target is predicted by itself."""
        rows = task["target_x"].shape[-2]
        step = max(1, _ROWS // len(task["context"])) if apart else rows
        return [
            {**task, "target_x": task["target_x"][:, a : a + step],
             "targets": task["targets"][:, a : a + step]}
            for a in range(0, rows, step)
        ]  # fmt: skip

    def _call(self, task: Task, *more: Any) -> Any:
        """The outputs of all members' networks for a shared task; tensors have a member axis."""
        dims = (None, *(0 if isinstance(value, Tensor) else None for value in more))
        with torch.no_grad():
            return Engine("stack").call(self.net, self.weights, task, *more, dims=dims)

    def _column(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if x.ndim == 1 else x

    def tensors(self) -> dict[str, Tensor]:
        named = {"weights": self.weights}
        if self.context_x is not None and self.context_y is not None:
            named |= {"context_x": self.context_x, "context_y": self.context_y}
        return named

    def extra(self) -> dict[str, Any]:
        return {"ids": self.ids, "outputs": self.outputs}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> NeuralPosterior:
        own: dict[str, Any] = {name: tensors.get(name) for name in ("context_x", "context_y")}
        weights = tensors["weights"]
        method, inputs, outputs = common["method"], common["inputs"][-1], extra["outputs"]
        make = lambda: Functional(method.network(inputs, outputs))  # noqa: E731
        small = made_small(make, weights.numel())
        if weights.ndim != 2 or small.layout.size != weights.shape[1]:
            raise StoreError(f"weights are {list(weights.shape)}, not of {small.layout.size}")
        with drawing("network"):  # torch's default generator does not move
            net = make()
        moved = net.to(weights.device, weights.dtype)
        return cls(**common, net=moved, weights=weights, **own, **extra)


def joint_log_prob(posterior: NeuralPosterior, x: Any, y: Any, n: int, seed: int) -> Tensor:
    """log p of all targets of a task together, [tasks]: y is [N, outputs] at rows x, or
    [tasks, N, outputs] for tasks given as a dict."""
    task = posterior._task(x)
    y = as_tensor(y, "y")
    check_finite(y, "y")
    wanted = (*task["target_x"].shape[:-1], posterior.outputs)
    if y.numel() != math.prod(wanted):
        raise ShapeError(f"y must be {list(wanted)}, of every target; it is {list(y.shape)}")
    y = cast(y.reshape(wanted), posterior.device, posterior.dtype)
    if posterior.method.autoregressive:
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
    """The additional inputs of an autoregressive network: y, and the position of each target in the
    order of the rows, both with a member axis."""
    shape = (posterior.members, *task["target_x"].shape[:-1])
    rank = torch.arange(shape[-1], device=posterior.device, dtype=posterior.dtype)
    return y.expand(*shape, -1), rank.expand(shape)


def drawn_in_turn(posterior: NeuralPosterior, x: Any, n: int, seed: int) -> Tensor:
    """Draws by the chain rule: y_1, then y_2 given y_1, and so on; [n, N, outputs]. The draws use
    the axis of tasks."""
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
