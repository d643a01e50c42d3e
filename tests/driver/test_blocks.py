"""Blocks of a fit: the cut, the joined results, leases, and folders of several machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa import store
from doxa.driver import blocks, loop
from doxa.driver.blocks import cut
from doxa.errors import MethodError, ProcessError, StoreError
from doxa.method import FitSettings
from doxa.registry import ROWS
from doxa.store import claims


def rows(n: int = 120) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(n, generator=g)


def net() -> nn.Module:
    return doxa.nets.mlp(2, 1, (8,))


def fitted(method: Any = "deep-ensemble", data: Any = None, **options: Any) -> Any:
    options = {"steps": 30, "progress": False, "members": 6, **options}
    return doxa.fit(net(), rows() if data is None else data, method, **options)


def same(one: Any, other: Any) -> None:
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert str(one.status) == str(other.status)
    assert one.validation == other.validation
    assert one.history == other.history


@pytest.mark.parametrize("members, size", [(1, 1), (6, 6), (6, 4), (7, 3), (33, 32), (10, 1)])
def test_the_cut_has_every_member_once_and_equal_blocks(members: int, size: int) -> None:
    found = cut(members, size)
    assert [m for b in found for m in range(b.start, b.stop)] == list(range(members))
    sizes = [b.stop - b.start for b in found]
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
    assert len(found) == -(-members // size)


SAMPLER = doxa.SGLD(draws=4, burn_in=6, thin=2)
CASES = [("deep-ensemble", {}), (SAMPLER, {}), ("mean-field", {})]


@pytest.mark.parametrize("method, options", CASES, ids=["ensemble", "sgld", "mean-field"])
def test_a_block_is_the_fit_of_its_members_alone(method: Any, options: dict[str, Any]) -> None:
    """Bit for bit: weights and draws of a cut fit are those of three fits of two members. What a
    mixture has in common, such as its noise, is computed from all."""
    common = {"validation": None, "likelihood": doxa.Gaussian(noise=0.3), **options}
    together = fitted(method, block_size=2, **common)
    assert together.diagnostics["blocks"] == {"count": 3, "members": 2}
    apart = [fitted(method, members=[m, m + 1], **common) for m in (0, 2, 4)]
    for name, value in together.tensors().items():
        alone = [p.tensors()[name] for p in apart]
        if alone[0].shape[:1] == (2,):
            assert torch.equal(value, torch.cat(alone)), name


def test_runs_and_members_are_cut_together() -> None:
    grid = doxa.Runs(grid={"lr": [0.01, 0.03]})
    swept = fitted(members=3, block_size=4, runs=grid, validation=None)
    assert swept[0].diagnostics["blocks"] == {"count": 2, "members": 3}
    plain = fitted(members=3, runs=grid, validation=None)
    for one, other in zip(swept, plain, strict=True):
        for name, value in one.tensors().items():
            assert torch.allclose(value, other.tensors()[name], rtol=1e-3, atol=1e-4), name
    single = fitted(members=3, block_size=3, validation=None, lr=0.03).tensors()["samples"]
    assert torch.allclose(swept[1].tensors()["samples"], single, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(swept[0].tensors()["samples"], single, rtol=1e-3, atol=1e-4)


def test_blocks_that_stop_at_different_steps_are_joined() -> None:
    """Members hold out different parts, large enough to stop each alone; in blocks of one, each
    training ends by itself. The state that a member keeps is that of the stacked fit."""
    options = {"data": rows(600), "validation": "auto", "steps": 400, "patience": 2, "lr": 0.05,
               "members": 4, "dtype": torch.float64}  # fmt: skip
    apart, together = fitted(block_size=1, **options), fitted(**options)
    assert apart.diagnostics["blocks"]["count"] == 4
    assert together.diagnostics["blocks"]["count"] == 1
    assert apart.diagnostics.stopping is not None and together.diagnostics.stopping is not None
    kept = apart.diagnostics.stopping["kept_step"]
    assert kept == together.diagnostics.stopping["kept_step"]
    assert len(set(kept)) > 1
    x = rows()[0]
    assert torch.allclose(apart.predict(x).mean, together.predict(x).mean, rtol=1e-6, atol=1e-8)
    looks = [step for step, _ in apart.history["validation"]]
    assert looks == sorted(set(looks)) and set(kept) <= set(looks)
    for step, values in apart.history["validation"]:
        assert len(values) == 4
        then = dict(together.history["validation"]).get(step)
        for m in range(4):  # up to its last look, a member's scores are those of the stacked fit
            if then is not None and step <= kept[m]:
                assert values[m] == pytest.approx(then[m], rel=1e-6)


def test_a_history_that_ends_earlier_keeps_its_last_values() -> None:
    state = {"theta": torch.zeros(1, 3)}
    long = loop.Progress(
        state, done=40, lengths=[30, 10],
        history={"step": [10, 20, 30, 40], "stage": ["a", "a", "a", "b"],
                 "loss": [[10, [1.0]], [20, [2.0]], [30, [3.0]], [40, [4.0]]]},
    )  # fmt: skip
    short = loop.Progress(
        state, done=30, lengths=[20, 10], diverged={0: 25}, history={
            "step": [10, 20, 30], "stage": ["a", "a", "b"],
            "loss": [[10, [5.0]], [20, [6.0]], [30, [7.0]]]},
    )  # fmt: skip
    joined = blocks.Joined(2)
    joined.add(slice(1, 2), short)
    joined.add(slice(0, 1), long)
    found = joined.progress()
    assert found.lengths == [30, 10] and found.done == 40
    assert found.history["step"] == [10, 20, 30, 40]
    assert found.history["stage"] == ["a", "a", "a", "b"]
    assert found.history["loss"] == [
        [10, [1.0, 5.0]], [20, [2.0, 6.0]], [30, [3.0, 6.0]], [40, [4.0, 7.0]],
    ]  # fmt: skip
    assert found.diverged == {1: 35}  # in the second stage, five steps after its start


def test_the_rule_reads_neither_memory_nor_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small networks are one stack; a loop has blocks of one; a stack of large ones is cut."""
    cases = [((8,), 6, "stack", 1), ((8,), 6, "loop", 6), ((8,), 64, "auto", 1),
             ((512, 512), 16, "auto", None)]  # fmt: skip
    counts = []
    for i, free in enumerate((1 << 30, 1 << 40)):
        monkeypatch.setattr(blocks, "free_memory", lambda _, free=free: free)
        for j, (hidden, members, engine, expected) in enumerate(cases):
            model = doxa.nets.mlp(2, 1, hidden)
            listed = doxa.blocks(
                model, rows(), "map", members=members, engine=engine,
                checkpoint=tmp_path / f"{i}-{j}", validation=None,
            )  # fmt: skip
            counts.append(len(listed))
            assert expected is None or len(listed) == expected
    assert counts[:4] == counts[4:] and counts[3] > 1


