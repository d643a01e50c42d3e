"""Noise is uniform, normal and independent, and a pure function of (seed, purpose, member, step).

Every statistical test here has a fixed seed, so it passes or fails for good. Its false-failure rate
is that of a fresh seed: ALPHA a p-value, and each test's docstring says how many p-values it takes.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from doxa.noise import Noise, PrefetchedNoise, _kept, digest, drawing, generator, repeated

ALPHA = 1e-4
SIZE = 1 << 16


def members(count: int, dtype: torch.dtype = torch.float64, purpose: str = "test") -> Noise:
    return Noise(0, purpose, list(range(count)), dtype=dtype)


def uniforms(draws: Tensor) -> np.ndarray:
    return draws.double().flatten().numpy()


def chi_square(cells: np.ndarray, bins: int) -> float:
    counts = np.bincount(cells, minlength=bins)
    return float(stats.chisquare(counts).pvalue)


def correlation_pvalue(a: Tensor, b: Tensor) -> float:
    return float(stats.pearsonr(uniforms(a), uniforms(b)).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_fill_the_unit_interval(dtype: torch.dtype) -> None:
    """Two p-values a type: 256 equal bins, and the 8 lowest bits of a 16-bit grid."""
    u = uniforms(members(4, dtype).uniform((SIZE,)))
    assert u.min() > 0.0 and u.max() <= 1.0
    fine = np.minimum((u * 65536).astype(np.int64), 65535)
    assert chi_square(fine >> 8, 256) > ALPHA
    assert chi_square(fine & 255, 256) > ALPHA


def test_consecutive_numbers_of_a_stream_are_independent() -> None:
    """Four p-values: pairs (u_i, u_{i+lag}) on a 16 x 16 grid."""
    u = uniforms(members(1).uniform((4 * SIZE,)))
    for lag in (1, 2, 7, 64):
        a, b = u[:-lag][:: lag + 1], u[lag:][:: lag + 1]
        cells = (a * 16).astype(np.int64).clip(max=15) * 16 + (b * 16).astype(np.int64).clip(max=15)
        assert chi_square(cells, 256) > ALPHA, lag


def test_every_bit_is_a_fair_coin() -> None:
    """32 two-sided tests of a bit's frequency, Bonferroni-corrected: ALPHA in all."""
    u = uniforms(members(2).uniform((2 * SIZE,)))
    words = (u * 2.0**32 - 0.5).round().astype(np.uint64)
    for bit in range(32):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        p = stats.binomtest(ones, len(words)).pvalue
        assert p > ALPHA / 32, f"bit {bit}: {ones} ones of {len(words)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_normal(dtype: torch.dtype) -> None:
    """Kolmogorov-Smirnov against N(0, 1): one p-value a type."""
    z = uniforms(members(2, dtype).normal((SIZE,), step=3, call=1))
    assert stats.kstest(z, "norm").pvalue > ALPHA


def test_moments_of_normals() -> None:
    """Mean, variance, skewness and kurtosis within 4.5 standard errors: 3e-5 in all."""
    z = uniforms(members(16).normal((SIZE,)))
    n = len(z)
    expected = {1: (0.0, 1.0), 2: (1.0, 2.0), 3: (0.0, 15.0), 4: (3.0, 96.0)}  # E z^k, Var z^k
    for power, (mean, variance) in expected.items():
        error = (z**power).mean() - mean
        assert abs(error) < 4.5 * math.sqrt(variance / n), power


def test_tails_of_normals_have_the_right_weight() -> None:
    """Counts beyond 3 and 4 standard deviations of 2 million: two p-values."""
    z = uniforms(members(16).normal((2 * SIZE,), call=2))
    for bound in (3.0, 4.0):
        beyond = int((np.abs(z) > bound).sum())
        assert stats.binomtest(beyond, len(z), 2 * stats.norm.sf(bound)).pvalue > ALPHA
    assert np.isfinite(z).all() and np.abs(z).max() < 6.8


def test_streams_are_uncorrelated() -> None:
    """Over members, steps, calls, purposes and seeds: 78 p-values, Bonferroni-corrected."""
    noise = members(6)
    drawn = list(noise.normal((SIZE,)))
    drawn += [noise.normal((SIZE,), step=t)[0] for t in (1, 2, 3)]
    drawn += [noise.normal((SIZE,), call=c)[0] for c in (1, 2)]
    drawn += [members(1, purpose="other").normal((SIZE,))[0]]
    drawn += [Noise(1, "test", [0]).normal((SIZE,))[0]]
    pairs = list(itertools.combinations(range(len(drawn)), 2))
    for i, j in pairs:
        assert correlation_pvalue(drawn[i], drawn[j]) > ALPHA / len(pairs), (i, j)


@pytest.mark.slow
def test_one_number_a_step_is_a_good_stream_too() -> None:
    """The first number of steps 0 … 4095, and of 4096 members: two KS tests, two serial tests."""
    noise = members(1)
    over_steps = torch.stack([noise.uniform((1,), t)[0, 0] for t in range(4096)])
    over_members = members(4096).uniform((1,))[:, 0]
    for u in (over_steps, over_members):
        assert stats.kstest(uniforms(u), "uniform").pvalue > ALPHA
        assert correlation_pvalue(u[:-1], u[1:]) > ALPHA


