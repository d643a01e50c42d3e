"""A fit that was interrupted goes on by itself; another one is never continued, and never lost.

What a fit was asked is written beside its checkpoints before it begins. The same command finds it
and goes on: the result has the same bits as an uninterrupted one. A command that asks for something
else is refused, with what differs; `--overwrite` starts anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from doxa.app.fitting import ASKED, forget_checkpoint
from doxa.errors import StoreError
from doxa.store import write_text

_STEP = re.compile(r"\d+-step-(\d+)")
_OPTIONS = {"hidden": "--hidden", "settings": "--set"}


def facts(
    target: str, method: str, settings: Sequence[str], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """All that decides a fit: what `fitting.provenance` knows, and the rest of the command."""
    source = {"sha256": origin["source"]["sha256"]}
    return {
        "source": source, "versions": origin["versions"], "target": target, "method": method,
        "settings": list(settings), **origin["asked"],
    }  # fmt: skip


def said(found: int | None, asked: bool) -> str:
    """What to tell the user about the fit that `begin` found, if it `asked` to go on or not."""
    if found:
        return f"going on with the interrupted fit, from step {found}\n"
    if found == 0:
        return "the interrupted fit had no checkpoint yet: starting from the beginning\n"
    return "no checkpoint to go on from: starting from the beginning\n" if asked else ""


def begin(checkpoint: Path, asked: Mapping[str, Any], overwrite: bool = False) -> int | None:
    """Claim the checkpoints' folder for a fit that was asked this.

    Returns the step that an earlier, interrupted one has reached, 0 before its first checkpoint;
    None where there was none. With `overwrite` one that was begun without it is removed.
    """
    now = json.loads(json.dumps(asked))
    before, begun_anew = _read(checkpoint / ASKED)
    if before == now and (begun_anew or not overwrite):
        return reached(checkpoint)
    if overwrite:
        forget_checkpoint(checkpoint)
    elif before is not None and reached(checkpoint):
        raise StoreError(
            f"{checkpoint} holds an interrupted fit that was asked something else: "
            f"{'; '.join(_differences(before, now))}. Repeat that command to go on with it, use "
            "--overwrite to start anew, or choose another --out"
        )
    found = reached(checkpoint) or None
    write_text(checkpoint / ASKED, json.dumps({"asked": now, "overwrite": overwrite}, indent=1))
    return found


def reached(checkpoint: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    names = [path.name for path in checkpoint.iterdir()] if checkpoint.is_dir() else []
    steps = {name: int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    return steps[max(steps)] if steps else 0


@contextmanager
def kept(checkpoint: Path) -> Iterator[None]:
    """A fit that ends before its first checkpoint leaves nothing behind."""
    try:
        yield
    except BaseException:
        if not reached(checkpoint):
            forget_checkpoint(checkpoint)
        raise


def _read(path: Path) -> tuple[dict[str, Any] | None, bool]:
    """What a fit was asked, None where nobody knows; and whether with `--overwrite`."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved["asked"], dict):
            return None, False
        return saved["asked"], saved["overwrite"] is True
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None, False  # `fit` tells another fit's checkpoint by its fingerprint


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What was asked then and now, in the words of the command."""
    for name in {**before, **now}:
        then: Any = before.get(name)
        today: Any = now.get(name)
        if then == today:
            continue
        if name == "source":
            yield "the data file had other contents"
        elif name == "versions":
            yield from (f"{k} {v}, now {today.get(k)}" for k, v in then.items() if today[k] != v)
        else:
            option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
            yield f"{option} {_said(then)}, now {_said(today)}"


def _said(value: Any) -> str:
    if value in (None, [], ()):
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
