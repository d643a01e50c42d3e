"""The record of a saved run on its rows, and checks before a run is written or recalibrated."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from doxa.app.calibration import Calibration, conformal_level
from doxa.app.held_out import checksum
from doxa.app.tables import check_name
from doxa.errors import DataError, MethodError, StoreError


def check_new(target: Path) -> None:
    """An error if the folder exists: a run never replaces anything."""
    check_name(target)
    if target.exists():
        raise StoreError(f"{target} exists already; choose another folder with --out")
    check_place(target)


def check_place(target: Path) -> None:
    """Check, before the work, that the folder exists or can be created."""
    check_name(target)
    if target.is_dir():
        return
    if target.exists():
        raise StoreError(f"{target} is a file; --out is a folder")
    above = next(place for place in target.absolute().parents if place.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".doxa-", dir=above))
    except OSError as error:
        why = "it is a file" if above.is_file() else error.strerror
        raise StoreError(
            f"{target} cannot be made in {above}: {why}; choose another folder with --out"
        ) from error


def check_unseen(posterior: Any, run: Path, data: Path) -> str:
    """The checksum of the rows to calibrate on. An error if the fit or an earlier calibration has
    seen them, or if the run is conformal already."""
    level = conformal_level(posterior)
    if level is not None:
        raise MethodError(
            f"{run} is conformal already, at level {level:g}; another calibration would void its "
            "guarantee; calibrate the run that it was made from"
        )
    digest = checksum(data)
    if digest == posterior.metadata.get("source", {}).get("sha256"):
        raise DataError(
            f"{run} was fitted to {data.name} itself: calibration needs rows that the fit has not "
            "seen; give another file, or hold rows out with doxa fit --calibrate"
        )
    for step in posterior.metadata.get("calibration", ()):
        if step.get("sha256") == digest:
            raise DataError(f"{run} was calibrated on {data.name} before; give other rows")
    return digest


def record_calibration(
    posterior: Any, asked: Calibration, file: str, digest: str, rows: int, seed: int
) -> None:
    """Add a calibration to the run's metadata. Scores from before it are removed, because they no
    longer hold."""
    step = {
        "kind": asked.kind, "level": asked.level, "conformal_kind": asked.guarantee,
        "file": file, "sha256": digest, "rows": rows, "seed": seed,
    }  # fmt: skip
    posterior.metadata["calibration"] = [*posterior.metadata.get("calibration", ()), step]
    posterior.metadata.pop("held_out_scores", None)
