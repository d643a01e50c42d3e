"""Every structure against explicit dense algebra (NumPy, SciPy) in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg, stats
from torch import Tensor

from doxa.errors import NumericalError, ShapeError, StoreError
from doxa.linalg import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Kronecker,
    LowRankPlusDiagonal,
    LowRankPrecision,
    Structure,
    structure,
)

K = 3


@dataclass
class Case:
    structure: Structure
    covariance: np.ndarray[Any, Any]  # [K, P, P], by dense algebra alone


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(n: int, seed: int) -> Tensor:
    """[K, n, n] with eigenvalues of order one."""
    root = normal(K, n, 2 * n, seed=seed)
    return root @ root.mT / (2 * n) + 0.3 * torch.eye(n, dtype=torch.float64)


def diagonal() -> Case:
    variance = normal(K, 7).exp()
    return Case(Diagonal(variance), np.stack([np.diag(v) for v in variance.numpy()]))


def low_rank(rank: int = 3) -> Case:
    variance, factor = normal(K, 7).exp(), normal(K, 7, rank, seed=1)
    d, f = variance.numpy(), factor.numpy()
    covariance = np.stack([np.diag(d[k]) + f[k] @ f[k].T for k in range(K)])
    return Case(LowRankPlusDiagonal(variance, factor), covariance)


def low_rank_precision(rank: int = 3) -> Case:
    precision, factor = normal(K, 7).exp(), normal(K, 7, rank, seed=1)
    d, f = precision.numpy(), factor.numpy()
    covariance = np.stack([np.linalg.inv(np.diag(d[k]) + f[k] @ f[k].T) for k in range(K)])
    return Case(LowRankPrecision(precision, factor), covariance)


def dense_covariance() -> Case:
    covariance = spd(7, seed=2)
    return Case(Dense.from_covariance(covariance), covariance.numpy())


def dense_precision() -> Case:
    precision = spd(7, seed=3)
    return Case(Dense.from_precision(precision), np.linalg.inv(precision.numpy()))


INDEX = [torch.tensor([6, 0, 3]), torch.tensor([5]), torch.tensor([1, 2, 4])]  # of 7 parameters


def blocks(of_precisions: bool) -> Case:
    """By dense algebra: each block put into its rows and columns of a matrix of zeros."""
    each = [spd(len(index), seed=20 + b) for b, index in enumerate(INDEX)]
    whole = np.zeros((K, 7, 7))
    for index, block in zip(INDEX, each, strict=True):
        for k in range(K):
            whole[k][np.ix_(index, index)] = block[k].numpy()
    if of_precisions:
        return Case(BlockDiagonal.from_precisions(each, INDEX), np.linalg.inv(whole))
    return Case(BlockDiagonal.from_covariances(each, INDEX), whole)


SCALE, DELTA = torch.tensor([1.0, 50.0, 0.1]), torch.tensor([0.5, 1.0, 2.0])


def kronecker_factors() -> tuple[list[Any], list[list[np.ndarray[Any, Any]]]]:
    """Weight [3, 4], its bias, a diagonal block, a one-output weight; and their curvatures."""
    b, a, bias, one = spd(3, 4), spd(4, 5), spd(3, 6), spd(1, 7)
    single = normal(K, 4, 1, seed=8)
    rank_one = single @ single.mT  # singular, as a factor from one example is
    diag = normal(K, 5, seed=9).exp()
    diag[:, 0] = 0
    factors = [(b, a), bias, diag, (one, rank_one)]
    curvatures = [
        [np.kron(b[k], a[k]), bias[k].numpy(), np.diag(diag[k]), np.kron(one[k], rank_one[k])]
        for k in range(K)
    ]
    return factors, curvatures


def kronecker() -> Case:
    factors, curvatures = kronecker_factors()
    precision = np.stack(
        [
            float(SCALE[k]) * linalg.block_diag(*curvatures[k]) + float(DELTA[k]) * np.eye(24)
            for k in range(K)
        ]
    )
    fitted = Kronecker.from_factors(factors, delta=DELTA.double(), scale=SCALE.double())
    return Case(fitted, np.linalg.inv(precision))


CASES: dict[str, Callable[[], Case]] = {
    "diagonal": diagonal,
    "low-rank": low_rank,
    "low-rank-0": lambda: low_rank(0),
    "low-rank-more-than-P": lambda: low_rank(9),
    "low-rank-precision": low_rank_precision,
    "low-rank-precision-more-than-P": lambda: low_rank_precision(9),
    "dense-covariance": dense_covariance,
    "dense-precision": dense_precision,
    "kronecker": kronecker,
    "blocks-covariance": lambda: blocks(of_precisions=False),
    "blocks-precision": lambda: blocks(of_precisions=True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def close(actual: Tensor, expected: np.ndarray[Any, Any]) -> None:
    assert actual.dtype == torch.float64
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_the_covariance_itself(case: Case) -> None:
    assert case.structure.shape == case.covariance.shape[:2]
    assert (case.structure.members, case.structure.size) == case.structure.shape
    close(case.structure.dense(), case.covariance)
    close(case.structure.diagonal(), np.diagonal(case.covariance, axis1=1, axis2=2))


def test_logdet(case: Case) -> None:
    close(case.structure.logdet(), np.linalg.slogdet(case.covariance)[1])


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
def test_matmul_and_solve(case: Case, lead: tuple[int, ...]) -> None:
    v = normal(*lead, *case.structure.shape, seed=10)
    close(case.structure.matmul(v), np.einsum("kpq,...kq->...kp", case.covariance, v))
    inverse = np.linalg.inv(case.covariance)
    close(case.structure.solve(v), np.einsum("kpq,...kq->...kp", inverse, v))


@pytest.mark.parametrize("lead", [(), (4,), (2, 5)])
def test_quad_and_outer(case: Case, lead: tuple[int, ...]) -> None:
    j = normal(K, *lead, 2, case.structure.size, seed=11)
    full = np.einsum("k...op,kpq,k...rq->k...or", j, case.covariance, j)
    outer = case.structure.outer(j)
    close(outer, full)
    assert torch.equal(outer, outer.mT)
    close(case.structure.quad(j), np.diagonal(full, axis1=-2, axis2=-1))


def test_the_sampling_map_is_a_root_of_the_covariance(case: Case) -> None:
    """`sample` is linear, ε ↦ R ε: unit vectors give R, and R Rᵀ must be Σ."""
    size = case.structure.size
    units = torch.eye(size, dtype=torch.float64)[:, None].expand(size, K, size)
    root = case.structure.sample(units).permute(1, 2, 0)  # [K, P, P]
    close(root @ root.mT, case.covariance)
    eps = normal(2, 3, K, size, seed=12)
    close(case.structure.sample(eps), np.einsum("kpq,...kq->...kp", root, eps))


def assert_covariance_of_draws(
    draws: np.ndarray[Any, Any], covariance: np.ndarray[Any, Any]
) -> None:
    """Draws [n, P] whitened by Σ: along any fixed unit vector the sum of squares is χ²(n).

    Tried along every axis and every (e_i ± e_j)/√2, with 1e-6 spread over all of them
    (Bonferroni): a right sampler fails with probability at most 1e-6.
    """
    n, size = draws.shape
    white = linalg.solve_triangular(np.linalg.cholesky(covariance), draws.T, lower=True)
    i, j = np.triu_indices(size, 1)
    squares = np.concatenate(
        [(white**2), (white[i] + white[j]) ** 2 / 2, (white[i] - white[j]) ** 2 / 2]
    ).sum(1)
    tail = 1e-6 / len(squares) / 2
    assert squares.min() > stats.chi2.ppf(tail, n)
    assert squares.max() < stats.chi2.isf(tail, n)


def test_draws_have_the_covariance(case: Case) -> None:
    """False-failure rate: 3e-6 for each structure (1e-6 a member), at a fixed seed."""
    draws = case.structure.sample(normal(4000, *case.structure.shape, seed=13)).numpy()
    for k in range(K):
        assert_covariance_of_draws(draws[:, k], case.covariance[k])
        with pytest.raises(AssertionError):  # the test has power: 20 % too wide is noticed
            assert_covariance_of_draws(draws[:, k] * 1.2**0.5, case.covariance[k])


@pytest.mark.parametrize("t", [0.25, torch.tensor(4.0), torch.tensor([0.5, 1.0, 30.0])])
def test_scaled(case: Case, t: float | Tensor) -> None:
    factor = np.broadcast_to(np.asarray(t, dtype=float), (K,))[:, None, None]
    scaled = case.structure.scaled(t)
    assert type(scaled) is type(case.structure)
    close(scaled.dense(), case.covariance * factor)
    close(scaled.logdet(), np.linalg.slogdet(case.covariance * factor)[1])


@pytest.mark.parametrize("t", [0.0, -1.0, torch.tensor([1.0, 0.0, 1.0])])
def test_scaling_by_nothing_positive_is_refused(case: Case, t: float | Tensor) -> None:
    with pytest.raises(NumericalError, match="positive"):
        case.structure.scaled(t)
    with pytest.raises(ShapeError):
        case.structure.scaled(torch.ones(K + 1))


def test_member(case: Case) -> None:
    for k in (0, 1, 2, -1):
        one = case.structure.member(k)
        assert one.members == 1
        close(one.dense(), case.covariance[[k]])
        v = normal(4, 1, case.structure.size)
        close(one.solve(v), (np.linalg.inv(case.covariance[k]) @ v[:, 0].numpy().T).T[:, None])
    with pytest.raises(IndexError):
        case.structure.member(K)


def test_members_do_not_touch_each_other(case: Case) -> None:
    """A member's draws do not depend on which others are there."""
    eps = normal(5, *case.structure.shape, seed=14)
    together = case.structure.sample(eps)
    for k in range(K):
        alone = case.structure.member(k).sample(eps[:, [k]])
        np.testing.assert_allclose(alone[:, 0], together[:, k], rtol=1e-12, atol=1e-12)


