"""Processes that divide the rows of a fit: the same bits for any number of them, errors that reach
all, checkpoints, and the rule on the number of blocks.

Quick tests have threads in place of processes. The slow one starts `torchrun` once for each number
of processes.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_rows import CASES, facts, fitted, rows
from launched import finished, started
from rank_threads import Ranks, ranks_of
from torch import nn
from torch.distributed import HashStore

import doxa
from doxa import store
from doxa.driver import processes
from doxa.errors import MethodError, ProcessError
from doxa.linalg.layout import LARGE
from doxa.method import Run
from doxa.method.row_sums import LEAST_ROWS, MOST, Together, nodes_of, number_of_blocks

log = logging.getLogger(__name__)
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "divided_rows.py"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return ranks_of(monkeypatch)


@pytest.mark.parametrize("case", ["hmc", "map", "large"])
def test_processes_that_divide_rows_have_the_bits_of_one(ranks: Ranks, case: str) -> None:
    alone = facts(fitted(case))
    found = ranks(lambda rank: facts(fitted(case)), size=3)
    assert alone["blocks"] == 5
    for one in found:
        assert one["hash"] == alone["hash"]
        assert len(one["by"]) == 3 and min(one["by"]) > 0
    assert sum(found[0]["by"]) % 5 == 0  # each sum has five blocks


def test_more_processes_than_blocks(ranks: Ranks) -> None:
    alone = facts(fitted("map", microbatches=2))
    found = ranks(lambda rank: facts(fitted("map", microbatches=2)), size=3)
    assert [one["hash"] for one in found] == [alone["hash"]] * 3
    assert sorted(map(bool, found[0]["by"])) == [False, True, True]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "method", [doxa.HMC(draws=3, burn_in=0, leapfrog=3), doxa.Metropolis(draws=5, burn_in=0)]
)
def test_blocks_have_the_density_of_all_rows(method: Any, weighted: bool) -> None:
    """In float64, to rounding: the scale of the likelihood and the prior are counted once."""
    x, y = (t.double() for t in rows(count=83))
    weight = torch.linspace(0.2, 2.0, 83).double() if weighted else None

    def drawn(blocks: int) -> torch.Tensor:
        fit = doxa.fit(
            doxa.nets.mlp(2, 1, (8,)).double(), (x, y), method, members=2, sample_weight=weight,
            microbatches=blocks, progress=False,
        )  # fmt: skip
        found: torch.Tensor = fit.samples
        return found

    assert torch.allclose(drawn(1), drawn(7), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal", "block-diagonal"])
@pytest.mark.parametrize("curvature", ["ggn", "sampled"])
def test_blocks_have_the_curvature_of_all_rows(structure: str, curvature: str) -> None:
    """In float64, to rounding, for classes. The draws of sampled curvature are those of the numbers
    of rows."""
    x, y = rows()
    x, labels = x.double(), (y > 0).long() + (y > 0.7).long()
    net = doxa.nets.mlp(2, 3, (8,)).double()
    method = doxa.Laplace(structure=structure, curvature=curvature, train=False)
    one, several = (
        doxa.fit(net, (x, labels), method, microbatches=blocks, batch_size=50, init="given",
                 likelihood="categorical", validation=None, progress=False)
        for blocks in (1, 7)
    )  # fmt: skip
    a, b = (p.covariance.diagonal() for p in (one, several))
    assert torch.allclose(a, b, rtol=1e-8)
    assert one.log_evidence == pytest.approx(several.log_evidence, rel=1e-9)


def test_blocks_have_the_gradient_of_a_large_network() -> None:
    """Whose gradient is taken by tensors: SGD without momentum, in float64."""
    one, several = (
        fitted("large", microbatches=blocks, optimizer="sgd", dtype=torch.float64)
        for blocks in (1, 7)
    )
    assert one.point().numel() >= LARGE
    assert torch.allclose(one.point(), several.point(), rtol=1e-8, atol=1e-12)


@store.register("failing in a sum, of tests/driver/test_divided_rows.py")
@dataclass(frozen=True)
class Failing(doxa.HMC):
    """One process fails in the middle of the draws."""

    name = "failing in a sum"

    def density(self, run: Run, state: Any, batch: Any) -> Any:
        inner = super().density(run, state, batch)

        def density(theta: torch.Tensor) -> Any:
            own = processes.launched()
            assert own is not None
            if own[0] == 1 and bool((state["transitions"] > 1).all()):
                raise RuntimeError("the fuse has blown")
            return inner(theta)

        return density


def test_an_error_in_a_sum_reaches_every_process(ranks: Ranks) -> None:
    method = Failing(draws=4, burn_in=0, leapfrog=2)
    found = ranks(
        lambda rank: doxa.fit(
            doxa.nets.mlp(2, 1, (8,)), rows(), method, members=2, microbatches=4, progress=False
        ),
        size=3,
    )
    assert isinstance(found[1], RuntimeError) and "fuse" in str(found[1])
    for other in (found[0], found[2]):
        assert isinstance(other, ProcessError), other
        assert "process 1 of 3 failed" in str(other) and "the fuse has blown" in str(other)


def test_a_process_that_waits_sees_that_another_has_failed() -> None:
    """It does not wait until the time is over."""

    def failed() -> None:
        raise ProcessError("process 1 has failed")

    kept, groups = HashStore(), dict[int, Together]()

    def join(rank: int) -> None:
        groups[rank] = Together(rank, 2, kept, failed, timeout=8.0)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(8.0)
    try:
        with pytest.raises(ProcessError, match="process 1 has failed"):
            groups[0].summed(2, lambda block: {"value": torch.ones(3)})
    finally:
        for group in groups.values():
            group.close()


@pytest.mark.parametrize("count", range(1, 20))
def test_the_nodes_of_processes_are_all_blocks_once(count: int) -> None:
    for size in range(1, 8):
        ends = [count * rank // size for rank in range(size + 1)]
        nodes = [node for r in range(size) for node in nodes_of(ends[r], ends[r + 1], count)]
        covered = [b for first, width in nodes for b in range(first, min(first + width, count))]
        assert covered == list(range(count))


def test_a_process_that_stops_answering_is_an_error(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that ends the training of one process only: the others do not wait for ever."""
    monkeypatch.setattr(processes, "TIMEOUT", 1.0)

    def call(rank: int) -> Any:
        stops = [lambda step, info: rank == 1 and step >= 10]
        return fitted("map", callbacks=stops, steps=60)

    for error in ranks(call):
        assert isinstance(error, ProcessError), error


