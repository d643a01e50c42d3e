"""Optimisers on flat stacked parameters, and learning-rate schedules.

One update advances all members: every operation acts on [M, P]. The rate is a tensor, [] or [M], so
that it may differ between runs and be an input of a compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.errors import MethodError

State = dict[str, Tensor]

_fusing: ContextVar[bool] = ContextVar("fusing", default=True)


@contextmanager
def unfused() -> Iterator[None]:
    """Updates as plain operations: what a compiler fuses with the rest of the step."""
    token = _fusing.set(False)
    try:
        yield
    finally:
        _fusing.reset(token)


@dataclass(frozen=True)
class Adam:
    """m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  θ ← θ − η m̂ / (√v̂ + ε)   (Kingma & Ba, 2015)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, theta: Tensor) -> State:
        return {"optim.m": torch.zeros_like(theta), "optim.v": torch.zeros_like(theta)}

    def update(
        self, theta: Tensor, grad: Tensor, state: State, rate: Tensor, t: Tensor,
        owned: bool = False,
    ) -> tuple[Tensor, State]:  # fmt: skip
        if rate.ndim == 0 and theta.dtype == torch.float32 and _fusing.get():
            return self._fused(theta, grad, state, rate, t, owned)
        m = torch.lerp(state["optim.m"], grad, 1 - self.beta1)
        v = torch.addcmul(state["optim.v"] * self.beta2, grad, grad, value=1 - self.beta2)
        step = t.to(theta.dtype) + 1
        first = 1 - self.beta1**step
        second = (1 - self.beta2**step).sqrt()
        size = rate * (second / first)  # the bias corrections, moved into the step size
        denominator = v.sqrt().add_(self.eps * second)
        return theta - size * (m / denominator), {"optim.m": m, "optim.v": v}

    def _fused(
        self, theta: Tensor, grad: Tensor, state: State, rate: Tensor, t: Tensor, owned: bool
    ) -> tuple[Tensor, State]:
        """The same in one kernel: one pass over memory, and no launches between."""
        own = (lambda v: v) if owned else torch.clone
        theta, m, v = own(theta), own(state["optim.m"]), own(state["optim.v"])
        torch._fused_adam_(
            [theta], [grad], [m], [v], [], [t.to(torch.float32) + 1], lr=rate, beta1=self.beta1,
            beta2=self.beta2, weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return theta, {"optim.m": m, "optim.v": v}


@dataclass(frozen=True)
class SGD:
    """u ← μu + g,  θ ← θ − ηu."""

    momentum: float = 0.9

    def init(self, theta: Tensor) -> State:
        return {"optim.u": torch.zeros_like(theta)} if self.momentum else {}

    def update(
        self, theta: Tensor, grad: Tensor, state: State, rate: Tensor, t: Tensor,
        owned: bool = False,
    ) -> tuple[Tensor, State]:  # fmt: skip
        if not self.momentum:
            return theta - rate * grad, {}
        u = torch.add(grad, state["optim.u"], alpha=self.momentum)
        return theta - rate * u, {"optim.u": u}


Optimizer = Adam | SGD


def optimizer(spec: str | Optimizer) -> Optimizer:
    if isinstance(spec, Adam | SGD):
        return spec
    known: dict[str, Callable[[], Optimizer]] = {"adam": Adam, "sgd": SGD}
    if spec not in known:
        raise MethodError(f"optimizer must be one of {sorted(known)} or an object, not {spec!r}")
    return known[spec]()


def schedule(spec: str | Callable[[float], float], steps: int) -> Tensor:
    """Multipliers of the rate for each step, [steps].

    "constant", "cosine" (to zero), "linear" (to zero), each with "warmup-" in front for a rise over
    the first 5 %, or a function of the fraction done.
    """
    at = torch.arange(steps, dtype=torch.float64) / max(1, steps)
    if callable(spec):
        return torch.tensor([float(spec(float(s))) for s in at], dtype=torch.float64)
    warm, name = spec.startswith("warmup-"), spec.removeprefix("warmup-")
    shapes = {
        "constant": torch.ones_like(at),
        "cosine": 0.5 * (1 + torch.cos(math.pi * at)),
        "linear": 1 - at,
    }
    if name not in shapes:
        raise MethodError(f"schedule must be one of {sorted(shapes)} or a function, not {spec!r}")
    rise = (at / 0.05 + 1.0 / max(1, steps)).clamp(max=1.0) if warm else torch.ones_like(at)
    return shapes[name] * rise
