"""Groups of settings mean the same as flat arguments, and contradictions are refused."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import doxa
from doxa.errors import MethodError
from doxa.fit import FitOptions


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1)


def test_a_group_and_flat_arguments_give_the_same_bits(tmp_path: Path) -> None:
    flat = doxa.fit(
        doxa.nets.mlp(3, 1), rows(), "map", steps=20, lr=3e-2, batch_size=16, schedule="constant",
        dtype=torch.float64, engine="loop:eager", progress=False,
    )  # fmt: skip
    grouped = doxa.fit(
        doxa.nets.mlp(3, 1), rows(), "map", progress=False,
        training=doxa.Training(steps=20, lr=3e-2, batch_size=16, schedule="constant"),
        compute=doxa.Compute(dtype=torch.float64, engine="loop:eager"),
        checkpoint=doxa.Checkpoint(tmp_path / "run", every=1000.0),
    )  # fmt: skip
    assert flat.tensors().keys() == grouped.tensors().keys()
    assert all(torch.equal(flat.tensors()[k], v) for k, v in grouped.tensors().items())
    other = doxa.fit(
        doxa.nets.mlp(3, 1), rows(), "map", progress=False, training=doxa.Training(steps=20)
    )
    assert not torch.equal(other.tensors()["samples"].double(), flat.tensors()["samples"])


def test_type_checkers_know_every_argument_of_fit() -> None:
    known = {*FitOptions.__annotations__, "model", "data", "method", "runs"}
    assert known == set(inspect.signature(doxa.fit).parameters)


def test_defaults_are_those_of_fit() -> None:
    flat = inspect.signature(doxa.fit).parameters
    for kind in (doxa.Training, doxa.Compute):
        assert {f.name: f.default for f in fields(kind)} == {
            f.name: flat[f.name].default for f in fields(kind)
        }
    assert doxa.Checkpoint("x").every == flat["checkpoint_every"].default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 5, "training": doxa.Training(steps=6)}, "steps is given twice"),
        ({"device": "cpu", "compute": doxa.Compute(device="cpu")}, "device is given twice"),
        ({"training": {"steps": 5}}, "must be doxa.Training"),
        ({"compute": doxa.Training()}, "must be doxa.Compute"),
        (
            {"checkpoint": doxa.Checkpoint("x"), "checkpoint_every": 3.0},
            "checkpoint_every is given twice",
        ),
    ],
)
def test_what_is_given_twice_or_of_another_kind_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(MethodError, match=message):
        doxa.fit(doxa.nets.mlp(3, 1), rows(), "map", progress=False, **options)


def test_settings_of_a_group_are_checked_like_flat_ones() -> None:
    with pytest.raises(doxa.errors.DoxaError, match="lr"):
        doxa.fit(doxa.nets.mlp(3, 1), rows(), "map", training=doxa.Training(lr=-1.0))
