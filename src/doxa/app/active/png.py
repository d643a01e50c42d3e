"""A picture as a PNG file, for people who label images; nothing but zlib is needed."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from doxa.app.reading import Array

_COLOUR = {1: 0, 3: 2}  # channels: PNG's colour type, grey or RGB


def encode(pixels: Array) -> bytes:
    """[H, W] or [H, W, 3], uint8, as the bytes of a file."""
    table = pixels[:, :, None] if pixels.ndim == 2 else pixels
    height, width, channels = table.shape
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), table.reshape(height, -1).astype(np.uint8)], 1
    )  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
