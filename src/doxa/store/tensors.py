"""Tensors in one safetensors file, written and read in blocks.

    8 bytes    the length of the header, little-endian
    header     JSON, {name: {"dtype", "shape", "data_offsets"}}, padded with spaces
    data       the tensors one after the other

The safetensors library builds the whole file in memory. This is not possible for draws that do not
fit into memory. Large tensors come first, and the data begin at a multiple of 64 bytes, so that
mapped tensors are aligned as tensors in memory are.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.errors import CorruptedArtefact, StoreError

PIECE = 8 << 20  # bytes that are read or written at a time
_LARGE = 1 << 20  # bytes; smaller tensors are not mapped
_ALIGNED = 64
HEADER_MOST = 100_000_000  # bytes, the limit of the format
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in the order of the file. Raises an error for a tensor that cannot be
    stored."""
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
    """Write the tensors that `storable` returned, and return the SHA-256 of the file."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for piece in (_header(tensors), *_pieces(tensors)):
            digest.update(piece)
            whole(file, piece)
    return digest.hexdigest()


def whole(file: Any, piece: Any) -> None:
    """Write all bytes of `piece`, in several writes if necessary. A single write may write fewer
    bytes if the disk is nearly full."""
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
    """The numbers of a tensor as bytes. If they are contiguous on the CPU, nothing is copied."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return memoryview(b"")
    row = plain.as_strided((plain.numel(),), (1,))  # a tensor of one number may have any stride
    numbers: Any = row.view(torch.uint8).numpy()
    return memoryview(numbers)


def read_bytes(file: Any, size: int) -> bytearray:
    """The content of an open file of this size."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size and (count := file.readinto(view[done:])):
        done += count
    if done < size:
        raise CorruptedArtefact(f"{file.name} became shorter while it was read")
    return data


def read_whole(file: Any, size: int) -> tuple[Tensor, str]:
    """Read a file into memory: its bytes, and its SHA-256."""
    data = read_bytes(file, size)
    return (
        torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8),
        hashlib.sha256(data).hexdigest(),
    )


def read_mapped(file: Any, size: int) -> tuple[Tensor, str]:
    """Map a file: its bytes, which are read from disk when they are used, and its SHA-256."""
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
    return mapped(file.fileno(), size), digest.hexdigest()


def check_size(file: Any, size: int) -> None:
    """Check that the header describes as many bytes as the file has, before the file is read.
    Raises `ValueError`."""
    length = int.from_bytes(file.read(8), "little")
    if 0 < length <= min(HEADER_MOST, size - 8):
        file.seek(0)
        head = torch.frombuffer(read_bytes(file, 8 + length), dtype=torch.uint8)
        _entries(head, size)
    file.seek(0)


def parse(data: Tensor, share: bool = False) -> dict[str, Tensor]:
    """The tensors in the bytes of a file.

    Parameters
    ----------
    data : Tensor
        The bytes.
    share : bool
        Return large tensors as views of `data`. By default all are copies.

    Raises
    ------
    ValueError
        If a tensor has not as many bytes as its shape needs, or if the tensors do not fill the file
        one after the other, as the format requires.
    """
    entries, start = _entries(data, len(data))
    found = {}
    for name, dtype, shape, (first, last) in entries:
        part = data[start + first : start + last]
        large = share and len(part) >= _LARGE and (start + first) % dtype.itemsize == 0
        if dtype == torch.bool and bool((part > 1).any()):
            raise ValueError(f"tensor {name!r} holds truth values that are neither 0 nor 1")
        own = part if large else part.clone()
        empty = first == last
        found[name] = torch.empty(shape, dtype=dtype) if empty else own.view(dtype).reshape(shape)
    return found


_Entry = tuple[str, torch.dtype, list[int], tuple[int, int]]


def _check_places(entries: list[_Entry], size: int) -> None:
    """Check that each tensor has as many bytes as its shape needs, and that the tensors fill the
    file one after the other."""
    at = 0
    for name, dtype, shape, (first, last) in sorted(entries, key=lambda entry: entry[3]):
        need = math.prod(shape) * dtype.itemsize
        if first != at or last - first != need:
            raise ValueError(
                f"the header places tensor {name!r} of {need:,} bytes at {first:,} to {last:,}, "
                f"after {at:,} bytes in use"
            )
        at = last
    if at != size:
        raise ValueError(f"the tensors take {at:,} bytes, and the file has {size:,} for them")


def _entries(data: Tensor, size: int) -> tuple[list[_Entry], int]:
    """Read and check the header of a file of `size` bytes, of which `data` contains at least the
    header. Returns name, type, shape and offsets of each tensor, and the position where the data
    begin."""
    length = int.from_bytes(data[:8].numpy().tobytes(), "little") if len(data) >= 8 else 0
    if not 0 < length <= min(HEADER_MOST, size - 8):
        raise ValueError(f"the tensors' header declares a length of {length:,} bytes of {size:,}")
    header = json.loads(data[8 : 8 + length].numpy().tobytes(), object_pairs_hook=_once)
    if not isinstance(header, dict):
        raise ValueError("the tensors' header is no object")
    header.pop("__metadata__", None)
    entries = [_entry(name, entry) for name, entry in header.items()]
    _check_places(entries, size - 8 - length)
    return entries, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _entry(name: str, entry: Any) -> _Entry:
    fields = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    known = isinstance(dtype, str) and dtype in _TYPES and len(fields) == 3
    if not (known and _sizes(shape) and len(shape) <= 64 and _sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"tensor {name!r} is not described as the format requires")
    if math.prod(shape) >= 1 << 62:
        raise ValueError(f"the header gives tensor {name!r} the shape {shape}")
    return name, _TYPES[dtype], shape, (offsets[0], offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 1 << 62 for size in value
    )


def mapped(descriptor: int, size: int) -> Tensor:
    """The bytes of an open file as a memory-mapped tensor. Changes to the tensor stay in memory.

    The system loads pages of the file when they are used, and may drop them from memory again. No
    memory is reserved for changes. Otherwise a file larger than the memory could not be mapped.
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
