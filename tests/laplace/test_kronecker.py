"""Laplace with Kronecker factors: where it is exact, products without J, what it refuses."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import curvature, status
from doxa.laplace.curvature import Jacobians
from doxa.laplace.kronecker import Factored
from doxa.linalg import Kronecker, KroneckerBlock


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


class Tokens(nn.Module):
    """An embedding with padding, a linear layer called twice with positions first, a norm layer and
    a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.norm, self.again = nn.LayerNorm(4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.embed(x))).transpose(0, 1)
        return self.head((self.again(torch.tanh(self.again(h))) @ self.gain).mean(0))


def tokens() -> Tensor:
    return torch.tensor([[1, 3, 3, 0, 6], [2, 2, 2, 4, 1], [5, 0, 0, 6, 3]])


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)), normal(6, 2)),
    "conv1d": (
        nn.Sequential(
            nn.Conv1d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"),
            nn.GELU(), nn.Conv1d(3, 2, 2, stride=2),
        ),
        normal(4, 2, 8),
    ),
    "conv2d": (
        nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(12, 2),
        ),
        normal(4, 2, 8, 8),
    ),
    "conv3d": (
        nn.Sequential(
            nn.Conv3d(1, 2, (2, 3, 2), padding=(1, 0, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)
        ),
        normal(3, 1, 3, 4, 3),
    ),
    "tokens": (Tokens(), tokens()),
}  # fmt: skip


def any_covariance(source: Factored) -> Kronecker:
    """Blocks in random bases, two members."""
    owner = {name: layer for layer in source.layers.values() for name in layer.names}
    basis = lambda n: torch.linalg.qr(normal(2, n, n, seed=n))[0]  # noqa: E731
    blocks = []
    for e in source.layout.entries:
        values, layer = normal(2, e.size, seed=3).square(), owner.get(e.name)
        if layer is None:
            blocks.append(KroneckerBlock(values))
        elif e.name == layer.bias:
            blocks.append(KroneckerBlock(values, basis(layer.outputs)))
        else:
            left = None if layer.embeds else basis(layer.outputs)
            right = basis(layer.outputs if layer.embeds else layer.inputs)
            blocks.append(KroneckerBlock(values, left, right))
    one = torch.ones(2, len(blocks), dtype=torch.float64)
    return Kronecker(tuple(blocks), one, one)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", CASES)
