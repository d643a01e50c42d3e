"""The room "Label": the queries of active learning sessions, answered by a person.

A page sees the open rows of a session: their cells, or their images. A label is entered as
`doxa active label --answer` does it, under the lock of the session and only if its row is still
open: a shell and several pages may answer at the same time. `undo` takes the last label back, until
a fit has used it. `next` fits and chooses rows, as `doxa active next` does.

Why a row was chosen: what the posterior that chose it predicts there, its score by the acquisition,
and its place among all rows that had no label then.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from doxa.app.active.session import Session, go_on
from doxa.app.figures import encode
from doxa.app.fitting import load_run
from doxa.decide.select import score
from doxa.errors import DataError, DoxaError
from doxa.tables.predictions import columns

MOST_SHOWN = 60  # open rows at a time
MOST_SCORED = 5000  # rows; of larger pools only the open rows are scored, without their place
_LONGEST_CELL = 20_000  # characters: a row may be a text to read
_JOINT = "batch_bald"

_folders: list[Path] = []
_net: list[str | None] = [None]
_sessions: dict[int, Session] = {}
_reasons: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}  # by session and labels of a fit


def begin(given: dict[str, Any]) -> None:
    """Take the folders that the command line has named."""
    _folders[:] = [Path(path) for path in given["sessions"]]
    _net[0] = given.get("net")
    _sessions.clear()
    _reasons.clear()


def facts() -> dict[str, Any]:
    """The names of the sessions; nothing is opened."""
    return {"sessions": [path.resolve().name for path in _folders]}


def warm_up() -> Iterator[Callable[[], object]]:
    """There is nothing to prepare: a session is read when a page shows it."""
    return iter(())


def _session(number: Any) -> Session:
    """The session of a number; its pool is read once, its labels each time."""
    if type(number) is not int or not 0 <= number < len(_folders):
        raise DataError(f"sessions have the numbers 0 to {len(_folders) - 1}, not {number!r:.40}")
    if number not in _sessions:
        _sessions[number] = go_on(_folders[number], _net[0])
    session = _sessions[number]
    session.refresh()
    return session


def state(asked: Any, call: Any) -> dict[str, Any]:
    """What a page shows: the open rows, why they were chosen, counts, and the curve."""
    number = asked.get("session")
    session = _session(number)
    book, pool = session.book, session.pool
    shown = book.asked[:MOST_SHOWN]
    why = reasons(number, session, shown)
    own = [row for row in book.unfitted if row not in pool.known]
    given = [str(label) for label in book.answers.values()]
    classes = None if pool.schema.classes is None else [str(one) for one in pool.schema.classes]
    return {
        "name": session.folder.resolve().name, "revision": session.revision,
        "target": pool.schema.target, "classes": classes,
        "counts": None if classes is None else [given.count(one) for one in classes],
        "rows": book.rows, "answered": len(book.answers), "open": len(book.asked),
        "free": len(book.free), "by": session.facts["by"], "method": session.facts["method"],
        "count": session.facts["count"],
        "queries": [query(session, row) | {"why": why.get(row)} for row in shown],
        "undo": None if not own else {
            "name": pool.ids[own[-1]], "label": str(book.answers[own[-1]]),
        },
        "curve": book.rounds,
    }  # fmt: skip


def query(session: Session, row: int) -> dict[str, Any]:
    """A row as a person sees it: cells by name, or an image as PNG."""
    pool = session.pool
    found: dict[str, Any] = {"name": pool.ids[row], "place": pool.places[row]}
    if pool.images is not None:
        png = base64.b64encode(encode(pool.images[row])).decode("ascii")
        return found | {"image": f"data:image/png;base64,{png}"}
    cells = pool.shown.iloc[row]
    return found | {"cells": [[str(name), _text(cells[name])] for name in pool.shown.columns]}


def _text(cell: Any) -> str:
    if cell is None or cell != cell:
        return ""
    return (f"{cell:.12g}" if isinstance(cell, float) else str(cell))[:_LONGEST_CELL]


def reasons(number: int, session: Session, rows: list[int]) -> dict[int, dict[str, Any]]:
    """Of rows that a fit has chosen: what it predicts there, the score, and the place by it.

    The scores are those by which `doxa active next` chose: of all rows without a label then. Rows
    that were chosen at random, and rows that were opened again, have no reason."""
    book, pool = session.book, session.pool
    run = session.folder / "run"
    if not book.rounds or session.facts["by"] == "random" or not run.is_dir():
        return {}
    key = number, book.fitted
    if any(row not in _reasons.get(key, {}) for row in rows):
        try:
            posterior, schema = load_run(run, session.net)
        except DoxaError:  # the run is for predictions; a session does not need it
            return {}
        used = set(list(book.answers)[: book.fitted])
        free = [row for row in range(book.rows) if row not in used]
        whole = len(free) <= MOST_SCORED
        scored = np.array(free if whole else [row for row in rows if row not in used], dtype=int)
        if not len(scored):
            return {}
        by, x = session.facts["by"], pool.x[scored]
        scores = None if by == _JOINT else score(posterior, x, by).double().numpy()
        order = [] if scores is None or not whole else np.argsort(-scores, kind="stable").tolist()
        places = {at: k + 1 for k, at in enumerate(order)}
        found = columns(posterior.predict(x), schema)
        _reasons.clear()
        _reasons[key] = {
            int(row): {
                "predicted": {name: _plain(values[k]) for name, values in found.items()},
                "score": None if scores is None else float(scores[k]),
                "place": places.get(k), "of": len(free),
            }
            for k, row in enumerate(scored)
        }  # fmt: skip
    return {row: _reasons[key][row] for row in rows if row in _reasons.get(key, {})}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float | np.floating) else str(value)


def answer(asked: Any, call: Any) -> dict[str, Any]:
    """Enter the label of one row. `entered` is False, with the reason, if the row is not open."""
    session = _session(asked.get("session"))
    name, label = asked.get("row"), asked.get("label")
    if not (isinstance(name, str) and isinstance(label, str | int | float)):
        raise DataError("an answer is the name of a row, and a label")
    problem = ""
    try:
        entered = session.take([(name, str(label))], partial=True)
    except DataError as error:
        entered, problem = 0, str(error)
    return state(asked, call) | {"entered": bool(entered), "problem": problem}


def undo(asked: Any, call: Any) -> dict[str, Any]:
    """Take the label of a row back: `row` is the one that the page shows as the last."""
    session = _session(asked.get("session"))
    name = asked.get("row")
    if not isinstance(name, str):
        raise DataError("undo names a row")
    session.undo(name)
    return state(asked, call)


def choose(asked: Any, call: Any) -> dict[str, Any]:
    """Fit, and choose the next rows."""
    session = _session(asked.get("session"))
    if not session.book.asked:
        call.check()
        how = session.ask(None)
        return state(asked, call) | {"how": how}
    return state(asked, call) | {"how": "still open"}


TASKS = {"state": state, "answer": answer, "undo": undo, "next": choose}