def test_callbacks_see_the_members_of_a_block() -> None:
    """All members, unless the size of a block is given: then those of the block, and which."""
    seen: list[Any] = []

    def look(step: int, info: Any) -> None:
        assert len(info.get("loss", info.members)) == len(info.members)
        seen.append((info.block, info.blocks, info.members))

    runs = doxa.Runs(seeds=[0, 1])
    everybody = [(run, member) for run in range(2) for member in range(3)]
    for engine in ("stack:eager", "loop"):
        found = fitted(callbacks=[look], runs=runs, members=3, engine=engine, validation=None)
        assert found[0].diagnostics["blocks"]["count"] == 1
        assert all(who == (0, 1, everybody) for who in seen) and seen
        seen.clear()
    found = fitted(callbacks=[look], runs=runs, members=3, block_size=2, validation=None)
    assert found[0].diagnostics["blocks"]["count"] == 3
    assert {(block, count, tuple(who)) for block, count, who in seen} == {
        (i, 3, tuple(everybody[2 * i : 2 * i + 2])) for i in range(3)
    }


def test_a_callback_stops_its_block() -> None:
    found = fitted(
        callbacks=[lambda step, info: info.block == 1], block_size=2, validation=None, steps=30
    )
    by_step = dict(found.history["loss"])
    assert max(by_step) == 30  # those of the other blocks
    assert str(found.status) == "stopped"


def test_snapshots_need_blocks_of_all_members(tmp_path: Path) -> None:
    """A folder that a fit without snapshots has begun."""
    see = doxa.Snapshots(lambda snapshot: None, steps=[10])
    options = {"block_size": 2, "checkpoint": tmp_path / "run", "validation": None}
    fitted(**options)
    with pytest.raises(MethodError, match="another folder"):
        fitted(callbacks=[see], **options)
    assert fitted(callbacks=[see], block_size=2).diagnostics["blocks"]["count"] == 1


