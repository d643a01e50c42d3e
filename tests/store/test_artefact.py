"""An artefact comes back bit for bit, or says why not; a failed write changes nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.errors import CorruptedArtefact, StoreError
from doxa.store import Checkpoints, read_artefact, write_artefact

FILES = ["checksums.sha256", "meta.json", "tensors.safetensors"]
OLD = ({"w": torch.arange(1000.0)}, {"version": "old"})
NEW = ({"w": torch.zeros(200_000)}, {"version": "new"})


def assert_is(path: Path, expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, meta = read_artefact(path)
    assert meta == expected[1]
    assert tensors.keys() == expected[0].keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected[0].items())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    write_artefact(path, *OLD)
    return path


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tensors = {
        "float64": base,
        "float32": base.float(),
        "half": base.half(),
        "bf16": base.bfloat16(),
        "bool": base > 0,
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "scalar": torch.tensor(math.pi, dtype=torch.float64),
        "scalar bool": torch.tensor(True),
        "empty": torch.empty(0),
        "empty rows": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "nan": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "view": base[1:3, ::2],
        "transposed": base.T,
        "shared": base,
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "": torch.ones(1),
        "σ/δ.0": torch.ones(1),
    }
    write_artefact(tmp_path / "run", tensors, {})
    back, meta = read_artefact(tmp_path / "run")
    assert meta == {}
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype, name
        assert back[name].shape == value.shape, name
        assert torch.allclose(back[name], value, rtol=0, atol=0, equal_nan=True), name
        assert not back[name].requires_grad
    back["float64"].add_(1)  # writable, and shares memory with nothing
    assert torch.equal(back["shared"], base)


def test_no_tensors_and_a_rich_meta(tmp_path: Path) -> None:
    meta: dict[Any, Any] = {
        "loss": [math.inf, -math.inf, 0.1],
        "shape": (1, (2,)),
        3: None,
        "type": "x",
        "é": "δ",
    }
    write_artefact(tmp_path / "a" / "b" / "run", {}, meta)
    assert read_artefact(tmp_path / "a" / "b" / "run") == ({}, meta)
    write_artefact(tmp_path / "nan", {}, {"loss": math.nan})
    assert math.isnan(read_artefact(tmp_path / "nan")[1]["loss"])


def test_the_checksums_are_those_of_sha256sum(old: Path) -> None:
    assert sorted(os.listdir(old)) == FILES
    for line in (old / "checksums.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((old / name).read_bytes()).hexdigest() == digest


def test_overwriting_leaves_only_the_new_one(old: Path) -> None:
    write_artefact(str(old) + "/", *NEW)
    assert_is(old, NEW)
    assert os.listdir(old.parent) == ["run"]


def test_an_empty_directory_and_a_link_can_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    write_artefact(tmp_path / "link", *NEW)
    assert (tmp_path / "link").is_symlink()
    assert_is(tmp_path / "run", NEW)


def test_a_directory_with_other_files_is_never_replaced(old: Path) -> None:
    (old / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="thesis"):
        write_artefact(old, *NEW)
    assert (old / "thesis.tex").read_text() == "years of work"
    assert_is(old, OLD)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove", "extend"])
def test_damage_to_any_file_is_noticed(old: Path, name: str, damage: str) -> None:
    file = old / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        new = {"truncate": data[:-20], "empty": data[:0], "extend": data[:20] + data}[damage]
        file.write_bytes(new)
    with pytest.raises(CorruptedArtefact, match=r"damaged|checksum"):
        read_artefact(old)


def test_files_with_right_checksums_but_wrong_contents(old: Path) -> None:
    for name, data in [("meta.json", b"{}"), ("tensors.safetensors", b"nonsense")]:
        (old / name).write_bytes(data)
        lines = [f"{hashlib.sha256((old / n).read_bytes()).hexdigest()}  {n}\n" for n in FILES[1:]]
        (old / "checksums.sha256").write_text("".join(lines))
        with pytest.raises(CorruptedArtefact, match="not written by doxa"):
            read_artefact(old)
        write_artefact(old, *OLD)


def test_paths_that_are_no_artefacts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, message in [
        (tmp_path / "missing", "nothing is there"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "is a file"),
        (tmp_path / "empty", "not a doxa artefact"),
        (tmp_path / ("x" * 300), "too long"),
    ]:
        with pytest.raises(StoreError, match=message):
            read_artefact(path)
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "run"):
        with pytest.raises(StoreError, match="is a file"):
            write_artefact(path, *NEW)
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"w": [1.0]}, {}),
        ({"w": torch.eye(2).to_sparse()}, {}),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, {}),
        ({1: torch.ones(1)}, {}),
        ({"__metadata__": torch.ones(1)}, {}),
        ({}, {"x": object()}),
        ({}, [1]),
        ({}, {"x": "\ud800"}),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    old: Path, tensors: Any, meta: Any
) -> None:
    with pytest.raises(StoreError):
        write_artefact(old, tensors, meta)
    assert_is(old, OLD)
    assert os.listdir(old.parent) == ["run"]


@contextlib.contextmanager
def readable_here(path: Path, code: int) -> Iterator[None]:
    """A `StoreError` on its way out names the path and keeps the system's error number."""
    try:
        yield
    except StoreError as error:
        if error.errno != code or str(path) not in str(error):
            raise AssertionError(f"not a helpful error: {error!r}") from error
        raise


