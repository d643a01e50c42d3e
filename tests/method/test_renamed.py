"""Settings that were renamed: their old names and values work at every place, with a warning."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pydoc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import doxa
from doxa import sklearn, store
from doxa.app.cli import app
from doxa.app.fitting import make_method
from doxa.decide import design
from doxa.errors import DoxaDeprecationWarning, MethodError, StoreError, UnknownSetting
from doxa.method.method import rules
from doxa.posterior.base import Diagnostics
from doxa.posterior.saving import read_record

ROOT = Path(__file__).resolve().parents[2]


def renamings() -> Iterator[tuple[str, str, str]]:
    for row in doxa.methods():
        for old, new in doxa.get_method(row.name).renamed.items():
            yield row.name, old, new


def renamed_values() -> Iterator[tuple[str, str, str, Any]]:
    for row in doxa.methods():
        for name, values in doxa.get_method(row.name).renamed_values.items():
            for old, new in values.items():
                yield row.name, name, old, new


NAMES, VALUES = list(renamings()), list(renamed_values())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64)[:, None]
    return x, x.square()


def default(cls: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(("method", "old", "new"), NAMES)
def test_an_old_name_is_accepted_and_read(method: str, old: str, new: str) -> None:
    cls: Any = doxa.get_method(method)
    value = default(cls, new)
    with pytest.warns(DoxaDeprecationWarning, match=rf"{old}=.*use {new}=") as caught:
        made = cls(**{old: value})
    assert caught[0].filename == __file__  # the line of the user
    assert made == cls(**{new: value})
    with pytest.warns(DoxaDeprecationWarning, match=rf"{old} is .*use {new}") as caught:
        assert getattr(made, old) == value
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("method", "old", "new"), NAMES)
def test_signatures_and_help_show_new_names_only(method: str, old: str, new: str) -> None:
    cls: Any = doxa.get_method(method)
    fields = [field.name for field in dataclasses.fields(cls)]
    assert list(inspect.signature(cls).parameters) == fields
    assert new in fields and old not in fields and old not in cls().settings()
    words = re.split(r"\W+", pydoc.render_doc(cls).splitlines()[3])  # the signature
    assert new in words and old not in words


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(("method", "old", "new"), NAMES)
def test_a_file_with_an_old_name_is_read_silently(method: str, old: str, new: str) -> None:
    cls: Any = doxa.get_method(method)
    stored = json.loads(json.dumps(store.encode(cls())))
    older = {old if name == new else name: value for name, value in stored.items()}
    assert old in older and new not in older
    assert store.decode(older) == cls()
    with pytest.raises(StoreError, match="twice"):
        store.decode({**stored, old: stored[new]})


@pytest.mark.parametrize(("method", "name", "old", "new"), VALUES)
def test_an_old_value_is_accepted(method: str, name: str, old: str, new: Any) -> None:
    cls: Any = doxa.get_method(method)
    rule = rules(cls)[name]
    assert rule.allows(new) and not rule.allows(old)
    with pytest.warns(DoxaDeprecationWarning, match=f"{name}='{old}'.*use {name}={new!r}"):
        assert getattr(cls(**{name: old}), name) == new
    place = [field.name for field in dataclasses.fields(cls)].index(name)
    before = [field.default for field in dataclasses.fields(cls)][:place]
    with pytest.warns(DoxaDeprecationWarning, match=old):
        assert cls(*before, old) == cls(**{name: new})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(store.decode({**store.encode(cls()), name: old}), name) == new


def test_the_order_of_positional_settings_is_as_before() -> None:
    assert doxa.SWAG(0.5, 3, "cyclic", 0.1).settings() | {"rank": 20} == {
        "average": 0.5, "cycle": 3, "schedule": "cyclic", "swa_lr": 0.1, "lowest": 0.01,
        "rank": 20, "deviations": "final", "scale": 1.0, "samples": 30,
    }  # fmt: skip
    assert doxa.PSGLD(1, 2, 3, 0.1, 0.9, 0.2).eps == 0.2


def test_both_names_are_an_error() -> None:
    for given in ({"share": 0.1, "average": 0.1}, {"average": 0.1, "share": 0.1}):
        with pytest.raises(MethodError, match="average twice: share is its old name"):
            doxa.SWAG(**given)
    with pytest.raises(MethodError, match="average twice"):
        doxa.SWAG(0.1, share=0.1)
    with pytest.raises(TypeError, match="multiple values"):
        doxa.SWAG(0.1, average=0.1)


def test_an_attribute_that_never_was_is_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="'SWAG' object has no attribute 'sharing'"):
        doxa.SWAG().sharing  # noqa: B018


@dataclasses.dataclass(frozen=True)
class Broken(doxa.MAP):
    renamed: ClassVar[dict[str, str]] = {}

    @property
    def engine(self) -> int:
        return {}.engine  # type: ignore[attr-defined]


def test_an_error_inside_a_property_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'engine'"):
        Broken().engine  # noqa: B018


def test_suggestions_name_the_new_setting() -> None:
    with pytest.raises(UnknownSetting, match=r"no setting 'polsh'; did you mean 'newton_steps'\?"):
        doxa.Laplace(polsh=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownSetting, match=r"doxa\.Laplace\(newton_steps=3\)"):
        doxa.fit(nn.Linear(1, 1), data(), "laplace", polish=3)  # type: ignore[call-overload]
    with pytest.raises(MethodError, match=r"no setting 'polsh'; did you mean 'newton_steps'\?"):
        make_method("laplace", ["polsh=3"])


def test_a_grid_takes_the_old_name() -> None:
    rates = [0.01, 0.05]
    common: dict[str, Any] = {"steps": 4, "progress": False, "likelihood": "gaussian"}
    net = nn.Linear(1, 1).double()
    new = doxa.fit(net, data(), "swa", runs=doxa.Runs(grid={"swa_lr": rates}), **common)
    for runs in (
        doxa.Runs(grid={"rate": rates}),
        doxa.Runs(rows=[range(24), range(24)], seeds=[0], per_split={"rate": rates}),
    ):
        with pytest.warns(DoxaDeprecationWarning, match="use swa_lr=") as caught:
            old = doxa.fit(net, data(), "swa", runs=runs, **common)
        assert caught[0].filename == __file__
        assert old.hyper == [{"swa_lr": rate} for rate in rates]
        for one, other in zip(new, old, strict=True):
            assert torch.equal(one.samples, other.samples)
    with pytest.raises(MethodError, match="swa_lr twice"):
        doxa.fit(net, data(), "swa", runs=doxa.Runs(grid={"rate": [1], "swa_lr": [1]}), **common)


def test_the_command_line_takes_the_old_name_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(DoxaDeprecationWarning, match="use average="):
        assert make_method("swag", ["share=0.5"]) == doxa.SWAG(average=0.5)
    with pytest.raises(MethodError, match="average twice"):
        make_method("swag", ["share=0.5", "average=0.5"])
    x, y = data()
    rows = "\n".join(f"{float(a)},{float(b)}" for a, b in zip(x, y, strict=True))
    (tmp_path / "rows.csv").write_text(f"x,y\n{rows}\n", encoding="utf-8")
    words = ["fit", str(tmp_path / "rows.csv"), "-t", "y", "-m", "laplace", "--steps", "5", "--out",
             str(tmp_path / "run"), "--set", "centre=mode", "--set", "polish=1"]  # fmt: skip
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    for message in ("use newton_steps=", "use mean_correction=..."):
        assert said.stderr.count(message) == 1
    loaded = doxa.load(tmp_path / "run")
    assert loaded.method.newton_steps == 1 and loaded.method.mean_correction is False


def test_estimators_take_a_method_by_its_old_names(tmp_path: Path) -> None:
    x, y = (part.numpy() for part in data())
    with pytest.warns(DoxaDeprecationWarning, match="use average="):
        method = doxa.SWA(share=0.5)  # type: ignore[call-arg]
    estimator = sklearn.BayesianRegressor(method=method, hidden=(2,), steps=20, members=1)
    estimator.fit(x, y[:, 0]).save(tmp_path / "run")
    assert sklearn.BayesianRegressor.load(tmp_path / "run").method == doxa.SWA(average=0.5)


@pytest.mark.usefixtures("silent")
def test_statuses_and_diagnostics_of_older_records() -> None:
    plain = {
        "seed": 0, "history": {}, "metadata": {}, "validation": None, "status": "learned-nothing",
        "diagnostics": {"centre": "mean", "rate": [0.1], "rate_limited": True, "left_out": {},
                        "seconds": 1.0},
    }  # fmt: skip
    record = read_record(plain, "", {})
    assert record.status == "prior-collapse"
    assert record.diagnostics == {
        "mean_correction": True, "step_size": [0.1], "step_size_limited": True,
        "held_out_calibration": {}, "seconds": 1.0,
    }  # fmt: skip
    plain["diagnostics"] = {"centre": "mode"}
    assert read_record(plain, "", {}).diagnostics == {"mean_correction": False}


def test_diagnostics_are_found_by_their_old_names() -> None:
    found = Diagnostics({"mean_correction": True, "step_size": [0.1]})
    for old, value in (("centre", "mean"), ("rate", [0.1])):
        with pytest.warns(DoxaDeprecationWarning, match="use diagnostics"):
            assert found[old] == value
    for name in ("left_out", "none"):  # not of this fit
        with pytest.raises(KeyError, match=name):
            found[name]


def test_attributes_and_classes_that_were_renamed() -> None:
    study = design.Study(design.working_memory())
    with pytest.warns(DoxaDeprecationWarning, match=r"use Study\.posterior"):
        assert study.belief is study.posterior
    with pytest.warns(DoxaDeprecationWarning, match="ParameterDistribution"):
        assert design.Belief is design.ParameterDistribution
    assert not hasattr(design, "Beliefs")


def test_the_table_of_renamed_settings_is_complete() -> None:
    """docs/versions.md lists every old name and value."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for method, old, new in NAMES:
        assert any(f"`{method}`" in r and f"`{old}`" in r and f"`{new}`" in r for r in rows), (
            method, old,
        )  # fmt: skip
    for method, name, old, new in VALUES:
        text = repr(new).replace("'", '"')
        assert any(
            f"`{method}`" in r and f'`{name}="{old}"`' in r and f"`{name}={text}`" in r
            for r in rows
        ), (method, old)
