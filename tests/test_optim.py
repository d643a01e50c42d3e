"""Optimisers against torch.optim and closed forms; schedules against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.optim import SGD, Adam, Optimizer, optimizer, schedule

M, P = 3, 5


def gradients(steps: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(steps, M, P, generator=g, dtype=torch.float64)


def run(ours: Optimizer, grads: Tensor, rates: list[Tensor]) -> Tensor:
    """Two names at once, of which the second has another shape and its own gradient."""
    theta = torch.ones(M, P, dtype=torch.float64)
    state = {"theta": theta, "other": torch.ones(M, P, 2, dtype=torch.float64)}
    state |= ours.init(dict(state))
    for t, grad in enumerate(grads):
        tick = torch.tensor(t, dtype=torch.int32)
        params = {name: state[name] for name in ("theta", "other")}
        given = {"theta": grad, "other": -grad.unsqueeze(2).expand(-1, -1, 2)}
        state |= ours.update(params, given, state, rates[t], tick)
    torch.testing.assert_close(
        state["other"][..., 0] - 1, 1 - state["theta"], rtol=1e-12, atol=1e-13
    )
    return state["theta"]


def reference(theirs: type, grads: Tensor, rates: list[float], **settings: float) -> Tensor:
    theta = torch.ones(M, P, dtype=torch.float64, requires_grad=True)
    optim = theirs([theta], lr=1.0, **settings)
    for grad, rate in zip(grads, rates, strict=True):
        optim.param_groups[0]["lr"] = rate
        theta.grad = grad.clone()
        optim.step()
    return theta.detach()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_adam_is_torchs_adam(betas: tuple[float, float]) -> None:
    grads = gradients(50)
    rates = [0.1 / (1 + t) for t in range(50)]
    ours = run(Adam(*betas), grads, [torch.tensor(r, dtype=torch.float64) for r in rates])
    theirs = reference(torch.optim.Adam, grads, rates, betas=betas)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_sgd(momentum: float) -> None:
    grads = gradients(50)
    rates = [0.1] * 50
    ours = run(SGD(momentum), grads, [torch.tensor(r, dtype=torch.float64) for r in rates])
    theirs = reference(torch.optim.SGD, grads, rates, momentum=momentum)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ours", [Adam(), SGD(0.9), SGD(0.0)])
def test_each_member_has_its_own_rate_and_path(ours: Optimizer) -> None:
    grads = gradients(20)
    rates = torch.tensor([[0.1], [0.01], [0.5]], dtype=torch.float64)
    together = run(ours, grads, [rates] * 20)
    for m in range(M):
        alone = run(ours, grads[:, m : m + 1].expand(-1, M, -1), [rates[m]] * 20)
        torch.testing.assert_close(together[m], alone[0], rtol=0, atol=0)


def test_the_state_given_is_not_changed() -> None:
    theta, grad = torch.ones(M, P), torch.ones(M, P)
    for ours in (Adam(), SGD()):
        state = ours.init({"theta": theta})
        before = {k: v.clone() for k, v in state.items()}
        ours.update({"theta": theta}, {"theta": grad}, state, torch.tensor(0.1), torch.tensor(0))
        assert all(torch.equal(state[k], before[k]) for k in state)
        assert torch.equal(theta, torch.ones(M, P))


def test_adams_first_step_has_the_size_of_the_rate() -> None:
    """m̂/√v̂ is ±1 at the first step whatever the gradient's scale (Kingma & Ba, section 2.1)."""
    grad = torch.tensor([[1e-3, -1e3, 7.0]], dtype=torch.float64)
    theta = torch.zeros(1, 3, dtype=torch.float64)
    rate = torch.tensor(0.25, dtype=torch.float64)
    params = {"theta": theta}
    new = Adam().update(params, {"theta": grad}, Adam().init(params), rate, torch.tensor(0))
    torch.testing.assert_close(new["theta"], -0.25 * grad.sign(), rtol=2e-5, atol=0)


def test_schedules_follow_their_formulas() -> None:
    steps = 200
    at = [t / steps for t in range(steps)]
    assert schedule("constant", steps).tolist() == [1.0] * steps
    cosine = [0.5 * (1 + math.cos(math.pi * s)) for s in at]
    assert schedule("cosine", steps).tolist() == pytest.approx(cosine, rel=1e-12)
    assert schedule("linear", steps).tolist() == pytest.approx([1 - s for s in at], rel=1e-12)
    assert schedule(lambda s: 2 * s, steps).tolist() == pytest.approx([2 * s for s in at])


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_warm_up_rises_over_the_first_twentieth(name: str) -> None:
    warm, plain = schedule(f"warmup-{name}", 1000), schedule(name, 1000)
    rise = warm[:50] / plain[:50]
    assert 0 < rise[0] < 0.05
    assert bool((rise.diff() > 0).all())
    assert torch.equal(warm[50:], plain[50:])


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "warmup-cosine"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_still_move(name: str, steps: int) -> None:
    values = schedule(name, steps)
    assert values.shape == (steps,) and values[0] > 0


def test_unknown_names_are_errors() -> None:
    with pytest.raises(MethodError, match=r"adam.*sgd.*'adagrad'"):
        optimizer("adagrad")
    with pytest.raises(MethodError, match=r"constant.*'exponential'"):
        schedule("exponential", 10)
    assert optimizer("sgd") == SGD()
    assert optimizer(Adam(eps=1e-3)) == Adam(eps=1e-3)
