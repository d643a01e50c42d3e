"""From a posterior to one HTML file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import doxa
from doxa.app.report.answers import Answer, ask
from doxa.app.report.markup import Content
from doxa.app.report.names import cut
from doxa.app.report.page import Section, page
from doxa.app.report.provenance import FITTED, HELD_OUT, without_seen
from doxa.app.report.sections.calibration import calibration
from doxa.app.report.sections.certain import certain
from doxa.app.report.sections.fitted import fitted, method_name
from doxa.app.report.sections.functions import functions
from doxa.app.report.sections.health import health
from doxa.app.report.sections.predictions import predictions
from doxa.app.report.sections.recipe import recipe
from doxa.app.report.sections.scores import scores
from doxa.app.report.sections.top import top
from doxa.app.report.sections.training import training
from doxa.app.report.sections.uncertainty import uncertainty
from doxa.app.report.subject import Input, Subject, column_names, rows_of_arrays
from doxa.app.report.verdict import Verdict, judge
from doxa.app.tables import check_name
from doxa.errors import StoreError


def write(
    posterior: Any,
    path: str | Path,
    test: Any = None,
    train: Any = None,
    *,
    names: Sequence[str] | None = None,
    target: str = "y",
    classes: Sequence[object] | None = None,
    title: str | None = None,
    image: Sequence[int] | None = None,
    diagnose: bool = True,
) -> Path:
    """Write a report of any posterior: one HTML file that needs nothing else.

    Parameters
    ----------
    path: the file, which ends in .html.
    test: held-out (x, y), which are scored. train: the rows it was fitted to, which the doctor
        compares with; scored, and said so, where there is no test.
    names, target, classes: what the input columns (default: `posterior.columns`), the target and
        the classes are called.
    image: the shape of one row of x, [H, W] or [3, H, W], where rows are to be looked at.
    diagnose: ask `doxa.diagnose.doctor` (it predicts many times).
    """
    test, train = posterior.ordered_pair(test), posterior.ordered_pair(train)
    names = posterior.columns if names is None else names
    subject = Subject(
        posterior,
        target,
        None if classes is None else tuple(map(str, classes)),
        test=None if test is None else rows_of_arrays(test, "the test rows", HELD_OUT, names),
        train=None if train is None else rows_of_arrays(train, "the training rows", FITTED, names),
        title=title,
        image=None if image is None else tuple(image),
    )
    shape = posterior.inputs
    if isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int):
        each = column_names(shape[0], names)
        subject.inputs = tuple(Input(name, (k,)) for k, name in enumerate(each))
    save(subject, path, diagnose)
    return Path(path)


def save(subject: Subject, path: str | Path, diagnose: bool = True) -> Verdict:
    """Write the file; what it comes to is given back."""
    path = Path(path)
    check_place(path)
    text, verdict = render(subject, diagnose)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return verdict


def check_place(path: Path) -> None:
    """Fail before the work is done, not after it."""
    check_name(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise StoreError(f"{path}: a report is written as .html")
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give a file")


def render(subject: Subject, diagnose: bool = True) -> tuple[str, Verdict]:
    """The document as text, and its verdict."""
    if subject.test is not None and subject.train is not None:
        subject.test, said = without_seen(subject.test, subject.train)
        subject.remarks += said
    answers = [] if subject.rows is None else ask(subject.posterior, subject.rows)
    verdict = judge(subject, answers, diagnose)
    head = top(subject, answers, verdict)
    sections = _sections(subject, answers, verdict)
    whole = subject.names.list_in_full()
    if whole is not None:
        sections.append(Section("names", "Long names in full", whole))
    called = subject.title or f"{method_name(subject.posterior)} for {subject.target}"
    return page(f"{cut(called, 80)} · doxa report", head, sections, _foot()), verdict


def _sections(subject: Subject, answers: Sequence[Answer], verdict: Verdict) -> list[Section]:
    found: list[Section | None] = []
    if answers:
        found += [
            scores(subject, answers),
            calibration(subject, answers),
            uncertainty(subject, answers),
            predictions(subject, answers),
            certain(subject, answers),
        ]
    found += [functions(subject), health(subject, verdict), training(subject), fitted(subject)]
    found += [recipe(subject)]
    return [section for section in found if section is not None]


def _foot() -> Content:
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    made = f"Written by doxa {doxa.__version__} on {today}."
    return f"{made} This file holds no script and loads nothing."
