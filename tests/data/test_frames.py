"""Rows that come with names or in batches: columns in the fit's order, rows in their own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import FRAME, NAMES, N, X, Y, fit, loader, named, numbers
from torch.utils.data import TensorDataset

import doxa
from doxa import evaluate
from doxa.app.report import write
from doxa.data import as_tensor
from doxa.diagnose import doctor


def test_a_frame_is_put_in_order() -> None:
    """The same columns in another order are the same rows; without names, place counts."""
    expected = named().predict(X).mean
    assert named().columns == NAMES
    assert torch.equal(named().predict(FRAME[NAMES[::-1]]).mean, expected)
    assert not torch.equal(named().predict(FRAME[NAMES[::-1]].to_numpy()).mean, expected)
    other = fit(data=(FRAME, Y[:, 0]), validation=(FRAME[NAMES[::-1]], Y[:, 0]), members=2)
    same = fit(data=(X, Y[:, 0]), validation=(X, Y[:, 0]), members=2)
    assert other.validation == same.validation


def test_names_are_saved_and_reach_every_consumer(tmp_path: Path) -> None:
    named().save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    turned = FRAME[NAMES[::-1]]
    expected = named().predict(X).mean
    assert again.columns == NAMES
    held = evaluate.conformal(
        again, (turned, Y[:, 0] + 0.1), groups=0, kind="mondrian", allow_infinite=True
    )
    mixed = doxa.MixturePosterior([again, named()], [0.5, 0.5])
    for posterior in (again, held, mixed):
        assert torch.equal(posterior.predict(X).mean, expected)
    assert torch.equal(again.predict(turned).mean, expected)
    assert torch.equal(held.predict(turned).interval()[0], held.predict(X).interval()[0])
    assert torch.allclose(mixed.predict(turned).mean, expected)
    scores = [evaluate.ood_scores(again, x)["epistemic"] for x in (X, turned)]
    assert torch.equal(*scores)


def test_doctor_and_report_read_columns_by_name(tmp_path: Path) -> None:
    turned = FRAME[NAMES[::-1]]
    found = [str(doctor(named(), (x, Y[:, 0]))) for x in (X, turned)]
    assert found[0] == found[1]
    pages = [
        write(named(), tmp_path / f"{i}.html", (x, Y[:, 0]), diagnose=False).read_text()
        for i, x in enumerate((X, turned))
    ]
    assert pages[0] == pages[1] and "height" in pages[0]


@pytest.mark.parametrize(
    "batches",
    [
        loader(),
        loader(TensorDataset(X)),
        loader(X),
        TensorDataset(X, Y),
        loader(num_workers=0, batch_size=None, sampler=torch.arange(N).split(7)),
    ],
    ids=["pairs", "singles", "rows", "dataset", "ready batches"],
)
def test_batches_are_joined_in_order(batches: Any) -> None:
    assert torch.equal(numbers().predict(batches).mean, numbers().predict(X).mean)


def test_a_read_only_array_is_shared_without_a_warning() -> None:
    """A mapped file is not copied, and no filter of warnings, which all threads share, is set."""
    array = np.arange(6, dtype=np.float32).reshape(3, 2)[:, ::-1][:, ::-1]
    array.flags.writeable = False
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(array, "x")
    assert warnings.filters == before
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
