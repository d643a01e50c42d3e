"""Which rows a fit used: recognised again, whatever their type, and not confused by chance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import doxa
from doxa.data import FittedRows, fitted_rows
from doxa.data.fitted_rows import row_hashes
from doxa.errors import DataError
from doxa.evaluate import conformal, recalibrate


def table(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x, x.sum(1) + 0.1 * torch.randn(n, generator=g)


def fit(data: Any, **options: Any) -> Any:
    net = doxa.nets.mlp(3, 1, hidden=(4,))
    return doxa.fit(net, data, "map", **{"steps": 5, "progress": False, **options})


def test_rows_that_differ_have_hashes_that_differ() -> None:
    """100,000 rows on a grid: by chance two would agree once in 4e9 such tests."""
    side = torch.arange(10.0)
    x = torch.cartesian_prod(*[side] * 4)
    y = torch.arange(10.0).repeat(1000)
    assert len(row_hashes(x, y).unique()) == len(torch.cat([x, y[:, None]], 1).unique(dim=0))
    twice = row_hashes(x.repeat(2, 1), y.repeat(2))
    assert torch.equal(twice[:10_000], twice[10_000:])


def test_a_number_is_the_same_whatever_its_type() -> None:
    x, y = torch.arange(12).reshape(4, 3) - 5, torch.arange(4)
    want = row_hashes(x, y)
    for dtype in (torch.float32, torch.float64, torch.int32):
        assert torch.equal(row_hashes(x.to(dtype), y.to(dtype)), want)
    assert torch.equal(row_hashes(x.double(), y[:, None]), want)
    assert torch.equal(row_hashes(-torch.zeros(1, 2), y[:1]), row_hashes(torch.zeros(1, 2), y[:1]))
    assert not torch.equal(row_hashes(x.flip(1), y), want)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = table(50)
    want = row_hashes({"b": x, "a": y}, y)
    monkeypatch.setattr(fitted_rows, "_BLOCK", 7)
    assert torch.equal(row_hashes({"a": y, "b": x}, y), want)


def test_fitted_rows_are_found_and_fresh_ones_are_not() -> None:
    used = FittedRows.of(*table(300))
    x, y = table(300)
    fresh = table(300, seed=1)
    assert used.overlap(x, y) == 300
    assert used.overlap(x[7:27].double(), y[7:27]) == 20
    assert used.overlap(*fresh) == 0
    assert used.overlap(x, fresh[1]) == 0  # another y: another row
    mixed = [torch.cat([old[:100], new[:100]]) for old, new in zip((x, y), fresh, strict=True)]
    assert used.overlap(*mixed) == 100
    few = [torch.cat([old[:5], new[:195]]) for old, new in zip((x, y), fresh, strict=True)]
    assert used.overlap(*few) == 0  # 2.5 %


def test_chance_is_no_fault_in_a_table_of_categories() -> None:
    """Rows of 60 kinds, of which 30 to 1,000 are seen: fresh ones match by chance in half of the
    cases and more. 300 tables; the fitted rows themselves are found where kinds are many."""

    def rows(n: int, kinds: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        kind = (kinds * torch.rand(n, generator=g).square()).long()  # some more common than others
        return torch.stack([kind % 7, kind // 7], 1).double(), kind % 2

    for seed in range(100):
        for n in (30, 200, 1000):
            used = FittedRows.of(*rows(n, 60, seed))
            assert used.overlap(*rows(200, 60, 10_000 + seed)) == 0
    many = rows(1000, 10_000, 0)  # about a fifth have a twin
    assert FittedRows.of(*many).overlap(*many) == 1000
    assert FittedRows.of(*many).overlap(*rows(1000, 10_000, 1)) == 0


def test_of_many_rows_a_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_rows, "MOST_ROWS", 500)
    x, y = table(2000)
    used = FittedRows.of(x, y)
    assert len(used.hashes) == 500 and used.total == 2000
    # of 1,000 fitted rows 250 ± 14 are kept: the estimate is 1,000 ± 55
    assert used.overlap(x[:1000], y[:1000]) == pytest.approx(1000, abs=5 * 55)
    assert used.overlap(*table(1000, seed=1)) == 0
    monkeypatch.setattr(fitted_rows, "MOST_NUMBERS", 400)
    assert len(FittedRows.of(x, y).hashes) == 100


def test_calibration_refuses_the_fitted_rows(tmp_path: Path) -> None:
    x, y = table(200)
    posterior = fit((x, y), validation=0.2)  # rows to stop by are used, too
    posterior.save(tmp_path / "run")
    for one in (posterior, doxa.load(tmp_path / "run")):
        for correct in (conformal, lambda p, d: recalibrate(p, d, "quantile")):
            with pytest.raises(DataError, match="200 of the 200 calibration rows were used by"):
                correct(one, (x, y))
            with pytest.raises(DataError, match="100 of the 150"):
                more = table(50, seed=1)
                correct(one, (torch.cat([x[:100], more[0]]), torch.cat([y[:100], more[1]])))
            again = correct(one, table(100, seed=1))
            with pytest.raises(DataError, match="used by the fit"):
                conformal(again, (x, y))
    mixed = doxa.MixturePosterior([fit(table(50, seed=2)), posterior], [1.0, 1.0])
    with pytest.raises(DataError, match="200 of the 200"):
        conformal(mixed, (x, y))


def test_rows_of_validation_of_a_run_and_of_condition_count() -> None:
    x, y = table(200)
    apart = table(100, seed=1)
    posterior = fit((x, y), validation=apart)
    with pytest.raises(DataError, match="100 of the 100"):
        conformal(posterior, apart)
    sweep = fit((x, y), runs=doxa.Runs(rows=[torch.arange(120), torch.arange(80, 200)]))
    conformal(sweep[0], (x[120:], y[120:]))
    with pytest.raises(DataError, match="80 of the 80"):
        conformal(sweep[1], (x[120:], y[120:]))
    weight = torch.ones(200)
    weight[:100] = 0.0
    conformal(fit((x, y), sample_weight=weight), (x[:100], y[:100]))
    process = doxa.fit(None, (x, y), doxa.GP(noise=0.1, refine=0))
    conformal(process, apart)
    with pytest.raises(DataError, match="100 of the 100"):
        conformal(process.condition(*apart), apart)


def test_jackknife_takes_the_rows_that_its_runs_left_out() -> None:
    x, y = table(60)
    fold = torch.arange(60) % 3
    sweep = fit((x, y), runs=doxa.Runs(rows=[fold != k for k in range(3)]))
    low, high = conformal(sweep, (x, y)).predict(x).interval()
    assert low.shape == high.shape == y.shape


def test_frames_in_another_order_and_labels_of_another_type() -> None:
    x, _ = table(100)
    y = (x[:, 0] > 0).long()
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    net = doxa.nets.mlp(3, 2, hidden=(4,))
    posterior = doxa.fit(net, (frame, y), "map", steps=5, progress=False)
    for labels in (y, y.double().numpy(), pd.Series(y.numpy().astype(np.int8))):
        with pytest.raises(DataError, match="100 of the 100"):
            conformal(posterior, (frame[["c", "a", "b"]], labels))


def test_the_rule_is_the_one_in_the_docs() -> None:
    """k = 400 fitted rows of which d = 100 have a twin: q = (100 + 6 √101)/400. Of 200 given ones
    m must exceed 200 q + 3 √(200 q (1 − q)), by the formula of the module."""
    x = torch.cat([torch.arange(50.0).repeat(2), torch.arange(100.0, 400.0)])[:, None]
    used = FittedRows.of(x, torch.zeros(400))
    q = (100 + 6 * math.sqrt(101)) / 400
    least = math.floor(200 * q + 3 * math.sqrt(200 * q * (1 - q))) + 1
    for m in (least - 1, least):
        given = torch.cat([x[100 : 100 + m], torch.arange(1000.0, 1200.0 - m)[:, None]])
        excess = (m - 200 * q) / (1 - q)
        wanted = m if m >= least and excess >= 20 else 0
        assert used.overlap(given, torch.zeros(200)) == wanted
