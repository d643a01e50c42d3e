"""Pictures as PNG, written with the standard library.

PNG (W3C, third edition): a signature, then chunks of length, type, data and CRC-32. Each row of
pixels begins with its filter (0: none), and all rows are compressed together.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from doxa.errors import ShapeError

_COLOUR_TYPE = {1: 0, 3: 2}  # by channels: grey, RGB


def encode(pixels: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """The bytes of a PNG file.

    Parameters
    ----------
    pixels : array
        [H, W] or [H, W, 3]. Integers are levels from 0 to 255; floats are shares from 0 to 1, of
        which what lies outside is clipped and NaN is black.
    """
    table = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if table.ndim != 3 or table.shape[2] not in _COLOUR_TYPE:
        raise ShapeError(f"a picture is [H, W] or [H, W, 3], not {list(pixels.shape)}")
    if np.issubdtype(table.dtype, np.floating):
        table = (np.nan_to_num(np.clip(table, 0.0, 1.0)) * 255.0).round()
    height, width, channels = table.shape
    rows = table.reshape(height, -1).astype(np.uint8)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
