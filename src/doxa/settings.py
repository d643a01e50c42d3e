"""Settings of `fit` in groups: how to train, where to compute, where to keep checkpoints.

    doxa.fit(net, data, "map", training=doxa.Training(steps=2000, lr=1e-3),
             compute=doxa.Compute(device="cuda", precision="bfloat16"),
             checkpoint=doxa.Checkpoint("run/", every=60.0))

Each field of a group is also a flat argument of `fit`: `steps=2000` and
`training=Training(steps=2000)` mean the same. A setting that is given both ways is an error. A
group can be stored and used for several fits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from doxa.errors import MethodError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained. The fields are those arguments of `doxa.fit`.

    Parameters
    ----------
    batch_size : int, optional
        Rows per step. Default: the method's.
    steps : int, optional
        Optimisation steps. Give `steps` or `epochs`, not both. Default: the method's.
    epochs : float, optional
        Passes over the training rows.
    lr : float, optional
        Learning rate. Default: the method's.
    schedule : str or callable
        "constant", "cosine", "linear", or a function of the share of steps done.
    optimizer : str or Optimizer
        For example "adam".
    patience : int
        How many evaluations on held-out rows without improvement end the training.

    Examples
    --------
    >>> import doxa
    >>> doxa.Training(steps=500, lr=1e-2)
    Training(steps=500, lr=0.01)
    """

    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    schedule: Any = "cosine"
    optimizer: Any = "adam"
    patience: int = 20

    def __repr__(self) -> str:
        return _changed(self)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and how tensors are computed. The fields are those arguments of `doxa.fit`.

    Parameters
    ----------
    device : torch.device or str, optional
        Default: the network's device.
    dtype : torch.dtype, optional
        Default: the network's floating-point type.
    precision : {"full", "bfloat16"}
        Precision of the network's products in training.
    engine : str or Engine
        "auto", or "stack" / "loop" with ":eager", ":traced", ":compiled" or ":graph".
    draws_budget : int, optional
        Bytes of memory for the draws that a sampler keeps; the rest is kept on disk.

    Examples
    --------
    >>> import doxa
    >>> doxa.Compute(device="cpu")
    Compute(device='cpu')
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    precision: str = "full"
    engine: Any = "auto"
    draws_budget: int | None = None

    def __repr__(self) -> str:
        return _changed(self)


@dataclass(frozen=True)
class Checkpoint:
    """Where a fit is saved while it runs, and how often.

    Parameters
    ----------
    folder : str or Path
        A fit that finds its own checkpoint there continues from it.
    every : float
        Seconds between two checkpoints.

    Examples
    --------
    >>> import doxa
    >>> doxa.Checkpoint("run/", every=60.0)
    Checkpoint(folder='run/', every=60.0)
    """

    folder: str | Path
    every: float = 30.0


def _changed(group: Any) -> str:
    """The group with the fields that differ from their defaults."""
    given = [f for f in fields(group) if getattr(group, f.name) != f.default]
    inner = ", ".join(f"{f.name}={getattr(group, f.name)!r}" for f in given)
    return f"{type(group).__name__}({inner})"


def grouped(function: Callable[P, R]) -> Callable[P, R]:
    """For `fit`: the fields of groups become flat arguments before it is called.

    A flat argument counts as given where it is passed, whatever its value; a field of a group where
    it differs from its default.
    """
    default = inspect.signature(function).parameters

    @wraps(function)
    def flat(*args: P.args, **given: P.kwargs) -> R:
        options: dict[str, Any] = given
        for name, kind in (("training", Training), ("compute", Compute)):
            group = options.pop(name, None)
            if group is None:
                continue
            if not isinstance(group, kind):
                raise MethodError(f"{name} must be doxa.{kind.__name__}(...), not {group!r}")
            for field in fields(group):
                value = getattr(group, field.name)
                if value == field.default:
                    continue
                if field.name in options:
                    raise MethodError(
                        f"{field.name} is given twice: as {field.name}={options[field.name]!r} and "
                        f"in {name}={group!r}; give it once"
                    )
                options[field.name] = value
        place = options.get("checkpoint")
        if isinstance(place, Checkpoint):
            if "checkpoint_every" in options:
                raise MethodError(
                    f"checkpoint_every is given twice: as {options['checkpoint_every']!r} and in "
                    f"checkpoint={place!r}; give it once"
                )
            options |= {"checkpoint": place.folder, "checkpoint_every": place.every}
        return function(*args, **options)

    assert {f.name for kind in (Training, Compute) for f in fields(kind)} <= set(default)
    return flat
