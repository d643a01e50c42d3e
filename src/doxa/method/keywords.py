"""Keywords that nothing takes: an error that says where they belong, or what was meant.

What a method is about are its own settings, `doxa.HMC(draws=10)`; what every fit has are those of
`fit`, `doxa.fit(..., members=4)`. Each says so of what is the other's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from doxa.errors import DoxaError, UnknownSetting, did_you_mean
from doxa.registry import get_method

P = ParamSpec("P")
R = TypeVar("R")

_TAKEN: dict[str, tuple[str, ...]] = {}  # by functions that take a method, beside it


def keywords(**checks: Callable[[str, Any], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that takes a `method`: unknown keywords are an error with a suggestion, and
    what a person gives for those named here, other than the default, is checked first."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = signature.parameters
        _TAKEN[function.__name__] = tuple(known)

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            for name, value in given.items():
                if name not in known:
                    rest = {key: value for key, value in given.items() if key in known}
                    arguments = signature.bind_partial(*args, **rest).arguments
                    method = arguments.get("method", known["method"].default)
                    said = _not_ours(function.__name__, name, value, method, tuple(known))
                    raise UnknownSetting(said)
                if name in checks and value is not known[name].default:
                    given[name] = checks[name](name, value)
            return function(*args, **given)

        return checked

    return decorated


def _not_ours(function: str, name: str, value: Any, method: Any, known: Sequence[str]) -> str:
    said = f"doxa.{function} has no keyword {name!r}"
    cls = _class(method)
    own = [] if cls is None else list(inspect.signature(cls).parameters)
    if cls is not None and name in own:
        return f"{said}: it is a setting of the method, doxa.{cls.__name__}({name}={value!r})"
    return f"{said}{did_you_mean(name, [*known, *own])}"


def _class(method: Any) -> type | None:
    if isinstance(method, str):
        try:
            return get_method(method)
        except DoxaError:
            return None
    return method if isinstance(method, type) else type(method)


def check_settings(cls: type, values: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """The settings given to a method's class are its own."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name in parameters if name != "self"]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name, value in settings.items():
        if name in known:
            continue
        said = f"{cls.__name__} has no setting {name!r}"
        for function in sorted(_TAKEN):
            if name in _TAKEN[function]:
                said += f": give it to doxa.{function}(..., {name}={value!r})"
                raise UnknownSetting(said)
        raise UnknownSetting(f"{said}{did_you_mean(name, known)}")
    if len(values) > len(known) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise UnknownSetting(
            f"{cls.__name__} has {len(known)} settings, {len(values)} values were given: name them"
        )
