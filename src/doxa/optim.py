"""Optimisers on named stacked tensors, and learning-rate schedules.

One update advances all members of every name: each operation acts on [M, ...]. The rate is a
tensor, [] or [M, 1], so that it may differ between runs and be an input of a compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from doxa.errors import MethodError

__all__ = ["SGD", "Adam", "Optimizer", "optimizer", "rate_for", "schedule"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


State = dict[str, Tensor]

_fusing: ContextVar[bool] = ContextVar("fusing", default=True)


@contextmanager
def unfused() -> Iterator[None]:
    """Use plain operations in updates, which a compiler can fuse with the rest of the step."""
    token = _fusing.set(False)
    try:
        yield
    finally:
        _fusing.reset(token)


@dataclass(frozen=True)
class Adam:
    """m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  θ ← θ − η m̂ / (√v̂ + ε)   (Kingma & Ba, 2015)."""

    moments: ClassVar[tuple[str, ...]] = ("m", "v")  # kept for each tensor

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, params: State) -> State:
        return _zeros("m", params) | _zeros("v", params)

    def update(
        self, params: State, grads: State, state: State, rate: Tensor, t: Tensor,
        owned: bool = False,
    ) -> State:  # fmt: skip
        """The entries of the state that change: the named tensors and their moments. If `owned`,
        the tensors may be overwritten."""
        m, v = ([state[f"optim.{kind}.{name}"] for name in params] for kind in ("m", "v"))
        single = all(value.dtype == torch.float32 for value in params.values())
        if rate.ndim == 0 and single and _fusing.get():
            return self._fused(params, grads, m, v, rate, t, owned)
        step = t.to(rate.dtype) + 1
        first = 1 - self.beta1**step
        second = (1 - self.beta2**step).sqrt()
        size = rate * (second / first)  # the bias corrections, moved into the step size
        new: State = {}
        for (name, value), own_m, own_v in zip(params.items(), m, v, strict=True):
            grad = grads[name]
            own_m = torch.lerp(own_m, grad, 1 - self.beta1)
            own_v = torch.addcmul(own_v * self.beta2, grad, grad, value=1 - self.beta2)
            denominator = own_v.sqrt().add_(self.eps * second)
            new[name] = value - _like(size, value) * (own_m / denominator)
            new |= {f"optim.m.{name}": own_m, f"optim.v.{name}": own_v}
        return new

    def _fused(
        self, params: State, grads: State, m: list[Tensor], v: list[Tensor], rate: Tensor,
        t: Tensor, owned: bool,
    ) -> State:  # fmt: skip
        """The same update in one kernel, with a single pass over memory."""
        own = (lambda values: values) if owned else (lambda values: [x.clone() for x in values])
        values, m, v = own(list(params.values())), own(m), own(v)
        self.update_(values, [grads[name] for name in params], [m, v], rate, t)
        new = dict(zip(params, values, strict=True))
        for name, own_m, own_v in zip(params, m, v, strict=True):
            new |= {f"optim.m.{name}": own_m, f"optim.v.{name}": own_v}
        return new

    def update_(
        self, values: list[Tensor], grads: list[Tensor], moments: Sequence[list[Tensor]],
        rate: Tensor, t: Tensor, decay: float = 0.0,
    ) -> None:  # fmt: skip
        """The same in place, for lists of contiguous tensors. `decay` times the values is added to
        the gradients."""
        m, v = moments
        torch._fused_adam_(
            values, grads, m, v, [], [t.to(torch.float32) + 1] * len(values), lr=rate,
            beta1=self.beta1, beta2=self.beta2, weight_decay=decay, eps=self.eps, amsgrad=False,
            maximize=False,
        )  # fmt: skip


@dataclass(frozen=True)
class SGD:
    """u ← μu + g,  θ ← θ − ηu."""

    momentum: float = 0.9

    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept for each tensor."""
        return ("u",) if self.momentum else ()

    def init(self, params: State) -> State:
        return _zeros("u", params) if self.momentum else {}

    def update(
        self, params: State, grads: State, state: State, rate: Tensor, t: Tensor,
        owned: bool = False,
    ) -> State:  # fmt: skip
        new: State = {}
        for name, value in params.items():
            u = grads[name]
            if self.momentum:
                u = torch.add(u, state[f"optim.u.{name}"], alpha=self.momentum)
                new[f"optim.u.{name}"] = u
            new[name] = value - _like(rate, value) * u
        return new

    def update_(
        self, values: list[Tensor], grads: list[Tensor], moments: Sequence[list[Tensor]],
        rate: Tensor, t: Tensor, decay: float = 0.0,
    ) -> None:  # fmt: skip
        """The same in place, as `Adam.update_`. The gradients are overwritten."""
        for i, (value, grad) in enumerate(zip(values, grads, strict=True)):
            if decay:
                grad.add_(value, alpha=decay)
            if self.momentum:
                grad = moments[0][i].mul_(self.momentum).add_(grad)
            value.addcmul_(grad, rate.to(value.dtype), value=-1.0)