def test_products_equal_those_of_the_jacobian(
    name: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J of every layer, by reverse mode, held whole; pieces have one row and output."""
    net, x = CASES[name]
    model = doxa.Model(net.double(), "gaussian").build(x)
    flat = 0.5 * normal(2, model.layout.size, seed=1)
    f, j = Jacobians(model, flat, model.subset_names)(x)
    if cut:
        monkeypatch.setattr(curvature, "_CHUNK_BYTES", {"cpu": 1})
    source = Factored(model, flat, model.subset_names)
    covariance, draws = any_covariance(source), normal(2, 40, j.shape[-1], seed=5)
    assert next(source.chunks(len(x))).stop == (1 if cut else len(x))
    expected = {
        "variance": (covariance.quad(j), source.variance(x, covariance)),
        "spread": (covariance.outer(j), source.spread(x, covariance)),
        "many draws": (torch.einsum("kbop,ksp->ksbo", j, draws), source.along(x, draws)),
        "one draw": (
            torch.einsum("kbop,ksp->ksbo", j, draws[:, :1]),
            source.along(x, draws[:, :1]),
        ),
    }
    for whole, (value, ours) in expected.values():
        assert torch.allclose(value, f, rtol=1e-12)
        assert torch.allclose(ours, whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("tune", [None, "evidence"])
def test_a_linear_network_with_gaussian_noise_is_exact(tune: str | None) -> None:
    """Any number of outputs, each with its own noise: G = diag(n/σ²) ⊗ XᵀX/n, so that noise, prior
    scale, evidence and covariance are those of the full matrix, which is exact."""
    x = normal(50, 3)
    y = x @ normal(3, 2, seed=1) + torch.tensor([0.2, 0.9]).double() * normal(50, 2, seed=2)
    net = nn.Linear(3, 2, bias=False).double()
    full, ours = (
        doxa.fit(
            net, (x, y), doxa.Laplace(structure, train=False, tune=tune), init="given",
            likelihood=doxa.Gaussian(per_output=True), prior=doxa.Normal(0.7),
        )
        for structure in ("full", "kronecker")
    )  # fmt: skip
    assert ours.log_evidence == pytest.approx(full.log_evidence, rel=1e-10)
    assert torch.allclose(ours.mean, full.mean, rtol=1e-9)
    assert torch.allclose(ours.covariance.dense(), full.covariance.dense(), rtol=1e-8, atol=1e-14)
    assert torch.allclose(ours.predict(x).variance, full.predict(x).variance, rtol=1e-8)


def test_an_embedding_under_a_fixed_linear_head_is_exact() -> None:
    """A row of one token has G = count ⊗ HᵀH/σ² whichever its token, and padding none."""
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(3, 2)).double()
    x = torch.tensor([[1], [1], [4], [2], [2], [0]])
    model = doxa.Model(net, doxa.Gaussian(0.3), doxa.Normal(1.0), subset=lambda n: n[0] == "0")
    full, ours = (
        doxa.fit(model, (x, normal(6, 2)), doxa.Laplace(structure, train=False), init="given")
        for structure in ("full", "kronecker")
    )
    assert torch.allclose(ours.covariance.dense(), full.covariance.dense(), rtol=1e-9, atol=1e-12)
    assert ours.log_evidence == pytest.approx(full.log_evidence, rel=1e-10)


def test_each_outputs_noise_is_at_its_fixed_point() -> None:
    """MacKay's equation, with all of it read off the posterior: Σ_g (n − χ²_g) = γ = p − δ tr Σ."""
    x = normal(40, 2)
    y = torch.stack([x.sum(1), torch.sin(2 * x[:, 0])], 1) * torch.tensor([1.0, 20.0]).double()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model = doxa.Model(net, doxa.Gaussian(per_output=True), doxa.Normal(1.0))
    ours = doxa.fit(model, (x, y), doxa.Laplace("kronecker"), steps=50, validation=None)
    net = ours.network
    f = net.forward(ours.layout.unflatten(ours.mean[0]), x)
    chi = ((y - f).square() / ours.predict(x).aleatoric).sum(0)
    gamma = ours.covariance.size - ours.covariance.diagonal().sum()
    assert float((40 - chi).sum()) == pytest.approx(float(gamma), rel=1e-6)


def image_data(n: int = 30) -> tuple[Tensor, Tensor]:
    return normal(n, 1, 6, 6), torch.arange(n) % 3


def image_net(norm: bool = False) -> nn.Module:
    made = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(made[0], nn.BatchNorm2d(2) if norm else nn.Identity(), *made[1:]).double()


def fit(net: nn.Module, data: Any, **options: Any) -> Any:
    settings = {k: options.pop(k) for k in ("tune", "train") if k in options}
    options = {"steps": 20, "likelihood": "categorical", "validation": None} | options
    return doxa.fit(net, data, doxa.Laplace("kronecker", **settings), **options)


def test_members_are_separate_fits_and_survive_saving(tmp_path: Path) -> None:
    x, y = image_data()
    two = fit(image_net(), (x, y), members=2)
    one = fit(image_net(), (x, y), members=1)
    assert torch.allclose(two.covariance.member(0).dense(), one.covariance.dense(), rtol=1e-8)
    two.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run", net=image_net())
    assert loaded.log_evidence == two.log_evidence
    assert torch.equal(loaded.functions(x, 4, seed=1), two.functions(x, 4, seed=1))


def test_the_last_layer_of_a_network_has_its_own_factors() -> None:
    """Those of the layer alone, on its features."""
    x, y = image_data()
    net = image_net()
    prior = doxa.Normal(1.0)
    part = doxa.Model(net, "categorical", prior, subset="last_layer")
    alone = doxa.Model(net[4], "categorical", prior)
    options: dict[str, Any] = {"init": "given", "validation": None}
    method = doxa.Laplace("kronecker", train=False)
    a = doxa.fit(part, (x, y), method, **options)
    b = doxa.fit(alone, (net[:4](x).detach(), y), method, **options)
    assert torch.allclose(a.covariance.dense(), b.covariance.dense(), rtol=1e-9)
    assert a.log_evidence == pytest.approx(b.log_evidence, rel=1e-9)


def test_row_weights_count_rows_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of two is a row twice: A is a weighted mean and B a weighted sum."""
    x, y = image_data(9)
    weight = torch.tensor([2.0, 1.0, 1.0] * 3)
    options: dict[str, Any] = {"train": False, "init": "given", "prior": doxa.Normal(1.0)}
    net = image_net()
    weighted = fit(net, (x, y), sample_weight=weight, **options)
    twice = torch.repeat_interleave(torch.arange(9), weight.long())
    monkeypatch.setattr(curvature, "_CHUNK_BYTES", {"cpu": 1})
    repeated = fit(net, (x[twice], y[twice]), batch_size=5, **options)
    assert torch.allclose(weighted.covariance.dense(), repeated.covariance.dense(), rtol=1e-7)


def test_norm_layers_have_their_diagonal_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Their block is the diagonal of the full matrix's."""
    x, y = image_data()
    net, prior = image_net(norm=True), doxa.Normal(1.0)
    options: dict[str, Any] = {"init": "given", "prior": prior, "likelihood": "categorical"}
    method = partial(doxa.Laplace, train=False, mean_correction=False)
    with caplog.at_level(logging.INFO, "doxa"):
        ours = doxa.fit(net, (x, y), method("kronecker"), **options)
    assert "1.weight, 1.bias have no Kronecker factors" in caplog.text
    other = doxa.fit(net, (x, y), method("diagonal"), **options)
    own = ours.layout.index(["1.weight", "1.bias"])
    assert torch.allclose(
        ours.covariance.diagonal()[:, own], other.covariance.diagonal()[:, own], rtol=1e-9
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    data = normal(9, 5, 3), torch.arange(9) % 3
    with pytest.raises(MethodError, match=r"layer 'cell' \(GRU\).*subset='last_layer'"):
        fit(Recurrent().double(), data)
    with pytest.raises(MethodError, match="one precision for each weight tensor"):
        fit(image_net(), image_data(), prior=doxa.StudentTPrior(), tune=None)
    monkeypatch.setattr(status, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryBudgetError, match="kronecker matrices over 119 weights take"):
        fit(image_net(), image_data())


def test_the_empirical_fisher_is_of_scores_and_the_hessian_of_the_log_joint() -> None:
    """Σ s sᵀ with s = ∂ log p(y_i | θ)/∂θ, and −∂² log p(D, θ)/∂θ², by autograd; the Hessian at
    random weights has a negative eigenvalue unless the prior outweighs it."""
    x, y = normal(20, 2), torch.arange(20) % 3
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    wide, tight = doxa.Normal(1.0), doxa.Normal(0.1)

    def ours(kind: str, prior: doxa.Normal) -> tuple[Any, Tensor]:
        model = doxa.Model(net, "categorical", prior)
        method = doxa.Laplace(curvature=kind, train=False, mean_correction=False)
        posterior = doxa.fit(model, (x, y), method, init="given", batch_size=7)
        return posterior, torch.linalg.inv(posterior.covariance.dense()[0])

    posterior, precision = ours("fisher", wide)
    each = lambda flat, a, b: posterior.network.likelihood.log_prob(  # noqa: E731
        posterior.network.forward(posterior.layout.unflatten(flat), a[None]), b[None], {}
    ).sum()
    flat = posterior.mean[0]
    scores = torch.stack([torch.func.grad(each)(flat, a, b) for a, b in zip(x, y, strict=True)])
    eye = torch.eye(len(flat), dtype=torch.float64)
    assert torch.allclose(precision, scores.mT @ scores + eye, rtol=1e-8, atol=1e-9)
    posterior, precision = ours("hessian", tight)
    joint = lambda flat: posterior.network.log_joint(posterior.layout.unflatten(flat), x, y)  # noqa: E731
    assert torch.allclose(precision, -torch.func.hessian(joint)(flat), rtol=1e-8, atol=1e-9)
    with pytest.raises(doxa.errors.NumericalError, match=r"has the eigenvalue -.*not at a maximum"):
        ours("hessian", doxa.Normal(100.0))
