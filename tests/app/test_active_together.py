"""Several commands and pages answer one session: no answer is lost, none is entered twice, and a
label is taken back only until a fit has used it."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from shell import doxa

from doxa.app.active.session import go_on, resume
from doxa.app.studio import label
from doxa.decide.active.labels import LabelState, change, load, read, save
from doxa.errors import DataError, DoxaError, StoreError

pd = pytest.importorskip("pandas")

QUICK = ("--method", "map", "--steps", 2, "--hidden", 4)


class Call:
    def check(self) -> None:
        pass


def session(folder: Path, rows: int, asked: int, by: str = "random", known: int = 0) -> Path:
    """A session with so many rows, of which some are open."""
    kinds = [["cat", "dog"][i % 2] if i < known else None for i in range(rows)]
    frame = pd.DataFrame({"a": [float(i % 17) for i in range(rows)], "kind": kinds})
    frame.to_csv(folder / "pool.csv", index=False)
    where = folder / "session"
    doxa(
        "active", "start", folder / "pool.csv", "--target", "kind", "--classes", "cat,dog",
        "--out", where, "--by", by, "--count", asked, *QUICK,
    )  # fmt: skip
    doxa("active", "next", where)
    return where


def book_of(folder: Path) -> LabelState:
    found = load(folder)
    assert found is not None
    return found[0][0]


def together(folder: Path, contested: int, batch: int, seed: int) -> None:
    """A shell and a page answer all open rows at the same time, with different labels; each has
    rows of its own, which a shell enters so many at a time, and both want the contested ones."""
    names = [str(row + 2) for row in book_of(folder).asked]
    random.Random(seed).shuffle(names)
    label.begin({"sessions": [str(folder)], "net": None})
    both, own = names[:contested], names[contested:]
    of_shell, of_page = own[::2], own[1::2]
    groups = [[name] for name in both]
    groups += [of_shell[i : i + batch] for i in range(0, len(of_shell), batch)]
    random.Random(seed + 1).shuffle(groups)
    queue = both + of_page
    random.Random(seed + 2).shuffle(queue)
    entered: list[dict[str, str]] = [{}, {}]
    writes = [0]
    wrong: list[BaseException] = []

    def shell() -> None:
        for group in groups:
            session = resume(folder)
            try:
                session.take(session.pairs([f"{name}=cat" for name in group]), partial=True)
            except DataError as error:
                assert "has an answer already" in str(error) or "no row is open" in str(error)
            else:
                entered[0].update(dict.fromkeys(group, "cat"))
                writes[0] += 1

    def page() -> None:
        for name in queue:
            found = label.answer({"session": 0, "row": name, "label": "dog"}, Call())
            if found["entered"]:
                entered[1][name] = "dog"

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (shell, page)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(280)
    assert wrong == []
    after = book_of(folder)
    assert after.asked == []
    assert len(after.answers) == len(names)  # none lost
    assert not entered[0].keys() & entered[1].keys()  # none twice
    assert {**entered[0], **entered[1]} == {str(r + 2): v for r, v in after.answers.items()}
    found = read(folder)
    assert found is not None
    assert found.revision == 2 + writes[0] + len(entered[1])  # begun, asked, and each write once


def test_forty_answers_from_a_shell_and_a_page(tmp_path: Path) -> None:
    together(session(tmp_path, 60, 40), 20, 2, 0)


@pytest.mark.slow
def test_a_thousand_answers_from_a_shell_and_a_page(tmp_path: Path) -> None:
    together(session(tmp_path, 1000, 1000), 60, 4, 1)


def test_a_write_of_what_is_no_longer_there_is_refused(tmp_path: Path) -> None:
    folder = session(tmp_path, 20, 4)
    old = resume(folder)
    new = resume(folder)
    name = new.pool.ids[new.book.asked[0]]
    new.take([(name, "cat")], partial=True)
    with pytest.raises(StoreError, match=r"revision 3, not 2"):
        old.save()
    assert list(book_of(folder).answers.values()) == ["cat"]
    old.take([(old.pool.ids[old.book.asked[1]], "dog")], partial=True)  # read again, under the lock
    assert sorted(book_of(folder).answers.values()) == ["cat", "dog"]
    with pytest.raises(DataError):
        change(folder, lambda books: books[0].answer({99: 1}))
    assert read(folder).revision == 4  # type: ignore[union-attr]


def test_rows_chosen_while_a_label_was_corrected_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = session(tmp_path, 30, 2, known=6)
    doxa("active", "label", folder, *(
        w for row in book_of(folder).asked for w in ("--answer", f"{row + 2}=cat")
    ))  # fmt: skip
    slow = go_on(folder, None)
    chosen = slow._chosen

    def meanwhile(*given: Any) -> Any:
        found = chosen(*given)
        doxa("active", "label", folder, "--correct", "--answer", "2=dog")
        return found

    monkeypatch.setattr(slow, "_chosen", meanwhile)
    with pytest.raises(StoreError, match="changed meanwhile"):
        slow.ask(2)
    assert book_of(folder).asked == []
    assert book_of(folder).answers[0] == "dog"


def test_a_sheet_that_is_filled_in_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = session(tmp_path, 30, 2)
    label.begin({"sessions": [str(folder)], "net": None})
    for row in book_of(folder).asked:
        assert label.answer({"session": 0, "row": str(row + 2), "label": "cat"}, Call())["entered"]
    slow = go_on(folder, None)
    chosen = slow._chosen

    def meanwhile(*given: Any) -> Any:
        found = chosen(*given)
        slow.sheet.write_text("line,kind\n2,dog\n")
        return found

    monkeypatch.setattr(slow, "_chosen", meanwhile)
    with pytest.raises(DataError, match="is kept"):
        slow.ask(2)
    assert slow.sheet.read_text() == "line,kind\n2,dog\n"
    assert len(book_of(folder).asked) == 2  # what was chosen is not lost


def test_undo_opens_a_row_until_a_fit_has_used_it(tmp_path: Path) -> None:
    folder = session(tmp_path, 30, 3, "max_entropy", known=6)
    asked = book_of(folder).asked
    assert len(asked) == 3
    assert "no label to take back" in doxa("active", "undo", folder, code=2)
    words = [w for row in asked for w in ("--answer", f"{row + 2}=cat")]
    doxa("active", "label", folder, *words)
    assert "is open again; its label was cat" in doxa("active", "undo", folder)
    book = book_of(folder)
    assert book.asked == [asked[2]]
    assert book.events == [{"event": "undone", "row": asked[2], "label": "cat"}]
    assert "came with the table" in doxa("active", "undo", folder, 2, code=2)
    assert "no label" in doxa("active", "undo", folder, asked[2] + 2, code=2)
    doxa("active", "label", folder, "--answer", f"{asked[2] + 2}=dog")
    doxa("active", "next", folder)  # a fit on nine labels
    assert "a fit has used all" in doxa("active", "undo", folder, code=2)
    assert "a fit has used the label" in doxa("active", "undo", folder, asked[0] + 2, code=2)
    assert len(book_of(folder).answers) == 9


def test_sessions_of_older_versions_have_revision_0(tmp_path: Path) -> None:
    from dataclasses import asdict

    from doxa import store

    page = asdict(LabelState(5, {1: 0}, [2])) | {"answers": [[1, 0]]}
    del page["events"]
    store.write_artefact(tmp_path / "state", {}, {"books": [page], "facts": {}})
    found = read(tmp_path)
    assert found is not None
    assert (found.revision, found.books[0].events) == (0, [])
    assert save(tmp_path, found.books, found.facts, 0) == 1


# ---- the room


def test_the_room_shows_what_the_session_has(tmp_path: Path) -> None:
    folder = session(tmp_path, 30, 3, "max_entropy", known=6)
    label.begin({"sessions": [str(folder)], "net": None})
    found = label.state({"session": 0}, Call())
    own = go_on(folder, None)
    assert [one["name"] for one in found["queries"]] == [own.pool.ids[r] for r in own.book.asked]
    assert found["queries"][0]["cells"] == [["a", f"{float(own.book.asked[0] % 17):g}"]]
    assert (found["answered"], found["open"], found["free"]) == (6, 3, 21)
    assert found["counts"] == [3, 3]
    assert found["curve"] == own.book.rounds
    assert found["undo"] is None


def test_why_a_row_was_chosen_is_the_score_that_chose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a batch have the largest scores of the posterior that was saved with it."""
    from doxa.app.fitting import load_run
    from doxa.decide.select import score

    folder = session(tmp_path, 30, 3, "max_entropy", known=6)
    label.begin({"sessions": [str(folder)], "net": None})
    found = label.state({"session": 0}, Call())
    own = go_on(folder, None)
    posterior, _ = load_run(folder / "run")
    free = [row for row in range(30) if row >= 6]
    scores = dict(zip(free, score(posterior, own.pool.x[free], "max_entropy"), strict=True))
    for one, row in zip(found["queries"], own.book.asked, strict=True):
        assert one["why"]["score"] == float(scores[row])
        assert one["why"]["of"] == 24
        assert sum(value > scores[row] for value in scores.values()) < one["why"]["place"]
        p = posterior.predict(own.pool.x[[row]])
        assert one["why"]["predicted"]["entropy"] == pytest.approx(float(p.entropy[0]), rel=1e-12)
    assert {scores[row] for row in own.book.asked} <= set(sorted(scores.values())[-12:])
    monkeypatch.setattr(label, "MOST_SCORED", 23)  # of a large pool, the open rows alone
    label.begin({"sessions": [str(folder)], "net": None})
    few = label.state({"session": 0}, Call())["queries"]
    assert [one["why"]["place"] for one in few] == [None] * 3
    for one, other in zip(few, found["queries"], strict=True):
        assert one["why"]["score"] == pytest.approx(other["why"]["score"], rel=1e-12)


