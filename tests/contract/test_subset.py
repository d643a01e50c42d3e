"""Weights outside the model's subset are points: one trunk for all draws of a member.

With `subset="last_layer"` a function is affine in the features that go into the last layer,
f_s(x) = W_s h(x) + b_s, whatever the method draws (weights, masks, a linearisation): the functions
of one member lie in the span of its features and the constant.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa


def network(case: Any) -> torch.nn.Module:
    """Two hidden layers, so that not every hidden weight feeds the last layer."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(6)
        return doxa.nets.mlp(2, 1 if case.regression else 3, hidden=(6, 4), activation="tanh")


def fit(case: Any, **options: Any) -> Any:
    likelihood = "gaussian" if case.regression else "categorical"
    model = doxa.Model(network(case), likelihood, subset="last_layer")
    chosen = {"dtype": torch.float64, "steps": 20, "likelihood": None, **options}
    return case.fit(net=model, **chosen)


@cache
def fitted(case: Any) -> Any:
    """Two members, which tests share."""
    return fit(case, members=2)


def away_from(span: Tensor, f: Tensor) -> float:
    """How much of functions [S, N, O] is outside the span of features [N, D] and the constant."""
    basis = torch.cat([span, torch.ones_like(span[:, :1])], 1)
    wanted = f.movedim(0, 1).flatten(1)  # [N, S·O]
    left = wanted - basis @ torch.linalg.lstsq(basis, wanted, driver="gelsd").solution
    return float(left.abs().max() / wanted.abs().max())


def inside(posterior: Any) -> set[str]:
    """The uncertain weights, and the likelihood's own parameters."""
    names = posterior.layout.names
    return {name for name in names if name.startswith(("4.", "likelihood."))}


def test_all_draws_of_a_member_have_one_trunk(trained: Any) -> None:
    x, _ = trained.data()
    posterior = fit(trained, members=[0])
    count = len(posterior.predict(x).weights)
    f = posterior.functions(x, min(30, count)).cpu()
    assert away_from(posterior.features(x).cpu(), f) < 1e-8


def test_weights_outside_the_subset_do_not_spread(trained: Any) -> None:
    """Of the draws of each member; the last layer's do, where there are several."""
    posterior = fitted(trained)
    assert posterior.model.subset_names == ("4.weight", "4.bias")
    if posterior.kind == "sample":
        samples = posterior.samples  # [K, T, P]
        spread = posterior.layout.unflatten((samples - samples[:, :1]).abs().amax((0, 1)))
        several = samples.shape[1] > 1
        if posterior.layers is not None:  # its components differ by what these learned alone
            names = {name.rpartition(".")[0] for name in posterior.model.layers.names}
            assert names == {"4"} and float((samples - samples[:, :1]).abs().max()) == 0
            assert (posterior.layers[:, 0] != posterior.layers[:, 1]).any()
            return
        for name, value in spread.items():
            moves = name in inside(posterior) and several
            assert (float(value.max()) > 0) == moves, name
    elif posterior.kind in ("gaussian", "laplace"):
        outputs = 1 if trained.regression else 3
        assert posterior.covariance.size == 5 * outputs
        try:
            draws = posterior.draw(8)
        except doxa.errors.Unavailable:  # where predictions are linearised
            return
        for name, value in draws.items():
            distinct = len(value.reshape(8, -1).unique(dim=0))
            assert distinct == (8 if name in posterior.model.subset_names else 2), name


@pytest.mark.by_family
def test_the_trunk_is_trained(trained: Any) -> None:
    """It is the point estimate that goes with the rest, not where it began."""
    start, after = (fit(trained, members=[0], steps=s, lr=lr) for s, lr in ((2, 1e-12), (40, None)))
    one, two = (p.layout.unflatten(p.point()[0]) for p in (start, after))
    assert not torch.allclose(one["0.weight"], two["0.weight"], rtol=1e-3)


def test_it_predicts_and_is_saved(trained: Any, answers: Any, tmp_path: Path) -> None:
    x, y = trained.data()
    posterior = fitted(trained)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", device=trained.device)
    assert again.model.subset_names == posterior.model.subset_names
    got, want = (answers(p.predict(x), y) for p in (again, posterior))
    assert all(torch.isfinite(value).all() for value in want.values())
    assert all(torch.equal(got[name], want[name]) for name in want)
