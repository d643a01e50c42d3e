"""What cannot be inverted says which member; what only looks degenerate works."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from doxa.errors import NumericalError, ShapeError
from doxa.linalg import Dense, Diagonal, Kronecker, LowRankPlusDiagonal

EYE = torch.eye(3, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def beside_good(bad: Tensor) -> Tensor:
    """[3, 3, 3] whose member 1 is `bad`."""
    return torch.stack([EYE, bad, 2 * EYE])


BAD = {
    "zero": torch.zeros(3, 3, dtype=torch.float64),
    "rank one": torch.ones(3, 3, dtype=torch.float64),
    "rank two": normal(3, 2) @ normal(3, 2).T,
    "indefinite": torch.diag(torch.tensor([1.0, -1e-3, 1.0], dtype=torch.float64)),
    "nan": EYE * math.nan,
    "infinite": torch.diag(torch.tensor([1.0, math.inf, 1.0], dtype=torch.float64)),
    "not symmetric": EYE + torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("name", BAD)
def test_dense_refuses_and_names_the_member(name: str) -> None:
    for build in (Dense.from_covariance, Dense.from_precision):
        with pytest.raises(NumericalError, match="member 1: "):
            build(beside_good(BAD[name]))
    with pytest.raises(NumericalError, match="members 0, 2: "):
        Dense.from_precision(torch.stack([BAD[name], EYE, BAD[name]]))


@pytest.mark.parametrize("name", BAD)
def test_kronecker_refuses_and_names_member_and_block(name: str) -> None:
    good = beside_good(EYE)
    bad = beside_good(BAD[name])
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(NumericalError, match="member 1: block 1"):
            Kronecker.from_factors([good, pair], delta=0.0)


@pytest.mark.parametrize("size", [3, 8, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_matrices_are_noticed_even_when_round_off_hides_it(
    size: int, dtype: torch.dtype
) -> None:
    """Rank P − 1, a hundred each: torch's own Cholesky accepts about half of them."""
    root = normal(100, size, size - 1, seed=1).to(dtype)
    singular = root @ root.mT
    accepted = [m for m in singular if int(torch.linalg.cholesky_ex(m).info) == 0]
    assert len(accepted) > 5
    for matrix in accepted:
        with pytest.raises(NumericalError, match=r"member 0: .*Cholesky"):
            Dense.from_precision(matrix[None])


def test_single_precision_with_a_weak_prior_is_accepted() -> None:
    """500 parameters, 300 examples, prior precision 1e-4 of the curvature: common in practice."""
    jacobian = normal(1, 300, 500, seed=2).float()
    eye = torch.eye(500)
    precision = jacobian.mT @ jacobian / 300 * 1e4 + eye
    logdet = Dense.from_precision(precision).logdet().item()
    exact = -np.linalg.slogdet(precision.double().numpy())[1].item()
    assert logdet == pytest.approx(exact, rel=1e-3)


def test_badly_scaled_is_not_singular() -> None:
    scales = torch.tensor([1e-12, 1.0, 1e12], dtype=torch.float64)
    precision = (scales[:, None] * (EYE + 0.5) * scales)[None]
    logdet = Dense.from_precision(precision).logdet()
    expected = -math.log(np.linalg.det((EYE + 0.5).numpy()))
    assert logdet.item() == pytest.approx(expected, rel=1e-10)


def test_ill_conditioned_but_regular_is_accepted() -> None:
    rows = torch.arange(5, dtype=torch.float64)
    hilbert = 1 / (rows[:, None] + rows + 1)
    # its determinant is 1 / 266716800000 (OEIS A005249)
    logdet = Dense.from_covariance(hilbert[None]).logdet().item()
    assert logdet == pytest.approx(-math.log(266716800000), rel=1e-10)


def test_diagonal_limits() -> None:
    variance = torch.tensor([[1.0, 2.0], [1.0, 0.0]], dtype=torch.float64)
    known = Diagonal(variance)
    assert known.sample(torch.ones(2, 2, dtype=torch.float64))[1, 1] == 0
    for act in (known.logdet, lambda: known.solve(variance)):
        with pytest.raises(NumericalError, match="member 1: "):
            act()
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(NumericalError, match="member 0: "):
            Diagonal(torch.tensor([[bad]]))
    with pytest.raises(ShapeError):
        Diagonal(torch.ones(3))


def test_low_rank_with_zeros_on_the_diagonal() -> None:
    variance = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    factor = torch.tensor([[[0.0], [2.0], [0.0]]], dtype=torch.float64)
    swag = LowRankPlusDiagonal(variance, factor)
    assert swag.diagonal().tolist() == [[1.0, 4.0, 0.0]]
    draw = swag.sample(torch.tensor([[3.0, 3.0, 3.0, 5.0]], dtype=torch.float64))
    assert draw.tolist() == [[3.0, 10.0, 0.0]]
    assert swag.quad(torch.ones(1, 3, dtype=torch.float64)).tolist() == [5.0]
    v = torch.ones(1, 3, dtype=torch.float64)
    for act in (swag.logdet, lambda: swag.solve(v), lambda: swag.sample(v)):
        with pytest.raises(NumericalError, match="member 0: "):
            act()
    with pytest.raises(NumericalError, match="member 0: the factor"):
        LowRankPlusDiagonal(variance, factor * math.inf)
    with pytest.raises(NumericalError, match="member 0: the diagonal"):
        LowRankPlusDiagonal(-variance, factor)
    with pytest.raises(ShapeError):
        LowRankPlusDiagonal(variance, factor[0])


