"""Checkpoints of a fit: what is saved between two steps, and gone on from bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn

from doxa import store
from doxa.driver.options import Options
from doxa.driver.progress import Progress
from doxa.engine import Engine
from doxa.errors import MethodError, StoreError
from doxa.method import Run, Stage

log = logging.getLogger("doxa")


def save(run: Run, options: Options, at: Progress, stage: Stage | None = None) -> None:
    """All that changes; of a stage that records parts of its steps, how they are executed."""
    assert options.checkpoint is not None
    recorded = None if stage is None else stage.recorded
    at.recorded = None if recorded is None else recorded.memory()
    if isinstance(at.kept, store.DrawsFile):
        at.kept.sync()  # before the checkpoint that counts on them
    tensors, progress = at.to_checkpoint()
    engine = run.engine  # what of it decides the bits of a result
    meta = {
        "fingerprint": options.fingerprint, "progress": progress,
        "engine": {"kind": engine.kind, "native": engine.native, "chunk": engine.chunk},
    }  # fmt: skip
    options.checkpoint.save(at.done, tensors, meta)


def stop(run: Run, options: Options, at: Progress, stage: Stage | None = None) -> NoReturn:
    """Act on Ctrl-C: between steps, so that what is saved resumes bit for bit."""
    if options.checkpoint is not None:
        try:
            save(run, options, at, stage)
            log.warning("stopped at step %d; checkpoint written, fit again to resume", at.done)
        except StoreError as error:
            log.error("stopped at step %d without a checkpoint: %s", at.done, error)
    raise KeyboardInterrupt


def resumed(run: Run, found: store.Checkpoint) -> Progress:
    """Where a fit stood."""
    log.info("resuming at step %d", found.step)
    tensors = {k: v.to(run.device) for k, v in found.tensors.items()}
    with store.decoding(f"the checkpoint of step {found.step}"):
        return Progress.from_checkpoint(tensors, found.meta["progress"])


def saved_engine(engine: Engine, found: store.Checkpoint, place: object) -> Engine:
    """The engine that wrote the checkpoint: of it, what decides the bits of a result."""
    with store.decoding(place):
        saved = found.meta["engine"]
        if not (
            saved.keys() == {"kind", "native", "chunk"}
            and saved["kind"] in ("stack", "loop")
            and isinstance(saved["native"], bool)
            and (saved["chunk"] is None or (type(saved["chunk"]) is int and saved["chunk"] > 0))
        ):
            raise ValueError(f"{saved!r} is no engine")
        return replace(engine, **saved)


def own_checkpoint(checkpoint: store.Checkpoints, fingerprint: str) -> store.Checkpoint | None:
    """The newest checkpoint, if there is one; another fit's is an error."""
    found = checkpoint.latest()
    if found is not None and found.meta.get("fingerprint") != fingerprint:
        raise MethodError(
            "the checkpoint belongs to another fit (other data, method, seed or members): "
            "use another folder, or remove it to start over"
        )
    return found
