"""Laplace in function space: the full matrix's numbers, from the kernel on the training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import functional


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def rows(n: int = 40) -> tuple[Tensor, Tensor]:
    x = normal(n, 2)
    return x, x.sin().sum(1, keepdim=True) + 0.3 * normal(n, 1, seed=2)


def classes(n: int = 40) -> tuple[Tensor, Tensor]:
    x = normal(n, 2)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def fit(data: Any, structure: str, *, settings: Any = None, **options: Any) -> Any:
    """At the same weights for either structure, on a network with more weights than rows."""
    outputs = 1 if data[1].is_floating_point() else 3
    net = doxa.nets.mlp(2, outputs, (20,), activation="tanh").double()
    method = doxa.Laplace(structure, newton_steps=0, mean_correction=False, **settings or {})
    return doxa.fit(net, data, method, **{"members": 2, "steps": 10, "validation": None} | options)


def same(full: Any, ours: Any, x: Tensor) -> None:
    """Everything that a covariance can do, and what follows from it."""
    one, other = full.covariance, ours.covariance
    _, j = full.jacobians()(x)
    assert torch.allclose(ours.mean, full.mean, rtol=1e-10)
    assert torch.allclose(other.outer(j), one.outer(j), rtol=1e-8, atol=1e-12)
    assert torch.allclose(other.dense(), one.dense(), rtol=1e-8, atol=1e-11)
    assert torch.allclose(other.diagonal(), one.diagonal(), rtol=1e-8)
    assert torch.allclose(other.solve(j[:, 0, 0]), one.solve(j[:, 0, 0]), rtol=1e-8, atol=1e-8)
    for name in ("prior_scale", "newton_decrement"):
        assert ours.diagnostics[name] == pytest.approx(full.diagnostics[name], rel=1e-7)
    if full.log_evidence is not None:
        assert ours.log_evidence == pytest.approx(full.log_evidence, rel=1e-10)


@pytest.mark.parametrize("data", [rows(), classes()], ids=["regression", "classes"])
def test_the_numbers_of_the_full_matrix(data: Any) -> None:
    """Covariance, evidence, noise and prior scale: two ways to write one thing."""
    full, ours = (fit(data, structure) for structure in ("full", "functional"))
    same(full, ours, normal(7, 2, seed=5))


def test_features_that_do_not_fit_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel blocks of ten rows by five of twelve, and products with five rows at a time."""
    full = fit(rows(12), "full")
    row = 8 * 2 * 81
    monkeypatch.setattr(functional, "_HELD", 10 * row)
    monkeypatch.setattr("doxa.laplace.curvature._CHUNK_BYTES", {"cpu": 5 * row})
    ours = fit(rows(12), "functional")
    assert ours.covariance.features._held is None
    same(full, ours, normal(3, 2, seed=5))


def test_a_linear_network_is_a_gaussian_process() -> None:
    """The formulas of Rasmussen & Williams (2006), eq. 2.25, 2.26 and 2.30, with k = s² xᵀx', at
    the posterior's mean."""
    x, y = rows()
    new = normal(5, 2, seed=7)
    noisy = 0.49 * x @ x.T + 0.09 * torch.eye(40).double()
    cross = 0.49 * new @ x.T
    mean = cross @ torch.linalg.solve(noisy, y)
    covariance = 0.49 * new @ new.T - cross @ torch.linalg.solve(noisy, cross.T)
    net = nn.Linear(2, 1, bias=False).double()
    net.weight.data = torch.linalg.lstsq(new, mean).solution.T
    model = doxa.Model(net, doxa.Gaussian(noise=0.3), doxa.Normal(0.7))
    method = doxa.Laplace("functional", train=False)
    posterior = doxa.fit(model, (x, y), method, init="given", validation=None)
    p = posterior.predict(new)
    assert torch.allclose(p.mean, mean, rtol=1e-9)
    assert torch.allclose(p.epistemic[:, 0], covariance.diagonal(), rtol=1e-9)
    evidence = multivariate_normal(np.zeros(40), noisy.numpy()).logpdf(y[:, 0].numpy())
    assert posterior.log_evidence == pytest.approx(float(evidence), rel=1e-10)
    drawn = posterior.functions(new, 20_000)[..., 0]
    error = ((covariance.diagonal()[:, None] * covariance.diagonal() + covariance.square())
             / 20_000).sqrt()  # fmt: skip
    assert ((drawn.T.cov() - covariance).abs() < 5 * error).all()  # 25 checks, chance 1e-5


def test_members_with_rows_of_their_own_and_weights(tmp_path: Path) -> None:
    """Each member holds out another part, of another length; weights count; float32; files."""
    x, y = rows(57)
    weight = torch.linspace(0.1, 2.0, 57).double()
    options: dict[str, Any] = {"sample_weight": weight, "members": 3}
    full, ours = (fit((x, y), s, **options) for s in ("full", "functional"))
    same(full, ours, normal(4, 2, seed=5))
    ours.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert torch.equal(loaded.predict(x).variance, ours.predict(x).variance)
    assert torch.equal(loaded.functions(x, 5), ours.functions(x, 5))
    single = doxa.fit(
        doxa.nets.mlp(2, 1, (20,)), (x.float(), y.float()), doxa.Laplace("functional"), steps=20
    )
    assert single.predict(x.float()).std.dtype == torch.float32


def test_weights_can_be_drawn_and_links_taken() -> None:
    x, _ = data = classes()
    posterior = fit(data, "functional", settings={"link": "probit-marginal"})
    f, j = posterior.jacobians()(x[:3])
    variance = posterior.covariance.quad(j)
    logits = f / (1 + torch.pi / 8 * variance).sqrt()
    assert torch.allclose(posterior.predict(x[:3]).probs, logits.softmax(-1).mean(0))
    drawn = posterior.layout.flatten(posterior.draw(4, seed=1))
    assert drawn.shape == (4, posterior.layout.size)


def test_few_rows_stand_for_all() -> None:
    """Rows that come in copies: one copy of each, with its precision multiplied so that the trace
    is that of all, is exact; the evidence of a part is none."""
    x, y = rows(20)
    x, y = x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)
    likelihood = doxa.Gaussian(noise=0.3)
    options: dict[str, Any] = {"likelihood": likelihood, "prior": doxa.Normal(1.0), "members": 1}
    whole = fit((x, y), "functional", **options)
    few = fit((x, y), "functional", settings={"kernel_rows": 20}, **options)
    new = normal(6, 2, seed=5)
    index = torch.linspace(0, 39, 20).double().round().long()
    assert len({i // 2 for i in index.tolist()}) == 20  # one of each pair
    assert torch.allclose(few.predict(new).variance, whole.predict(new).variance, rtol=1e-8)
    assert few.log_evidence is None
    assert whole.log_evidence is not None
    least = fit((x, y), "functional", settings={"kernel_rows": 3}, **options)
    ratio = least.predict(new).epistemic / whole.predict(new).epistemic
    assert (ratio > 1.0).float().mean() > 0.5  # three rows say less of most places


def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MethodError, match="structure='functional'"):
        doxa.Laplace("full", kernel_rows=10)
    with pytest.raises(MethodError, match="Gaussian prior"):
        fit(rows(), "functional", prior=doxa.StudentTPrior())
    monkeypatch.setattr(functional, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryBudgetError, match="use kernel_rows="):
        fit(rows(), "functional")
