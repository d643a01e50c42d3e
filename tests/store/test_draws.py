"""A file of draws is the tensor of what was appended; a full disk is said before the first step."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from doxa.errors import CorruptedArtefact, StoreError
from doxa.store import Checkpoints, DrawsFile, read_artefact, write_artefact
from doxa.store.tensors import bytes_of

SHAPE = (3, 5, 4)  # members, capacity, size


def draws(dtype: torch.dtype = torch.float32) -> Tensor:
    """[members, draws, size]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


def filled(count: int = SHAPE[1], dtype: torch.dtype = torch.float32, **kw: Any) -> DrawsFile:
    file = DrawsFile(SHAPE, dtype, **kw)
    for t in range(count):
        file.append(draws(dtype)[:, t])
    return file


def maps() -> str:
    return Path("/proc/self/maps").read_text() if os.path.exists("/proc/self/maps") else ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_what_was_appended_comes_back(dtype: torch.dtype, count: int) -> None:
    file = filled(count, dtype)
    assert len(file) == count
    assert torch.equal(file.tensor(), draws(dtype)[:, :count])
    assert file.tensor().is_contiguous()
    in_memory = filled(count, dtype, budget=1000)
    assert torch.equal(in_memory.tensor(), draws(dtype)[:, :count])


def test_it_is_on_disk_past_its_budget_only() -> None:
    """A map changes its own pages only: two looks at one file are two tensors in memory, and one
    where it is mapped."""
    size = draws().nbytes
    on_disk, in_memory = filled(budget=size - 1), filled(budget=size)
    assert on_disk.tensor().data_ptr() == on_disk.tensor().data_ptr()
    assert in_memory.tensor().data_ptr() != in_memory.tensor().data_ptr()


@pytest.mark.skipif(not maps(), reason="needs /proc")
def test_the_file_goes_with_the_last_that_refers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    part = filled().tensor()[1, 2]
    gc.collect()
    assert list(tmp_path.iterdir()) == []  # no name: a killed process leaves nothing either
    assert str(tmp_path) in maps()
    assert torch.equal(part, draws()[1, 2])
    del part
    gc.collect()
    assert str(tmp_path) not in maps()


def test_changes_to_the_tensor_stay_out_of_the_file(tmp_path: Path) -> None:
    file = filled(folder=tmp_path)
    file.tensor().zero_()
    again = DrawsFile(SHAPE, torch.float32, tmp_path, saved=file.at)
    assert torch.equal(again.tensor(), draws())


@pytest.mark.parametrize("count", [0, 2, 5])
def test_taken_up_where_it_was(tmp_path: Path, count: int) -> None:
    """Draws after those that were saved are written over, whatever they were."""
    first = filled(count, folder=tmp_path)
    at = first.at
    for _ in range(count, SHAPE[1]):
        first.append(torch.full((3, 4), torch.nan))
    second = DrawsFile(SHAPE, torch.float32, tmp_path, saved=at)
    for t in range(count, SHAPE[1]):
        second.append(draws()[:, t])
    assert torch.equal(second.tensor(), draws())
    assert second.at == filled().at
    assert os.listdir(tmp_path) == ["draws"]


def test_a_new_run_does_not_change_what_an_old_one_reads(tmp_path: Path) -> None:
    old = filled(folder=tmp_path).tensor()
    fresh = DrawsFile(SHAPE, torch.float32, tmp_path)
    fresh.append(torch.zeros(3, 4))
    assert torch.equal(old, draws())


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    at = filled(3, folder=tmp_path).at
    path = tmp_path / "draws"
    data = bytearray(path.read_bytes())
    data[4 * 4 * 5 + 3] ^= 1  # of the second member's first draw
    new = {"flip": data, "truncate": data[:-1], "extend": data + b"x"}
    path.unlink() if damage == "remove" else path.write_bytes(new[damage])
    with pytest.raises(CorruptedArtefact, match=r"start afresh"):
        DrawsFile(SHAPE, torch.float32, tmp_path, saved=at)


