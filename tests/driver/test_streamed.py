"""A fit to rows that are read by windows, beside fits to the same rows in memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_streams import N, table, write
from torch import Tensor

import doxa
from doxa import store
from doxa.data import Batch, BatchRequest, Feed, Source, Standardisation, Stream, read_parquet
from doxa.data.streams import row_hash
from doxa.driver.streamed import HeldPart, StreamBatches, StreamedRows
from doxa.errors import DataError, MethodError


@pytest.fixture
def rows(tmp_path: Path) -> Stream:
    x, y = table()
    write(tmp_path / "rows.parquet", x, y)
    return read_parquet(tmp_path, target="y", window=2000)


EAGER: dict[str, Any] = {"engine": "loop:eager"}


def net() -> torch.nn.Module:
    return doxa.nets.mlp(3, 1, hidden=(8,))


def streamed(rows: Stream, parts: Any = (None,), seed: int = 0) -> StreamedRows:
    counts = [len(rows)] * len(parts)
    return StreamedRows(
        rows, Standardisation(), torch.device("cpu"), torch.float32, lambda y: y, seed, parts,
        counts,
    )  # fmt: skip


def feed(rows: Stream, size: int = 64, **options: Any) -> StreamBatches:
    own = streamed(rows, **options)
    request = BatchRequest(None, [0, 0], ["0/0", "0/1"], size, "train")  # type: ignore[arg-type]
    return StreamBatches(own, request)


def places(batch: Batch) -> list[int]:
    """The numbers of the rows of a batch."""
    return [known()[row.numpy().tobytes()] for row in batch.x]


@cache
def known() -> dict[bytes, int]:
    return {row.tobytes(): i for i, row in enumerate(table()[0])}


def test_an_epoch_has_each_row_once_in_an_order_of_its_own(rows: Stream) -> None:
    one = feed(rows)
    epochs = [[i for t in range(15) for i in places(one.batch(15 * e + t))] for e in range(2)]
    for order in epochs:
        assert len(set(order)) == len(order) == 15 * 64
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    other = [i for t in range(15) for i in places(feed(rows, seed=1).batch(t))]
    assert other != epochs[0]
    # a run of rows is shuffled inside its window
    window = np.searchsorted(rows.starts, epochs[0], side="right")
    assert (np.diff(window) != 0).sum() == len(set(window)) - 1


def test_batch_t_is_found_by_seeking(rows: Stream) -> None:
    forward = [feed(rows).batch(t) for t in range(40)]
    again = feed(rows)
    for t in (39, 3, 17, 16, 0):
        assert torch.equal(again.batch(t).x, forward[t].x)
        assert torch.equal(feed(rows).batch(t).y, forward[t].y)


@dataclass(frozen=True)
class Given(Source):
    """The batches of a stream, from rows in memory."""

    rows: Any = None

    def open(self, request: BatchRequest) -> Feed:
        own = StreamBatches(self.rows, request)

        class InMemory:
            steps, size = None, own.size

            def batch(self, t: int) -> Batch:
                index = torch.tensor(places(own.batch(t)))
                x, y = request.data.take(index, torch.tensor(0))
                return Batch(x, y, own.scale)

        return InMemory()


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("members", [1, 3])
def test_the_same_batches_give_the_same_bits(
    rows: Stream, monkeypatch: pytest.MonkeyPatch, members: int, standardize: bool
) -> None:
    """The batches of a stream, once from the file and once from memory."""
    options: dict[str, Any] = {
        "members": members, "steps": 40, "validation": None, "seed": 3, "likelihood": "gaussian",
    }  # fmt: skip
    found = doxa.fit(net(), rows, "map", standardize=standardize, **options)
    x, y = (torch.tensor(part) for part in table())
    scales = found.scales if standardize else Standardisation()
    given = Given(streamed(rows, seed=3))
    stage = doxa.MAP().stages

    def stages(self: Any, run: Any) -> Any:
        return [replace(own, source=given) for own in stage(run)]

    monkeypatch.setattr(doxa.MAP, "stages", stages)
    if standardize:
        x, y = scales.x(x), scales.y(y)
    expected = doxa.fit(net(), (x, y), "map", **options)
    assert torch.equal(found.samples, expected.samples)


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["deep-ensemble", "bootstrap", "swa"])
def test_a_fit_that_stops_in_an_epoch_resumes_with_the_same_bits(
    rows: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fitted(**options: Any) -> Any:
        again = read_parquet(tmp_path, target="y", window=2000)
        return doxa.fit(
            net(), again, method, members=2, steps=60, batch_size=50, standardize=True, **options
        )

    expected = fitted()
    folder = tmp_path / "checkpoints"
    kept = store.Checkpoints.save
    count = 0

    def save(self: Any, *given: Any) -> None:
        nonlocal count
        kept(self, *given)
        count += 1
        if count == 27:  # inside the second epoch, and inside a window
            raise Stop

    monkeypatch.setattr(store.Checkpoints, "save", save)
    with pytest.raises(Stop):
        fitted(checkpoint=folder, checkpoint_every=0.0)
    monkeypatch.setattr(store.Checkpoints, "save", kept)
    found = fitted(checkpoint=folder)
    x = torch.randn(20, 3)
    assert torch.equal(found.predict(x).mean, expected.predict(x).mean)
    assert found.diagnostics["held_out"] == expected.diagnostics["held_out"]


def test_a_checkpoint_of_other_rows_is_refused(rows: Stream, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    doxa.fit(net(), rows, steps=5, checkpoint=folder, checkpoint_every=0.0)
    other = read_parquet(tmp_path / "rows.parquet", target="y", window=4000)
    with pytest.raises(MethodError, match="another fit"):
        doxa.fit(net(), other, steps=5, checkpoint=folder)
    x, y = table()
    write(tmp_path / "rows.parquet", x + np.float32(1.0), y)
    changed = read_parquet(tmp_path / "rows.parquet", target="y", window=2000)
    with pytest.raises(MethodError, match="another fit"):
        doxa.fit(net(), changed, steps=5, checkpoint=folder)


def test_a_change_of_one_row_is_another_fit(
    rows: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a row that is not among those in memory."""
    monkeypatch.setattr("doxa.driver.streamed.SAMPLE", 20)
    options: dict[str, Any] = {"steps": 5, "validation": None, "checkpoint": tmp_path / "c"}
    doxa.fit(net(), rows, checkpoint_every=0.0, **options)
    x, y = table()
    mark = row_hash(0, "sample of rows", torch.arange(N))
    x[int(mark.argmax()), 1] += 1.0
    write(tmp_path / "rows.parquet", x, y)
    changed = read_parquet(tmp_path / "rows.parquet", target="y", window=2000)
    with pytest.raises(MethodError, match="another fit"):
        doxa.fit(net(), changed, **options)


