"""Kernels composed from text against scikit-learn's, what cannot be read, and gpytorch's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import examples
import gpytorch
import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
)
from torch import Tensor

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.function.evidence import Problem, Sizes, kernel_start
from doxa.function.kernels import Composed

X = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 2)))
ONE = X[:, :1]
PEERS: dict[str, tuple[Tensor, Any]] = {
    "rbf": (X, 1.5 * RBF([0.7, 2.0])),
    "matern12": (X, 1.5 * Matern([0.7, 2.0], nu=0.5)),
    "matern32": (X, 1.5 * Matern([0.7, 2.0], nu=1.5)),
    "matern52": (X, 1.5 * Matern([0.7, 2.0], nu=2.5)),
    "rq": (ONE, 1.5 * RationalQuadratic(0.7, 0.6)),
    "periodic": (ONE, 1.5 * ExpSineSquared(0.7, 1.3)),
    "linear": (X, 1.5 * DotProduct(0.0)),
    "polynomial3": (X, 1.5 * DotProduct(math.sqrt(0.4)) ** 3),
    "rbf * periodic + constant": (
        ONE, 1.5 * (RBF(0.7) * ExpSineSquared(0.7, 1.3)) + ConstantKernel(1.5)),
    "(rbf + linear) * periodic": (
        ONE, (1.5 * RBF(0.7) + 1.5 * DotProduct(0.0)) * ExpSineSquared(0.7, 1.3)),
}  # fmt: skip
VALUES = {"variance": 1.5, "alpha": 0.6, "period": 1.3, "offset": 0.4, "lengthscale": 0.7}


def logs(kernel: Composed) -> Tensor:
    """Logarithms of the values above, a lengthscale of 2 for a second column."""
    values = {}
    for entry in kernel.layout.entries:
        value = VALUES[entry.name.rpartition(".")[2]]
        own = torch.full(entry.shape, value, dtype=torch.float64)
        own[0, 1:] = 2.0
        values[entry.name] = own.log()
    return kernel.layout.flatten(values)


@pytest.mark.parametrize("text", PEERS)
def test_equal_to_scikit_learn(text: str) -> None:
    x, peer = PEERS[text]
    kernel = Composed(text, x.shape[1])
    flat = logs(kernel).expand(2, -1)  # two members
    found = kernel(flat, x, x[:5])
    assert np.allclose(found[1], peer(x.numpy(), x[:5].numpy()), rtol=1e-6, atol=1e-9)
    assert torch.allclose(kernel(flat, x, x, True), kernel(flat, x, x).diagonal(0, 1, 2))


@pytest.mark.parametrize("layers", [1, 3])
def test_the_kernel_of_a_wide_network(layers: int) -> None:
    """Cho & Saul (2009): |u||v| J(θ)/π with J(θ) = sin θ + (π − θ) cos θ, and cos θ ← J(θ)/π for
    each further layer; u, v are rows over lengthscales, and a 1."""
    kernel = Composed(f"relu{layers}", 2)
    u = torch.cat([X / torch.tensor([0.7, 2.0]), torch.ones(len(X), 1)], 1).double()
    size = u.norm(dim=1)
    cosine = (u @ u.mT / size / size[:, None]).clamp(-1, 1)
    for _ in range(layers):
        angle = cosine.acos()
        cosine = (angle.sin() + (math.pi - angle) * cosine) / math.pi
    found = kernel(logs(kernel), X, X)
    assert torch.allclose(found, 1.5 * size * size[:, None] * cosine, rtol=1e-6)
    assert torch.allclose(kernel(logs(kernel), X, X, True), found.diagonal())


def test_a_cosine_is_periodic_in_every_column() -> None:
    kernel = Composed("cosine", 2)
    want = (2 * math.pi * (X[:, None] - X[None]) / torch.tensor([1.3, 2.0])).cos().mean(2)
    assert torch.allclose(kernel(logs(kernel), X, X), 1.5 * want)


def test_equal_rows_have_no_distance() -> None:
    """Far from zero, where a distance by products would be rounding: r = 1e-5 in place of 0."""
    kernel = Composed("matern12")
    x = 1e3 + ONE
    found = kernel(kernel.start().requires_grad_(), x, x)
    assert torch.equal(found.diagonal(), torch.ones(12).double())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rfb", "no kernel 'rfb'; did you mean 'rbf'"),
        ("rbf + mattern32", "did you mean 'matern32'"),
        ("rbf +", "a kernel's name is expected at its end"),
        ("(rbf + linear", r"a closing bracket, \+ or \* is expected at its end"),
        ("rbf linear", r"an end, \+ or \* is expected at 'linear'"),
        ("(rbf linear)", "a closing bracket.* is expected at 'linear"),
        ("rbf + (", "a kernel's name is expected at its end"),
        ("rbf)", r"an end, \+ or \* is expected at '\)'"),
        ("rbf(linear)", r"expected at '\(linear\)'"),
        ("(rbf) linear", r"an end, \+ or \* is expected at 'linear'"),
        ("rbf * ()", r"a kernel's name is expected at '\(\)'"),
        ("rbf ** linear", r"a kernel's name is expected at '\* linear'"),
        ("2 * rbf", r"a kernel's name is expected at '2 \* rbf'"),
        ("+rbf", r"a kernel's name is expected at '\+rbf'"),
        ("rbf # linear", "expected at '# linear'"),
        ("ｒｂｆ", "no kernel 'ｒｂｆ'"),  # Python itself would read rbf
        ("(" * 10_000 + "rbf", "at most 200 signs"),
        ("+" * 10_000, "at most 200 signs"),
        ("rbf - linear", "expected at '- linear'"),
        ("", "a kernel's name is expected"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        doxa.GP(text)


def test_a_composed_kernel_is_saved_by_its_text(tmp_path: Path) -> None:
    y = X.sin().sum(1, keepdim=True)
    method = doxa.GP("rbf * periodic + linear", noise=0.1, refine=5)
    posterior = doxa.fit(None, (X, y), method, members=2)
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert loaded.method.kernel == "rbf * periodic + linear"
    assert torch.equal(loaded.predict(X).variance, posterior.predict(X).variance)
    assert set(posterior.diagnostics["kernel"]) == {
        "rbf*periodic.variance", "linear.variance", "rbf.lengthscale", "periodic.lengthscale",
        "periodic.period",
    }  # fmt: skip


def test_a_period_is_found() -> None:
    """Twelve periods of a sine: the evidence has a top at every multiple."""
    x = torch.linspace(0, 12, 80).double()[:, None]
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(80, 1)))
    posterior = doxa.fit(None, (x, (2 * math.pi * x).sin() + 0.1 * noise), doxa.GP("periodic"))
    periods = np.ravel(posterior.diagnostics["kernel"]["periodic.period"])
    assert np.allclose(np.round(periods), periods, atol=0.01)
    later = posterior.predict(x + 12).mean
    assert (later - (2 * math.pi * x).sin()).abs().max() < 0.2


class Difference(gpytorch.kernels.Kernel):
    """exp(−½r²) − ½: its mean over rows is below zero for rows far apart."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        squared = self.covar_dist(x1, x2, diag=diag, square_dist=True)
        return (-0.5 * squared).exp() - 0.5