def test_a_fit_goes_on_with_another_number_of_processes(ranks: Ranks, tmp_path: Path) -> None:
    """Interrupted in one process, finished by two, with the bits of a fit that was not."""
    whole = facts(fitted("hmc", callbacks=[lambda step, info: None]))

    def stop(step: int, info: Any) -> None:
        if step >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted("hmc", callbacks=[stop], checkpoint=tmp_path / "run", checkpoint_every=0)
    assert list((tmp_path / "run").glob("*-step-*"))
    found = ranks(lambda rank: facts(fitted("hmc", checkpoint=tmp_path / "run")))
    assert [one["hash"] for one in found] == [whole["hash"]] * 2
    assert all(min(one["by"]) > 0 for one in found)


def test_small_data_are_one_block() -> None:
    """And the number of blocks reads the work alone, never the number of processes."""
    cpu = torch.device("cpu")
    assert number_of_blocks(2 * LEAST_ROWS - 1, 10**9, cpu) == 1
    assert number_of_blocks(10**5, 10, cpu) == 1
    assert number_of_blocks(10**5, 900, cpu) == 1
    assert number_of_blocks(10**5, 2000, cpu) == MOST
    assert number_of_blocks(3 * LEAST_ROWS, 10**6, cpu) == 3


@pytest.mark.parametrize(
    "more, what",
    [
        ({"net": nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))}, "BatchNorm"),
        ({"engine": "stack:traced"}, "traced"),
        ({"net": None, "method": "linear"}, "no network"),
        ({"microbatches": 0}, "microbatches"),
    ],
)
def test_what_cannot_be_divided_is_an_error(more: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {
        "net": doxa.nets.mlp(2, 1, (8,)), "method": "map", "microbatches": 4, "steps": 2, **more,
    }  # fmt: skip
    if given["method"] == "linear":
        del given["steps"]
    with pytest.raises(doxa.errors.DoxaError, match=what):
        doxa.fit(given.pop("net"), rows(), given.pop("method"), progress=False, **given)


def test_an_objective_that_is_no_sum_is_an_error() -> None:
    own = next(
        row.name for row in doxa.registry.ROWS
        if not doxa.get_method(row.name).sums_over_rows and doxa.get_method(row.name).needs_network
    )  # fmt: skip
    with pytest.raises(MethodError, match="do not set microbatches"):
        doxa.fit(doxa.nets.mlp(2, 1, (8,)), rows(), own, microbatches=4, progress=False)


# -- processes


@pytest.mark.slow
def test_one_two_and_three_processes_have_the_same_bits(tmp_path: Path) -> None:
    """All methods at one start for each number of processes."""
    found: dict[int, list[dict[str, Any]]] = {}
    for count in (1, 2, 3):
        out = tmp_path / str(count)
        out.mkdir()
        finished(started(SCRIPT, out, "all", count), out, 170)
        found[count] = [json.loads((out / f"{r}.json").read_text()) for r in range(count)]
    for case in CASES:
        alone = found[1][0][case]
        assert alone["blocks"] > 1, case
        for count in (2, 3):
            for one in found[count]:
                assert one[case]["hash"] == alone["hash"], (case, count)
            by = found[count][0][case]["by"]
            log.info("%s: %d blocks of rows, computed by %s", case, alone["blocks"], by)
            assert len(by) == count
            assert sum(n > 0 for n in by) == min(count, alone["blocks"]), (case, by)
