"""Same seed, same result; nothing global is touched; the user's network is only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doxa.errors import DoxaError
from doxa.method.method import Choice, Flag, rules


def test_same_seed_same_posterior(case: Any, answers: Any) -> None:
    """Whatever the global generator stands at."""
    x, y = case.data()
    one = case.posterior()
    torch.manual_seed(12345)
    two = case.fit()
    for name, value in one.tensors().items():
        assert torch.equal(value, two.tensors()[name]), name
    first, second = answers(one.predict(x), y), answers(two.predict(x), y)
    assert all(torch.equal(first[name], second[name]) for name in first)


def variants(case: Any) -> Iterator[dict[str, Any]]:
    """The shortest settings with every choice and flag that the method has, one at a time."""
    short = case.fast.one_step
    yield short
    yield {**case.fast.changed, **short}
    own = case.method().settings()
    for name, rule in rules(case.cls).items():
        values = rule.choices if isinstance(rule, Choice) else ()
        values = (not own[name],) if isinstance(rule, Flag) else values
        yield from ({**short, name: value} for value in values if value != own[name])


def with_dropout(outputs: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, outputs),
        )  # fmt: skip


@pytest.mark.by_family
def test_no_layer_draws_from_the_global_generator(trained: Any) -> None:
    """Neither the network's own dropout nor a layer that a method puts in its place, whichever way
    the method goes: the generator is not moved, and where it stands makes no difference."""
    x, _ = trained.data()
    found = []
    for seed, settings in enumerate([trained.fast.one_step, *variants(trained)]):
        net = with_dropout(1 if trained.regression else 3)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        try:
            posterior = trained.fit(net=net, settings=settings, steps=2)
        except DoxaError:
            continue  # settings that do not go together, or not with these rows
        posterior.predict(x[:2])
        assert torch.equal(torch.get_rng_state(), before), settings
        found.append(posterior.tensors())
    one, two = found[:2]  # of the same settings
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.by_family
def test_another_seed_another_posterior(trained: Any) -> None:
    """Starts, batches and noise all come from it."""
    x, _ = trained.data()
    one, two = trained.posterior(), trained.fit(seed=4)
    assert not torch.equal(one.predict(x).mean, two.predict(x).mean)


@pytest.mark.by_family
def test_global_state_is_left_alone(
    case: Any, global_state: Callable[[], list[Any]], tmp_path: Path
) -> None:
    x, y = case.data()
    net = case.net()
    torch.manual_seed(8)
    before = global_state()
    posterior = case.fit(net=net, validation=0.2, steps=10)
    p = posterior.predict(x)
    p.sample(3)
    p.log_prob(y)
    posterior.functions(x, 1)
    posterior.save(tmp_path / "run")
    assert global_state() == before


@pytest.mark.by_family
def test_the_users_network_is_never_changed(trained: Any) -> None:
    net = trained.net()
    net.train()
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.5)
    modules = [id(module) for module in net.modules()]
    parameters = [id(p) for p in net.parameters()]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    posterior = trained.fit(net=net, steps=10)
    posterior.predict(trained.data()[0])
    posterior.features(trained.data()[0])
    assert [id(module) for module in net.modules()] == modules
    assert [id(p) for p in net.parameters()] == parameters
    assert all(module.training for module in net.modules())
    for name, now in net.named_parameters():
        assert torch.equal(now, before[name]), name
        assert now.grad is not None
        assert (now.grad == 0.5).all(), name
        assert now.requires_grad
        assert now.device.type == "cpu"
        assert now.dtype == torch.float32
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(module, kind) for module in net.modules() for kind in hooks)


@pytest.mark.by_family
def test_the_data_are_never_changed(case: Any) -> None:
    x, y = case.data()
    case.fit((x, y), steps=5)
    then_x, then_y = case.data()
    assert torch.equal(x, then_x)
    assert torch.equal(y, then_y)