def test_a_kernel_that_is_not_positive_definite_is_refused() -> None:
    x = torch.arange(0.0, 60.0, 3.0).double()[:, None]
    with pytest.raises(MethodError, match=r"not positive definite: .* eigenvalue of -"):
        doxa.fit(None, (x, x.sin()), doxa.GP(Difference(), noise=0.1))


def test_constant_and_many_columns() -> None:
    y = X.sin().sum(1, keepdim=True)
    constant = torch.cat([X, torch.ones(12, 1).double()], 1)
    one, other = (doxa.fit(None, (x, y), doxa.GP(noise=0.1)) for x in (X, constant))
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-3)
    many = doxa.GP().function(51)
    assert (doxa.GP().function(50).layout.size, many.layout.size) == (51, 2)
    assert doxa.GP(ard=True).function(51).layout.size == 52


def test_memory_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three members: three factors to keep and two matrices to work with, of 12 × 12 numbers."""
    data, need = (X, X[:, :1]), 8 * 12**2 * 5 + (256 << 20)
    method = doxa.GP(noise=0.1, refine=1)
    with caplog.at_level("INFO", "doxa"):
        doxa.fit(None, data, method, members=3)
    assert f"12 rows take {need / 2**30:.3g} GiB ({need} bytes)" in caplog.text
    monkeypatch.setattr("doxa.function.gp.free_memory", lambda device: need - 1)
    with pytest.raises(MemoryBudgetError, match=f'{need} bytes.*"sparse-gp"'):
        doxa.fit(None, data, method, members=3)


@pytest.mark.slow
def test_the_evidence_foresees() -> None:
    """Of a series with a trend and a season: the kernel of both has the largest evidence, and the
    best score on two years that none has seen."""
    example = examples.load("gaussian_process")
    found = {kernel: example.fitted(kernel) for kernel in ("rbf", "linear + rbf * periodic")}
    evidence = {kernel: posterior.log_evidence for kernel, posterior in found.items()}
    unseen = {kernel: example.foreseen(posterior) for kernel, posterior in found.items()}
    assert max(evidence, key=lambda k: evidence[k]) == max(unseen, key=lambda k: unseen[k])
    assert unseen["linear + rbf * periodic"] > 0 > unseen["rbf"]
    period = found["linear + rbf * periodic"].diagnostics["kernel"]["periodic.period"]
    assert np.ravel(period)[0] == pytest.approx(1.0, abs=0.01)  # a year


def test_where_hyper_parameters_start_is_each_members_own() -> None:
    """Stacked or alone, with one lengthscale for all columns: √2 times the root of the summed
    variances of the columns."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 2, generator=g).double() * torch.tensor([1.0, 5.0, 0.2])[:, None, None]
    y = torch.randn(3, 40, 1, generator=g).double()
    kernel = Composed("rbf")
    sizes = Sizes.of(x, y, None)
    together = kernel_start(kernel, x, sizes, None, None)
    alone = [kernel_start(kernel, x[k], Sizes.of(x[k], y[k], None), None, None) for k in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))
    want = (2 * x.var(1, correction=0).sum(1)).sqrt().log()
    torch.testing.assert_close(together[:, kernel.layout.slices["rbf.lengthscale"]], want[:, None])