def test_state_comes_back(case: Case) -> None:
    state = {name: value.clone() for name, value in case.structure.state().items()}
    assert all(len(value) == K for value in state.values())
    back = structure(case.structure.name, state)
    assert type(back) is type(case.structure)
    assert torch.equal(back.dense(), case.structure.dense())
    for name in state:  # nothing in it is optional
        rest = {other: value for other, value in state.items() if other != name}
        if ".left" in name or ".right" in name:
            continue
        with pytest.raises(StoreError):
            structure(case.structure.name, rest)
    with pytest.raises(StoreError):
        structure("unknown", state)


@pytest.mark.parametrize("make", [Dense.from_precision, Dense.from_covariance])
def test_a_stored_factor_gives_the_same_bits(make: Callable[[Tensor], Dense]) -> None:
    """A file holds tensors row by row; a Cholesky decomposition returns them column by column."""
    root = normal(K, 40, 40, seed=31).float()
    one = make(root @ root.mT + torch.eye(40))
    two = structure(one.name, {n: v.clone(memory_format=torch.contiguous_format)
                               for n, v in one.state().items()})  # fmt: skip
    eps = normal(7, K, 40, seed=32).float()
    assert torch.equal(one.sample(eps), two.sample(eps))
    assert torch.equal(one.matmul(eps), two.matmul(eps))
    assert torch.equal(one.solve(eps), two.solve(eps))


