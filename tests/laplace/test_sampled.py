"""Sampled curvature: unbiased for every likelihood, its stated error, its defaults."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import curvature
from doxa.likelihoods import Heads, likelihood
from doxa.noise import Noise


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


NUMBERS = {"log_noise": torch.tensor(-0.4).double()}
LIKELIHOODS: dict[str, tuple[Any, tuple[int, ...], dict[str, Tensor], Any]] = {
    "gaussian": (doxa.Gaussian(), (3,), NUMBERS, None),
    "heteroscedastic": (doxa.HeteroscedasticGaussian(), (4,), {}, None),
    "student-t": (doxa.StudentT(5.0), (3,), {"log_scale": torch.tensor(0.3).double()}, None),
    "bernoulli": (doxa.Bernoulli(temperature=2.0), (3,), {}, None),
    "categorical": (doxa.Categorical(temperature=0.7), (4,), {}, None),
    "pixels": (doxa.Categorical(ignore_index=9), (3, 2), {}, torch.tensor([[0, 2], [9, 1]])),
    "class weights": (
        doxa.Categorical(class_weight=(1.0, 2.0, 0.5)), (3,), {}, torch.tensor([1, 2])
    ),
    "expected class weights": (doxa.Categorical(class_weight=(1.0, 2.0, 0.5)), (3,), {}, None),
    "poisson": (doxa.Poisson(), (3,), {}, None),
    "negative binomial": (likelihood("negative-binomial"), (3,),
                          {"log_concentration": torch.tensor(0.2).double()}, None),
}  # fmt: skip


def all_signs(count: int) -> Tensor:
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=count))).double()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_mean_over_all_signs_is_the_curvature(name: str) -> None:
    own, shape, theta, y = LIKELIHOODS[name]
    f = normal(2, *shape)
    expected = own.curvature(f, theta, 0, y)
    signs = all_signs(f[0].numel())
    draws = torch.stack(
        [own.curvature_draw(f, theta, s.reshape(shape).expand_as(f), 0, y) for s in signs]
    )
    assert torch.allclose(torch.einsum("sno,snp->nop", draws, draws) / len(signs), expected)


def test_a_likelihood_with_only_a_matrix_and_heads_have_draws_too() -> None:
    class Correlated(doxa.Gaussian):
        def curvature_diagonal(self, f: Tensor, theta: Any, lead: int = 0) -> None:  # type: ignore[override]
            return None

        def curvature(self, f: Tensor, theta: Any, lead: int = 0, y: Any = None) -> Tensor:
            c = torch.tensor([[2.0, 1.0], [1.0, 1.0]]).double()
            return c.expand(*f.shape[: lead + 1], 2, 2)

    both = Heads((Correlated(), doxa.Categorical()))
    f = (normal(2, 3, 2), normal(2, 3, 3, seed=1))  # one leading axis
    expected = both.curvature(f, {}, 1)
    signs = all_signs(5)
    each = [(s[:2].expand(2, 3, 2), s[2:].expand(2, 3, 3)) for s in signs]
    draws = torch.stack([both.curvature_draw(f, {}, own, 1) for own in each])
    assert torch.allclose(torch.einsum("smno,smnp->mnop", draws, draws) / len(signs), expected)


def test_a_certain_row_varies_less_than_with_a_drawn_label() -> None:
    """One class with probability 1 − ε: the square of a label's score has the relative variance
    1/ε, that of the draw less than 2."""
    f = torch.tensor([[10.0, 0.0, 0.0, 0.0]]).double()
    p = torch.softmax(f, 1)[0]
    signs = all_signs(4)
    drawn = torch.stack([doxa.Categorical().curvature_draw(f, {}, s[None]) for s in signs])
    squares = drawn.square().sum((1, 2))
    assert float(squares.var(correction=0) / squares.mean() ** 2) < 2
    label = (torch.eye(4).double() - p).square().sum(1)
    variance = p @ label.square() - (p @ label) ** 2
    assert float(variance / (p @ label) ** 2) > 0.2 / float(1 - p[0])


def test_signs_are_balanced_and_a_row_has_its_own() -> None:
    noise = Noise(0, "test", ["a", "b"], dtype=torch.float64)
    steps = torch.arange(100, dtype=torch.int32)
    signs = noise.signs((70,), steps)  # [100, 2, 70]
    assert signs.shape == (100, 2, 70)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert torch.equal(signs[40:60], noise.signs((70,), steps[40:60]))
    assert torch.equal(noise.signs((10, 7), 3), noise.signs((70,), 3).reshape(2, 10, 7))
    flat = signs.flatten(1)  # [100, 140]: each mean is normal with 1/√100; 4.5 is exceeded by
    assert float(flat.mean(0).abs().max()) < 0.45  # one of 140 columns once in a thousand times
    gram = signs.reshape(200, 70) @ signs.reshape(200, 70).T / 70
    assert float((gram - torch.eye(200)).abs().max()) < 6 / 70**0.5  # 19,900 pairs


def classes(n: int = 60, count: int = 12) -> tuple[Tensor, Tensor]:
    return normal(n, 3), torch.arange(n) % count


def network(count: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, count)
    ).double()  # fmt: skip


def fit(net: nn.Module, data: Any, structure: str, **options: Any) -> Any:
    names = ("curvature", "curvature_draws", "tune", "mean_correction")
    settings = {"tune": None, "mean_correction": False} | {
        name: options.pop(name) for name in names if name in options
    }
    defaults = {"init": "given", "likelihood": "categorical", "prior": doxa.Normal(1.0)}
    method = doxa.Laplace(structure, train=False, **settings)
    return doxa.fit(net, data, method, **(defaults | options))


@pytest.mark.parametrize(
    "structure",
    [
        "diagonal",
        "kronecker",
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("block-diagonal", marks=pytest.mark.slow),
    ],
)
def test_the_evidence_is_that_of_the_exact_curvature_within_its_error(structure: str) -> None:
    """The mean of eight fits, within four standard errors, and their spread within a factor of
    2.3, which a χ² with seven degrees of freedom leaves once in a thousand times."""
    net, data = network(), classes()
    draws = {"full": 400, "block-diagonal": 200}.get(structure, 4)
    exact = fit(net, data, structure, curvature="ggn")
    several = [
        fit(net, data, structure, curvature="sampled", curvature_draws=draws, seed=seed)
        for seed in range(8)
    ]
    away = torch.tensor([own.log_evidence - exact.log_evidence for own in several])
    stated = torch.tensor([own.diagnostics["log_evidence_error"] for own in several]).mean()
    assert abs(float(away.mean())) < 4 * float(stated) / 8**0.5
    assert float(stated) / 3 < float(away.std()) < 2.3 * float(stated)
    found = several[0].diagnostics["curvature"]
    assert found["draws"] == draws
    assert found["trace_error"][0] < 0.2 / draws**0.5


def test_draws_do_not_depend_on_batches_pieces_or_other_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data = network(), classes()
    kinds: dict[str, Any] = {"curvature": "sampled", "curvature_draws": 3, "steps": 3}
    whole = fit(net, data, "kronecker", **kinds)
    parts = fit(net, data, "kronecker", batch_size=7, **kinds)
    assert torch.allclose(whole.covariance.dense(), parts.covariance.dense(), rtol=1e-9)
    two = fit(net, data, "kronecker", members=2, **kinds)
    with monkeypatch.context() as patch:
        patch.setattr(curvature, "_CHUNK_BYTES", {"cpu": 1})  # one row at a time
        pieces = fit(net, data, "kronecker", **kinds)
    assert torch.allclose(whole.covariance.dense(), pieces.covariance.dense(), rtol=1e-9)
    first = two.covariance.member(0).dense()
    assert torch.allclose(first, whole.covariance.dense(), rtol=1e-9)
    other = two.covariance.member(1).dense()
    assert not torch.allclose(first, other, rtol=1e-3)  # the same weights, other draws


def test_curvature_is_sampled_for_more_than_ten_outputs_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "doxa"):
        many = fit(network(11), classes(count=11), "kronecker")
    said = [r.getMessage() for r in caplog.records if "sampled" in r.getMessage()]
    assert len(said) == 1
    assert "10 draws for the 11 outputs of a row" in said[0]
    assert many.diagnostics["curvature"]["kind"] == "sampled"
    assert many.method.curvature == "sampled"
    for structure, count in (("kronecker", 10), ("diagonal", 10), ("full", 11)):
        few = fit(network(count), classes(count=count), structure)
        same = fit(network(count), classes(count=count), structure, curvature="ggn")
        assert few.log_evidence == same.log_evidence
        assert "curvature" not in few.diagnostics


def test_an_exact_kronecker_factor_needs_one_draw() -> None:
    """Linear with Gaussian noise: B = n/σ² 1, and vvᵀ has the diagonal of 1 for any signs; the
    outputs are correlated only by the signs, which rows average."""
    x = normal(400, 3)
    net = nn.Linear(3, 12, bias=False).double()
    data = (x, x @ normal(3, 12, seed=1))
    options: dict[str, Any] = {"likelihood": doxa.Gaussian(0.5)}
    exact = fit(net, data, "diagonal", curvature="ggn", **options)
    drawn = fit(net, data, "diagonal", curvature="sampled", curvature_draws=1, **options)
    assert torch.allclose(drawn.covariance.diagonal(), exact.covariance.diagonal(), rtol=1e-9)
    assert drawn.diagnostics["log_evidence_error"] < 1e-6


def test_dense_outputs_need_no_matrix_over_outputs_and_no_jacobian(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 classes at 32 × 32 pixels: C has 9 million entries for every row, and J half a million."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    x = normal(4, 1, 32, 32).float()
    y = (x[:, 0] > 0).long()
    y[:, :4] = -1
    options: dict[str, Any] = {"likelihood": doxa.Categorical(ignore_index=-1)}
    monkeypatch.setattr(curvature, "free_memory", lambda device: 1 << 20)
    for structure in ("kronecker", "diagonal"):
        p = fit(net, (x, y), structure, curvature_draws=2, **options)
        assert p.diagnostics["curvature"]["draws"] == 2
        assert p.log_evidence is not None
    assert p.predict(x, n=5).probs.shape == (4, 3, 32, 32)
    with pytest.raises(MemoryBudgetError, match="3072 outputs"):
        fit(net, (x, y), "diagonal", curvature="ggn", **options)


def test_a_corrected_mean_averages_the_curvature_over_draws() -> None:
    net, data = network(), classes()
    exact, drawn = (
        fit(net, data, "kronecker", curvature=kind, curvature_draws=100, mean_correction=True)
        for kind in ("ggn", "sampled")
    )
    assert torch.allclose(
        drawn.covariance.diagonal(), exact.covariance.diagonal(), rtol=0.15, atol=1e-3
    )


def test_what_it_refuses() -> None:
    with pytest.raises(MethodError, match="a kernel is over all outputs"):
        doxa.Laplace("functional", curvature="sampled")
    with pytest.raises(MethodError, match="one noise level for all outputs"):
        fit(nn.Linear(3, 12), (normal(9, 3).float(), normal(9, 12).float()), "diagonal",
            likelihood=doxa.Gaussian(per_output=True), curvature="sampled")  # fmt: skip


@pytest.mark.slow
def test_the_log_determinant_is_too_small_by_the_stated_bias() -> None:
    """The mean over 100 fits of two draws each, within four standard errors (once in ten thousand
    times). Twice or half of the bias is further away."""
    net, data = network(), classes()
    exact = fit(net, data, "kronecker", curvature="ggn").covariance.logdet()
    several = [
        fit(net, data, "kronecker", curvature="sampled", curvature_draws=2, seed=seed)
        for seed in range(100)
    ]
    short = torch.tensor([float((p.covariance.logdet() - exact).sum()) for p in several])
    found = [p.diagnostics["curvature"] for p in several]
    stated = float(torch.tensor([each["log_det_bias"][0] for each in found]).mean())
    error = float(short.std()) / 10.0
    assert abs(float(short.mean()) - stated) < 4 * error
    assert 0.5 * stated > 4 * error
    spread = float(torch.tensor([each["log_det_error"][0] for each in found]).mean())
    assert 0.7 * spread < float(short.std()) < 1.5 * spread
