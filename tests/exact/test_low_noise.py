"""BayesianLinear at any ratio of signal to noise: scipy's maximum of the evidence, and coverage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import doxa

Array = np.ndarray[Any, Any]


def rows(n: int, noise: float, inputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, inputs))
    y = x @ rng.normal(size=(inputs, 1)) + 0.5 + noise * rng.normal(size=(n, 1))
    return torch.from_numpy(x), torch.from_numpy(y)


class Evidence:
    """log N(y; 0, σ²I + s²ΦΦᵀ) from [Φ y] = QR, which keeps the digits of a small residual."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.n = len(x)
        table = np.column_stack([x.numpy(), np.ones(self.n), y.numpy()])
        upper = np.linalg.qr(table, mode="r")
        self.phi, self.y, self.residual = upper[:-1, :-1], upper[:-1, -1], abs(upper[-1, -1])

    def __call__(self, noise: float, std: float) -> float:
        inside = np.eye(len(self.y)) + (std / noise) ** 2 * self.phi @ self.phi.T
        quadratic = self.residual**2 + self.y @ np.linalg.solve(inside, self.y)
        constant = self.n * math.log(2 * math.pi * noise**2)
        return float(-0.5 * (constant + np.linalg.slogdet(inside)[1] + quadratic / noise**2))

    def maximum(self, **given: float) -> tuple[float, dict[str, float]]:
        names = [name for name in ("noise", "std") if name not in given]
        start = {"noise": self.residual / math.sqrt(self.n), "std": 1.0}

        def loss(logs: Array) -> float:
            return -self(**given, **dict(zip(names, np.exp(logs), strict=True)))

        best = min(
            (
                minimize(loss, [math.log(start[k]) + d for k in names], method="Nelder-Mead",
                         options={"xatol": 1e-9, "fatol": 1e-9, "maxiter": 4000})
                for d in (0.0, 1.0)
            ), key=lambda found: found.fun,
        )  # fmt: skip
        return -best.fun, dict(zip(names, np.exp(best.x), strict=True))


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-2, 1.0])
def test_both_are_at_the_maximum_at_any_noise(noise: float) -> None:
    x, y = rows(200, noise)
    ours = doxa.fit(None, (x, y), "linear")
    best, at = Evidence(x, y).maximum()
    assert ours.status == "ok"
    assert ours.log_evidence == pytest.approx(best, abs=1e-5)
    assert float(ours.noise) == pytest.approx(at["noise"], rel=1e-5)
    assert float(ours.prior_std) == pytest.approx(at["std"], rel=1e-4)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("given", [{"noise": 1.2}, {"prior_std": 0.7}])
def test_one_is_at_the_maximum_where_the_other_is_given(
    noise: float, given: dict[str, float]
) -> None:
    x, y = rows(50, noise)
    given = {k: v * (noise if k == "noise" else 1.0) for k, v in given.items()}
    ours = doxa.fit(None, (x, y), doxa.BayesianLinear(**given))
    best, _ = Evidence(x, y).maximum(**{k.removeprefix("prior_"): v for k, v in given.items()})
    assert ours.log_evidence == pytest.approx(best, abs=1e-5)


def test_each_output_at_its_own_low_noise() -> None:
    (x, first), (_, second) = rows(60, 1e-6), rows(60, 1e-2)
    both = torch.cat([first, second], 1)
    ours = doxa.fit(None, (x, both), "linear", likelihood=doxa.Gaussian(per_output=True))
    noise, std = ours.noise[0].tolist(), float(ours.prior_std)
    each = [Evidence(x, y) for y in (first, second)]

    def total(noise: list[float], std: float) -> float:
        return sum(e(s, std) for e, s in zip(each, noise, strict=True))

    best = total(noise, std)
    assert ours.log_evidence == pytest.approx(best, abs=1e-5)
    moved = [[f * noise[0], noise[1]] for f in (0.99, 1.01)]
    moved += [[noise[0], f * noise[1]] for f in (0.99, 1.01)]
    assert max(total(m, std) for m in moved) < best
    assert max(total(noise, 0.98 * std), total(noise, 1.02 * std)) < best


