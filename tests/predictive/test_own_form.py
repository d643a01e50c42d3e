"""A likelihood that gives its own predictive form: a mixture density with two components.

    p(y | f) = Σ_k π_k N(y; μ_k, σ_k²),    f = (logits, μ, log σ) of both components

Bishop (1994). Only this file knows the likelihood: all that others need is what it declares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator, Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

import doxa
from doxa import store
from doxa.likelihoods import Affine
from doxa.likelihoods.base import Likelihood, Shape, check_finite, check_match, sum_event, uniform
from doxa.noise import generator
from doxa.predictive import Predictive
from doxa.predictive.form import Form, check_rows, solve

K = 2


def parts(f: Tensor, lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """log π, μ and σ, [*lead, N, K]."""
    logits, mean, log_std = f.split(K, lead + 1)
    return torch.log_softmax(logits, lead + 1), mean, log_std.exp()


class NormalsPerRow(Form):
    """A mixture of normals whose weights differ between rows: log w, μ and σ, [C, N]."""

    def __init__(self, likelihood: Likelihood, log_w: Tensor, mean: Tensor, std: Tensor) -> None:
        self.likelihood = likelihood
        self.log_w, self.at, self.std_of = log_w, mean, std

    @property
    def splits(self) -> bool:
        return False

    @property
    def mean(self) -> Tensor:
        return (self.log_w.exp() * self.at).sum(0).unsqueeze(1)

    @property
    def variance(self) -> Tensor:
        second = (self.log_w.exp() * (self.at.square() + self.std_of.square())).sum(0)
        return second.unsqueeze(1) - self.mean.square()

    def targets(self, y: Any) -> Tensor:
        ready = self.likelihood.prepare_targets(y, (3 * K,))
        return check_rows(ready, self.at.shape[1]).to(self.at)

    def log_prob(self, y: Tensor) -> Tensor:
        z = (y[:, 0] - self.at) / self.std_of
        each = -0.5 * z.square() - self.std_of.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(self.log_w + each, 0)

    def cdf(self, y: Tensor) -> Tensor:
        below = torch.special.ndtr((y[..., 0] - self.at) / self.std_of)
        return (self.log_w.exp() * below).sum(0).unsqueeze(1)

    def quantile(self, level: float) -> Tensor:
        each = self.at + self.std_of * torch.special.ndtri(torch.tensor(level).to(self.at))
        low, high = each.amin(0).unsqueeze(1), each.amax(0).unsqueeze(1)
        return solve(self.cdf, level, low, high)

    def sample(self, n: int, seed: int) -> Tensor:
        source = generator(seed, "test", "mixture density")
        chosen = torch.multinomial(self.log_w.exp().T, n, True, generator=source).T  # [n, N]
        noise = torch.randn(chosen.shape, generator=source, dtype=self.at.dtype)
        return (self.at.gather(0, chosen) + self.std_of.gather(0, chosen) * noise).unsqueeze(2)


@store.register("test.mixture-density")
@dataclass(frozen=True)
class MixtureDensity(Likelihood):
    name: ClassVar[str] = "mixture-density"
    scales_targets: ClassVar[bool] = True

    def event(self, output: Shape) -> Shape:
        return (1,)

    def outputs(self, y: Tensor) -> Shape:
        return (3 * K,)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return check_finite(y)

    def log_prob(self, f: Tensor, y: Tensor, theta: Any, lead: int = 0) -> Tensor:
        log_w, mean, std = parts(f, lead)
        check_match(mean[..., :1], y, lead)
        each = -0.5 * ((y - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(log_w + each, -1)

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        return self.mean(f, {}, lead)

    def mean(self, f: Tensor, theta: Any, lead: int = 0) -> Tensor:
        log_w, mean, _ = parts(f, lead)
        return (log_w.exp() * mean).sum(-1, keepdim=True)

    def variance(self, f: Tensor, theta: Any, lead: int = 0) -> Tensor:
        log_w, mean, std = parts(f, lead)
        second = (log_w.exp() * (mean.square() + std.square())).sum(-1, keepdim=True)
        return second - self.mean(f, theta, lead).square()

    def entropy(self, f: Tensor, theta: Any, lead: int = 0) -> Tensor:
        raise doxa.errors.Unavailable("the entropy of a mixture density has no closed form")

    def sample(self, f: Tensor, theta: Any, generator: Generator, lead: int = 0) -> Tensor:
        log_w, mean, std = parts(f, lead)
        first = uniform(f, tuple(mean.shape[:-1]), generator) < log_w[..., 0].exp()
        k = (~first).long().unsqueeze(-1)
        noise = torch.randn(k.shape, generator=generator, dtype=f.dtype)
        return mean.gather(-1, k) + std.gather(-1, k) * noise

    def curvature(self, f: Tensor, theta: Any, lead: int = 0, y: Tensor | None = None) -> Tensor:
        raise doxa.errors.Unavailable("only sampled")

    def predictive(
        self, f: Tensor, theta: Mapping[str, Tensor], weights: Tensor, f_variance: Tensor | None
    ) -> Form:
        log_w, mean, std = (part.movedim(-1, 1).flatten(0, 1) for part in parts(f, 1))
        joint = log_w + weights.log().repeat_interleave(K).unsqueeze(1)
        return NormalsPerRow(self, joint, mean, std)


def exact(posterior: Any, x: Tensor) -> list[MixtureSameFamily]:
    """torch's mixture at every row, in units of y, from the functions of the posterior."""
    form = posterior.predict(x)._form
    base = form.base
    loc, scale = (float(v) for v in (posterior.scales.y_loc, posterior.scales.y_scale))
    return [
        MixtureSameFamily(
            Categorical(logits=base.log_w[:, i]),
            Normal(loc + scale * base.at[:, i], scale * base.std_of[:, i]),
        )
        for i in range(len(x))
    ]


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    """y = 30 ± 4 with a sign that is tossed: one normal cannot have both."""
    x = torch.linspace(-1, 1, 200).double().unsqueeze(1)
    toss = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) < 0.3
    noise = 0.2 * torch.randn(200, 1, generator=torch.Generator().manual_seed(1))
    return x, 30.0 + 4.0 * torch.where(toss, 1.0, -1.0).double() + x + noise.double()