def test_both_ways_to_sample_low_rank_have_the_same_covariance() -> None:
    q = LowRankPlusDiagonal(normal(2, 4).exp(), normal(2, 4, 2, seed=1))
    units = torch.eye(6, dtype=torch.float64)[:, None].expand(6, 2, 6)
    root = q.sample(units).permute(1, 2, 0)  # [K, P, P + R]
    torch.testing.assert_close(root @ root.mT, q.dense(), rtol=1e-12, atol=1e-12)


def test_a_weight_is_flattened_by_rows() -> None:
    """For W [out, in], vec(W)ᵀ (B ⊗ A) vec(W) = tr(B W A Wᵀ)."""
    b, a = (root @ root.mT for root in (normal(1, 2, 2), normal(1, 3, 3, seed=1)))
    weight = normal(1, 2, 3, seed=2)
    q = Kronecker.from_factors([(b, a)], delta=0.7, scale=3.0)
    flat = weight.reshape(1, 6)
    energy = (flat * q.solve(flat)).sum()
    expected = 3 * torch.trace(b[0] @ weight[0] @ a[0] @ weight[0].T) + 0.7 * weight.square().sum()
    assert energy.item() == pytest.approx(expected.item(), rel=1e-12)


def test_kronecker_prior_precision_per_block_and_reweighting() -> None:
    b, a = beside_good(EYE) + 0.2, beside_good(EYE) + 0.1
    bias = beside_good(EYE)
    delta = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    q = Kronecker.from_factors([(b, a), bias], delta)
    for k in range(3):
        weight_part = np.kron(b[k], a[k]) + float(delta[k, 0]) * np.eye(9)
        bias_part = bias[k].numpy() + float(delta[k, 1]) * np.eye(3)
        expected = -np.linalg.slogdet(weight_part)[1] - np.linalg.slogdet(bias_part)[1]
        assert q.logdet()[k].item() == pytest.approx(expected, rel=1e-12)
    for again in (
        Kronecker.from_factors([(b, a), bias], 1.0).reweighted(delta=delta),
        Kronecker.from_factors([(b, a), bias], delta, scale=9.0).reweighted(scale=1.0),
    ):
        torch.testing.assert_close(again.dense(), q.dense(), rtol=1e-13, atol=1e-13)


def test_the_evidence_s_gradient_in_the_prior_precision() -> None:
    """d log|Σ| / dδ = −tr Σ."""
    delta = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    base = Kronecker.from_factors([(beside_good(EYE) + 0.2, beside_good(EYE))], 1.0)
    q = base.reweighted(delta=delta)
    (gradient,) = torch.autograd.grad(q.logdet().sum(), delta)
    torch.testing.assert_close(gradient, -q.diagonal().sum(-1).detach(), rtol=1e-12, atol=0)


def test_kronecker_draws_do_not_depend_on_the_eigenvectors_chosen() -> None:
    """Equal eigenvalues leave the eigenvectors free; the symmetric root does not see them."""
    turn = torch.linalg.qr(normal(3, 3, seed=3))[0]
    factor = (turn @ torch.diag(torch.tensor([2.0, 2.0, 5.0]).double()) @ turn.T)[None]
    q = Kronecker.from_factors([factor], 1.0)
    eps = normal(4, 1, 3, seed=4)
    # Σ^{1/2} = I/√3 + (1/√6 − 1/√3) t tᵀ with t the eigenvector of 5
    t = turn[:, 2]
    expected = eps / 3**0.5 + (6**-0.5 - 3**-0.5) * (eps @ t)[..., None] * t
    torch.testing.assert_close(q.sample(eps), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("factors", "delta", "scale", "error"),
    [
        ([], 1.0, 1.0, ShapeError),
        ([EYE[None], EYE.expand(2, 3, 3)], 1.0, 1.0, ShapeError),
        ([(EYE[None], EYE.expand(2, 3, 3))], 1.0, 1.0, ShapeError),
        ([torch.ones(1, 2, 3)], 1.0, 1.0, ShapeError),
        ([EYE[None]], torch.ones(2), 1.0, ShapeError),
        ([EYE[None]], torch.ones(1, 2), 1.0, ShapeError),
        ([EYE[None]], -0.1, 1.0, NumericalError),
        ([EYE[None]], math.nan, 1.0, NumericalError),
        ([EYE[None]], 1.0, -1.0, NumericalError),
        ([EYE[None]], 0.0, 0.0, NumericalError),
        ([torch.tensor([[1.0, 0.0]])], 0.0, 1.0, NumericalError),
        ([torch.tensor([[1.0, -1.0]])], 2.0, 1.0, NumericalError),
    ],
)
def test_kronecker_inputs_are_checked(
    factors: Any, delta: Any, scale: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Kronecker.from_factors(factors, delta, scale)


def test_diagonal_blocks_of_any_scale_need_no_prior() -> None:
    q = Kronecker.from_factors([torch.tensor([[1e-30, 1.0]], dtype=torch.float64)], delta=0.0)
    assert q.diagonal()[0].tolist() == pytest.approx([1e30, 1.0], rel=1e-14)
