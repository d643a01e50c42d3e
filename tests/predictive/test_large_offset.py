"""Targets near 1e6 in float32: what is known in float64 about y is not lost to its offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.evaluate import crps


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(120, 1, generator=g, dtype=torch.float64)
    return x, 1e6 + 0.05 * (x.sum(1, keepdim=True) + noise)


def predictive(method: str, dtype: torch.dtype) -> Any:
    x, y = rows()
    options: dict[str, Any] = {}
    net = None
    if method == "laplace":
        net = nn.Linear(2, 1).to(dtype)
        options = {"steps": 300, "validation": None}
    given = (x[:60], y[:60])
    fitted = doxa.fit(net, given, method, dtype=dtype, standardize=True, **options)
    return fitted.predict(x[60:]), y[60:]


@pytest.mark.parametrize("method", ["linear", "gp", "laplace"])
def test_scores_in_float32_are_those_of_float64(method: str) -> None:
    """In float32 a mean near 1e6 is a multiple of 0.06, a standard deviation of the noise here."""
    if method == "gp":
        pytest.importorskip("gpytorch")
    (single, y), (double, _) = (predictive(method, t) for t in (torch.float32, torch.float64))
    assert single.mean.dtype == torch.float32
    assert single.log_prob(y).dtype == torch.float32
    assert torch.allclose(single.log_prob(y).double(), double.log_prob(y), atol=5e-3)
    assert torch.allclose(single.cdf(y).double(), double.cdf(y), atol=2e-3)
    assert float(crps(single, y)) == pytest.approx(float(crps(double, y)), rel=1e-3)
    assert torch.allclose(single.variance.double(), double.variance, rtol=5e-3)
    assert (single.mean.double() - double.mean).abs().max() < 0.032  # half a step of float32
    assert (single.quantile(0.9).double() - double.quantile(0.9)).abs().max() < 0.032


def test_functions_that_nearly_agree() -> None:
    """They differ by 0.005 in units of y; seven weights of 1/7 in float32 sum to 1 + 4e-8, which
    would be 0.04 of 1e6."""
    f = 0.1 * torch.randn(7, 50, 1, generator=torch.Generator().manual_seed(0))
    likelihood = doxa.likelihoods.Affine(
        doxa.Gaussian(noise=0.1), torch.tensor([1e6]).double(), torch.tensor([0.05]).double()
    )
    single, double = (doxa.Predictive(each, likelihood) for each in (f, f.double()))
    assert torch.allclose(single.epistemic.double(), double.epistemic, rtol=1e-4)
    assert torch.allclose(single.epistemic, 0.05**2 * f.var(0, correction=0), rtol=1e-4)
    assert torch.allclose(single.std.double(), double.std, rtol=1e-5)
    assert torch.allclose(single.mean.double(), double.mean, rtol=0, atol=0.032)


def test_further_rows_near_a_large_offset() -> None:
    x, y = rows()
    found = {}
    for dtype in (torch.float32, torch.float64):
        method = doxa.BayesianLinear(noise=0.05, prior_std=1.0)
        first = doxa.fit(None, (x[:60], y[:60]), method, dtype=dtype, standardize=True)
        found[dtype] = first.condition(x[60:], y[60:]).log_evidence
    assert found[torch.float32] == pytest.approx(found[torch.float64], abs=1e-3)