def test_what_members_have_in_common_is_one_block() -> None:
    few = fitted(data=rows(40), block_size=1)  # parts of eight rows: the members pool them
    assert few.diagnostics["blocks"]["count"] == 1
    gp = doxa.fit(None, rows(30), "gp", block_size=1)
    assert gp.diagnostics["blocks"]["count"] == 1


def test_methods_say_what_they_share() -> None:
    for row in ROWS:
        cls = doxa.get_method(row.name)
        assert cls.shares == row.shares, row.name
        assert row.shares in ("members", "rows", "both", "none")
        assert cls.needs_network or row.shares in ("none", "rows"), row.name
    assert "processes share" in repr(doxa.methods())


@store.register("failing, of tests/driver/test_blocks.py")
@dataclass(frozen=True)
class Failing(doxa.MAP):
    """Fails at the start of a block with member 4, once."""

    def init(self, run: Any) -> Any:
        if 4 in run.members and not failed:
            failed.append(1)
            raise RuntimeError("the fuse has blown")
        return super().init(run)


failed: list[int] = []


def test_results_of_blocks_outlive_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    drive = loop.Driver.drive
    monkeypatch.setattr(
        loop.Driver, "drive", lambda self: trained.append(list(self.run.members)) or drive(self)
    )
    options = {"block_size": 2, "checkpoint": tmp_path / "run", "validation": None}
    failed.clear()
    with pytest.raises(RuntimeError, match="fuse"):
        fitted(Failing(), **options)
    again = fitted(Failing(), **options)
    assert trained == [[0, 1], [2, 3], [4, 5], [4, 5]]
    trained.clear()
    third = fitted(Failing(), **options)
    assert trained == []
    same(again, third)
    same(again, fitted(Failing(), **options | {"checkpoint": None}))
    with pytest.raises(MethodError, match="another fit"):
        fitted(Failing(), seed=1, **options)


def test_draws_larger_than_the_budget_are_joined_on_disk(tmp_path: Path) -> None:
    plain = fitted(SAMPLER, block_size=2)
    same(plain, fitted(SAMPLER, block_size=2, draws_budget=0))
    same(plain, fitted(SAMPLER, block_size=2, draws_budget=0, checkpoint=tmp_path / "run"))


# -- folders


def listed(folder: Path, **options: Any) -> list[blocks.Block]:
    return doxa.blocks(
        net(), rows(), "deep-ensemble", members=6, steps=30, block_size=2, progress=False,
        checkpoint=folder, **options,
    )  # fmt: skip


