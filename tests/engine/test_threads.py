"""Threads: one for small work, those that were set for large, and restored whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import doxa
from doxa.engine.engine import threads_for


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """Three, which nobody sets by chance."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_large_products_get_what_was_set_and_small_ones_one_thread() -> None:
    with threads_for(1.0):
        assert torch.get_num_threads() == 1
        with threads_for(1e9):
            assert torch.get_num_threads() == 3
            with threads_for(0.0):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_never_more_than_was_set() -> None:
    torch.set_num_threads(2)
    with threads_for(1e12):
        assert torch.get_num_threads() == 2


def seen(net: Any, x: torch.Tensor, method: Any = "map", **options: Any) -> set[int]:
    """How many threads the steps of a fit have; afterwards they are as before."""
    found: set[int] = set()
    note = lambda *_: found.add(torch.get_num_threads())  # noqa: E731
    y = x.flatten(1).sum(1, keepdim=True)
    settings = {"steps": 3, "progress": False, "callbacks": [note]} | options
    doxa.fit(net, (x, y), method, **settings)
    assert torch.get_num_threads() == 3
    return found


def test_a_fit_of_a_small_net_has_one_thread() -> None:
    assert seen(doxa.nets.mlp(4, 1, (8,)), torch.randn(32, 4)) == {1}


def test_a_fit_with_large_products_has_what_was_set() -> None:
    """512 rows × 500 × 500 weights: 1.3e8 multiplications, of which a batch of 16 has 4e6."""
    net, x = doxa.nets.mlp(4, 1, (500, 500)), torch.randn(512, 4)
    assert seen(net, x, batch_size=512, validation=None) == {3}
    assert seen(net, x, batch_size=16) == {1}


def test_convolutions_count_at_every_place() -> None:
    """16 × 16 × 9 weights at 64 × 64 places of 16 rows: 1.5e8, and 2,304 weights."""
    layers = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1)]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 1)]
    net = torch.nn.Sequential(*layers, *head)
    assert seen(net, torch.randn(16, 1, 64, 64), steps=1, validation=None) == {3}


def test_a_stage_that_says_what_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laplace's matrix over 541 weights is factored with all threads; its training has one."""
    threads: dict[str, int] = {}
    settle, add = doxa.Laplace._settle, doxa.Laplace._add

    def noted(name: str, call: Any) -> Any:
        def inner(*args: Any) -> Any:
            threads[name] = torch.get_num_threads()
            return call(*args)

        return inner

    monkeypatch.setattr(doxa.Laplace, "_settle", noted("settle", settle))
    monkeypatch.setattr(doxa.Laplace, "_add", noted("curvature", add))
    net, method = doxa.nets.mlp(4, 1, (20, 20)), doxa.Laplace(structure="full")
    assert seen(net, torch.randn(32, 4), method) == {1, 3}
    assert threads == {"settle": 3, "curvature": 3}


def test_threads_come_back_after_an_error() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def fail(*_: Any) -> None:
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        doxa.fit(doxa.nets.mlp(4, 1, (8,)), (x, y), callbacks=[fail], progress=False)
    assert torch.get_num_threads() == 3


def test_sample_has_one_thread() -> None:
    found: set[int] = set()

    def density(p: dict[str, torch.Tensor]) -> torch.Tensor:
        found.add(torch.get_num_threads())
        return -0.5 * p["a"].square().sum()

    method = doxa.HMC(draws=4, burn_in=4, leapfrog=2)
    doxa.sample(density, {"a": torch.zeros(2)}, method, 2, progress=False)
    assert found == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.slow
def test_a_prediction_takes_what_its_tiles_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one has one thread; of many large tiles all but the first have what was set."""
    x = torch.randn(3000, 4)
    y = x.sum(1, keepdim=True)
    net = doxa.nets.mlp(4, 1, (600, 600))
    posterior = doxa.fit(net, (x, y), "map", steps=1, batch_size=8, progress=False)
    found: list[int] = []
    forward = type(posterior)._forward

    def noted(self: Any, *args: Any) -> Any:
        found.append(torch.get_num_threads())
        return forward(self, *args)

    monkeypatch.setattr(type(posterior), "_forward", noted)
    posterior.predict(x[:4])
    assert found == [1]
    found.clear()
    posterior.predict(x)
    assert found[0] == 1
    assert len(found) > 2
    assert set(found[1:]) == {3}
    assert torch.get_num_threads() == 3


def test_a_thread_that_begins_meanwhile_has_what_was_set_outside() -> None:
    """torch lets it begin with the number of a block that runs elsewhere, which is 1."""
    inside, done, found = threading.Event(), threading.Event(), []

    def other() -> None:
        inside.wait(60)
        with threads_for(1e9):
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())
        done.set()

    def first() -> None:
        with threads_for(0.0):
            inside.set()
            done.wait(60)
        found.append(torch.get_num_threads())

    threads = [threading.Thread(target=work) for work in (other, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3, 3, 3]
    later: list[int] = []
    last = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    last.start()
    last.join()
    assert later == [3], "threads that begin afterwards have what was set"


@pytest.mark.slow
def test_convolutions_are_deterministic_while_something_is_trained() -> None:
    """A fit inside the callback of another leaves the switch as the outer one needs it, and an
    error puts it back too."""
    seen: list[bool] = []
    x, y = torch.randn(20, 2), torch.randn(20)
    net = doxa.nets.mlp(2, 1, hidden=(4,))

    def inner(step: int, info: dict[str, Any]) -> None:
        doxa.fit(net, (x, y), "map", steps=2, progress=False)
        seen.append(torch.backends.cudnn.deterministic)

    def broken(step: int, info: dict[str, Any]) -> None:
        raise RuntimeError("on purpose")

    assert not torch.backends.cudnn.deterministic
    doxa.fit(net, (x, y), "map", steps=2, progress=False, callbacks=[inner])
    assert seen and all(seen)
    assert not torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="on purpose"):
        doxa.fit(net, (x, y), "map", steps=2, progress=False, callbacks=[broken])
    assert not torch.backends.cudnn.deterministic
