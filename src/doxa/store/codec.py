"""Conversion of plain values and registered frozen dataclasses to JSON and back.

`decode(encode(v))` restores None, bool, int, float (also NaN and infinities), str, list, tuple,
dict (with any encodable keys), dense real tensors and arrays of any shape, `torch.dtype`,
`torch.device`, and instances of registered classes, nested in any way. NumPy scalars become Python
numbers, and other mappings become dicts. `encode` raises an error for all other values, so that a
value that cannot be restored is found when it is saved, and not when it is needed.

JSON has no tuple, NaN or tensor, so these become tagged objects, `{"type": "tuple", ...}`. The text
is strict JSON, which any reader accepts. Only small tensors should be encoded, such as a noise
vector or class weights. Large ones belong to the tensors of an artefact.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from doxa.errors import DoxaError, StoreError

Json = None | bool | int | float | str | list[Any] | dict[str, Any]
Where = tuple[Any, Any]  # (the enclosing place or None, the last part of the path)
T = TypeVar("T")

_RESERVED = frozenset({"float", "tuple", "dict", "tensor", "array", "dtype", "device"})
_classes: dict[str, type] = {}
_names: dict[type, str] = {}
_lazy: dict[str, str] = {}
_types: dict[type, dict[str, Any]] = {}  # a cache of the types of each class's fields


def register(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that makes instances storable. It is put above `@dataclass(frozen=True)`.

    Parameters
    ----------
    name : str
        The name under which instances are stored. It must be unique over all registered classes.
        It is part of the file format: the class itself may be renamed, but a change of `name` makes
        saved files unreadable.
    """

    def add(cls: type[T]) -> type[T]:
        if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise StoreError(f"{cls.__qualname__} cannot be registered: not a frozen dataclass")
        if name in _RESERVED:
            raise StoreError(f"{name!r} cannot be registered: the file format uses it itself")
        if any(field.name == "type" for field in dataclasses.fields(cls)):
            raise StoreError(f"{cls.__qualname__} cannot be registered: rename its field 'type'")
        known = _classes.get(name)
        if known is not None and _origin(known) != _origin(cls):
            raise StoreError(f"{name!r} is already registered, by {'.'.join(_origin(known))}")
        _classes[name] = cls
        _names[cls] = name
        return cls

    return add


def register_lazily(name: str, target: str) -> None:
    """Declare that `name` is registered by the class `target`, "module:Class". The module is
    imported only when it is needed."""
    if name in _RESERVED:
        raise StoreError(f"{name!r} cannot be registered: the file format uses it itself")
    if _lazy.setdefault(name, target) != target:
        raise StoreError(f"{name!r} is already registered, at {_lazy[name]}")


def encode(value: Any, where: str = "value") -> Json:
    """Convert a value to strict JSON. `where` is its name in error messages."""
    try:
        return _encode(value, (None, where))
    except RecursionError as error:
        raise StoreError(f"{where} contains itself or is nested too deeply") from error


def decode(data: Json, where: str = "value") -> Any:
    """Restore the value that was passed to `encode`. `where` is its name in error messages."""
    try:
        return _decode(data, (None, where))
    except RecursionError as error:
        raise StoreError(f"{where} is nested too deeply") from error


