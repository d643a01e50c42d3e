"""The skeleton in CONTRIBUTING.md works as it stands: it samples a known posterior, and keeps what
the protocol promises."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from trial import curve, held_to_the_protocol

import doxa

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path_factory.mktemp("guide") / "my_sgld.py"
    path.write_text(blocks[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_sgld", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_sgld"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_skeleton_samples_the_exact_posterior(skeleton: ModuleType, tmp_path: Path) -> None:
    """y = wx + ε with noise 1 and w ~ N(0, 1): w | D ~ N(Σxy/(Σx² + 1), 1/(Σx² + 1))."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1))
    y = 0.7 * x + rng.normal(size=(20, 1))
    precision = float((x**2).sum() + 1.0)
    exact_mean, exact_std = float((x * y).sum()) / precision, precision**-0.5
    posterior = doxa.fit(
        nn.Linear(1, 1, bias=False).double(), (x, y), skeleton.MySGLD(),
        likelihood=doxa.Gaussian(noise=1.0), members=50, steps=4000, lr=0.06, batch_size=20,
        schedule="constant",
    )  # fmt: skip
    draws = posterior.draw()["weight"].flatten().numpy()
    assert draws.size == 50 * 200
    # 50 independent chains: the mean of the chain means has a standard error of at most std/√50.
    # The step is η = lr/n = 0.003: the variance is 1/(1 − η·precision/2) times the exact one. A
    # chain forgets in 1/(η·precision) = 21 steps and a draw is kept every ten, so that there are
    # some 2,400 independent draws and the error of their standard deviation is 1.4 %.
    wide = exact_std / np.sqrt(1.0 - 0.003 * precision / 2)
    assert abs(draws.mean() - exact_mean) < 4 * exact_std / np.sqrt(50)
    assert draws.std() == pytest.approx(wide, rel=0.06)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=nn.Linear(1, 1, bias=False).double())
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


@pytest.mark.parametrize("name, values", [("lr", [0.01, 0.05]), ("temperature", [0.2, 1.0])])
def test_a_grid_gives_the_runs_that_single_fits_give(
    skeleton: ModuleType, name: str, values: list[float]
) -> None:
    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    options = {"steps": 40, "batch_size": 8, "members": 2, "lr": 0.02, "progress": False}
    runs = doxa.Runs(grid={name: values})
    sweep = doxa.fit(net, curve(), skeleton.MySGLD(), runs=runs, **options)
    assert not torch.allclose(sweep[0].samples, sweep[1].samples, rtol=1e-2)
    for run, value in zip(sweep, values, strict=True):
        rate = {"lr": value} if name == "lr" else {}
        method = skeleton.MySGLD(**({} if rate else {name: value}))
        alone = doxa.fit(net, curve(), method, **(options | rate))
        torch.testing.assert_close(run.samples, alone.samples, rtol=1e-8, atol=1e-10)


def test_members_are_their_own_and_a_run_is_resumed(skeleton: ModuleType, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    method = skeleton.MySGLD(thin=5)
    posterior = held_to_the_protocol(net, curve(), method, tmp_path, steps=80, lr=0.1)
    assert posterior.samples.shape[:2] == (3, 8)
    assert posterior.buffers["1.num_batches_tracked"].tolist() == [80, 80, 80]


def test_weights_outside_the_subset_are_points(skeleton: ModuleType) -> None:
    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    posterior = doxa.fit(
        net, curve(), skeleton.MySGLD(), subset="last_layer", steps=60, members=2, lr=0.05
    )
    draws = posterior.layout.unflatten(posterior.samples)  # {name: [2, T, ...]}
    sampled = {*posterior.network.subset_names, "likelihood.log_noise"}
    assert 0 < len(sampled) < len(draws)
    for name, value in draws.items():
        assert bool((value.std(1) > 0).all()) == (name in sampled), name


def test_the_skeleton_checks_its_settings(skeleton: ModuleType) -> None:
    with pytest.raises(doxa.errors.MethodError):
        skeleton.MySGLD(thin=0)
