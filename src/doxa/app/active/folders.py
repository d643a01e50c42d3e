"""A folder of pictures, one a file, packed into the one file that a campaign keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from doxa.app.cells import Array
from doxa.errors import DataError, DoxaError, StoreError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp")
NUMBERS = ".npy"
_GREY = ("1", "L", "LA")  # Pillow's modes; the others become RGB
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


def pack(folder: Path, packed: Path) -> Path:
    """The pictures of a folder in the order of their names, as `x` [N, H, W] or [N, H, W, 3] and
    `names` [N] of a .npz file. Other files, hidden ones and folders in it are left alone."""
    kinds = (*PICTURES, NUMBERS)
    files = sorted(
        path for path in folder.iterdir()
        if path.suffix.lower() in kinds and path.is_file() and not path.name.startswith(".")
    )  # fmt: skip
    if not files:
        raise DataError(f"{folder} holds no picture: {', '.join(kinds)} files, one a picture")
    first = _pixels(files[0])
    pixels = np.empty((len(files), *first.shape), first.dtype)
    for i, path in enumerate(files):
        own = _pixels(path)
        if own.shape != first.shape or own.dtype != first.dtype:
            raise DataError(
                f"{path} is {_words(own)}, and {files[0].name} is {_words(first)}: bring all "
                "pictures to one size and one kind, grey or coloured"
            )
        pixels[i] = own
    try:
        packed.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(packed, x=pixels, names=np.array([path.name for path in files]))
    except OSError as error:
        raise StoreError(f"{packed} cannot be written: {error.strerror or error}") from error
    return packed


def _words(pixels: Array) -> str:
    return f"{'×'.join(map(str, pixels.shape))} of {pixels.dtype}"


def _pixels(path: Path) -> Array:
    """One picture, [H, W] or [H, W, 3]."""
    try:
        if path.suffix.lower() == NUMBERS:
            found = np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        else:
            found = _read(path)
    except DoxaError:
        raise
    except Exception as error:  # whatever NumPy and Pillow raise of a file that is damaged
        raise DataError(f"{path} cannot be read as a picture: {error}") from error
    one = found[0] if found.ndim == 3 and found.shape[0] == 1 else found
    shaped = one.ndim == 2 or (one.ndim == 3 and one.shape[2] == 3)
    if one.dtype.kind not in "buif" or not shaped or not one.size:
        raise DataError(f"{path} is {_words(found)}: a picture is [H, W] or [H, W, 3], of numbers")
    return one


def _read(path: Path) -> Array:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"{path} is read with Pillow, which comes with matplotlib: pip install doxa[plots]; "
            "or save each picture as a .npy file"
        ) from error
    with Image.open(path) as picture:
        if picture.mode not in (*_GREY, *_COLOUR):
            raise DataError(f"{path} has pixels of mode {picture.mode}: save it with 8 bits each")
        return np.asarray(picture.convert("L" if picture.mode in _GREY else "RGB"))
