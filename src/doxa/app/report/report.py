"""Writing a report: from a posterior to one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from doxa.app.report import calibration, fitted, predictions, scores, status
from doxa.app.report.evaluation import evaluate
from doxa.app.report.html import Content, Section, cut, render_page
from doxa.app.report.status import OverallStatus
from doxa.app.report.subject import (
    FITTED,
    HELD_OUT,
    TEST,
    Input,
    Subject,
    column_names,
    rows_of_arrays,
    without_seen,
)
from doxa.errors import StoreError
from doxa.tables.files import check_name


class Part(NamedTuple):
    """One section: its anchor, its title, the function that returns its content (None if there is
    nothing to show), and whether it needs scored rows."""

    key: str
    title: str
    content: Callable[[Subject], Content]
    scored: bool = False


SECTIONS = (
    Part("scores", "Scores", scores.scores_section, True),
    Part("rare-class", "Rare class", scores.rare_class_section, True),
    Part("calibration", "Calibration", calibration.calibration_section, True),
    Part("uncertainty", "Uncertainty", calibration.uncertainty_section, True),
    Part("predictions", "Predictions and targets", predictions.predictions_section, True),
    Part("rows", "Most and least certain rows", predictions.extreme_rows_section, True),
    Part("functions", "Functions", predictions.functions_section),
    Part("diagnostics", "Diagnostics", status.diagnostics_section),
    Part("training", "Training", fitted.training_section),
    Part("fitted", "What was fitted", fitted.fitted_section),
    Part("recipe", "Recipe", fitted.recipe_section),
)


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
    """Write a report of any posterior, as one HTML file that needs no other files.

    Parameters
    ----------
    posterior : Posterior
        Any posterior. It may be loaded from disk, recalibrated or conformal.
    path : str or Path
        The path of the file, which ends in .html.
    test : pair (x, y), optional
        Held-out rows, which are scored.
    train : pair (x, y), optional
        The rows that the posterior was fitted to, which the diagnostics need. If there are no test
        rows, they are scored, and the report says so.
    names : sequence of str, optional
        The names of the input columns. Default: `posterior.columns`.
    target : str
        The name of the target.
    classes : sequence, optional
        The names of the classes. Default: those in the table that the posterior was fitted to, if
        there was one.
    title : str, optional
        The title of the report.
    image : sequence of int, optional
        The shape of one row of x, [H, W] or [3, H, W]. If it is given, rows are shown as pictures.
    diagnose : bool
        Whether to run `doxa.diagnose.doctor`, which predicts many times.

    Returns
    -------
    Path
        The file.
    """
    test, train = posterior.ordered_pair(test), posterior.ordered_pair(train)
    names = posterior.columns if names is None else names
    subject = Subject(
        posterior,
        target,
        None if classes is None else tuple(map(str, classes)),
        test=None if test is None else rows_of_arrays(test, TEST, HELD_OUT, names),
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


def save(subject: Subject, path: str | Path, diagnose: bool = True) -> OverallStatus:
    """Write the file and return its overall status."""
    path = Path(path)
    check_place(path)
    text, overall = render(subject, diagnose)
    write_page(text, path)
    return overall


def check_place(path: Path) -> None:
    """Check that the file can be written, before the report is computed."""
    check_name(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise StoreError(f"{path}: a report is written as .html")
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give a file")


def write_page(text: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def render(subject: Subject, diagnose: bool = True) -> tuple[str, OverallStatus]:
    """The document as text, and its overall status."""
    if subject.test is not None and subject.train is not None:
        subject.test, remarks = without_seen(subject.test, subject.train)
        subject.remarks += remarks
    if subject.rows is not None:
        subject.evaluations = evaluate(subject.posterior, subject.rows)
        for each in subject.evaluations:
            each.scores |= scores.own_scores(each) if each.scores else {}
    overall = subject.status = status.assess(subject, diagnose)
    made = (
        (part, part.content(subject)) for part in SECTIONS if subject.evaluations or not part.scored
    )
    called = subject.title or f"{subject.method_name} for {subject.target}"
    text = render_page(
        title=f"{cut(called, 80)} · doxa report",
        over="doxa report",
        heading=subject.heading,
        marks=status.overall_mark(overall),
        lead=status.lead(subject),
        tiles=scores.score_tiles(subject),
        sections=[Section(part.key, part.title, made) for part, made in made if made is not None],
        names=subject.names,
    )
    return text, overall
