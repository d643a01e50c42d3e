"""A text file written whole or not at all: results as JSON, tables as Markdown."""

from __future__ import annotations

import os
from pathlib import Path

from doxa.store.artefact import beside, make_directory, readable_errors, sync


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Replace a file by this text, atomically; its folder is made when missing."""
    target = Path(path)
    with readable_errors("written", target):
        make_directory(target.parent)
        temporary = beside(target, f".{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)
    return target
