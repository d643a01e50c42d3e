"""Small images as PNG in a data: address, written with the standard library.

PNG (W3C, third edition): a signature, then chunks of length, type, data and CRC-32; each row of
pixels is preceded by its filter (0: none) and all rows are deflated together.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from doxa.app.report.charts.marks import Array
from doxa.app.report.markup import PNG
from doxa.errors import ShapeError

_GREY, _COLOUR = 0, 2


def data_png(pixels: Array) -> str:
    """[H, W] or [H, W, 3] of numbers in 0…1 (what lies outside is clipped, NaN is black)."""
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ShapeError(f"a picture is [H, W] or [H, W, 3], not {list(pixels.shape)}")
    levels = (np.nan_to_num(np.clip(pixels, 0.0, 1.0)) * 255.0).round().astype(np.uint8)
    height, width = levels.shape[:2]
    rows = levels.reshape(height, -1)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    kind = _GREY if pixels.ndim == 2 else _COLOUR
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(filtered, 9)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return PNG + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode("ascii")


def as_picture(row: Array, most: int = 64) -> Array | None:
    """One row of x as something to look at: [1 or 3, H, W] or [H, W]; None for anything else.
    Scaled to its own range, thinned to at most `most` pixels a side."""
    if row.ndim == 3 and row.shape[0] in (1, 3):
        row = row[0] if row.shape[0] == 1 else np.moveaxis(row, 0, 2)
    if row.ndim not in (2, 3) or (row.ndim == 3 and row.shape[2] != 3) or min(row.shape[:2]) < 4:
        return None
    step = max(1, -(-max(row.shape[:2]) // most))
    small = row[::step, ::step].astype(float)
    low, high = np.nanmin(small), np.nanmax(small)
    return (small - low) / (high - low) if high > low else np.zeros_like(small)