def test_each_member_holds_out_its_own_rows(rows: Stream) -> None:
    """A row is held out from a member by a hash of seed, member and row number; it has weight 0 in
    the member's batches, and is among the rows that evaluate it."""
    parts = [HeldPart(0, k * 0.1, (k + 1) * 0.1, (k + 1) * 0.1) for k in range(2)]
    own = streamed(rows, parts=parts)
    request = BatchRequest(None, [0, 1], ["0", "1"], 50, "train")  # type: ignore[arg-type]
    batches = StreamBatches(own, request)
    weight = torch.ones(2, N)
    for t in range(batches.per_epoch):
        batch = batches.batch(t)
        assert batch.weight is not None
        weight[:, places(batch)] = batch.weight
    mark = row_hash(0, "held out", torch.arange(N))
    for k in range(2):
        assert torch.equal(weight[k] == 0, (mark > k * 0.1) & (mark <= (k + 1) * 0.1))
    assert not bool(((weight == 0).sum(0) == 2).any())


@pytest.mark.slow
def test_the_default_evaluates_a_fit(rows: Stream) -> None:
    x, y = table()
    good = doxa.fit(net(), rows, "deep-ensemble", steps=400, members=3, standardize=True, **EAGER)
    held = good.diagnostics["held_out"]
    assert good.status == "ok" and 250 < held["rows"] < 350  # three tenths
    assert held["by"] == "parts of the members"
    assert good.diagnostics["yardsticks"]["tested"]
    assert good.fitted_rows is not None and good.fitted_rows.overlap(
        torch.tensor(x[:200]), torch.tensor(y[:200])
    )
    assert good.input_reference is not None and good.columns == ["c0", "c1", "c2"]
    bad = doxa.fit(net(), rows, "map", steps=3, standardize=True)
    assert bad.status == "underfit"
    shared = doxa.fit(net(), rows, "map", steps=30, validation=0.3, members=2)
    assert 230 < shared.diagnostics["held_out"]["rows"] < 370
    pair = doxa.fit(net(), rows, "map", steps=30, validation=(x[:50], y[:50]))
    assert pair.diagnostics["held_out"]["rows"] == 50 and pair.diagnostics["rows"] == N


