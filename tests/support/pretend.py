"""A GPU that is pretended: its tensors lie in the host's memory, and its graphs are lists of calls.

A CUDA graph refuses what would wait for the host or copy from it: it takes a GPU to see that. Here
tensors claim to be on another device, so that a constant that was left on the host, or is sent from
there in a step, shows. `gpu` puts graphs in the place of those of `torch.cuda`: what runs while one
is captured is listed, and so is what a capture would refuse; a replay runs the list again, into the
same memory.

The device is "meta": the one besides the CPU whose gradients run in a process without a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import doxa
from doxa import checks

DEVICE = torch.device("meta")
_HOST = torch.device("cpu")
_SOURCE = str(Path(doxa.__file__).parent)

# What waits for the host: a value that is read, a shape that depends on values, a check of errors.
_WAITS = frozenset({
    "_local_scalar_dense", "item", "equal", "allclose", "is_nonzero", "nonzero", "masked_select",
    "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount", "histc",
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq",
    "_linalg_slogdet", "_linalg_det", "cholesky",
})  # fmt: skip
_COPIES = ("_to_copy", "copy_")
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_ALIASES = (torch.ops.aten._unsafe_view.default,)  # no view by name, and one in memory
_FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class Pretended(Tensor):
    """A tensor on the pretended device, and where its numbers really are."""

    held: Tensor
    is_meta = False  # type: ignore[assignment]  # there are numbers

    @staticmethod
    def __new__(cls, real: Tensor) -> Pretended:
        new = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device=DEVICE,
        )  # fmt: skip
        new.held = real
        return new

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    current: Graph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.refused: dict[str, None] = {}

    def replay(self) -> None:
        for call in self.calls:
            call()

    def refuse(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(_SOURCE)]
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1]]
        self.refused[f"{what} at {' from '.join(where)}"] = None

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.is_view or func in _ALIASES:
            return  # memory that stays where it is

        def call() -> None:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)

        self.calls.append(call)


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    asked = kwargs.get("device")
    here = any(isinstance(leaf, Pretended) for leaf in given)
    if not here and (asked is None or torch.device(asked) != DEVICE):
        return func(*args, **kwargs)
    name = func._schema.name.partition("::")[2]
    refuse = Graph.current.refuse if Graph.current is not None else (lambda what: None)
    if name in _WAITS:
        refuse(name)
    if name in _COPIES and _crosses(name, args, asked):
        refuse(f"{name} between devices")
    elif name in _INDEXES:
        indices = [i for i in args[1] if i is not None]
        if not all(isinstance(i, Pretended) for i in indices):
            refuse(f"{name} by numbers of the host")
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            refuse(f"{name} by a mask")
    elif any(not isinstance(leaf, Pretended) and leaf.ndim for leaf in given):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    own = lambda tree: tree_map(lambda t: t.held if isinstance(t, Pretended) else t, tree)  # noqa: E731
    real_args, real_kwargs = own(args), own(kwargs)
    if asked is not None:
        real_kwargs["device"] = _HOST
    out = func(*real_args, **real_kwargs)
    if Graph.current is not None:
        Graph.current.add(func, real_args, real_kwargs, out)
    if name == "copy_":
        return args[0]
    if name == "_to_copy" and asked is not None and torch.device(asked) != DEVICE:
        return out
    wrapped = tree_map(lambda t: Pretended(t) if isinstance(t, Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if here else wrapped


def _crosses(name: str, args: Any, asked: Any) -> bool:
    if name == "copy_":
        return isinstance(args[0], Pretended) != isinstance(args[1], Pretended)
    there = isinstance(args[0], Pretended)
    return asked is not None and (torch.device(asked) == DEVICE) != there


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Python(TorchFunctionMode):
    """Numbers that go between Python and the device, which no dispatcher sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_PYTHON:
            like = args[0].device if func is Tensor.new_tensor else None
            device = kwargs.pop("device", None) or like
            if isinstance(args[-1], Tensor):
                return args[-1].to(device or args[-1].device, kwargs.get("dtype"))
            return func(*args, **kwargs, device=_HOST).to(device or _HOST)
        if func is Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].cpu().tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Pretended):
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            where = tuple(
                torch.tensor(i, dtype=None if i else torch.long) if isinstance(i, list) else i
                for i in where
            )
            return func(args[0], where, *args[2:])
        return func(*args, **kwargs)


@contextmanager
def gpu(patch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """Fits with `device=DEVICE` run there, and graphs are captured: those that were."""
    captured: list[Graph] = []

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        Graph.current = graph
        try:
            yield
        finally:
            Graph.current = None
        if graph.refused:
            raise RuntimeError("refused: " + "; ".join(graph.refused))
        captured.append(graph)

    for name, value in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph, "graph": capture,
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, name, value)
    place = checks.place  # which knows that this device holds no numbers elsewhere
    patch.setattr(checks, "place", lambda spec: DEVICE if spec == DEVICE else place(spec))
    with _Python(), _Dispatch():
        yield captured
