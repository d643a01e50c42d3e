"""Numbers drawn ahead are those of their step, and so is where their block begins."""

from __future__ import annotations

import math

import torch
from doxa.mcmc.ahead import Ahead

from doxa.noise import Noise


def test_numbers_are_those_of_the_step() -> None:
    source = Noise(0, "test", [3, 5], dtype=torch.float64)
    ahead = Ahead(source)
    for t in (0, 1, 63, 64, 200, 5):
        step = torch.tensor(t, dtype=torch.int32)
        for call in (1, 2):
            assert torch.equal(ahead.uniform((7,), step, call), source.uniform((7,), step, call))
            want = source.normal((4, 3), step, call)
            assert torch.allclose(ahead.normal((4, 3), step, call), want, rtol=1e-13)


def test_a_run_that_begins_later_gets_the_same_bits() -> None:
    source = Noise(1, "test", [0, 1, 2])
    whole, resumed = Ahead(source), Ahead(source)
    early = [whole.normal((501,), t, 1) for t in range(60)]
    late = [resumed.normal((501,), t, 1) for t in range(41, 60)]
    assert all(torch.equal(a, b) for a, b in zip(early[41:], late, strict=True))


def test_more_numbers_than_a_block_holds() -> None:
    source = Noise(1, "test", [0])
    big = Ahead(source).uniform((200_000,), 3, 1)
    assert torch.equal(big, source.uniform((200_000,), 3, 1))
    assert abs(float(big.mean()) - 0.5) < 5 / math.sqrt(12 * 200_000)