def _zeros(kind: str, params: State) -> State:
    return {f"optim.{kind}.{name}": torch.zeros_like(value) for name, value in params.items()}


def _like(rate: Tensor, value: Tensor) -> Tensor:
    """A rate [] unchanged; a rate [M, 1] with as many axes as the value."""
    return rate if rate.ndim == 0 else rate.reshape(-1, *(1,) * (value.ndim - 1)).to(value.dtype)


Optimizer = Adam | SGD


FEWEST_SLOWER = 100_000  # trained weights of a network, from which the default rate is smaller


def rate_for(net: nn.Module) -> tuple[float, str]:
    """The factor of a method's default learning rate with Adam, and the schedule, for a network.

    With Adam, a weight moves by about the rate per step, whatever its gradient. In a wide layer the
    moves of many weights add up, so a rate of 0.01, which suits small networks, makes large ones
    diverge. The rule is one by kind:

    =========================================  ======  =============
    trained weights                            factor  schedule
    =========================================  ======  =============
    fewer than 100,000                         1       cosine
    more; most layers are normalised by row    0.03    warmup-cosine
    more; any other                            0.1     warmup-cosine
    =========================================  ======  =============

    Normalised by row: layers of attention, or more layer normalisations than convolutions, as in
    transformers and mixers.

    Parameters
    ----------
    net : nn.Module
        The network.

    Returns
    -------
    tuple of float and str
        The factor, and the name of the schedule.
    """
    size = sum(p.numel() for p in net.parameters() if p.requires_grad)
    if size < FEWEST_SLOWER:
        return 1.0, "cosine"
    kinds = [type(module) for module in net.modules()]
    names = [kind.__name__ for kind in kinds]
    by_row = sum(name.endswith(("LayerNorm", "RMSNorm")) for name in names)
    convolutions = sum(issubclass(kind, _ConvNd) for kind in kinds)
    attention = any(issubclass(kind, nn.MultiheadAttention) for kind in kinds)
    if attention or by_row > convolutions:
        return 0.03, "warmup-cosine"
    return 0.1, "warmup-cosine"


def optimizer(spec: str | Optimizer) -> Optimizer:
    if isinstance(spec, Adam | SGD):
        return spec
    known: dict[str, Callable[[], Optimizer]] = {"adam": Adam, "sgd": SGD}
    if spec not in known:
        raise MethodError(f"optimizer must be one of {sorted(known)} or an object, not {spec!r}")
    return known[spec]()


def schedule(spec: str | Callable[[float], float], steps: int) -> Tensor:
    """Multipliers of the learning rate for each step, [steps].

    Parameters
    ----------
    spec : str or callable
        "constant", "cosine" (to zero) or "linear" (to zero), each also with the prefix "warmup-"
        for a linear rise over the first 5 %; or a function of the fraction of steps done.
    steps : int
        The number of steps.
    """
    at = torch.arange(steps, dtype=torch.float64) / max(1, steps)
    if callable(spec):
        return torch.tensor([_multiplier(spec, float(s)) for s in at], dtype=torch.float64)
    if not isinstance(spec, str):
        raise MethodError(f"schedule must be a name or a function, not {spec!r}")
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


def _multiplier(spec: Callable[[float], float], done: float) -> float:
    """The value of a user's schedule, checked to be a finite number."""
    value = spec(done)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MethodError(f"schedule must give a finite number; at {done:g} of the way: {value!r}")
    return number