def test_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    """Targets that can only be memorised: with weight 0 a row is not."""
    g = np.random.default_rng(0)
    x, y = g.normal(size=(60, 20)).astype(np.float32), g.normal(size=60).astype(np.float32)
    write(tmp_path / "a.parquet", x, y, 10)
    rows = read_parquet(tmp_path, target="y")
    wide = doxa.nets.mlp(20, 1, hidden=(100,))
    part = HeldPart(0, 0.0, 0.3, 0.3)
    out = part.of(torch.arange(60))
    last = doxa.fit(
        wide, rows, "swa", steps=400, validation=0.3, batch_size=60, patience=10**6, **EAGER,
        likelihood=doxa.Gaussian(noise=0.05), prior=doxa.Normal(10.0),
    )  # fmt: skip
    away = (last.predict(x).mean.squeeze() - torch.tensor(y)).square()
    assert float(away[~out].mean()) < 0.1 < 0.5 < float(away[out].mean())


def test_exact_sums_by_passes(rows: Stream) -> None:
    """A linear model and Laplace at given weights are those of the rows in memory."""
    x, y = table()
    exact = doxa.fit(None, (x, y), "linear")
    found = doxa.fit(None, rows, "linear")
    assert found.log_evidence == pytest.approx(exact.log_evidence, rel=1e-10)
    assert torch.allclose(found.predict(x).std, exact.predict(x).std, rtol=1e-6)
    start = doxa.fit(net(), (x, y), steps=50, likelihood=doxa.Gaussian(noise=1.0))
    method = doxa.Laplace(train=False, structure="kronecker")
    options: dict[str, Any] = {"init": start, "likelihood": doxa.Gaussian(noise=1.0)}
    a, b = (doxa.fit(net(), data, method, **options) for data in (rows, (x, y)))
    assert a.log_evidence == pytest.approx(b.log_evidence, rel=1e-6)


def test_a_frozen_trunk_is_computed_in_every_pass(rows: Stream) -> None:
    trained = net()
    fitted = doxa.fit(trained, rows, "map", steps=20, trunk="0", init="given")
    assert fitted.diagnostics["trunk"] == "in every pass" and fitted.diagnostics["rows"] > 850


def test_laplace_settings_that_need_all_rows(rows: Stream) -> None:
    for settings in ({"structure": "functional"}, {"newton_steps": 2}, {"mean_correction": True}):
        with pytest.raises(MethodError, match=f"{next(iter(settings))}=.*all rows at once"):
            doxa.fit(net(), rows, doxa.Laplace(**settings), steps=2)


def test_bootstrap_weights_are_functions_of_the_row(rows: Stream) -> None:
    method = doxa.BayesianBootstrap()
    numbers = torch.tensor([5, 900, 17])
    some = method.streamed_row_weights(["0/0", "0/1"], numbers)
    every = method.streamed_row_weights(["0/1"], torch.arange(N))
    assert torch.equal(some[1], every[0][numbers])
    assert abs(float(every.mean()) - 1.0) < 0.15 and abs(float(every.std()) - 1.0) < 0.2
    fitted = doxa.fit(net(), rows, method, members=2, steps=200, standardize=True, init="fresh")
    first, second = fitted.samples[:, 0]
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("row", [row.name for row in doxa.methods() if "tasks" not in row.tasks])
def test_a_method_says_how_it_reads(row: str, rows: Stream) -> None:
    try:
        method = doxa.get_method(row)
    except doxa.errors.MissingExtra:
        pytest.skip("an extra")
    assert method.streams in (None, "batches", "passes")
    assert doxa.methods()[row].streams == (method.streams or "")
    if method.streams is None:
        given = net() if method.needs_network else None
        with pytest.raises(MethodError, match=r"stream\.sample"):
            doxa.fit(given, rows, row)


