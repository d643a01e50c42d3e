"""Checks of arguments: each function checks one value, and its errors name the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch

from doxa.errors import MethodError


def whole(name: str, value: Any, least: int = 1) -> int:
    """An integer of any integer type, at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise MethodError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return number


def budget(name: str, value: Any) -> int | None:
    """A number of bytes, or None for the default."""
    return None if value is None else whole(name, value, least=0)


def positive(name: str, value: Any) -> float:
    """A finite number above zero."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0) or isinstance(value, str | bool):
        raise MethodError(f"{name} must be a positive number, not {value!r}")
    return number


def seed(name: str, value: Any) -> int:
    """A whole number, positive or negative."""
    try:
        number = operator.index(value)
    except TypeError:
        raise MethodError(f"{name} must be a whole number, not {value!r}") from None
    return number


def seconds(name: str, value: Any) -> float:
    """A duration in seconds, which may be zero."""
    return 0.0 if isinstance(value, int | float) and value == 0 else positive(name, value)


def flag(name: str, value: Any) -> bool:
    """True or False; no other value is converted."""
    if not isinstance(value, bool | np.bool_):
        raise MethodError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def functions(name: str, value: Any) -> tuple[Any, ...]:
    """A list of callables."""
    if callable(value):
        raise MethodError(f"{name} must be a list of functions: {name}=[{_called(value)}]")
    try:
        each = tuple(value)
    except TypeError:
        each = (value,)
    for one in each:
        if not callable(one):
            raise MethodError(f"{name} must be a list of functions, but {one!r} is not callable")
    return each


def _called(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def place(spec: Any) -> torch.device:
    """A device that exists on this machine and can hold data."""
    try:
        device = torch.device(spec)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise MethodError(f"device {spec!r} cannot be used here: {reason}") from error
    if device.type == "meta":
        raise MethodError("the meta device holds no data; move the network to a real device")
    return device


def floating(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise MethodError(f"dtype must be a floating torch.dtype, not {dtype!r}")
    return dtype
