"""The noise of members that are averaged, against a case whose errors are known."""

from __future__ import annotations

import pytest
import torch

import doxa

NOISE, OWN, MEMBERS = 0.5, 0.8, 10


def fitted(**options: object) -> doxa.Posterior:
    """Members f_m = b_m at every x, b_m ~ N(0, OWN²), as they are given (a rate of almost zero);
    rows of the data are N(0, NOISE²)."""
    g = torch.Generator().manual_seed(0)
    x = torch.zeros(2000, 1)
    y = NOISE * torch.randn(2000, 1, generator=g)
    net = torch.nn.Linear(1, 1)
    return doxa.fit(net, (x, y), "deep-ensemble", members=MEMBERS, seed=0, lr=1e-12, **options)


def test_the_spread_of_members_is_not_counted_as_noise_again() -> None:
    """A member's held-out error is NOISE² + b_m²: its noise. The mixture's whole variance, noise
    and spread, is the mean of those, which is what a member errs by."""
    posterior = fitted(steps=1)
    b = posterior.functions(torch.zeros(1, 1), MEMBERS)[:, 0, 0].double()
    wanted = NOISE**2 + float(b.square().mean())
    variance = float(posterior.predict(torch.zeros(1, 1)).variance)
    assert variance == pytest.approx(wanted, rel=0.02)
    assert variance < wanted + 0.5 * float(b.var())  # twice: wanted + b.var(), less a tenth


def test_a_member_alone_keeps_its_noise() -> None:
    alone = doxa.fit(torch.nn.Linear(1, 1), (torch.zeros(200, 1), torch.ones(200, 1)), "map",
                     members=[3], steps=5, seed=1)  # fmt: skip
    same = doxa.fit(torch.nn.Linear(1, 1), (torch.zeros(200, 1), torch.ones(200, 1)),
                    "deep-ensemble", members=[3], steps=5, seed=1)  # fmt: skip
    assert torch.equal(alone.samples, same.samples)