def test_a_problem_is_thinned_evenly() -> None:
    x = torch.arange(9.0).double()[:, None]
    problem = Problem(Composed("rbf"), x, 2 * x, None, torch.tensor(9.0).double(), None)
    few = problem.thinned(3)
    assert few.x.flatten().tolist() == [0.0, 4.0, 8.0]
    assert few.y.flatten().tolist() == [0.0, 8.0, 16.0] and float(few.n) == 3


@pytest.mark.parametrize("text", ["rbf", "polynomial2", "rbf + linear", "relu1 * periodic + rq"])
def test_variances_start_at_the_mean_square_of_the_targets(text: str) -> None:
    """The prior variance of f, averaged over the rows, is that of y, shared evenly by the terms."""
    x, y = 3 * X + 1, 5 * X[:, :1] + 2
    kernel = Composed(text, 2)
    theta = kernel_start(kernel, x, Sizes.of(x, y, None), None, None)
    torch.testing.assert_close(kernel(theta, x, x, True).mean(), y.square().mean())
    terms = [s.start for name, s in kernel.layout.slices.items() if name.endswith(".variance")]
    for term in terms:
        alone = theta.clone()
        alone[[other for other in terms if other != term]] = -torch.inf
        torch.testing.assert_close(kernel(alone, x, x, True).mean(), y.square().mean() / len(terms))
