"""The skeleton in CONTRIBUTING.md works as it stands: it samples a known posterior."""

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


def test_the_skeleton_samples_the_exact_posterior(skeleton: ModuleType, tmp_path: Path) -> None:
    """y = wx + ε with noise 1 and w ~ N(0, 1): w | D ~ N(Σxy/(Σx² + 1), 1/(Σx² + 1))."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1))
    y = 0.7 * x + rng.normal(size=(20, 1))
    precision = float((x**2).sum() + 1.0)
    exact_mean, exact_std = float((x * y).sum()) / precision, precision**-0.5
    posterior = doxa.fit(
        nn.Linear(1, 1, bias=False).double(), (x, y), skeleton.MySGLD(),
        likelihood=doxa.Gaussian(noise=1.0), members=50, steps=4000, lr=3e-3, batch_size=20,
    )  # fmt: skip
    draws = posterior.draw()["weight"].flatten().numpy()
    assert draws.size == 50 * 200
    # 50 independent chains: the mean of the chain means has a standard error of at most
    # std/√50, and η times the precision (0.03 to 0.07) bounds the relative bias of the variance
    assert abs(draws.mean() - exact_mean) < 4 * exact_std / np.sqrt(50)
    assert draws.std() == pytest.approx(exact_std, rel=0.1)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=nn.Linear(1, 1, bias=False).double())
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_the_skeleton_checks_its_settings(skeleton: ModuleType) -> None:
    with pytest.raises(doxa.errors.MethodError):
        skeleton.MySGLD(thin=0)