def test_single_precision_and_device(case: Case) -> None:
    single = case.structure.to(dtype=torch.float32)
    v = normal(2, *case.structure.shape).float()
    for result in (single.sample(v), single.solve(v), single.logdet(), single.diagonal()):
        assert result.dtype == torch.float32
    np.testing.assert_allclose(single.dense(), case.covariance, rtol=1e-4, atol=1e-4)
    assert single.to("cpu").diagonal().dtype == torch.float32
    if torch.cuda.is_available():
        moved = case.structure.to("cuda")
        close(moved.sample(v.double().cuda()).cpu(), case.structure.sample(v.double()).numpy())


def test_wrong_shapes_are_refused(case: Case) -> None:
    size = case.structure.size
    for bad in (normal(size), normal(K, size + 1), normal(1, size), normal(size, K)):
        for act in (case.structure.sample, case.structure.solve, case.structure.matmul):
            with pytest.raises(ShapeError, match="expected"):
                act(bad)
        with pytest.raises(ShapeError, match="expected"):
            case.structure.quad(bad)


@pytest.mark.parametrize("index", [[0, 1, 1], [0, 1, 3], [0, 1]])
def test_blocks_have_each_parameter_once(index: list[int]) -> None:
    each, sets = [spd(2, 0), spd(1, 1)], [torch.tensor(index[:2]), torch.tensor(index[2:])]
    with pytest.raises(ShapeError, match="once"):
        BlockDiagonal.from_covariances(each, sets)


def test_gradients_flow_through_what_variational_methods_use() -> None:
    variance = normal(2, 4).exp().requires_grad_()
    factor = normal(2, 4, 3, seed=1).requires_grad_()
    eps = normal(2, 7)
    v = normal(2, 4, seed=2)

    def objective(variance: Tensor, factor: Tensor) -> Tensor:
        q = LowRankPlusDiagonal(variance, factor)
        return q.logdet().sum() + (q.sample(eps) * v).sum() + q.quad(v).sum() + q.solve(v).sum()

    assert torch.autograd.gradcheck(objective, (variance, factor))
    assert torch.autograd.gradcheck(
        lambda d: Diagonal(d).logdet() + Diagonal(d).solve(v).sum(), (variance,)
    )