def test_a_mixture_density_has_its_own_form(rows: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    x, y = rows
    net = doxa.nets.mlp(1, 3 * K, (8,), "tanh").double()
    posterior = doxa.fit(
        net, (x, y), "deep-ensemble", likelihood=MixtureDensity(), members=3, steps=400, lr=0.02,
        standardize=True, progress=False,
    )  # fmt: skip
    p = posterior.predict(x[::20])
    wanted = exact(posterior, x[::20])
    at = y[::20]
    log_p = torch.stack([law.log_prob(value[0]) for law, value in zip(wanted, at, strict=True)])
    torch.testing.assert_close(p.log_prob(at), log_p, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(p.mean[:, 0], torch.stack([law.mean for law in wanted]))
    torch.testing.assert_close(p.variance[:, 0], torch.stack([law.variance for law in wanted]))
    for level in (0.1, 0.5, 0.9):
        found = p.quantile(level)
        below = [law.cdf(value[0]) for law, value in zip(wanted, found, strict=True)]
        torch.testing.assert_close(torch.stack(below), torch.full((10,), level).double())
        torch.testing.assert_close(p.cdf(found), torch.full((10, 1), level).double())
    low, high = p.interval(0.9)
    torch.testing.assert_close(torch.stack([low, high]), p.quantile([0.05, 0.95]))
    draws = p.sample(20_000)
    assert ((draws.mean(0) - p.mean).abs() < 6 * (p.variance / 20_000).sqrt()).all()
    # Two modes were found: the density between them is far below that at either.
    middle = p.log_prob(30.0 + x[::20])
    assert (p.log_prob(34.0 + x[::20]) > middle + 1).all()
    assert (p.log_prob(26.0 + x[::20]) > middle + 1).all()

    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run").predict(x[::20])
    assert torch.equal(again.log_prob(at), p.log_prob(at))
    assert torch.equal(again.quantile(0.3), p.quantile(0.3))


def test_the_form_is_also_that_of_parts_and_of_functions_without_scales() -> None:
    f = torch.randn(4, 5, 3 * K, generator=torch.Generator().manual_seed(2)).double()
    y = torch.randn(5, 1, generator=torch.Generator().manual_seed(3)).double()
    plain = Predictive(f, MixtureDensity(), weights=[1.0, 2.0, 0.0, 1.0])
    assert isinstance(plain._form, NormalsPerRow)
    each = MixtureDensity().log_prob(f, y, {}, 1)
    weights = torch.tensor([0.25, 0.5, 0.0, 0.25]).double()
    torch.testing.assert_close(plain.log_prob(y), (weights @ each.exp()).log())
    loc, scale = torch.tensor([3.0]).double(), torch.tensor([2.0]).double()
    moved = Predictive(f, Affine(MixtureDensity(), loc, scale))
    base = Predictive(f, MixtureDensity())
    torch.testing.assert_close(moved.log_prob(loc + scale * y), base.log_prob(y) - math.log(2.0))
    torch.testing.assert_close(moved.mean, loc + scale * base.mean)
    torch.testing.assert_close(moved.variance, 4.0 * base.variance)
    torch.testing.assert_close(moved.quantile(0.2), loc + scale * base.quantile(0.2))
    torch.testing.assert_close(moved.cdf(loc + scale * y), base.cdf(y))
    assert torch.equal(moved.sample(3), loc + scale * base.sample(3))
    two = Predictive.mix([moved, moved])
    torch.testing.assert_close(two.log_prob(y), moved.log_prob(y))
    assert sum_event(y, 0).shape == (5,)
