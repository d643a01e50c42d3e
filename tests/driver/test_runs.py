"""Runs: splits, grids and seeds side by side are what they would be alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.driver.runs import Runs, Sweep
from doxa.errors import DataError, MethodError, Unavailable

N, D = 48, 2


def table() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.1 * torch.randn(N, 1, generator=g, dtype=torch.float64)


def mlp() -> nn.Module:
    return doxa.nets.mlp(D, 1, hidden=(5,), activation="tanh").double()


SETTINGS: dict[str, Any] = {"steps": 25, "batch_size": 12, "members": 2}


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a.samples, b.samples, rtol=1e-8, atol=1e-9)


def test_given_noise_is_in_the_units_of_y_of_each_run() -> None:
    """Scaled by each run's own rows, noise of 0.3 is 0.3 / std(y) in fitted units."""
    x, y = table()
    y = torch.cat([y[: N // 2], 10 * y[N // 2 :]])
    rows = [list(range(N // 2)), list(range(N // 2, N))]
    sweep = doxa.fit(
        mlp(), (x, y), likelihood=doxa.Gaussian(0.3), runs=Runs(rows=rows), standardize=True,
        steps=1, validation=None,
    )  # fmt: skip
    for posterior, own in zip(sweep, rows, strict=True):
        want = (0.3 / y[own].std(correction=0)).log()
        torch.testing.assert_close(posterior.constants["log_noise"].squeeze(), want)


def test_order_is_splits_then_grid_then_seeds() -> None:
    specs = Runs(rows=[[0, 1], [2]], grid={"lr": [0.1, 0.2], "p": [0.5]}, seeds=[7, 8]).expand(0)
    assert [(s.split, s.hyper["lr"], s.seed) for s in specs] == [
        (i, lr, seed) for i in (0, 1) for lr in (0.1, 0.2) for seed in (7, 8)
    ]
    assert [s.seed for s in Runs().expand(3)] == [3]


def test_each_split_has_a_seed_of_its_own() -> None:
    """Else the same noise in all splits would be missing from a standard error over them."""
    specs = Runs(rows=[[0, 1], [2], [3]], grid={"lr": [0.1, 0.2]}).expand(5)
    assert [(s.split, s.seed) for s in specs] == [(i, 5 + i) for i in range(3) for _ in range(2)]
    given = Runs(rows=[[0, 1], [2]], seeds=np.array([7, 8])).expand(5)
    assert [s.seed for s in given] == [7, 8, 7, 8]
    x, y = table()
    same = doxa.fit(mlp(), (x, y), runs=Runs(rows=[range(N)] * 3), **SETTINGS)
    first = [posterior.samples.flatten() for posterior in same]
    close(same[0], doxa.fit(mlp(), (x, y), **SETTINGS))
    assert float((first[0] - first[1]).abs().max()) > 1e-3
    assert float((first[1] - first[2]).abs().max()) > 1e-3


def test_masks_and_numbers_name_the_same_rows() -> None:
    mask = np.zeros(N, dtype=bool)
    mask[[1, 5, 9]] = True
    (spec,) = Runs(rows=[mask]).expand(0)
    assert spec.rows is not None and spec.rows.tolist() == [1, 5, 9]


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_splits_of_different_lengths_are_what_they_are_alone(engine: str) -> None:
    x, y = table()
    splits = [torch.arange(30), torch.arange(10, 48), torch.tensor([0, 5, 7, 9] * 4)]
    net = mlp()
    sweep = doxa.fit(net, (x, y), runs=Runs(rows=splits), engine=engine, **SETTINGS)
    assert isinstance(sweep, Sweep) and len(sweep) == 3
    for r, (posterior, rows) in enumerate(zip(sweep, splits, strict=True)):
        close(posterior, doxa.fit(net, (x[rows], y[rows]), engine=engine, seed=r, **SETTINGS))
        assert posterior.diagnostics["rows"] == len(rows)


def test_full_batch_methods_do_not_see_the_padding() -> None:
    x, y = table()
    splits = [torch.arange(30), torch.arange(20, 48)]
    method = doxa.HMC(draws=4, burn_in=10, leapfrog=3)
    net = mlp()
    sweep = doxa.fit(net, (x, y), method, members=2, runs=Runs(rows=splits), engine="stack")
    for r, (posterior, rows) in enumerate(zip(sweep, splits, strict=True)):
        alone = doxa.fit(net, (x[rows], y[rows]), method, members=2, engine="stack", seed=r)
        torch.testing.assert_close(posterior.samples, alone.samples, rtol=1e-5, atol=1e-6)


def test_a_grid_of_rates_and_seeds() -> None:
    x, y = table()
    net = mlp()
    runs = Runs(grid={"lr": [1e-3, 1e-2]}, seeds=[0, 4])
    sweep = doxa.fit(net, (x, y), runs=runs, **SETTINGS)
    assert sweep.hyper == [{"lr": 1e-3}, {"lr": 1e-3}, {"lr": 1e-2}, {"lr": 1e-2}]
    for posterior, spec in zip(sweep, sweep.specs, strict=True):
        close(posterior, doxa.fit(net, (x, y), lr=spec.hyper["lr"], seed=spec.seed, **SETTINGS))
    assert not torch.equal(sweep[0].samples, sweep[1].samples)


def test_a_grid_of_priors() -> None:
    x, y = table()
    net = mlp()
    priors = [doxa.Normal(1.0), doxa.Normal(0.01)]
    sweep = doxa.fit(net, (x, y), runs=Runs(grid={"prior": priors}), **SETTINGS)
    for posterior, prior in zip(sweep, priors, strict=True):
        close(posterior, doxa.fit(net, (x, y), prior=prior, **SETTINGS))


def test_a_grid_of_a_methods_field() -> None:
    x, y = table()
    net = mlp()
    sweep = doxa.fit(net, (x, y), doxa.MCDropout(), runs=Runs(grid={"p": [0.05, 0.5]}), **SETTINGS)
    for posterior, p in zip(sweep, (0.05, 0.5), strict=True):
        alone = doxa.fit(net, (x, y), doxa.MCDropout(p=p), **SETTINGS)
        torch.testing.assert_close(posterior.theta, alone.theta, rtol=1e-8, atol=1e-9)
        q, a = posterior.predict(x), alone.predict(x)
        torch.testing.assert_close(q.mean, a.mean, rtol=1e-8, atol=1e-9)


def test_fields_that_cannot_differ_between_runs_are_refused() -> None:
    """Lengths are common to a stacked fit: a grid over them must not be ignored silently."""
    for method, name in (("hmc", "leapfrog"), ("hmc", "draws"), ("mean-field", "average")):
        with pytest.raises(MethodError, match=name):
            doxa.fit(mlp(), table(), method, runs=Runs(grid={name: [2, 3]}), steps=2)


def test_bad_grids_are_refused() -> None:
    data = table()
    with pytest.raises(MethodError, match=r"unknown.*'dropout'"):
        doxa.fit(mlp(), data, "mc-dropout", runs=Runs(grid={"dropout": [0.1]}))
    with pytest.raises(MethodError, match=r"0 < p < 1"):
        doxa.fit(mlp(), data, "mc-dropout", runs=Runs(grid={"p": [0.1, 1.5]}))
    with pytest.raises(MethodError, match="must be numbers"):
        doxa.fit(mlp(), data, "mc-dropout", runs=Runs(grid={"p": [0.1, "high"]}))
    with pytest.raises(MethodError, match=r"famil|stack"):
        priors = [doxa.Normal(1.0), doxa.LaplacePrior(1.0)]
        doxa.fit(mlp(), data, runs=Runs(grid={"prior": priors}))
    for empty in (Runs(grid={"lr": []}), Runs(rows=[]), Runs(seeds=[])):
        with pytest.raises(MethodError, match="empty"):
            doxa.fit(mlp(), data, runs=empty)


def test_bad_rows_are_refused() -> None:
    data = table()
    for rows in ([], [N], [-1], [0.5, 1.0]):
        with pytest.raises(DataError, match=f"0 … {N - 1}|whole"):
            doxa.fit(mlp(), data, runs=Runs(rows=[rows]))
    with pytest.raises(DataError, match=f"mask has {N + 1} entries"):
        doxa.fit(mlp(), data, runs=Runs(rows=[np.ones(N + 1, dtype=bool)]))


def test_select_takes_the_best_of_each_split() -> None:
    x, y = table()
    splits = [torch.arange(30), torch.arange(18, 48)]
    runs = Runs(rows=splits, grid={"lr": [1e-2, 1e-9]})
    sweep = doxa.fit(mlp(), (x, y), runs=runs, steps=200, validation=0.25)
    scores = sweep.score()
    chosen = sweep.select()
    assert isinstance(chosen, Sweep) and len(chosen) == 2
    for i in range(2):
        best = max(range(2 * i, 2 * i + 2), key=scores.__getitem__)
        assert chosen[i] is sweep[best]
        assert chosen[i].validation == scores[best] == max(scores[2 * i : 2 * i + 2])
    one = doxa.fit(mlp(), (x, y), runs=Runs(grid={"lr": [1e-2, 1e-9]}), steps=50, validation=0.25)
    assert one.select() is max(one, key=lambda p: p.validation)


def test_select_without_a_score_says_what_to_do() -> None:
    sweep = doxa.fit(mlp(), table(), runs=Runs(seeds=[0, 1]), steps=2, validation=None)
    with pytest.raises(Unavailable, match=r"validation=0\.2"):
        sweep.select()
    with pytest.raises(Unavailable, match="evidence"):
        sweep.select(by="evidence")
    with pytest.raises(MethodError, match="'luck'"):
        sweep.select(by="luck")


def test_a_run_is_an_ordinary_posterior(tmp_path: Any) -> None:
    x, y = table()
    sweep = doxa.fit(mlp(), (x, y), runs=Runs(seeds=[0, 1]), **SETTINGS)
    sweep[1].save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=mlp())
    assert torch.equal(again.predict(x).mean, sweep[1].predict(x).mean)
    assert again.members == 2


def test_each_split_may_have_what_was_chosen_for_it() -> None:
    x, y = _line()
    noises = [doxa.Gaussian(noise=0.1), doxa.Gaussian(noise=0.4)]
    rows = [torch.arange(20), torch.arange(10, 30)]
    runs = doxa.Runs(rows=rows, per_split={"likelihood": noises, "lr": [0.01, 0.02]})
    options = {"steps": 30, "progress": False, "standardize": True}
    together = doxa.fit(
        doxa.nets.mlp(1, 1), (x, y), "map", likelihood=noises[0], runs=runs, seed=3, **options
    )
    assert [hyper["lr"] for hyper in together.hyper] == [0.01, 0.02]
    for r, (noise, lr) in enumerate(zip(noises, [0.01, 0.02], strict=True)):
        alone = doxa.fit(
            doxa.nets.mlp(1, 1), (x[rows[r]], y[rows[r]]), "map", likelihood=noise, lr=lr,
            seed=3 + r, **options,
        )  # fmt: skip
        assert together[r].likelihood.base.noise == noise.noise
        p, q = together[r].predict(x), alone.predict(x)
        torch.testing.assert_close(p.mean, q.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(p.aleatoric, torch.full_like(p.aleatoric, noise.noise**2))


def test_a_grid_of_noise_levels_trains_each_with_its_own() -> None:
    x, y = _line()
    noises = [doxa.Gaussian(noise=s) for s in (0.05, 5.0)]
    sweep = doxa.fit(
        doxa.nets.mlp(1, 1), (x, y), "map", likelihood=noises[0], prior=doxa.Normal(0.3),
        runs=doxa.Runs(grid={"likelihood": noises}), steps=300, progress=False,
    )  # fmt: skip
    # With much noise the prior wins and the function shrinks.
    assert sweep[1].predict(x).mean.abs().max() < 0.5 * sweep[0].predict(x).mean.abs().max()


@pytest.mark.parametrize("method", ["last-layer-vi", "batch-ensemble"])
def test_a_grid_of_noises_with_layers_rewritten(method: str) -> None:
    """A method that rewrites layers has seen the network there, too, also where it is to know which
    layer runs last; a run is the fit that it would be alone."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g, dtype=torch.float64)
    noises = [doxa.Gaussian(noise=0.1), doxa.Gaussian(noise=1.0)]
    fit = lambda noise, **more: doxa.fit(  # noqa: E731
        doxa.nets.mlp(2, 1, (3,)).double(), (x, x.sum(1)), method, likelihood=noise, steps=5,
        subset="last_layer", progress=False, **more,
    )  # fmt: skip
    sweep = fit(noises[0], runs=doxa.Runs(grid={"likelihood": noises}))
    for got, noise in zip(sweep, noises, strict=True):
        assert torch.allclose(got.predict(x).mean, fit(noise).predict(x).mean, rtol=1e-8)
    assert not torch.allclose(sweep[0].predict(x).std, sweep[1].predict(x).std)


def test_what_cannot_stand_together_is_refused() -> None:
    x, y = _line()
    fit = lambda runs: doxa.fit(  # noqa: E731
        doxa.nets.mlp(1, 1), (x, y), "map", likelihood=doxa.Gaussian(noise=1.0), runs=runs, steps=1
    )
    with pytest.raises(doxa.errors.MethodError, match="family"):
        fit(doxa.Runs(grid={"likelihood": [doxa.StudentT()]}))
    with pytest.raises(doxa.errors.MethodError, match="same learned parameters"):
        fit(doxa.Runs(grid={"likelihood": [doxa.Gaussian()]}))
    with pytest.raises(doxa.errors.MethodError, match="3 values for 2 splits"):
        fit(doxa.Runs(rows=[[0, 1], [2, 3]], per_split={"lr": [1, 2, 3]}))
    with pytest.raises(doxa.errors.MethodError, match="given twice"):
        fit(doxa.Runs(rows=[[0, 1]], grid={"lr": [1.0]}, per_split={"lr": [1.0]}))


def _line() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    return x, (2.0 * x + 0.1 * torch.sin(20 * x)).squeeze(1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (doxa.Categorical(class_weight=[1.0, 1.0]), doxa.Categorical(class_weight=[1.0, 20.0])),
        (doxa.Categorical(), doxa.Categorical(ignore_index=5)),
        (doxa.StudentT(df=4.0, scale=1.0), doxa.StudentT(df=9.0, scale=1.0)),
    ],
)
def test_what_all_members_share_in_a_step_cannot_differ(first: Any, second: Any) -> None:
    """A step reads it from one likelihood: a grid would train every run with the first."""
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() if first.classifies else x[:, 0]
    net = doxa.nets.mlp(2, 2 if first.classifies else 1)
    runs = Runs(grid={"likelihood": [first, second]})
    with pytest.raises(MethodError, match="fit once for each"):
        doxa.fit(net, (x, y), "map", likelihood=first, runs=runs, steps=1)