def _encode(value: Any, where: Where) -> Json:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"type": "float", "value": str(value)}
    if kind in _names:
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        encoded = {name: _encode(getattr(value, name), (where, f".{name}")) for name in fields}
        return {"type": _names[kind], **encoded}
    if kind is list:
        return [_encode(item, (where, i)) for i, item in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {"type": "tuple", "items": [_encode(x, (where, i)) for i, x in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, np.ndarray):
        return _encode_array(value, where)
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.dtype.itemsize <= 8:
        return _encode(value.item(), where)
    if isinstance(value, torch.dtype):
        return {"type": "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"type": "device", "name": str(value)}
    raise StoreError(
        f"{_place(where)} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: "
        "use plain values, or a frozen dataclass with @doxa.store.register(name)"
    )


def _encode_mapping(value: Mapping[Any, Any], where: Where) -> Json:
    items = [(key, _encode(item, (where, [key]))) for key, item in value.items()]
    if all(type(key) is str and key != "type" for key, _ in items):
        return dict(items)
    pairs = [[_encode(key, (where, [key])), item] for key, item in items]
    return {"type": "dict", "items": pairs}


def _encode_tensor(value: Tensor, where: Where) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise StoreError(
            f"{_place(where)} is a {value.layout} {value.dtype} tensor: not dense real"
        )
    flat = [_encode_number(item) for item in value.detach().cpu().flatten().tolist()]
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "dtype": dtype, "shape": [*value.shape], "data": flat}


def _encode_array(value: np.ndarray[Any, Any], where: Where) -> Json:
    if not _is_real(value.dtype):
        raise StoreError(f"{_place(where)} is an array of {value.dtype}, which cannot be stored")
    flat = [_encode_number(item) for item in value.ravel().tolist()]
    return {"type": "array", "dtype": value.dtype.str, "shape": [*value.shape], "data": flat}


def _encode_number(item: bool | int | float) -> bool | int | float | str:
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item


def _decode(data: Any, where: Where) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [_decode(item, (where, i)) for i, item in enumerate(data)]
    if not isinstance(data, dict):
        raise StoreError(f"{_place(where)} is a {type(data).__qualname__}, which is not JSON")
    if "type" not in data:
        return {key: _decode(item, (where, [key])) for key, item in data.items()}
    name = data["type"]
    if not isinstance(name, str) or name not in _RESERVED:
        return _decode_instance(str(name), data, where)
    try:
        return _decode_builtin(name, data, where)
    except DoxaError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise StoreError(f"{_place(where)} does not hold a valid {name}: {error!r}") from error


def _decode_builtin(name: str, data: dict[str, Any], where: Where) -> Any:
    if name == "float":
        if data["value"] not in ("nan", "inf", "-inf"):
            raise ValueError(f"{_shown(data['value'])} is written as a number")
        return float(data["value"])
    if name == "tuple":
        return tuple(_decode(item, (where, i)) for i, item in enumerate(data["items"]))
    if name == "dict":
        pairs = [(_decode(key, where), item) for key, item in data["items"]]
        return {key: _decode(item, (where, [key])) for key, item in pairs}
    if name == "device":
        if not isinstance(data["name"], str):
            raise TypeError("a device has a name")
        return torch.device(data["name"])
    if name == "dtype":
        return _torch_dtype(data["name"])
    shape = data["shape"]
    if not isinstance(data["data"], list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{_shown(shape)} is no shape")
    if math.prod(shape) != len(data["data"]):
        raise ValueError(f"{len(data['data'])} numbers for the shape {shape}")
    numbers = [_decode_number(item) for item in data["data"]]
    if name == "tensor":
        return torch.tensor(numbers, dtype=_torch_dtype(data["dtype"])).reshape(data["shape"])
    dtype = np.dtype(data["dtype"])
    if not _is_real(dtype):
        raise StoreError(f"{_place(where)}: {dtype} is not a dtype that is stored")
    return np.array(numbers, dtype=dtype).reshape(data["shape"])


def _decode_number(item: Any) -> bool | int | float:
    if isinstance(item, str) and item in ("nan", "inf", "-inf"):
        return float(item)
    if not isinstance(item, bool | int | float):
        raise TypeError(f"{_shown(item)} is no number")
    return item


@runtime_checkable
class _Renames(Protocol):
    """A class that can read fields by their names in earlier versions. Methods are such classes."""

    def current_settings(
        self, settings: Mapping[str, Any], given: Iterable[str] = (), warn: bool = True
    ) -> dict[str, Any]: ...


def _decode_instance(name: str, data: dict[str, Any], where: Where) -> Any:
    cls: Any = _find_class(name, where)
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    given = {key: item for key, item in data.items() if key != "type"}
    if isinstance(cls, _Renames):
        try:
            given = cls.current_settings(given, warn=False)
        except DoxaError as error:
            raise StoreError(f"{_place(where)}: {name!r} cannot be rebuilt: {error}") from error
    unknown = [key for key in given if key not in known]
    if unknown:
        raise StoreError(
            f"{_place(where)}: {name!r} has no field {unknown[0]!r}: saved by another version"
        )
    values = {key: _decode(item, (where, f".{key}")) for key, item in given.items()}
    hints = _hints(cls)
    for key, value in values.items():
        if not _fits(value, hints.get(key, Any)):
            raise StoreError(
                f"{_place((where, f'.{key}'))} is {_shown(value)}, which is no {hints[key]}"
            )
    try:
        return cls(**values)
    except DoxaError as error:
        raise StoreError(f"{_place(where)}: {name!r} cannot be rebuilt: {error}") from error
    except Exception as error:  # a class may raise any exception for unexpected values
        message = f"{name!r} cannot be rebuilt: {error!r}"
        raise StoreError(f"{_place(where)}: {message}") from error


def _hints(cls: type[Any]) -> dict[str, Any]:
    """The types of the fields of a class. Empty if they cannot be determined."""
    if cls not in _types:
        try:
            _types[cls] = typing.get_type_hints(cls)
        except (NameError, TypeError):  # the type is imported for type checkers only
            _types[cls] = {}
    return _types[cls]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value has the type of a field, as far as this can be checked. A tuple is
    accepted for a list, a list for a tuple, and a whole number for a float."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is typing.Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    kind = hint if origin is None else origin
    if hint is Any:
        return True
    if not isinstance(kind, type):
        return hint is not None or value is None
    if kind in (int, float) and isinstance(value, int | float):
        whole = isinstance(value, int)
        return not isinstance(value, bool) and (whole or kind is float) and _in_range(value, kind)
    if not isinstance(value, (list, tuple) if kind in (list, tuple, Sequence) else kind):
        return False
    if isinstance(value, list | tuple) and arguments:
        if kind is tuple and arguments[-1] is not Ellipsis:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(item, arguments[0]) for item in value)
    if isinstance(value, Mapping) and len(arguments) == 2:
        return all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())
    return True


def _in_range(value: float, kind: type) -> bool:
    """Whether a number is in range. The range is that of float64 for a float, and of 64 bits for a
    whole number."""
    if isinstance(value, float):
        return True
    return abs(value) < (1 << 64 if kind is int else 1 << 1000)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else type(value).__qualname__
    return text if len(text) <= 60 else f"{text[:60]}…"


def _find_class(name: str, where: Where) -> type[Any]:
    if name not in _classes and name in _lazy:
        module, _, attribute = _lazy[name].partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise StoreError(f"{_place(where)}: {name!r} needs {_lazy[name]}: {error}") from error
        if _names.get(cls) != name:
            raise StoreError(f"{_place(where)}: {_lazy[name]} is not registered as {name!r}")
    if name not in _classes:
        raise StoreError(
            f"{_place(where)}: unknown type {name!r}; import the module that registers it"
        )
    return _classes[name]


def _place(where: Where) -> str:
    """The path of a value as text, such as `meta['method'].noise[2]`. It is built for error
    messages only."""
    steps: list[str] = []
    place: Any = where
    while place is not None:
        place, step = place
        if isinstance(step, list):
            step = f"[{step[0]!r}]"
        steps.append(f"[{step}]" if isinstance(step, int) else step)
    return "".join(reversed(steps))


def _is_real(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"{name!r} is not a torch dtype")
    return dtype


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__