def test_what_a_stream_cannot_have(rows: Stream) -> None:
    ones = np.ones(N)
    for name in ("sample_weight", "groups", "time"):
        with pytest.raises(DataError, match=r"stream\.sample"):
            doxa.fit(net(), rows, **{name: ones})
    with pytest.raises(MethodError, match="without rows"):
        doxa.fit(net(), rows, runs=doxa.Runs(rows=[[0, 1, 2]]))
    with pytest.raises(doxa.errors.MemoryBudgetError, match="predict_blocks"):
        doxa.fit(net(), rows, steps=2).predict(rows)


def test_runs_of_a_stream(rows: Stream) -> None:
    sweep = doxa.fit(net(), rows, steps=200, runs=doxa.Runs(grid={"lr": [1e-6, 1e-2]}))
    best = sweep.select(by="validation")
    assert best.validation == sweep[1].validation > sweep[0].validation


def test_predictions_and_pools_by_blocks(rows: Stream, tmp_path: Path) -> None:
    x, _ = table()
    fitted = doxa.fit(net(), rows, "deep-ensemble", members=3, steps=20)
    mean: list[Tensor] = []
    numbers: list[Tensor] = []
    pool = read_parquet(tmp_path, columns=["c2", "c0", "c1"])  # in another order
    for index, p in fitted.predict_blocks(pool, rows=64):
        numbers.append(index)
        mean.append(p.mean)
    assert torch.equal(torch.cat(numbers), torch.arange(N))
    expected = fitted.predict(x)
    assert torch.allclose(torch.cat(mean), expected.mean, atol=1e-6)
    with pytest.raises(DataError, match="lacks the column 'c1'"):
        next(fitted.predict_blocks(read_parquet(tmp_path, columns=["c2", "c0"])))
    score = doxa.decide.score(fitted, pool, by="predictive_variance", block=100)
    assert torch.allclose(score, doxa.decide.score(fitted, x, by="predictive_variance"), atol=1e-6)
    found = doxa.decide.top_rows(fitted, pool, 7, by="predictive_variance", block=100)
    assert found.rows.tolist() == doxa.decide.select(score, 7).tolist()
    assert torch.allclose(found.scores, score[found.rows].double(), atol=1e-6)
    assert np.allclose(found.x, x[found.rows])


_MEMORY = """
import sys, resource, torch, doxa
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])
rows = doxa.data.read_parquet(sys.argv[1], target="y", window=4 << 20)
net = doxa.nets.mlp(8, 1)
doxa.fit(net, rows.sample(2000), "map", steps=50, engine="loop:eager")
before = anonymous()
peak = 0
def look(step, info):
    global peak
    peak = max(peak, anonymous())
fitted = doxa.fit(net, rows, "map", epochs=1, batch_size=4096, validation=None,
                  callbacks=[look], engine="loop:eager")
for _, p in fitted.predict_blocks(rows, n=1, rows=65536):
    p.mean
    look(0, None)
print((peak - before) >> 10)
"""


@pytest.mark.slow
def test_memory_is_that_of_windows(tmp_path: Path) -> None:
    """In a process of its own: 137 MiB of rows, of which a window of 32 MiB is in memory, besides
    what a fit takes."""
    g = np.random.default_rng(0)
    for k in range(4):
        x = g.normal(size=(10**6, 8)).astype(np.float32)
        write(tmp_path / f"{k}.parquet", x, x.sum(1), 50_000)
    command = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "MiB of anonymous memory above the start"
