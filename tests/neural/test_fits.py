"""Fits of neural processes: units, contexts, tasks without end, and what they learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from short import short
from torch import Tensor

import doxa
from doxa.data import Tasks, TaskSampler
from doxa.data.simulated import gp_tasks
from doxa.errors import DataError, MethodError, ModelError


def lines(count: int = 12, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Straight lines through the origin, of uneven length."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        x = 2 * torch.rand(4 + i % 4, 1, generator=g, dtype=torch.float64) - 1
        found.append((x, x * torch.randn(1, generator=g, dtype=torch.float64)))
    return found


@pytest.mark.parametrize("name", ["cnp", "np", "convcnp"])
def test_units_do_not_matter_where_tasks_are_standardised(name: str) -> None:
    """x in other units and y in others give the same answers in those."""
    tasks = lines()
    moved = [(3 * x + 2, 10 * y - 4) for x, y in tasks]
    options = {"steps": 5, "standardize": True, "progress": False}
    one = doxa.fit(None, Tasks(tasks), short(name), **options)
    two = doxa.fit(None, Tasks(moved), short(name), **options)
    (x, y), (u, v) = tasks[0], moved[0]
    p, q = one.condition(x, y).predict(x), two.condition(u, v).predict(u)
    assert torch.allclose(10 * p.mean - 4, q.mean, atol=1e-8)
    assert torch.allclose(100 * p.aleatoric, q.aleatoric, rtol=1e-8)
    assert torch.allclose(100 * p.epistemic, q.epistemic, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["cnp", "anp", "tnp"])
def test_a_context_by_parts_and_tasks_at_once(name: str) -> None:
    """Two conditionings are one with all rows; a task is itself among others that are longer."""
    tasks = lines()
    posterior = doxa.fit(None, Tasks(tasks), short(name), steps=5, progress=False)
    x, y = tasks[4]  # of 4 points, padded to 7
    whole = posterior.condition(x, y).predict(x).mean
    parts = posterior.condition(x[:2], y[:2]).condition(x[2:], y[2:]).predict(x).mean
    assert torch.equal(parts, whole)
    given, _ = Tasks(tasks).padded()
    together = posterior.predict(given).mean.reshape(len(tasks), -1)
    assert torch.allclose(together[4, : len(x)], whole[:, 0], atol=1e-12)


def test_an_autoregressive_draw_begins_with_the_marginal_of_predict() -> None:
    """Of the first point mean and spread, within 4 standard errors of 4000 draws."""
    method = doxa.TNP(width=8, depth=1, layers=1, heads=2, mode="autoregressive", min_std=0.2)
    tasks = lines()
    posterior = doxa.fit(None, Tasks(tasks), method, steps=20, progress=False)
    known = posterior.condition(*tasks[0])
    x = torch.tensor([[0.3], [0.31]]).double()
    p, f = known.predict(x), known.functions(x, 4000)
    std = float(p.aleatoric[0].sqrt())
    assert abs(float(f[:, 0].mean() - p.mean[0])) < 4 * std / 4000**0.5
    assert float(f[:, 0].std()) == pytest.approx(std, rel=4 / 8000**0.5)
    again = known.functions(x.flip(0), 4000)
    assert torch.allclose(again[:, 0].mean(), p.mean[1].mean(), atol=4 * std / 4000**0.5)


def test_tasks_of_a_sampler_are_a_function_of_the_step(tmp_path: Path) -> None:
    """A fit that is stopped past the first block of steps and resumed is the uninterrupted one."""
    data = TaskSampler(gp_tasks(points=8))
    options = {"steps": 80, "batch_size": 2, "progress": False}
    want = doxa.fit(None, data, short("cnp"), **options)

    def stop(step: int, info: object) -> None:
        if step >= 70 and not stopped:
            stopped.append(step)
            raise KeyboardInterrupt

    stopped: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        doxa.fit(None, data, short("cnp"), checkpoint=tmp_path, callbacks=[stop], **options)
    got = doxa.fit(None, data, short("cnp"), checkpoint=tmp_path, **options)
    assert torch.equal(got.weights, want.weights)
    other = doxa.fit(None, TaskSampler(gp_tasks(points=8), seed=1), short("cnp"), **options)
    assert not torch.equal(other.weights, want.weights)


def test_gp_tasks_have_the_covariance_they_say() -> None:
    """The mean square is E[s²] + 0.02² = 0.37 + 0.0004 and every size is within the protocol;
    2,000 tasks, within 4 standard errors."""
    g = torch.Generator().manual_seed(0)
    x, y, context, targets = gp_tasks("matern")(g, 2_000)
    first = y[:, 0, 0].square()
    assert abs(float(first.mean()) - 0.3704) < 4 * float(first.std()) / 2_000**0.5
    seen, asked = context.sum(1), targets.sum(1)
    assert (int(seen.min()), int(seen.max()), int(asked.min())) == (3, 46, 3)
    assert int((seen + asked).max()) == 49
    assert float(x.abs().max()) <= 2
    assert float((context * targets).max()) == 0


def test_a_folder_of_files_is_tasks(tmp_path: Path) -> None:
    """Columns in any order; what is no number is named by file and line."""
    (tmp_path / "a.csv").write_text("t,y,id\n1,10,7\n2,20,7\n")
    (tmp_path / "b.csv").write_text("y,id,t\n30,8,3\n40,8,4\n50,8,5\n")
    (x, y), (u, v) = Tasks.from_folder(tmp_path, "y", drop=["id"]).tasks
    assert x.tolist() == [[1], [2]]
    assert y.tolist() == [[10], [20]]
    assert torch.cat([u, v], 1).tolist() == [[3, 30], [4, 40], [5, 50]]
    (tmp_path / "b.csv").write_text("y,id,t\n30,8,3\n40,8,four\n")
    with pytest.raises(DataError, match=r"b\.csv, line 3: t is 'four'"):
        Tasks.from_folder(tmp_path, "y", drop=["id"])


def test_what_is_wrong_is_said() -> None:
    tasks = Tasks(lines())
    with pytest.raises(DataError, match="learns from tasks"):
        doxa.fit(None, (torch.randn(9, 1), torch.randn(9)), "cnp")
    with pytest.raises(MethodError, match="noise of every point"):
        doxa.fit(None, tasks, "cnp", likelihood=doxa.Gaussian(noise=0.1))
    with pytest.raises(DataError, match="one or two columns"):
        doxa.fit(None, Tasks([(torch.randn(5, 3), torch.randn(5))]), "convcnp")
    posterior = doxa.fit(None, tasks, short("cnp"), steps=1, progress=False)
    with pytest.raises(DataError, match="no context"):
        posterior.predict(torch.zeros(3, 1))
    bad = TaskSampler(gp_tasks())
    with pytest.raises(DataError, match="for 3 tasks"):
        TaskSampler(lambda g, n: bad.first, look=3)


def test_a_network_beside_tasks_is_named() -> None:
    tasks = Tasks([(torch.rand(6, 1), torch.rand(6, 1)) for _ in range(12)])
    with pytest.raises(ModelError, match="cnp has its own network: pass None"):
        doxa.fit(doxa.nets.mlp(1, 1, (3,)), tasks, "cnp")
    with pytest.raises(ModelError, match=r'are tasks.* a neural process \("cnp", "tnp"'):
        doxa.fit(doxa.nets.mlp(1, 1, (3,)), tasks, "map")


@pytest.mark.slow
def test_short_training_on_gp_tasks_beats_a_constant() -> None:
    """The best constant guess N(0, σ²) on these tasks has a log-likelihood of about −0.9 a point;
    what looks at the context is above it after some hundred steps."""
    data, cpu = TaskSampler(gp_tasks()), torch.device("cpu")
    posterior = doxa.fit(None, data, doxa.CNP(width=64), steps=400, lr=2e-3, progress=False)
    x, y, context, targets = data.drawn(("test",), 200, cpu)
    seen = context[..., None]
    given = {"context_x": x * seen, "context_y": y * seen, "context": context, "target_x": x}
    logs = posterior.predict(given).log_prob(y.reshape(-1, 1).float()).reshape(200, -1)
    score = float(((logs * targets).sum(1) / targets.sum(1)).mean())
    variance = float(y.square().mean())
    constant = -0.5 * (torch.tensor(2 * torch.pi * variance).log() + 1)
    assert score > float(constant) + 0.2


@pytest.mark.parametrize("name", ["cnp", "np"])
def test_many_targets_are_predicted_some_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of three targets or all at once, with samples or moments kept: the same answers."""
    tasks = lines()
    fitted = doxa.fit(None, Tasks(tasks), short(name), steps=5, progress=False)
    posterior = fitted.condition(*tasks[0])
    x = torch.linspace(-1, 1, 10).double()[:, None]
    whole = posterior.predict(x)
    monkeypatch.setattr("doxa.neural.posterior._ROWS", 3)
    for keep in ("samples", "moments"):
        tiled = posterior.predict(x, keep=keep)
        torch.testing.assert_close(tiled.mean, whole.mean)
        torch.testing.assert_close(tiled.variance, whole.variance)