def test_answers_of_a_page_are_checked(tmp_path: Path) -> None:
    folder = session(tmp_path, 20, 2)
    label.begin({"sessions": [str(folder)], "net": None})
    names = [one["name"] for one in label.state({"session": 0}, Call())["queries"]]
    for row, given, words in (
        (names[0], "fox", "no class"), ("999", "cat", "no line"), ("../x", "cat", "no line"),
    ):  # fmt: skip
        found = label.answer({"session": 0, "row": row, "label": given}, Call())
        assert (found["entered"], found["answered"]) == (False, 0)
        assert words in found["problem"]
    for number in (1, -1, True, "0", None, str(folder)):
        with pytest.raises(DataError, match="sessions have the numbers"):
            label.state({"session": number}, Call())
    for row, given in ((0, "cat"), (None, "cat"), (names[0], None), (names[0], ["cat"])):
        with pytest.raises(DataError, match="an answer is"):
            label.answer({"session": 0, "row": row, "label": given}, Call())
    found = label.answer({"session": 0, "row": names[0], "label": "cat"}, Call())
    assert found["entered"]
    assert found["undo"] == {"name": names[0], "label": "cat"}
    again = label.answer({"session": 0, "row": names[0], "label": "cat"}, Call())
    assert not again["entered"]
    back = label.undo({"session": 0, "row": names[0]}, Call())
    assert (back["answered"], back["open"], back["queries"][0]["name"]) == (0, 2, names[0])
    with pytest.raises(DoxaError):
        label.undo({"session": 0, "row": names[0]}, Call())


def test_images_are_shown_as_they_are(tmp_path: Path) -> None:
    import base64

    import numpy as np

    from doxa.app.figures import encode

    images = np.random.default_rng(0).integers(0, 256, (12, 5, 4)).astype(np.uint8)
    np.save(tmp_path / "x.npy", images)
    folder = tmp_path / "session"
    doxa(
        "active", "start", tmp_path / "x.npy", "--target", "digit", "--classes", "0,1", "--out",
        folder, "--count", 2, *QUICK,
    )  # fmt: skip
    label.begin({"sessions": [str(folder)], "net": None})
    found = label.choose({"session": 0}, Call())
    assert found["how"].startswith("at random")
    for one in found["queries"]:
        kind, _, content = one["image"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content) == encode(images[int(one["name"])])
