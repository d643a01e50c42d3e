"""What infinitely wide networks believe after data: a Gaussian process, as in `process.py`, whose
kernel is an architecture's; of classes, its functions over a temperature are logits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.data import as_tensor, rows_of
from doxa.errors import ShapeError
from doxa.exact.targets import new_targets
from doxa.function.process import GPPosterior
from doxa.function.wide.classes import coded, temperatures
from doxa.function.wide.function import WideFunction
from doxa.linalg.layout import Params
from doxa.noise import Noise
from doxa.posterior import register_posterior
from doxa.predictive import Moments, Predictive

_DRAWS = 100  # of each member, of classes


@register_posterior
class WidePosterior(GPPosterior):
    """A process with an architecture's kernel.

    temperature: T of each member, [K], by which functions become logits; None: as calibrated on
    the training rows, each left out in turn.
    """

    kind = "infinite-width"
    kernel: Any  # a WideFunction

    def __init__(self, *args: Any, temperature: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        if temperature is not None:
            self.__dict__["temperature"] = temperature
        if self.base_likelihood.classifies:
            self.log_evidence = None  # that of numbers is not that of classes

    @cached_property
    def temperature(self) -> Tensor:
        return temperatures(self._solved, self._levels[:, 0], self.base_likelihood)

    def _logits(self, mean: Tensor, spread: Tensor, power: int, some: slice) -> Any:
        if not self.base_likelihood.classifies:
            return mean, spread
        t = self.temperature[some]
        by = lambda value: t.reshape(-1, *(1,) * (value.ndim - 1))  # noqa: E731
        return mean / by(mean), spread / by(spread) ** power

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._logits(*super().marginals(x), 2, slice(None))

    def joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return self._logits(*super().joints(x, members), 1, members)

    def prior_joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        return self._logits(*super().prior_joints(x, members), 1, members)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """The closed form, whatever n; of classes, n draws, else 100 of each member.

        Such a draw is so many standard deviations from the mean at every row: probabilities are
        those of each row by itself, and do not depend on which others are asked for.
        """
        if not self.base_likelihood.classifies:
            return super()._predict(x, n, seed, keep)
        seed = self.sampling(n, seed, keep)
        f = self._drawn(x, n or _DRAWS * self.members, seed)
        if keep == "samples":
            return Predictive(f, self.likelihood)
        moments = Moments(self.likelihood, seed)
        moments.update(f, {})
        return moments.result()

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws of f, jointly over the rows of x; of classes, those of `predict`."""
        if not self.base_likelihood.classifies:
            return super()._draw_functions(x, n, seed)
        return self._drawn(x, n, self.sampling(n, seed, "samples"))

    def _drawn(self, x: Any, n: int, seed: int) -> Tensor:
        """Logits [n, N, *event]."""
        f, variance = self.marginals(self.prepared(x))  # [K, N, *event]
        who = [k for k, count in enumerate(self.split(n)) for _ in range(count)]
        keys = [f"{self.ids[k]}/{who[:i].count(k)}" for i, k in enumerate(who)]
        away = Noise(seed, "draws", keys, f.device, f.dtype).normal((1, *self.event))
        return torch.addcmul(f[who], variance.sqrt()[who], away).to(self.dtype)

    def theta(self) -> Params:
        return {} if self.base_likelihood.classifies else super().theta()

    def prepared(self, x: Any) -> Tensor:
        return self.vectors(self.check_inputs(x)).double()

    def vectors(self, x: Any) -> Tensor:
        """Inputs as rows of numbers, [N, D]."""
        return x.unsqueeze(-1) if x.ndim == 1 else x.flatten(1)

    def _condition(self, x: Any, y: Any) -> WidePosterior:
        """The process with further rows, at the same hyper-parameters."""
        x, y = self._targets(x, y)
        weight = self.weight
        if weight is not None:
            weight = torch.cat([weight, weight.new_ones(len(y))])
        rows = {"x": torch.cat([self.x, x]), "y": torch.cat([self.y, y]), "weight": weight}
        tensors = {k: v for k, v in self.tensors().items() if k != "temperature"}
        new = type(self).restore(
            {
                "model": self.model, "method": self.method, "likelihood": self.base_likelihood,
                "scales": self.scales, "inputs": self.inputs,
            },
            tensors | {k: v for k, v in rows.items() if v is not None},
            self.extra(),
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows"] = rows_of(new.x, "x")
        return new

    def _targets(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        if not self.base_likelihood.classifies:
            x, y = new_targets(self, x, y, self.event)
            return self.vectors(x), y.double()
        x = self.vectors(self.check_inputs(x))
        y = self.base_likelihood.prepare_targets(as_tensor(y, "y"), self.event).to(self.device)
        if len(y) != len(x):
            raise ShapeError(f"x has {len(x)} rows and y {len(y)}")
        return x, coded(y, self.base_likelihood, self.event)

    def tensors(self) -> dict[str, Tensor]:
        named = {"hyper": self.hyper, "log_noise": self.log_noise, "x": self.x, "y": self.y}
        if self.base_likelihood.classifies:
            named["temperature"] = self.temperature
        return named if self.weight is None else named | {"weight": self.weight}

    def extra(self) -> dict[str, Any]:
        kernel = self.kernel
        return super().extra() | {
            "architecture": kernel.architecture, "shape": kernel.shape, "kernel": kernel.kind
        }  # fmt: skip

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> WidePosterior:
        names = ("hyper", "log_noise", "x", "y", "weight", "temperature", "time", "shown")
        own = {name: tensors[name] for name in names if name in tensors}
        kernel = cls.kernel_of(common, extra)
        return cls(**common, kernel=kernel, event=extra["event"], ids=extra["ids"], **own)

    @classmethod
    def kernel_of(cls, common: dict[str, Any], extra: dict[str, Any]) -> Any:
        """The kernel that `extra` describes."""
        return WideFunction(extra["architecture"], tuple(extra["shape"]), extra["kernel"])