def test_overlapping_counters_do_not_repeat_numbers() -> None:
    """A hashed counter must not make one stream a shifted copy of another."""
    noise = members(1)
    seen = [set(uniforms(noise.uniform((SIZE,), t)).tolist()) for t in range(4)]
    # Two sets of n 32-bit words share n²/2^32 = 1 by chance; 12 has a tail below 1e-9 a pair.
    for a, b in itertools.combinations(seen, 2):
        assert len(a & b) < 12


def test_a_member_does_not_see_the_others() -> None:
    alone = Noise(5, "p", ["0/3"]).normal((101,), step=9, call=2)
    among = Noise(5, "p", ["0/1", "0/3", "7/0"]).normal((101,), step=9, call=2)
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])


def test_it_is_a_pure_function() -> None:
    noise = members(3)
    first = noise.normal((5, 7), step=4, call=1)
    noise.normal((1000,), step=5)
    assert torch.equal(noise.normal((5, 7), step=4, call=1), first)
    assert torch.equal(members(3).normal((5, 7), torch.tensor(4, dtype=torch.int32), 1), first)


def test_global_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    members(2).normal((10,))
    generator("anything", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_both_precisions_read_the_same_stream() -> None:
    single, double = (members(2, t).uniform((SIZE,)) for t in (torch.float32, torch.float64))
    assert (single.double() - double).abs().max() <= 2.0**-24
    z32, z64 = (members(2, t).normal((SIZE,)) for t in (torch.float32, torch.float64))
    near = z64.abs() < 4  # further out log(u) magnifies the rounding of u
    assert (z32.double() - z64)[near].abs().max() < 2e-3
    assert (z32.double() - z64).abs().median() < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_reads_the_same_stream() -> None:
    here, there = (Noise(3, "p", [0, 1], device) for device in ("cpu", "cuda"))
    assert torch.equal(here.uniform((SIZE,), 7, 2), there.uniform((SIZE,), 7, 2).cpu())
    z, other = here.normal((SIZE,), 7, 2), there.normal((SIZE,), 7, 2).cpu()
    torch.testing.assert_close(z, other, rtol=1e-5, atol=1e-5)


def test_zero_odd_and_shaped_draws() -> None:
    noise = members(3)
    assert noise.normal((0,)).shape == (3, 0)
    assert noise.normal(()).shape == (3,)
    assert noise.normal((3, 1, 5)).shape == (3, 3, 1, 5)
    assert torch.isfinite(noise.normal((7,))).all()


def test_it_can_be_traced_with_the_step_as_input() -> None:
    noise = members(4, torch.float32)

    def draw(step: Tensor) -> Tensor:
        return noise.normal((33,), step, 1) + noise.uniform((33,), step, 2)

    traced = make_fx(draw)(torch.tensor(0, dtype=torch.int32))
    for t in (0, 1, 12345):
        step = torch.tensor(t, dtype=torch.int32)
        assert torch.equal(traced(step), draw(step))


def test_digests_separate_their_parts() -> None:
    assert digest("a", 12) != digest("a1", 2) != digest("a", 1, 2)
    draws = {digest("x", i) & 0xFFFFFFFF for i in range(2000)}
    assert len(draws) > 1995  # 0.0005 collisions of 32 bits expected


def test_no_draw_is_infinite_where_the_lowest_words_round_to_zero() -> None:
    # In float32 the lowest 65 of the 2^32 words round to 0; one of them is met here.
    noise = Noise(0, "x", [0])
    assert noise.uniform((2 * 711465,), 38).min() > 0
    assert noise.normal((2 * 711465,), 38).isfinite().all()


def test_alternating_normals_change_their_sign_at_odd_steps() -> None:
    source = Noise(0, "test", ["a", "b"])
    even, odd, after = (source.alternating((5,), torch.tensor(t), 1) for t in (6, 7, 8))
    assert torch.equal(odd, -even)
    assert not torch.equal(after, even)
    assert torch.equal(even, source.normal((5,), 3, 1))


def test_draws_that_are_kept_are_those_of_a_new_source() -> None:
    """Whatever else was asked for before, and in whichever mode: to the bit. No more is kept than
    64 draws of 256 kB."""
    kinds, shapes, types = ("normal", "uniform"), ((3,), (1, 3)), (torch.float32, torch.float64)
    for _ in range(2):
        for kind, seed, purpose, names, shape, dtype in itertools.product(
            kinds, (0, 1), ("a", "b"), ("01", "10", "1"), shapes, types
        ):
            source = Noise(seed, purpose, list(names), "cpu", dtype)
            new = source.normal(shape) if kind == "normal" else source.uniform(shape)
            with torch.inference_mode():
                first = repeated(kind, seed, purpose, list(names), shape, source.device, dtype)
            again = repeated(kind, seed, purpose, list(names), shape, source.device, dtype)
            assert again is first and not again.is_inference()
            assert torch.equal(again, new) and again.dtype == dtype
    ask = ("normal", 0, "large", ["0"])
    rest = (torch.device("cpu"), torch.float32)
    small, large = (repeated(*ask, (size,), *rest) for size in (1 << 16, (1 << 16) + 1))
    assert repeated(*ask, (1 << 16,), *rest) is small
    assert repeated(*ask, ((1 << 16) + 1,), *rest) is not large
    assert _kept.cache_info().currsize == _kept.cache_info().maxsize == 64


def _drawn_by_torch() -> list[Tensor]:
    """What modules and functions draw that take no generator."""
    weight = torch.empty(5, 4)
    out = [nn.init.kaiming_uniform_(weight).clone(), nn.init.orthogonal_(weight).clone()]
    out += [nn.init.trunc_normal_(weight).clone(), weight.exponential_().clone()]
    out += [torch.rand(3), torch.randn(17), torch.randperm(9), torch.randint(2, 5, (4,))]
    out += [torch.randn_like(weight), torch.normal(weight, 1.0), torch.bernoulli(weight.sigmoid())]
    out += [torch.multinomial(torch.ones(5), 2), nn.functional.dropout(weight, 0.5)]
    out += [nn.functional.rrelu(-weight, training=True), nn.functional.gumbel_softmax(weight)]
    lstm = nn.LSTM(2, 3, 2, dropout=0.5)
    return [*out, *(p.detach() for p in lstm.parameters()), lstm(torch.ones(4, 1, 2))[0].detach()]


def test_drawing_is_the_default_generator_without_touching_it() -> None:
    """The same numbers as after torch.manual_seed, and the default generator does not move."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(digest("a", 1) & 0xFFFFFFFF)
        want = _drawn_by_torch()
        state = torch.get_rng_state()
        with drawing("a", 1):
            got = _drawn_by_torch()
        assert torch.equal(torch.get_rng_state(), state)
        with drawing("a", 2):
            other = _drawn_by_torch()
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))
    assert not torch.equal(other[0], want[0])


def test_drawing_belongs_to_its_thread() -> None:
    """Another thread meanwhile draws from the default generator as ever."""
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        want = torch.rand(4)
        torch.manual_seed(3)
        with drawing("a"):
            thread = threading.Thread(target=lambda: found.append(torch.rand(4)))
            thread.start()
            thread.join()
    assert torch.equal(found[0], want)


def test_fused_dropout_draws_from_the_same_generator() -> None:
    """Its output, its share of zeros (1,000 of them: four standard errors fail one seed in 16,000),
    and its derivative, x ↦ mask/(1 − p)."""
    x, state = torch.full((1000,), 2.0, requires_grad=True), torch.get_rng_state()
    with drawing("a") as numbers:
        assert not numbers.drew
        out, kept = torch.native_dropout(x, 0.25, True)
        assert numbers.drew
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(out, torch.where(kept, 2.0 / 0.75, 0.0))
    assert abs(float(kept.float().mean()) - 0.75) < 4 * (0.75 * 0.25 / 1000) ** 0.5
    out.sum().backward()
    assert torch.allclose(x.grad, kept / 0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 17, 65_537, 200_001])
def test_a_large_row_has_the_bits_of_the_formula(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, in place, and as one expression."""
    noise = Noise(0, "x", ["a", "b"], dtype=dtype)
    want = noise.normal((size,), 5, 2)
    monkeypatch.setattr("doxa.noise._ROW", 1)
    monkeypatch.setattr("doxa.noise._ROWS", 1)
    monkeypatch.setattr("doxa.noise._BLOCK", 1 << 14)
    assert torch.equal(noise.normal((size,), 5, 2), want)


@pytest.mark.parametrize("size", [1000, 16_384, 40_003])
def test_an_alternating_row_in_blocks_is_the_row(size: int) -> None:
    """All eight steps that share a draw, the next one, and blocks that go past its end."""
    first, second = (PrefetchedNoise(Noise(0, "x", ["0/0", "0/1"])) for _ in range(2))
    for t in range(9):
        step = torch.tensor(t)
        want, row = first.alternating((size,), step, 1), second.alternating_row(size, step, 1)
        for member in (0, 1):
            parts = [
                row.columns(member, start, min(start + 999, size)) for start in range(0, size, 999)
            ]
            assert torch.equal(row.sign * torch.cat(parts), want[member])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1000, 16_384, 16_385, 40_000, 65_543, 81_921])
def test_a_stream_is_the_row_in_order(dtype: torch.dtype, size: int) -> None:
    source = PrefetchedNoise(Noise(0, "x", ["0/0", "0/1"], dtype=dtype))
    step = torch.tensor(3)
    rows = source.normal((size,), step, 1)
    for member, most in ((0, size), (1, 4097), (1, 16_384)):
        following = source.stream(member, size, step, 1)
        cuts = [most] * (size // most) + [size % most] * bool(size % most)
        found = torch.cat([following(count).clone() for count in cuts])
        assert torch.equal(found, rows[member])


def test_drawing_does_not_load_the_compiler() -> None:
    """It takes 70 MiB and a second."""
    code = (
        "import sys, torch\nfrom doxa.noise import drawing\n"
        "with drawing('a'): torch.randn(3)\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
