"""Rows that are held out by default: whose they are, and what they change."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trial import held_to_the_protocol

import doxa
from doxa.driver.setup import FEWEST_ROWS, own_parts, parts

ROWS = [torch.arange(100, 300)]


def noise_only(n: int, inputs: int = 20) -> tuple[Tensor, Tensor]:
    """Targets that know nothing of the inputs: whatever is learned of them is overfitted."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, inputs, generator=g), torch.randn(n, generator=g)


def curve(n: int = 200) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=g)
    return x, x[:, 0].sin() + 0.3 * torch.randn(n, generator=g)


def test_every_row_is_held_out_by_one_member_of_a_full_set() -> None:
    splits = own_parts(ROWS, range(parts(200)), [0])
    assert splits is not None and splits.held_out is not None
    assert torch.equal(torch.cat(splits.held_out).sort().values, ROWS[0])
    for kept, held in zip(splits.rows, splits.held_out, strict=True):
        assert torch.equal(torch.cat([kept, held]).sort().values, ROWS[0])


def test_a_part_belongs_to_the_member_not_to_its_place() -> None:
    many, one = own_parts(ROWS, range(5), [0]), own_parts(ROWS, [3], [0])
    assert many is not None and one is not None
    assert many.held_out is not None and one.held_out is not None
    assert torch.equal(many.held_out[many.of[3]], one.held_out[one.of[0]])
    other = own_parts(ROWS, [3], [1])
    assert other is not None and other.held_out is not None
    assert not torch.equal(other.held_out[0], one.held_out[0])


def test_members_beyond_the_parts_share_them_again() -> None:
    count = parts(200)
    splits = own_parts(ROWS, range(count + 2), [0])
    assert splits is not None
    assert len(splits.rows) == count and splits.of[count] == splits.of[0]


def test_runs_are_cut_each_by_itself() -> None:
    splits = own_parts([torch.arange(200), torch.arange(50, 350)], [0, 1], [0, 0])
    assert splits is not None and splits.owners == [0, 0, 1, 1] and splits.of == [0, 1, 2, 3]


def test_too_few_rows_are_not_cut() -> None:
    """A single member needs ten rows for itself; several members pool theirs."""
    assert own_parts([torch.arange(49)], [0], [0]) is None
    assert own_parts([torch.arange(50)], [0], [0]) is not None
    assert own_parts([torch.arange(FEWEST_ROWS - 1)], [0, 1], [0]) is None
    assert own_parts([torch.arange(FEWEST_ROWS)], [0, 1], [0]) is not None
    assert own_parts([torch.arange(FEWEST_ROWS)], [0, 4], [0]) is None, "the same part twice"


@pytest.mark.parametrize(
    ("rows", "count"),
    [(8, 4), (9, 4), (10, 5), (50, 5), (160, 8), (400, 10), (9999, 10), (10_000, 20)],
)
def test_parts(rows: int, count: int) -> None:
    assert parts(rows) == count


def test_none_written_out_fits_every_row() -> None:
    data, net = curve(), doxa.nets.mlp(2, 1, (8,))
    own = doxa.fit(net, data, "map", steps=20, progress=False)
    full = doxa.fit(net, data, "map", steps=20, validation=None, progress=False)
    # 200 rows are few: cross-fitted, so that each was held out once; then fitted by the last fit
    assert own.diagnostics["rows"] == 200 and own.diagnostics["held_out"]["rows"] == 200
    assert full.diagnostics["rows"] == 200 and "held_out" not in full.diagnostics
    assert full.validation is None and own.validation is not None


def test_together_the_members_see_every_row() -> None:
    posterior = doxa.fit(
        doxa.nets.mlp(2, 1, (8,)), curve(), "deep-ensemble", steps=20, progress=False
    )
    assert posterior.diagnostics["rows"] == 200
    assert posterior.diagnostics["held_out"]["rows"] == 100  # five parts of twenty


@pytest.mark.slow
def test_a_member_is_the_same_among_others() -> None:
    """Of so many rows, that one member alone is not cross-fitted."""
    net, data = doxa.nets.mlp(2, 1, (8,)), curve(1000)
    many = doxa.fit(net, data, "deep-ensemble", steps=60, progress=False, engine="loop")
    one = doxa.fit(net, data, "deep-ensemble", members=[3], steps=60, progress=False, engine="loop")
    x = data[0][:10]
    torch.testing.assert_close(many.predict(x).samples[3], one.predict(x).samples[0])


def test_methods_that_do_not_overfit_hold_nothing_out() -> None:
    posterior = doxa.fit(None, curve(), "linear", progress=False)
    assert posterior.diagnostics["rows"] == 200 and posterior.validation is None


@pytest.mark.parametrize("method", ["map", "deep-ensemble", "swa", "mean-field", "mc-dropout"])
def test_noise_is_not_estimated_on_the_rows_that_were_fitted(method: str) -> None:
    """120 rows of pure noise of standard deviation 1, and a network that can learn them by heart.
    The noise found on 24 held-out rows is within 40 % of it: more than 2.5 standard errors."""
    data = noise_only(120)
    posterior = doxa.fit(doxa.nets.mlp(20, 1, (100,)), data, method, steps=300, progress=False)
    x, y = noise_only(600)
    p = posterior.predict(x[120:])
    low, high = p.interval(0.9)
    covered = ((y[120:, None] >= low) & (y[120:, None] <= high)).double().mean()
    assert covered > 0.8


@pytest.mark.parametrize("method", ["map", "snapshot"])
def test_noise_of_a_few_rows_is_a_little_wider(method: str) -> None:
    """A network that stays at zero, m = 12 rows held out, and N(0, 1) for log σ: the derivative of
    −(m − 2) log σ − Σ y²/2σ² − (log σ)²/2 is zero, Σ y²/σ² = m − 2 + log σ."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.zeros(72, 1), 0.5 * torch.randn(72, 1, generator=g)
    net = torch.nn.Linear(1, 1, bias=False)
    held = (x[60:], y[60:])
    posterior = doxa.fit(
        net, (x[:60], y[:60]), method, init="given", lr=1e-12, steps=5, validation=held,
        progress=False,
    )  # fmt: skip
    variance = float(posterior.predict(x[:1]).variance)
    found = float(y[60:].square().sum()) / variance
    assert found == pytest.approx(10 + 0.5 * math.log(variance), rel=0.02)


@pytest.mark.slow
def test_without_held_out_rows_it_would_be_too_sure() -> None:
    """What the default protects against."""
    data = noise_only(120)
    net = doxa.nets.mlp(20, 1, (100,))
    posterior = doxa.fit(net, data, "map", steps=600, validation=None, progress=False)
    x, y = noise_only(600)
    low, high = posterior.predict(x[120:]).interval(0.9)
    assert ((y[120:, None] >= low) & (y[120:, None] <= high)).double().mean() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "likelihood"),
    [("map", doxa.Gaussian(noise=0.3)), ("mean-field", doxa.Gaussian())],
)
def test_members_with_parts_of_their_own_resume_to_the_bit(
    method: str, likelihood: doxa.Gaussian, tmp_path: Path
) -> None:
    """Also what each is alone, with the noise from its own part. What belongs to the mixture is
    given here: the noise's shape, and of averaged members, as map has, its level."""
    net = doxa.nets.mlp(2, 1, (8,)).double()
    x, y = curve(1000)  # so many, that one member alone is not cross-fitted
    data = (x.double(), y.double())
    posterior = held_to_the_protocol(net, data, method, tmp_path, likelihood=likelihood)
    assert posterior.diagnostics["held_out"]["rows"] == 300
