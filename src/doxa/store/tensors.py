"""Tensors in one safetensors file, written and read a piece at a time.

    8 bytes    the length of the header, little-endian
    header     JSON, {name: {"dtype", "shape", "data_offsets"}}, padded with spaces
    data       the tensors one after the other

The library that defines the format builds the whole file in memory, which draws that are on disk
because they do not fit there could not stand. Large tensors come first and the data begin at a
multiple of 64 bytes, so that what is mapped back lies as it would in memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.errors import StoreError

PIECE = 8 << 20  # bytes at a time
_LARGE = 1 << 20  # bytes from which on a tensor is worth mapping
_ALIGNED = 64
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in the order of the file; an error for one that cannot be stored."""
    for name, value in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise StoreError(f"{name!r} cannot be the name of a stored tensor")
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise StoreError(f"tensor {name!r} is a {type(value).__qualname__}, not a dense tensor")
        if value.dtype not in _NAMES:
            raise StoreError(f"tensor {name!r} is of {value.dtype}, which cannot be stored")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"{name!r} cannot be the name of a stored tensor") from error
    return dict(sorted(tensors.items(), key=_place))


def _place(item: tuple[str, Tensor]) -> tuple[bool, int, int, str]:
    name, value = item
    return value.nbytes < _LARGE, -value.element_size(), -value.nbytes, name


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write what `storable` gave; the file's SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for piece in (_header(tensors), *_pieces(tensors)):
            digest.update(piece)
            whole(file, piece)
    return digest.hexdigest()


def whole(file: Any, piece: Any) -> None:
    """All of it: a write may end early, at the disk's last free byte."""
    view = memoryview(piece).cast("B")
    while len(view):
        view = view[file.write(view) :]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, start = {}, 0
    for name, value in tensors.items():
        stop = start + value.nbytes
        entries[name] = {
            "dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, stop]
        }  # fmt: skip
        start = stop
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    for value in tensors.values():
        flat = bytes_of(value)
        for start in range(0, len(flat), PIECE):
            yield flat[start : start + PIECE]


def bytes_of(value: Tensor) -> Any:
    """A tensor's numbers as bytes; without a copy where it lies in order on the CPU."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return memoryview(b"")
    row = plain.as_strided((plain.numel(),), (1,))  # a single number may keep an odd stride
    numbers: Any = row.view(torch.uint8).numpy()
    return memoryview(numbers)


def read_mapped(path: Path) -> tuple[Tensor, str]:
    """A file's bytes, which stay on disk and are read as they are used, and its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
        return mapped(file.fileno(), os.fstat(file.fileno()).st_size), digest.hexdigest()


def parse(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a file's bytes: the large ones are parts of `data`, the others copies."""
    found = {}
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    entries = json.loads(data[8 : 8 + length].numpy().tobytes())
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
        part = data[start:stop]
        own = part if len(part) >= _LARGE and start % dtype.itemsize == 0 else part.clone()
        found[name] = (
            own.view(dtype).reshape(shape) if len(own) else torch.empty(shape, dtype=dtype)
        )
    return found


def mapped(descriptor: int, size: int) -> Tensor:
    """A file's bytes, as a tensor that can be changed: changes are its own and stay in memory.

    The system lends the pages it has in memory, and takes them back when it needs them. Nothing is
    reserved for changes: a file larger than the memory could not be mapped otherwise.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if os.name == "nt":
        area = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    else:
        unreserved = 0x4000 if sys.platform == "linux" else 0
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", unreserved)
        area = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.from_numpy(np.frombuffer(area, dtype=np.uint8))
