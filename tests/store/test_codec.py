"""`decode(encode(v))` is `v`, through real JSON text; everything else is refused by name."""

from __future__ import annotations

import json
import math
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from doxa.errors import StoreError
from doxa.store import decode, encode, register, register_lazily


@register("test-inner")
@dataclass(frozen=True)
class Inner:
    scale: float
    shape: tuple[int, ...] = ()


@register("test-outer")
@dataclass(frozen=True)
class Outer:
    inner: Inner
    parts: tuple[Inner, ...] = ()
    table: dict[str, Any] = field(default_factory=dict)
    noise: Tensor | None = None
    derived: int = field(init=False, default=7)


@dataclass(frozen=True)
class Unregistered:
    x: int = 0


@register("test-picky")
@dataclass(frozen=True)
class Picky:
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError("rank must be at least 1")


def through_text(value: Any) -> Any:
    # allow_nan=False: the text must be JSON that any reader accepts
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, with NaN equal to NaN and -0.0 unequal to 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, q) and same(x, y) for (k, x), (q, y) in zip(a.items(), b.items(), strict=True)
        )
    return bool(a == b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = (
    st.text()
    | st.just("type")
    | st.integers()
    | st.booleans()
    | st.tuples(st.integers(), st.text())
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys | st.just("type"), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert same(through_text(value), value)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(values)
def test_an_encoded_value_is_itself_plain_data(value: Any) -> None:
    # a caller may put encode(x) into a meta that is encoded again
    encoded = encode(value)
    assert same(through_text(encoded), encoded)


def test_nested_dataclasses_come_back_equal() -> None:
    value = Outer(
        Inner(math.inf, (1, 2)), (Inner(0.1), Inner(-0.0)), {"a": [None, (1,)], "type": 3}
    )
    assert through_text(value) == value
    assert encode(value.inner) == {
        "type": "test-inner",
        "scale": {"type": "float", "value": "inf"},
        "shape": {"type": "tuple", "items": [1, 2]},
    }
    assert through_text([value, {"k": value}]) == [value, {"k": value}]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.0, math.nan], [math.inf, -math.inf]]),
        torch.tensor([0.1, -0.0, 1e-310], dtype=torch.float64),
        torch.tensor([1.5, 3e38], dtype=torch.bfloat16),
        torch.tensor([1.5, 6e-8], dtype=torch.float16),
        torch.tensor(2**62 + 1),
        torch.tensor([2**64 - 1], dtype=torch.uint64),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.empty(2, 0, dtype=torch.int32),
        torch.tensor(7.0),
        torch.arange(6.0).reshape(2, 3).T,
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
)
def test_tensors_and_arrays_keep_bits_dtype_and_shape(tensor: Tensor) -> None:
    back = through_text(tensor)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    bits = torch.uint8
    assert torch.equal(back.reshape(-1).view(bits), tensor.reshape(-1).contiguous().view(bits))
    if tensor.dtype != torch.bfloat16:
        array = tensor.numpy()
        restored = through_text(array)
        assert restored.dtype == array.dtype
        assert np.array_equal(restored, array, equal_nan=array.dtype.kind == "f")


def test_a_learnable_tensor_is_stored_by_value() -> None:
    back = through_text(Outer(Inner(1.0), noise=torch.nn.Parameter(torch.ones(2))))
    assert torch.equal(back.noise, torch.ones(2))


def test_convenient_types_become_plain_ones() -> None:
    assert same(through_text(np.float32(0.5)), 0.5)
    assert same(through_text(np.int64(3)), 3)
    assert same(through_text(np.bool_(True)), True)
    assert same(through_text(torch.Size([2, 3])), (2, 3))
    assert same(through_text(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})
    assert through_text(torch.float64) is torch.float64
    assert through_text(torch.device("cpu")) == torch.device("cpu")


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        {1, 2},
        b"bytes",
        1 + 2j,
        Path("x"),
        Colour.RED,
        Unregistered(),
        Unregistered,
        torch.nn.Linear(1, 1),
        torch.tensor([1j]),
        torch.eye(2).to_sparse(),
        np.array([object()]),
        np.array(["a"]),
        np.longdouble(1),
    ],
    ids=lambda v: type(v).__name__,
)
def test_unknown_types_are_refused_where_they_are(value: Any) -> None:
    with pytest.raises(StoreError, match=r"meta\['rows'\]\[1\]\.table\['x'\] is a"):
        encode({"rows": [0, Outer(Inner(1.0), table={"x": value})]}, "meta")


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot be stored"):
        encode({Colour.RED: 1})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StoreError, match="contains itself"):
        encode(loop)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "os.system", "command": "true"}, "unknown type 'os.system'"),
        ({"type": ["list"]}, "unknown type"),
        ({"type": "test-inner", "scale": 1.0, "colour": 2}, "no field 'colour'"),
        ({"type": "test-inner"}, "cannot be rebuilt.*scale"),
        ({"type": "test-picky", "rank": 0}, "rank must be at least 1"),
        ({"type": "tuple"}, "valid tuple"),
        ({"type": "tensor", "dtype": "Tensor", "shape": [1], "data": [1]}, "not a torch dtype"),
        ({"type": "tensor", "dtype": "float32", "shape": [3], "data": [1]}, "valid tensor"),
        ({"type": "tensor", "dtype": "float32", "shape": [1], "data": ["x"]}, "valid tensor"),
        ({"type": "array", "dtype": "O", "shape": [1], "data": [1]}, "not a dtype"),
        ({"type": "dict", "items": [[[1], 2]]}, "valid dict"),
        ({"a": object()}, "not JSON"),
    ],
)
def test_bad_json_is_a_store_error(data: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        decode(data)


def test_a_field_added_since_takes_its_default() -> None:
    assert decode({"type": "test-inner", "scale": 2.0}) == Inner(2.0)


def test_registration_is_checked() -> None:
    with pytest.raises(StoreError, match="already registered"):
        register("test-inner")(Outer)
    with pytest.raises(StoreError, match="frozen dataclass"):
        register("test-thawed")(dataclass(type("Thawed", (), {})))
    with pytest.raises(StoreError, match="frozen dataclass"):
        register("test-plain")(type("Plain", (), {}))
    with pytest.raises(StoreError, match="itself"):
        register("tensor")(Inner)
    with pytest.raises(StoreError, match="field 'type'"):
        register("test-type")(
            dataclass(frozen=True)(type("Typed", (), {"__annotations__": {"type": str}}))
        )
    assert register("test-inner")(Inner) is Inner  # a reloaded module registers again


def test_lazy_registration_imports_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def late() -> types.ModuleType:
        module = types.ModuleType("doxa_test_late")
        cls = type("Late", (), {"__annotations__": {"x": int}, "__module__": "doxa_test_late"})
        module.Late = register("test-late")(dataclass(frozen=True)(cls))  # type: ignore[attr-defined]
        return module

    register_lazily("test-late", "doxa_test_late:Late")
    with pytest.raises(StoreError, match="doxa_test_late"):
        decode({"type": "test-late", "x": 1})
    monkeypatch.setitem(sys.modules, "doxa_test_late", late())
    assert decode({"type": "test-late", "x": 1}).x == 1
    with pytest.raises(StoreError, match="already registered"):
        register_lazily("test-late", "elsewhere:Late")