def test_two_folders_are_joined(tmp_path: Path) -> None:
    one, two = listed(tmp_path / "one"), listed(tmp_path / "two")
    assert [block.name for block in one] == ["00000-00002", "00002-00004", "00004-00006"]
    assert one[1].members == [(0, 2), (0, 3)]
    assert one[0].run() and one[1].run() and two[1].run() and two[2].run()
    assert [block.done for block in one] == [True, True, False]
    to = doxa.join([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert all(block.done for block in listed(to))
    same(fitted(block_size=2), fitted(block_size=2, checkpoint=to))
    with pytest.raises(MethodError, match="no blocks"):
        doxa.join([tmp_path / "empty"], tmp_path / "nothing")
    with pytest.raises(MethodError, match="another fit"):
        listed(to, seed=1)


def test_two_results_of_one_block_have_to_be_equal(tmp_path: Path) -> None:
    listed(tmp_path / "one")[0].run()
    listed(tmp_path / "two")[0].run()
    result = tmp_path / "two" / "blocks" / "00000-00002" / "result"
    tensors, meta = store.read_artefact(result)
    tensors["state.theta"][0, 0] += 1e-6
    store.write_artefact(result, tensors, meta)
    with pytest.raises(ProcessError, match="different results"):
        doxa.join([tmp_path / "one", tmp_path / "two"], tmp_path / "all")


def test_a_checkpoint_of_one_block_goes_on(tmp_path: Path) -> None:
    """A loop over members that an earlier version, or a fit with callbacks, has begun."""

    def interrupt(step: int, info: Any) -> None:
        if step >= 10:
            raise KeyboardInterrupt

    options = {"engine": "loop", "checkpoint": tmp_path / "run", "validation": None}
    with pytest.raises(KeyboardInterrupt):
        fitted(callbacks=[interrupt], **options)
    found = fitted(**options)
    assert found.diagnostics["blocks"]["count"] == 1
    same(found, fitted(callbacks=[lambda *_: None], engine="loop", validation=None))


# -- leases


@pytest.fixture
def place(tmp_path: Path) -> Iterator[claims.Place]:
    yield claims.Place(tmp_path / "block", "digest")


def foreign(place: claims.Place, **facts: Any) -> None:
    given = {"nonce": "other", "count": 0, "host": "elsewhere", "space": "", "pid": 1, "start": ""}
    place.path.mkdir(exist_ok=True)
    (place.path / claims.LEASE).write_text(json.dumps({**given, **facts}))


def test_a_lease_is_held_by_one(place: claims.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEW", 0.02)
    monkeypatch.setattr(claims, "EXPIRES", 0.3)
    seen = claims.Seen()
    lease = place.claim(seen)
    assert lease is not None
    with lease:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:  # longer than EXPIRES: it is renewed
            assert place.claim(seen) is None
            time.sleep(0.02)
    again = place.claim(seen)
    assert again is not None


def test_a_lease_expires_by_the_readers_clock(
    place: claims.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "EXPIRES", 0.2)
    foreign(place)
    os.utime(place.path / claims.LEASE, (0, 0))  # another machine's clock says nothing
    seen = claims.Seen()
    assert place.claim(seen) is None
    time.sleep(0.12)
    foreign(place, count=1)  # a renewal
    assert place.claim(seen) is None
    time.sleep(0.12)
    assert place.claim(seen) is None
    time.sleep(0.2)
    lease = place.claim(seen)
    assert lease is not None
    assert claims.holder((place.path / claims.LEASE).read_text()) == lease.nonce


def test_many_take_an_expired_lease_and_one_has_it(
    place: claims.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "EXPIRES", -1.0)
    foreign(place)
    text = (place.path / claims.LEASE).read_text()
    start = threading.Barrier(8)
    found: list[claims.Lease] = []

    def take() -> None:
        seen = claims.Seen({place.path / claims.LEASE: (text, 0.0)})
        start.wait()
        lease = place.claim(seen)
        if lease is not None:
            found.append(lease)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


def test_a_lease_that_changes_hands_meanwhile_is_given_back(
    place: claims.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "EXPIRES", -1.0)
    foreign(place)
    text, rename = (place.path / claims.LEASE).read_text(), os.rename

    def late(old: Any, new: Any) -> None:  # another process was faster, and has it now
        foreign(place, nonce="third")
        rename(old, new)

    monkeypatch.setattr(os, "rename", late)
    assert place.claim(claims.Seen({place.path / claims.LEASE: (text, 0.0)})) is None
    assert claims.holder((place.path / claims.LEASE).read_text()) == "third"


def test_a_process_that_has_ended_needs_no_wait(place: claims.Place) -> None:
    code = "import json; from doxa.store.claims import this_process; "
    if sys.platform != "linux":
        pytest.skip("only Linux says when a process has started")
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(this_process()))"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert claims.has_ended(facts)
    assert not claims.has_ended({**facts, "host": "elsewhere"})
    assert not claims.has_ended(claims.this_process())
    foreign(place, **facts)
    assert place.claim(claims.Seen()) is not None


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StoreError, match="run"):
        fitted(block_size=2, checkpoint=tmp_path / "run")


def test_a_full_disk_is_an_error_and_the_lease_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full"):
        fitted(block_size=2, checkpoint=tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob("blocks/*/lease"))
    same(fitted(block_size=2, checkpoint=tmp_path / "run"), fitted(block_size=2))


def test_settings_of_members_are_those_of_the_block() -> None:
    settings = FitSettings(
        begin=torch.arange(4.0)[:, None], stop_at={0: [1, 2, 3, 4]},
        held_out_noise=torch.arange(4.0)[:, None],
    )  # fmt: skip
    part = settings.select_members(slice(1, 3))
    assert part.begin is not None and part.begin.flatten().tolist() == [1.0, 2.0]
    assert part.stop_at == {0: [2, 3]}
    assert part.held_out_noise is not None
    assert part.held_out_noise.flatten().tolist() == [1.0, 2.0]
    assert replace(settings, begin=None, stop_at={}, held_out_noise=None).select_members(
        slice(0, 1)
    )


def test_rows_in_order_of_time_are_cut() -> None:
    """The fit to all rows ends each member at its own step, with its own noise."""
    x, y = rows(200)
    options = {"data": (x, y), "time": torch.arange(200), "steps": 60, "members": 4}
    apart = fitted(block_size=2, **options)
    together = fitted(**options)
    assert apart.diagnostics["blocks"]["count"] == 2
    assert apart.validation == pytest.approx(together.validation, rel=1e-3)
