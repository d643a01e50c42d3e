"""structure="block-diagonal": the blocks of the dense matrix, and the evidence by the formula."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg
from torch import Tensor, nn

import doxa
from doxa.linalg import BlockDiagonal

NOISE, STD = 0.4, 0.8
LAYERS = [(0, 9), (9, 25), (25, 35)]  # weights and biases of 2-3-4-2, without likelihood parameters


@cache
def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g, dtype=torch.float64)
    return x, torch.stack([x[:, 0].sin(), x.prod(1)], 1)


def fit(structure: str, members: int = 1, likelihood: Any = None, **settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        ).double()
    x, y = data()
    likelihood = likelihood or doxa.Gaussian(NOISE)
    y = y if likelihood.is_normal else (y[:, 0] > 0).long()
    settings |= {"newton_steps": 0} if structure == "full" else {}
    prior = doxa.Normal(STD) if settings.get("tune", "auto") is None else None
    return doxa.fit(
        net, (x, y), doxa.Laplace(structure, **settings), likelihood=likelihood, prior=prior,
        steps=300, members=members, validation=None, progress=False,
    )  # fmt: skip


def blocks_of(matrix: Any) -> Any:
    return linalg.block_diag(*(matrix[a:b, a:b] for a, b in LAYERS))


@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_blocks_are_those_of_the_dense_matrix(kind: str, curvature: str) -> None:
    """H of "full" without its entries between layers, inverted by numpy; of each member."""
    likelihood = None if kind == "gaussian" else doxa.Categorical()
    options: Any = {"members": 2, "likelihood": likelihood, "tune": None, "curvature": curvature}
    full, ours = (fit(name, **options) for name in ("full", "block-diagonal"))
    assert isinstance(ours.covariance, BlockDiagonal)
    assert torch.equal(ours.mean, full.mean)
    for k in range(2):
        precision = np.linalg.inv(full.covariance.dense()[k].numpy())
        want = np.linalg.inv(blocks_of(precision))
        np.testing.assert_allclose(ours.covariance.dense()[k].numpy(), want, rtol=1e-8, atol=1e-10)
        assert np.abs(blocks_of(precision) - precision).max() > 1e-2


def test_the_evidence_is_the_formula() -> None:
    """log p(D, θ*) + ½ gᵀH⁻¹g + (p/2) log 2π − ½ log |H| with the blocks of H."""
    full, ours = (fit(name, tune=None) for name in ("full", "block-diagonal"))
    x, y = data()
    theta = ours.mean[0].clone().requires_grad_()
    params = ours.layout.unflatten(theta)
    joint = ours.model.log_joint(params, x, y)
    (g,) = torch.autograd.grad(joint, theta)
    h = blocks_of(np.linalg.inv(full.covariance.dense()[0].numpy()))
    above = 0.5 * g.numpy() @ np.linalg.solve(h, g.numpy())
    want = (
        float(joint.detach()) + above + 17.5 * math.log(2 * math.pi) - 0.5 * np.linalg.slogdet(h)[1]
    )
    assert ours.log_evidence == pytest.approx(want, rel=1e-9)
    assert abs(ours.log_evidence - full.log_evidence) > 0.1


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("scale", ["shared", "layer"])
def test_noise_and_prior_scale_are_at_their_fixed_point(per_output: bool, scale: str) -> None:
    """n_g σ²_g = χ²_g + γ_g σ²_g and τ_k = γ_k / |θ_k|², from the blocks by numpy: with these γ one
    more round changes nothing. Iterations of several noise levels end after a fixed number."""
    ours = fit("block-diagonal", likelihood=doxa.Gaussian(per_output=per_output), tuned_scale=scale)
    x, y = data()
    layout, mean = ours.layout, ours.mean[0]
    params = layout.unflatten(mean)
    noise = params["likelihood.log_noise"].exp().expand(2)
    names = [name for name in layout.names if not name.startswith("likelihood.")]
    prior = [ours.priors[0]] * 6 if scale == "shared" else [ours.priors[0][n] for n in names]
    sizes = [layout.slices[n].stop - layout.slices[n].start for n in names]
    delta = np.repeat([one.std**-2 for one in prior], sizes)

    def f(flat: Tensor) -> Tensor:
        return ours.model.forward(layout.unflatten(flat), x)

    j = torch.autograd.functional.jacobian(f, mean)[..., :35].numpy()  # [N, O, p]
    each = [j[:, o].T @ j[:, o] / float(noise[o]) ** 2 for o in range(2)]
    inverse = np.linalg.inv(blocks_of(sum(each)) + np.diag(delta))
    gamma = [np.trace(inverse @ blocks_of(own)) for own in each]
    chi = (y - f(mean)).square().sum(0).numpy()
    if per_output:
        for o in range(2):
            assert float(noise[o]) ** 2 == pytest.approx(chi[o] / (30 - gamma[o]), rel=1e-3)
    else:
        assert float(noise[0]) ** 2 == pytest.approx(chi.sum() / (60 - sum(gamma)), rel=1e-3)
    share = 1 - np.diag(inverse) * delta
    square = mean[:35].numpy() ** 2
    groups = [slice(0, 35)]
    if scale == "layer":
        ends = np.cumsum(sizes)
        groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    for own in groups:
        assert delta[own][0] == pytest.approx(share[own].sum() / square[own].sum(), rel=0.02)


def test_one_layer_is_the_full_matrix_and_it_is_saved(tmp_path: Path) -> None:
    x, y = data()
    net = nn.Linear(2, 2).double()
    fits = [
        doxa.fit(net, (x, y), method, steps=100, validation=None, progress=False)
        for method in (doxa.Laplace("full", newton_steps=0), doxa.Laplace("block-diagonal"))
    ]
    assert fits[1].log_evidence == pytest.approx(fits[0].log_evidence, rel=1e-9)
    assert torch.allclose(fits[1].covariance.dense(), fits[0].covariance.dense(), rtol=1e-8)
    fits[1].save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert torch.equal(again.covariance.dense(), fits[1].covariance.dense())
    assert torch.equal(again.predict(x).std, fits[1].predict(x).std)
