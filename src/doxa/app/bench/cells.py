"""Results kept as data: a table is made of cells, and a cell is computed once.

A cell is one (table, data set, method, …) → a JSON-able result. It is written the moment it is
known, under a temporary name and then renamed, together with the machine, the versions, the seed
and the time it took; a table that was interrupted goes on where it stopped, and several processes
can share one folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doxa.noise import digest
from doxa.store import write_text

log = logging.getLogger(__name__)

Key = Mapping[str, str | int | float | bool]
Result = dict[str, Any]


class Store:
    """Cells as one JSON file each, in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, key: Key) -> Path:
        """`table-set-method….json`, readable, and unique through a digest of the whole key."""
        words = "-".join(_slug(value) for value in list(key.values())[:3])
        return self.folder / f"{words}-{_short(key)}.json"

    def get(self, key: Key) -> Result | None:
        """The stored result, or None; a file that cannot be read counts as absent."""
        try:
            cell = json.loads(self.path(key).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s): it is computed again", self.path(key), error)
            return None
        known = isinstance(cell, dict) and cell.get("key") == dict(key)
        return cell["result"] if known else None

    def cell(self, key: Key, make: Callable[[], Result]) -> Result:
        """The stored result, else what `make` gives, stored."""
        known = self.get(key)
        if known is not None:
            return known
        start = time.perf_counter()
        result = make()
        seconds = time.perf_counter() - start
        self.put(key, result, seconds)
        return result

    def put(self, key: Key, result: Result, seconds: float) -> None:
        cell = {"key": dict(key), "result": result, "seconds": seconds, **circumstances()}
        text = json.dumps(plain(cell), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(self.path(key), text + "\n")

    def cells(self, **wanted: Any) -> Iterator[dict[str, Any]]:
        """Whole cells whose key has these values, by file name."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                cell = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            key = cell.get("key", {}) if isinstance(cell, dict) else {}
            if key and all(key.get(name) == value for name, value in wanted.items()):
                yield cell


def circumstances() -> dict[str, Any]:
    """Where and with what a result was made."""
    gpu = torch.cuda.is_available()
    return {
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if gpu else None,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "doxa": _version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def plain(value: Any) -> Any:
    """Only what JSON has: tensors and arrays as lists, non-finite numbers as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _version() -> str:
    import doxa

    return doxa.__version__


def _short(key: Key) -> str:
    return f"{digest(json.dumps(plain(key), sort_keys=True)) & 0xFFFFFFFF:08x}"


def _slug(value: Any) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in str(value))[:40]