def test_damage_after_what_was_saved_is_none(tmp_path: Path) -> None:
    at = filled(3, folder=tmp_path).at
    path = tmp_path / "draws"
    data = bytearray(path.read_bytes())
    data[4 * 4 * 3] ^= 1  # the first member's fourth
    path.write_bytes(data)
    assert len(DrawsFile(SHAPE, torch.float32, tmp_path, saved=at)) == 3


def test_a_full_disk_is_an_error_at_the_start(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tiny_disk))
    for folder in (tiny_disk, None):
        with pytest.raises(StoreError, match="disk is full") as caught:
            DrawsFile((4, 1000, 100), torch.float32, folder)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(tiny_disk) == []
    assert torch.equal(filled(folder=tiny_disk).tensor(), draws())  # usable still


def test_a_disk_that_fills_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where space cannot be claimed beforehand."""
    file = filled(2, folder=tmp_path)
    before = file.at

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="disk is full"):
            file.append(draws()[:, 2])
    assert file.at == before
    file.append(draws()[:, 2])
    assert torch.equal(file.tensor(), draws()[:, :3])


def test_a_write_that_ends_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: real(f, data[:3], at))
    assert torch.equal(filled(folder=tmp_path).tensor(), draws())


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="is a file"):
            DrawsFile(SHAPE, torch.float32, folder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match="nothing is there"):
        DrawsFile(SHAPE, torch.float32)


def test_checkpoints_do_not_mind_the_file(tmp_path: Path) -> None:
    filled(folder=tmp_path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    for step in range(4):
        checkpoints.save(step, {}, {})
    assert Checkpoints(tmp_path).latest().step == 3  # type: ignore[union-attr]
    assert (tmp_path / "draws").exists()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(600, 500, generator=generator)
    return {
        "a": torch.tensor(3), "large": large, "wide": large.double(), "odd": torch.ones(3) > 0,
        "half": large[:2].half(), "empty": torch.empty(0, 4), "σ": large.T[3],
    }  # fmt: skip


def test_others_read_what_is_streamed(tmp_path: Path) -> None:
    """The library that defines the format, whole and mapped."""
    write_artefact(tmp_path / "run", tensors(), {})
    theirs = load_file(tmp_path / "run" / "tensors.safetensors")
    mapped, _ = read_artefact(tmp_path / "run", budget=0)
    for found in (theirs, mapped):
        assert found.keys() == tensors().keys()
        for name, value in tensors().items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name


def test_large_tensors_are_mapped_past_the_budget(tmp_path: Path) -> None:
    write_artefact(tmp_path / "run", tensors(), {})
    size = (tmp_path / "run" / "tensors.safetensors").stat().st_size
    found, _ = read_artefact(tmp_path / "run", budget=size - 1)
    assert found["wide"].untyped_storage().nbytes() == size  # the file's
    assert found["large"].untyped_storage().data_ptr() == found["wide"].untyped_storage().data_ptr()
    assert found["wide"].data_ptr() % 64 == 0
    assert found["half"].untyped_storage().nbytes() < size
    whole, _ = read_artefact(tmp_path / "run", budget=size)
    assert whole["wide"].untyped_storage().nbytes() < size
    found["large"].zero_()  # its own: the artefact is as it was
    assert torch.equal(read_artefact(tmp_path / "run")[0]["large"], tensors()["large"])
    write_artefact(tmp_path / "run", {}, {})
    assert torch.equal(found["wide"], tensors()["wide"])


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damage_to_what_is_mapped_is_noticed(tmp_path: Path, damage: str) -> None:
    write_artefact(tmp_path / "run", tensors(), {})
    path = tmp_path / "run" / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(CorruptedArtefact, match="checksum"):
        read_artefact(tmp_path / "run", budget=0)


def test_bytes_of_views_and_scalars() -> None:
    base = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    for value in (base, base.T, base[:, 1], base[0, 0], base[:0]):
        assert bytes(bytes_of(value)) == value.contiguous().numpy().tobytes()
