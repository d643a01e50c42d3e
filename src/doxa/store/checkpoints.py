"""Checkpoints of one run: the newest readable state, also after a power failure at any moment.

Each save is a new artefact `NUMBER-step-STEP` in one directory. It gets this name when it is
complete and synced. Then older checkpoints are removed, except the previous one. NUMBER counts
saves, not steps, so the last save is the newest checkpoint even if the run went back to an earlier
step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from doxa.errors import CorruptedArtefact, StoreError
from doxa.store.artefact import (
    make_directory,
    pack,
    read_artefact,
    readable_errors,
    remove_abandoned,
    sync,
    written_aside,
)
from doxa.store.draws import NAME as DRAWS

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{8,})-step-(\d+)")
_TEMPORARY = ".tmp-"


class Checkpoint(NamedTuple):
    """The result of `Checkpoints.latest`."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    path : str or Path
        A directory for these checkpoints only. It is created at the first save.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._good: str | None = None  # the newest checkpoint known to be readable
        self._number: int | None = None

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a checkpoint may have this name."""
        return _NAME.fullmatch(name) is not None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write a new checkpoint, then remove all older ones except the last readable one.

        Parameters
        ----------
        step : int
            The step of the run.
        tensors, meta
            As in `write_artefact`.

        Raises
        ------
        StoreError
            For example if the disk is full. The earlier checkpoints are then unchanged.
        """
        contents = pack(tensors, {"step": int(step), "meta": meta})
        with readable_errors("written", self.path):
            make_directory(self.path)
            if self._number is None:
                remove_abandoned(self.path, _TEMPORARY)
                names = self._names()
                self._number = _number(names[0]) if names else 0
                self._good = self._good or (names[0] if names else None)
            with written_aside(self.path, contents, _TEMPORARY) as fresh:
                name = self._rename(fresh, int(step))
            sync(self.path)
            self._remove_all_but({name, self._good})
        self._good = name

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose checksums match. None if there are no checkpoints.

        Damaged checkpoints are skipped with a warning. If all are damaged, `CorruptedArtefact` is
        raised, because a new start without a message would hide that a run was lost.
        """
        with readable_errors("read", self.path):
            while True:
                names = self._names() if self.path.exists() else []
                for name in names:
                    checkpoint = self._read(name)
                    if checkpoint is not None:
                        self._good = name
                        return checkpoint
                if not names:
                    return None
                if names == self._names():  # else a writer changed the checkpoints: try again
                    raise CorruptedArtefact(
                        f"every checkpoint in {self.path} is damaged; remove it to start afresh"
                    )

    def _read(self, name: str) -> Checkpoint | None:
        try:
            tensors, meta = read_artefact(self.path / name)
            step, facts = meta.get("step"), meta.get("meta")
            if type(step) is not int or step < 0 or not isinstance(facts, dict):
                raise CorruptedArtefact(f"{self.path / name} is no checkpoint")
        except CorruptedArtefact as error:
            logger.warning("skipped a damaged checkpoint: %s", error)
            return None
        except StoreError:
            if (self.path / name).exists():
                raise
            return None  # a writer has just removed it, so there are newer ones
        return Checkpoint(step, tensors, facts)

    def _rename(self, fresh: Path, step: int) -> str:
        assert self._number is not None
        while True:
            self._number += 1
            name = f"{self._number:08d}-step-{step}"
            try:
                os.rename(fresh, self.path / name)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # taken: another process saves here too
            else:
                return name

    def _names(self) -> list[str]:
        names = [name for name in os.listdir(self.path) if _NAME.fullmatch(name)]
        return sorted(names, key=_number, reverse=True)

    def _remove_all_but(self, kept: set[str | None]) -> None:
        for name in self._names():
            if name not in kept:  # renamed before removal: a checkpoint is never incomplete
                doomed = self.path / f"{_TEMPORARY}old-{name}"
                with contextlib.suppress(OSError):  # another process removes it too
                    os.rename(self.path / name, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def copy_newest(path: str | os.PathLike[str], to: Path) -> Path:
    """Copy the checkpoints in a folder, and the draws beside them, to another, and return it."""
    source = Path(path)
    with readable_errors("copied", source):
        for name in os.listdir(source) if source.is_dir() else ():
            if _NAME.fullmatch(name):
                shutil.copytree(source / name, to / name)
            elif name == DRAWS:
                shutil.copy2(source / name, to / name)
    return to


def _number(name: str) -> int:
    return int(name.split("-", 1)[0])
