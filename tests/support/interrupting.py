"""Fits that are stopped and taken up again, and what has to be the same then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Killed(BaseException):
    """Ends a fit as abruptly as a test can: nothing is saved on the way out."""


def stop_at(step: int, error: type[BaseException]) -> Callable[[int, dict[str, Any]], None]:
    def callback(done: int, info: dict[str, Any]) -> None:
        if done >= step:
            raise error

    return callback


def interrupted(
    case: Any, path: Path, error: type[BaseException], step: int, **options: Any
) -> Any:
    """Fit until stopped, then fit again from the checkpoint."""
    try:
        case.fit(checkpoint=path, callbacks=[stop_at(step, error)], **options)
    except error:
        pass
    else:
        assert case.row.family == "exact", "the fit was not stopped, so that nothing was tested"
    steps: list[int] = []
    posterior = case.fit(
        checkpoint=path, callbacks=[lambda done, info: steps.append(done)], **options
    )
    if case.row.family != "exact":
        assert all(done >= step for done in steps), "the fit began anew"
    return posterior


def assert_same(got: Any, want: Any, answers: Any, data: Any) -> None:
    for name, value in want.tensors().items():
        assert torch.equal(got.tensors()[name], value), name
    x, y = data
    one, two = answers(got.predict(x), y), answers(want.predict(x), y)
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert got.status == want.status
    assert got.elbo == want.elbo
    assert got.log_evidence == want.log_evidence
    assert got.history == want.history
