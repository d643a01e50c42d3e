"""The tables that `doxa bench` computes: UCI regression, on standard splits (`uci`) and gap splits.

A table has a name, its cells (`tasks`), how the known ones are shown (`tables`), and the figures
that go with it. The tables of images are benchmarks of doxa itself and live in its repository,
outside the installed library; they use the same `Store`, `Task`, `compute` and `publish`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from doxa.app.bench.cells import Store, Table, Task, compute
from doxa.errors import MethodError, did_you_mean
from doxa.store import write_text

__all__ = ["Store", "Table", "Task", "compute", "find", "names", "publish", "store_of"]

# name → "module:object" with tasks(data, sets, methods, device, seed), tables(store) and
# figures(store, folder); imported when it is needed.
_TABLES = {
    "uci": "doxa.app.bench.uci_tables:STANDARD",
    "gap": "doxa.app.bench.uci_tables:GAP",
}
# Made by `benchmarks/images.py` of the repository.
_IMAGES = ("mnist", "ood", "cifar", "cifar-frn", "reference", "camvid")


def names() -> list[str]:
    """The tables of `doxa bench`."""
    return list(_TABLES)


def find(name: str) -> Any:
    """A table by its name.

    Raises
    ------
    MethodError : there is none; for a table of images the message says which command makes it.
    """
    if name in _IMAGES:
        raise MethodError(
            f"the table {name!r} is not part of the installed library: run `python -m "
            f"benchmarks.images {name}` in a checkout of the doxa repository; `doxa bench` "
            f"computes {' and '.join(names())}"
        )
    if name not in _TABLES:
        raise MethodError(f"no benchmark {name!r}{did_you_mean(name, names())}")
    module, _, attribute = _TABLES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def store_of(table: Any, folder: Path) -> Store:
    """The file that holds the cells of a table."""
    return Store(folder / f"{table.name}.jsonl")


def publish(table: Any, store: Store, folder: Path) -> list[Path]:
    """Write what is known as Markdown, and its figures, beside the results."""
    text = "\n".join(each.markdown() for each in table.tables(store))
    return [write_text(folder / f"{table.name}.md", text), *table.figures(store, folder)]