def test_the_predictive_at_low_noise_covers_what_it_should() -> None:
    """z of 2,000 further rows: its mean square is 1 within 5 standard errors (chance 6e-7)."""
    x, y = rows(2400, 1e-5)
    ours = doxa.fit(None, (x[:400], y[:400]), "linear")
    p = ours.predict(x[400:])
    z = (y[400:] - p.mean) / p.variance.sqrt()
    # its own variance is known to 2/400 from the rows of the fit
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / 2000 + 2 / 400)


def test_a_column_twice_leaves_its_difference_to_the_prior() -> None:
    """ΦᵀΦ is singular: half the difference of the two weights has no data, and s²/2 a variance.
    The other directions are at s²λ/σ² of 1e16, where adding I/s² to ΦᵀΦ/σ² would do nothing."""
    x, y = rows(10_000, 1e-6, inputs=1)
    twice = torch.cat([x, x], 1)
    ours = doxa.fit(None, (twice, y), doxa.BayesianLinear(noise=1e-6, prior_std=1.0))
    covariance = ours.covariance.dense()[0]
    half = torch.tensor([0.5, -0.5, 0.0]).double()
    assert float(half @ covariance @ half) == pytest.approx(0.5, rel=1e-6)
    once = doxa.fit(None, (x, y), doxa.BayesianLinear(noise=1e-6, prior_std=1.0)).predict(x[:5])
    p = ours.predict(x[:5].expand(5, 2))
    assert torch.allclose(p.mean, once.mean, rtol=0, atol=1e-10)
    assert torch.allclose(p.epistemic, once.epistemic, rtol=1e-5)


def test_further_rows_keep_the_digits() -> None:
    x, y = rows(80, 1e-7)
    given = doxa.BayesianLinear(noise=1e-7, prior_std=1.0)
    whole = doxa.fit(None, (x, y), given)
    part = doxa.fit(None, (x[:50], y[:50]), given).condition(x[50:], y[50:])
    assert whole.log_evidence == pytest.approx(Evidence(x, y)(1e-7, 1.0), abs=1e-5)
    assert part.log_evidence == pytest.approx(whole.log_evidence, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "inputs"), [(40, 2), (20, 40)])
def test_an_exact_fit_says_that_the_noise_is_unknown(
    dtype: torch.dtype, n: int, inputs: int
) -> None:
    """With fewer rows than weights the evidence levels off as the noise goes to 0."""
    x, y = rows(n, 0.0, inputs, seed=1)
    ours = doxa.fit(None, (x.to(dtype), y.to(dtype)), "linear")
    assert ours.status == "degenerate"
    assert "cannot tell the noise from none" in ours.status.reason
    p = ours.predict(x.to(dtype))
    assert torch.isfinite(p.mean).all()
    assert (p.variance > 0).all()


def test_noise_just_above_the_rounding_is_no_exact_fit() -> None:
    for dtype, noise in ((torch.float32, 3e-6), (torch.float64, 1e-13)):
        x, y = rows(200, noise)
        ours = doxa.fit(None, (x.to(dtype), y.to(dtype)), "linear")
        assert ours.status == "ok"
        assert float(ours.noise) == pytest.approx(noise, rel=0.2)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0])
def test_a_million_rows(noise: float) -> None:
    """s is known from three weights and an intercept, whatever n; evidence to 1e-8 a row."""
    x, y = rows(1_000_000, noise)
    ours = doxa.fit(None, (x, y), "linear")
    best, at = Evidence(x, y).maximum()
    assert ours.log_evidence == pytest.approx(best, abs=1e-2)
    assert float(ours.noise) == pytest.approx(at["noise"], rel=1e-6)
    assert float(ours.prior_std) == pytest.approx(at["std"], rel=1e-3)
