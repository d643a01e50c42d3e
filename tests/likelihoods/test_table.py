"""Every row of the table of likelihoods, wherever a likelihood can be used."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from likelihood_rows import draws_of, outputs_of
from torch import Tensor

import doxa
from doxa import store
from doxa.app.held_out import constant
from doxa.errors import ModelError
from doxa.likelihoods import LIKELIHOODS, likelihood
from doxa.predictive import Predictive
from doxa.sklearn import BayesianClassifier, BayesianRegressor
from doxa.tables.columns import CLASSIFIERS, REGRESSIONS
from doxa.tables.schema import infer_schema

every = pytest.mark.parametrize("name", LIKELIHOODS)
N = 40


def data(name: str) -> tuple[Tensor, Tensor]:
    """Targets that the likelihood itself draws, one per row."""
    x = torch.linspace(-2, 2, N).double().unsqueeze(1)
    shape = outputs_of(name, 1)
    f = torch.cat([(1.0 + k) * torch.sin(2 * x + k) for k in range(shape[0])], 1)
    return x, draws_of(name, f)


SLOWER = ("laplace", "hmc", "sparse-gp")


@every
def test_a_row_is_complete(name: str) -> None:
    kind = LIKELIHOODS[name]
    made = likelihood(name)
    assert type(made) is kind and made.name == name == kind.name
    assert kind.__name__ in doxa.__all__ and getattr(doxa, kind.__name__) is kind
    assert store.decode(store.encode(made), "here") == made
    assert kind.classifies == (kind.binary or kind.class_axis)
    assert not (kind.counts or kind.classifies) or kind.discrete
    assert name in (CLASSIFIERS if kind.classifies else REGRESSIONS)
    with pytest.raises(ModelError, match=name):
        likelihood("no such likelihood")


@every
@pytest.mark.parametrize(
    "method",
    ["map", "mean-field", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOWER)],
)
def test_it_can_be_fitted_saved_and_loaded(name: str, method: str, tmp_path: Path) -> None:
    x, y = data(name)
    network = None if method == "sparse-gp" else doxa.nets.mlp(1, outputs_of(name, 1)[0], (4,))
    chosen = doxa.HMC(draws=4, burn_in=4, leapfrog=3) if method == "hmc" else method
    options = {} if method in ("laplace", "hmc") else {"steps": 20}
    posterior = doxa.fit(network, (x, y), chosen, likelihood=name, progress=False, **options)
    p = posterior.predict(x)
    assert torch.isfinite(p.log_prob(y)).all() and torch.isfinite(p.mean).all()
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert torch.equal(again.predict(x).log_prob(y), p.log_prob(y))
    assert again.base_likelihood == posterior.base_likelihood


@every
def test_tables_and_estimators_take_it(name: str) -> None:
    pd = pytest.importorskip("pandas")
    x, y = data(name)
    kind = LIKELIHOODS[name]
    frame = pd.DataFrame({"a": x[:, 0].numpy(), "y": y.reshape(N).numpy()})
    schema = infer_schema(frame, "y", name)
    assert (schema.likelihood, schema.outputs) == (name, outputs_of(name, 1)[0])
    chosen = BayesianClassifier if kind.classifies else BayesianRegressor
    model = chosen("map", likelihood=name, hidden=(4,), steps=5)
    model.fit(x.numpy(), y.reshape(N).numpy())
    assert model.predict(x.numpy()).shape == (N,)
    wrong = BayesianRegressor if kind.classifies else BayesianClassifier
    labels = np.arange(N) % 2
    with pytest.raises(ModelError, match=name):
        wrong("map", likelihood=name, hidden=(4,), steps=5).fit(x.numpy(), labels)


@every
def test_its_constant_is_better_than_other_constants(name: str) -> None:
    """The mean log-likelihood of the targets, against f that are ±0.3 away, in all outputs."""
    pd = pytest.importorskip("pandas")
    x, y = data(name)
    frame = pd.DataFrame({"a": x[:, 0].numpy(), "y": y.reshape(N).numpy()})
    schema = infer_schema(frame, "y", name)
    seen = schema.targets(frame)
    best = constant(schema, seen, N)
    given, f = likelihood(name).constant_prediction(seen, (schema.outputs,))
    assert given.parameters(tuple(f.shape)) == {}
    before = best.log_prob(seen).double().sum()
    for k in range(f.numel()):
        for by in (-0.3, 0.3):
            away = f.clone().reshape(-1)
            away[k] += by
            other = Predictive(away.reshape(f.shape).expand(1, N, *f.shape), given)
            assert other.log_prob(seen).double().sum() < before + 0.1


def test_the_command_line_lists_it() -> None:
    from typer.testing import CliRunner

    from doxa.app.cli import app

    shown = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "200"}).output
    assert all(name in shown for name in LIKELIHOODS)


# These methods are defined for one likelihood only, and make an object of it.
NEED_A_CLASS = {"exact/targets.py", "neural/base.py"}


def test_no_other_part_asks_for_the_class_of_a_likelihood() -> None:
    """A likelihood declares what others need, so that a new one changes no other file."""
    source = Path(doxa.__file__).parent
    classes = {kind.__name__ for kind in LIKELIHOODS.values()}
    found = set()
    for path in source.rglob("*.py"):
        if path.parent.name == "likelihoods":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            read = [each.value for each in node.args if isinstance(each, ast.Constant)]
            by_name = {"ignore_index", "per_output", "noise"} & {r for r in read if type(r) is str}
            if (node.func.id == "isinstance" and named & classes) or (
                node.func.id in ("getattr", "hasattr") and "likelihood" in named and by_name
            ):
                found.add(path.relative_to(source).as_posix())
    assert found == NEED_A_CLASS
