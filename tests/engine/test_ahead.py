"""Numbers drawn ahead are a pure function of (seed, purpose, member, call, step)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa import noise
from doxa.data import Batch
from doxa.engine import execute
from doxa.noise import Noise, PrefetchedNoise


def at(t: int) -> torch.Tensor:
    return torch.tensor(t, dtype=torch.int32)


def test_a_run_that_begins_later_gets_the_same_bits() -> None:
    source = Noise(1, "test", [0, 1, 2])
    whole, resumed = PrefetchedNoise(source), PrefetchedNoise(source)
    for shape in ((501,), (3, 2), (20_000,)):
        early = [whole.normal(shape, at(t), 1) for t in range(60)]
        late = [resumed.normal(shape, at(t), 1) for t in range(41, 60)]
        assert all(torch.equal(a, b) for a, b in zip(early[41:], late, strict=True))


def test_a_member_does_not_depend_on_its_company() -> None:
    together, alone = (
        PrefetchedNoise(Noise(0, "test", [3, 5, 9])),
        PrefetchedNoise(Noise(0, "test", [5])),
    )
    part = together.select_members(slice(1, 2))
    for t in (0, 63, 64):
        want = together.uniform((7,), at(t), 2)[1:2]
        assert torch.equal(alone.uniform((7,), at(t), 2), want)
        assert torch.equal(part.uniform((7,), at(t), 2), want)


def test_members_steps_calls_purposes_and_particles_have_numbers_of_their_own() -> None:
    one, other = PrefetchedNoise(Noise(0, "test", [0, 1])), PrefetchedNoise(Noise(0, "other", [0]))
    drawn = [one.normal((4,), at(t), call)[m] for t in range(70) for call in (1, 2) for m in (0, 1)]
    drawn += [other.normal((4,), at(0), 1)[0], *one.expand_particles(3).normal((4,), at(0), 1)]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)


def test_many_alternating_numbers_serve_eight_steps_and_no_place_has_one_twice() -> None:
    """ε, −ε, and both again a quarter of a row further on, three times; then new ones.
    Correlations of a place over pairs of steps are 0 within five standard errors."""
    n = noise._MANY
    quarter = n // 4
    whole, late = (
        PrefetchedNoise(Noise(0, "test", [4, 7])),
        PrefetchedNoise(Noise(0, "test", [4, 7])),
    )
    drawn = [whole.alternating((n,), at(t), 1) for t in range(9)]
    for k in range(4):
        even, odd = drawn[2 * k : 2 * k + 2]
        assert even.shape == (2, n) and torch.equal(even, -odd)
        assert torch.equal(even, drawn[0].roll(-k * quarter, -1))
    assert torch.equal(drawn[5], late.alternating((n,), at(5), 1))
    alone = PrefetchedNoise(Noise(0, "test", [7])).alternating((n,), at(6), 1)
    assert torch.equal(alone[0], drawn[6][1])
    for other in (*drawn[2::2],):
        assert (drawn[0] * other).mean(1).abs().max() < 5 / math.sqrt(n)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_noise_of_rows_is_the_hash_whatever_is_found_ahead(kind: str) -> None:
    source = Noise(2, "test", [4, 7, 9])
    for cut in (slice(0, 3), slice(1, 2)):
        ahead, hashed = PrefetchedNoise(source).select_members(cut), source.select_members(cut)
        for t, call in ((130, 1), (0, 1), (63, 2), (64, 2)):
            want = hashed.expand_particles(2).rowwise(kind, (5, 3), at(t), call)
            assert torch.equal(ahead.expand_particles(2).rowwise(kind, (5, 3), at(t), call), want)


def test_they_are_distributed_as_they_should_be() -> None:
    """A mean and a variance over 200,000 numbers within five standard errors."""
    source = PrefetchedNoise(Noise(2, "test", [0], dtype=torch.float64))
    n = 200_000
    z, u = source.normal((n,), at(3), 1)[0], source.uniform((n,), at(3), 2)[0]
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    assert float(u.min()) > 0
    assert float(u.max()) <= 1


def test_alternating_numbers_cancel_in_pairs() -> None:
    """Steps 2k and 2k + 1 have opposite numbers, pairs have others."""
    source = PrefetchedNoise(Noise(0, "test", [0, 1]))
    drawn = [source.alternating((5,), at(t), 1) for t in range(130)]
    assert all(torch.equal(a, -b) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    assert len({tuple(row.flatten().tolist()) for row in drawn[::2]}) == 65


def test_what_a_step_asks_for_can_be_handed_in() -> None:
    source = PrefetchedNoise(Noise(0, "test", [0, 1]))

    def step(t: torch.Tensor) -> torch.Tensor:
        return source.normal((3,), t, 1) + source.select_members(slice(0, 2)).uniform((3,), t, 2)

    with source.listening() as asked:
        want = step(at(5))
    numbers = {request: source.reader(request)(5) for request in asked}
    assert len(numbers) == 2
    with source.giving(numbers):
        assert torch.equal(step(at(99)), want)  # whatever the step: from what was handed in
    with source.giving({}), pytest.raises(KeyError):
        step(at(5))


def test_a_compiled_step_is_given_the_strides_it_was_compiled_for(monkeypatch: Any) -> None:
    """It reads memory by them: numbers that lie apart, as those of many alternating ones do, are
    put together for the compiler as they are at every call."""
    strides: list[list[tuple[int, ...]]] = []

    def compiled(graph: Any, example: list[torch.Tensor]) -> Any:
        strides.append([value.stride() for value in example])

        def call(*given: torch.Tensor) -> Any:
            strides.append([value.stride() for value in given])
            return graph(*given)

        return call

    monkeypatch.setattr(execute, "_compiled", compiled)
    source, n = PrefetchedNoise(Noise(0, "test", [0, 1])), noise._MANY

    def step(state: Any, _: Any, t: torch.Tensor, rate: torch.Tensor) -> Any:
        return {"theta": state["theta"] + source.alternating((n,), t, 1)}, {}

    run, batch = execute.Executor(step, "compiled", source), Batch((), (), torch.ones(()))
    state = {"theta": torch.zeros(2, n)}
    for t in range(4):
        state, _ = run(state, batch, at(t), torch.zeros(()))
    assert run.mode == "compiled" and len(strides) == 6  # for the compiler, a trial, and calls
    assert all(each == strides[0] for each in strides)


METHODS = {
    "sgld": doxa.SGLD(draws=12, burn_in=12, thin=2, step_size=1e-4),
    "sghmc": doxa.SGHMC(draws=12, burn_in=12, thin=2, step_size=1e-4),
    "cyclical": doxa.CyclicalSGMCMC(cycles=2, draws=6, thin=2, step_size=1e-4),
}


def fit(method: Any, **options: Any) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    net = doxa.nets.mlp(3, 1, hidden=(7,)).double()
    chosen = {"members": 2, "batch_size": 8, "progress": False, **options}
    return doxa.fit(net, (x, x[:, :1].sin()), method, **chosen).samples


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_recorded_chain_sees_the_same_numbers(method: Any) -> None:
    eager, recorded = (fit(method, engine=f"stack:{mode}") for mode in ("eager", "traced"))
    torch.testing.assert_close(recorded, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [1, 1 << 14])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_chain_is_resumed_to_the_bit(
    method: Any, numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a block, and where a block holds one step's noise."""
    monkeypatch.setattr(noise, "_NUMBERS", numbers)
    want = fit(method)

    def stop(step: int, info: Any) -> None:
        if step >= 20:
            raise KeyboardInterrupt

    kept = {"checkpoint": tmp_path / "run", "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(method, callbacks=[stop], **kept)
    assert torch.equal(fit(method, **kept), want)


def test_long_runs_of_small_networks_use_the_hash() -> None:
    """By a rule about the work alone: numbers do not depend on how a step is executed."""
    assert noise.worthwhile(1_000, 5_000)
    assert not noise.worthwhile(1_000, 50_000)
    assert noise.worthwhile(1_000_000, 50_000)
