"""The tables people quote, one command each: `doxa bench uci`, `gap`, `ood`, …

A table knows its cells (`tasks`), how to show the ones that are known (`tables`), and the figures
that go with it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from doxa.app.bench.cells import Store
from doxa.app.bench.work import Task, compute
from doxa.errors import MethodError, did_you_mean
from doxa.store import write_text

__all__ = ["Store", "Task", "compute", "find", "names", "publish"]

# name → "module:object" with tasks(data, sets, methods, device, seed), tables(store) and
# figures(store, folder); imported when asked for.
_TABLES = {
    "uci": "doxa.app.bench.uci_tables:STANDARD",
    "gap": "doxa.app.bench.uci_tables:GAP",
    "mnist": "doxa.app.bench.image_tables:MNIST",
    "ood": "doxa.app.bench.image_tables:OOD",
    "cifar": "doxa.app.bench.image_tables:CIFAR",
    "cifar-frn": "doxa.app.bench.image_tables:CIFAR_FRN",
    "reference": "doxa.app.bench.image_tables:REFERENCE",
    "camvid": "doxa.app.bench.scene_tables:CAMVID",
}


def names() -> list[str]:
    return list(_TABLES)


def find(name: str) -> Any:
    """A table by its name."""
    if name not in _TABLES:
        raise MethodError(f"no benchmark {name!r}{did_you_mean(name, names())}")
    module, _, attribute = _TABLES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def publish(table: Any, store: Store, folder: Path) -> list[Path]:
    """Write what is known as Markdown, and its figures, beside the results."""
    text = "\n".join(each.markdown() for each in table.tables(store))
    return [write_text(folder / f"{table.name}.md", text), *table.figures(store, folder)]