CALLS = ["mkdir", "open", "write", "fsync", "rename"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failure_at_any_system_call_leaves_the_old_one(
    old: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Fail the first, second, ... call of each kind until the write gets through."""
    owner: Any = Path if call == "write" else os
    name = "write_bytes" if call == "write" else call
    original = getattr(owner, name)
    for allowed in range(20):
        calls = 0

        def failing(*args: Any, allowed: int = allowed, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == allowed + 1:
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        write_artefact(old, *OLD)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with contextlib.suppress(StoreError), readable_here(old, code):
                write_artefact(old, *NEW)
                break
        committed = (call, allowed) in [("fsync", 4), ("open", 5)]  # syncing the new name
        assert_is(old, NEW if committed else OLD)
        assert not [n for n in os.listdir(old.parent) if ".tmp-" in n]
    assert allowed > 0
    assert_is(old, NEW)


def test_an_interrupt_leaves_the_old_one(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_artefact(old, *NEW)
    assert_is(old, OLD)
    assert os.listdir(old.parent) == ["run"]


def test_a_writer_killed_between_its_renames_loses_nothing(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.rename(old, old.parent / ".run.previous")
    assert_is(old, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "io")))
        with pytest.raises(StoreError):
            write_artefact(old, *NEW)
    assert_is(old, OLD)
    write_artefact(old, *NEW)
    assert_is(old, NEW)
    assert os.listdir(old.parent) == ["run"]


def test_a_writer_killed_after_its_renames_is_cleaned_up(old: Path) -> None:
    shutil.copytree(old, old.parent / ".run.previous")
    write_artefact(old, *NEW)
    assert_is(old, NEW)
    assert os.listdir(old.parent) == ["run"]


def test_abandoned_temporaries_go_but_a_live_writer_s_stays(old: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    dead, alive = old.parent / ".run.tmp-dead", old.parent / ".run.tmp-alive"
    dead.mkdir()
    (dead / "tensors.safetensors").write_bytes(b"half")
    alive.mkdir()
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        write_artefact(old, *NEW)
    finally:
        os.close(lock)
    assert sorted(os.listdir(old.parent)) == [".run.tmp-alive", "run"]


def test_reading_while_it_is_replaced(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open
    pending = [True]

    def replaced_meanwhile(path: Any, *args: Any, **kw: Any) -> int:
        if path == old / "tensors.safetensors" and pending:
            pending.clear()
            write_artefact(old, *NEW)
        return original(path, *args, **kw)

    monkeypatch.setattr(os, "open", replaced_meanwhile)
    assert_is(old, NEW)


@pytest.fixture
def small_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """No file may grow past 64 KiB: a real failure of a real write."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_size_limit(old: Path, small_files: None) -> None:
    with pytest.raises(StoreError, match="ulimit") as caught:
        write_artefact(old, *NEW)
    assert caught.value.errno == errno.EFBIG
    assert_is(old, OLD)
    assert os.listdir(old.parent) == ["run"]


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    write_artefact(tiny_disk / "run", *OLD)
    with pytest.raises(StoreError, match="disk is full") as caught:
        write_artefact(tiny_disk / "run", *NEW)
    assert caught.value.errno == errno.ENOSPC
    assert_is(tiny_disk / "run", OLD)
    assert os.listdir(tiny_disk) == ["run"]
    write_artefact(tiny_disk / "run", {}, {"small": True})  # usable again


@pytest.fixture
def locked() -> Iterator[Path]:
    """A directory `closed` that cannot be written and an artefact that cannot be read."""
    if os.name != "posix":
        pytest.skip("POSIX permissions")
    home = Path(tempfile.mkdtemp())  # pytest's own is closed to other users
    os.chmod(home, 0o755)
    (home / "closed").mkdir()
    write_artefact(home / "closed" / "run", *OLD)
    write_artefact(home / "unreadable", *OLD)
    os.chmod(home / "closed", 0o555)
    os.chmod(home / "unreadable", 0o000)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may do everything: be nobody for a while
    yield home
    os.seteuid(user)
    os.chmod(home / "closed", 0o755)
    os.chmod(home / "unreadable", 0o755)
    shutil.rmtree(home)


def test_permission_denied(locked: Path) -> None:
    for act in (
        lambda: write_artefact(locked / "closed" / "run", *NEW),
        lambda: write_artefact(locked / "closed" / "new" / "run", *NEW),
        lambda: read_artefact(locked / "unreadable"),
        lambda: Checkpoints(locked / "closed").save(1, {}, {}),
        lambda: Checkpoints(locked / "unreadable").latest(),
    ):
        with pytest.raises(StoreError, match="permission denied") as caught:
            act()
        assert not isinstance(caught.value, CorruptedArtefact)
        assert caught.value.errno == errno.EACCES
    assert_is(locked / "closed" / "run", OLD)
