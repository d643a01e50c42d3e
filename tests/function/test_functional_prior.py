"""Functional priors: distances against closed forms and scipy, scales that are known beforehand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, MethodError, ModelError
from doxa.function.functional_prior import Matched, energy, sliced


def normals(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_energy_of_two_normals() -> None:
    """E|N(m, s²)| is known, so that the distance of N(0, 1) and N(1.5, 2²) is; of 4,000 draws, with
    a standard error near 0.01. Of draws of one distribution, few at a time, it is zero on average:
    400 pairs of 8 draws, five standard errors."""

    def absolute(mean: float, std: float) -> float:
        z = mean / std
        return std * math.sqrt(2 / math.pi) * math.exp(-(z**2) / 2) + mean * math.erf(z / 2**0.5)

    f, g = normals(1, 2000, 1), 1.5 + 2 * normals(1, 2000, 1, seed=1)
    wanted = 2 * absolute(1.5, 5**0.5) - absolute(0, 2**0.5) - absolute(0, 8**0.5)
    assert float(energy(f, g)) == pytest.approx(wanted, abs=0.06)
    alike = energy(normals(400, 8, 3), normals(400, 8, 3, seed=1))
    assert abs(float(alike.mean())) < 5 * float(alike.std()) / math.sqrt(400)


def test_sliced_is_wasserstein_on_a_line() -> None:
    f, g = normals(1, 30, 1), 1 + 2 * normals(1, 30, 1, seed=1)
    wanted = stats.wasserstein_distance(f.flatten().numpy(), g.flatten().numpy())
    found = sliced(f, g, normals(1, 1, 5, seed=2))
    assert float(found) == pytest.approx(wanted, rel=1e-12)


def line() -> tuple[nn.Module, Tensor]:
    return nn.Linear(2, 1, bias=False).double(), normals(60, 2)


@pytest.mark.parametrize("distance", ["energy", "sliced"])
def test_a_line_finds_its_scale(distance: str) -> None:
    """Lines w·x with w ~ N(0, v/ℓ²) are the process of a linear kernel."""
    net, x = line()
    target = doxa.GPPrior("linear", lengthscale=2.0, variance=9.0)
    prior = doxa.functional_prior(net, x, target, distance=distance, steps=150, points=12)
    assert prior["weight"].std == pytest.approx(1.5, rel=0.05)  # type: ignore[attr-defined]
    assert float(prior.distances[-20:].mean()) < 0.6 * float(prior.distances[:5].mean())


@pytest.mark.slow
def test_a_scale_that_is_unknown_finds_its_width() -> None:
    """Lines of σ z · x with log σ ~ N(log 2, 0.8²), one σ for the line."""

    def lines(x: Tensor, z: Tensor) -> Tensor:
        return 2.0 * torch.exp(0.8 * z[0]) * (x @ z[1:])

    net, x = line()
    target = doxa.ImplicitPrior(lines, numbers=3)
    prior = doxa.functional_prior(
        net, x, target, kind="hierarchical", steps=300, points=8, functions=256
    )
    found: Any = prior["weight"]
    assert found.hyper == "log-normal"
    assert math.log(found.scale / 2.0) == pytest.approx(0.0, abs=0.12)
    assert found.shape == pytest.approx(0.8, abs=0.12)


@pytest.mark.slow
def test_a_flow_finds_its_tail() -> None:
    """Lines of weights 2 sinh(0.8 z)/0.8."""

    def lines(x: Tensor, z: Tensor) -> Tensor:
        return x @ (2.0 * torch.sinh(0.8 * z) / 0.8)

    net, x = line()
    target = doxa.ImplicitPrior(lines, numbers=2)
    prior = doxa.functional_prior(net, x, target, kind="flow", points=8, functions=256)
    found: Any = prior["weight"]
    assert math.log(found.scale / 2.0) == pytest.approx(0.0, abs=0.12)
    assert found.tail == pytest.approx(0.8, abs=0.12)


def test_what_was_found_becomes_priors_of_the_same_scales() -> None:
    """Scales 2 and 3, and tails or shapes 0.5 and 0.7, of two tensors in the second of two runs."""
    scale, shape = (torch.tensor([[1.0, 1.0], row]).double() for row in ([2.0, 3.0], [0.5, 0.7]))
    none = torch.zeros(2, 1)
    flow: Any = Matched(("a", "b"), scale.log(), shape.log(), none, "flow").priors(1)
    for name, s, a in (("a", 2.0, 0.5), ("b", 3.0, 0.7)):
        assert (flow[name].scale, flow[name].tail) == pytest.approx((s, a))
    found: Any = Matched(("a", "b"), scale.log(), shape.log(), none, "hierarchical").priors(1)
    assert (found["b"].scale, found["b"].shape) == pytest.approx((3.0, 0.7))


def test_the_method_is_sghmc_under_that_prior() -> None:
    """Tuned inside of a fit and given to one: the same draws, and the posterior has the prior."""
    net, x = line()
    data, likelihood = (x, x.sum(1, keepdim=True)), doxa.Gaussian(1.0)
    tuning: dict[str, Any] = {"lengthscale": 3.0, "variance": 2.0, "functions": 16, "points": 6}
    steps: dict[str, Any] = {"draws": 10, "burn_in": 10, "thin": 1, "step_size": 1e-3}
    options: dict[str, Any] = {"likelihood": likelihood, "members": 2, "seed": 3}
    own = doxa.fit(net, data, doxa.FunctionalPrior(prior_steps=5, **tuning, **steps), **options)
    prior = doxa.functional_prior(net, x, steps=5, seed=3, **tuning)
    given = doxa.fit(net, data, doxa.SGHMC(**steps), prior=prior, **options)
    assert own.priors == [prior, prior]
    assert own.diagnostics["prior_distances"] == prior.distances.tolist()
    torch.testing.assert_close(own.samples, given.samples, rtol=1e-12, atol=1e-12)
    plain = doxa.fit(net, data, doxa.SGHMC(**steps), **options)
    assert (own.samples - plain.samples).abs().max() > 1e-3


@pytest.mark.parametrize(("likelihood", "variance"), [("gaussian", 1.0), ("categorical", 8.0)])
def test_logits_are_larger_than_numbers_before_the_data(likelihood: str, variance: float) -> None:
    """8 is what the paper's authors take for classes."""
    net, x = doxa.nets.mlp(2, 2, (5,)).double(), normals(60, 2)
    prior = doxa.functional_prior(doxa.Model(net, likelihood), x, steps=1, functions=4)
    assert prior.target.variance == variance
    given = doxa.functional_prior(
        doxa.Model(net, likelihood), x, steps=1, functions=4, variance=2.0
    )
    assert given.target.variance == 2.0


def test_bad_input_says_so() -> None:
    net, x = line()
    with pytest.raises(DataError, match="there are none"):
        doxa.functional_prior(net, x[:0])
    with pytest.raises(DataError, match="one array of real numbers"):
        doxa.functional_prior(nn.Embedding(5, 1), torch.arange(5))
    with pytest.raises(DataError, match="not finite"):
        doxa.functional_prior(net, x / 0)
    with pytest.raises(MethodError, match="target must be one of"):
        doxa.functional_prior(net, x, "rfb")
    with pytest.raises(MethodError, match="in the target itself"):
        doxa.functional_prior(net, x, doxa.GPPrior(), lengthscale=2.0)
    with pytest.raises(ModelError, match="one output"):
        doxa.functional_prior(_Two().double(), x)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.a(x)
