"""`init="given"`: a fit starts from the network's own weights, and members still part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.errors import MethodError

STILL = 1e-12  # a rate, a step or a proposal's scale at which nothing moves
AWAY = 3.0  # the given weights are so far from any fresh ones


def network(case: Any) -> Any:
    net = case.net()
    with torch.no_grad():
        for p in net.parameters():
            p += AWAY
    return net


def still(case: Any) -> dict[str, Any]:
    """The method's own step sizes made tiny, in its shortest run."""
    known = case.cls().settings()
    tiny = {name: STILL for name in ("step_size", "swa_lr", "scale") if name in known}
    short = {"leapfrog": 1, "max_depth": 1, "probes": 2}
    short = {name: value for name, value in short.items() if name in known}
    return {**case.fast.one_step, **short, **tiny}


def given(case: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network(case).parameters()]).double()


@pytest.mark.by_family
def test_the_fit_starts_where_the_network_is(trained: Any) -> None:
    """To rounding where the steps can be made tiny. HMC and NUTS choose theirs: the one transition
    of their shortest run stays near (0.04 times a momentum of order 1, else it is rejected).
    SVGD's particles start 1 % apart, since at one place they would never part."""
    posterior = trained.fit(
        net=network(trained), init="given", members=2, steps=2, lr=STILL, dtype=torch.float64,
        settings=still(trained), schedule="constant", optimizer="sgd",
    )  # fmt: skip
    theta = posterior.point()
    if posterior.kind == "sample":
        theta = posterior.samples.mean(1)
    names = [n for n in posterior.layout.names if not n.startswith("likelihood.")]
    weights = posterior.layout.select(names).flatten(posterior.layout.unflatten(theta))
    settings = trained.method().settings()
    own = not {"step_size", "scale"} & set(settings) and trained.row.family == "mcmc"
    loose = 1.0 if own else 0.2 if trained.method().width > 1 else 1e-4
    assert float((weights.cpu() - given(trained)).abs().max()) < loose
    fresh = trained.fit(members=2, steps=2, lr=STILL, settings=still(trained)).point()
    assert float((fresh[:, : weights.shape[1]].cpu() - given(trained)).abs().mean()) > 0.5 * AWAY


@pytest.mark.by_family
def test_members_that_start_together_part(trained: Any) -> None:
    """By the order of their data, or by their noise."""
    posterior = trained.fit(init="given", members=2, steps=20)
    point = posterior.point()
    assert not torch.equal(point[0], point[1])


@pytest.mark.by_family
def test_the_start_is_fresh_or_given(case: Any) -> None:
    with pytest.raises(MethodError, match="'fresh' or 'given'"):
        case.fit(init="warm")
