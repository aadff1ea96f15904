"""The packed weight cache: entries are complete or absent, bounded in size, and shared by independent processes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.checkpoint import packed_cache
from moeserve.models.checkpoint.packed_cache import NEW_SECONDS, PARTIAL, Entry, PackedWeightCache, fingerprint
from moeserve.models.checkpoint.shards import open_shard

TENSORS = {
    "panels": torch.arange(256, dtype=torch.uint8).repeat(1000),
    "norm": torch.arange(33).bfloat16(),
    "empty": torch.empty(0),
    "router": torch.arange(28.0).view(4, 7),
}


def assert_same(entry: Entry | None, tensors: dict[str, Tensor]) -> None:
    assert entry is not None
    found = entry.tensors
    assert entry.damaged_tensor(lambda: False) is None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        assert stored.nbytes - tensor.nbytes in range(64)
        assert stored.data_ptr() % 64 == found["panels"].data_ptr() % 64  # as aligned as the whole file is
        assert torch.equal(stored[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_stored_tensors_are_loaded(tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path / "packed", 2**20)
    assert cache.load("a") is None
    assert cache.store("a", TENSORS)
    assert_same(cache.load("a"), TENSORS)
    assert_same(PackedWeightCache(tmp_path / "packed", 0).load("a"), TENSORS)
    found = cache.load("a")
    assert found is not None
    found.tensors["panels"].zero_()  # changes the mapping, not the file
    assert_same(cache.load("a"), TENSORS)
    assert files_in(tmp_path / "packed") == ["a.safetensors"]


def test_the_least_recently_used_entry_is_evicted(tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path, 800_000)  # room for three
    for index, key in enumerate("abc"):
        cache.store(key, TENSORS)
        os.utime(tmp_path / f"{key}.safetensors", (index, index))
    assert cache.load("a") is not None  # used now
    cache.store("d", TENSORS)
    assert files_in(tmp_path) == ["a.safetensors", "c.safetensors", "d.safetensors"]


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 200_000])
def test_a_damaged_entry_is_stored_again(tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)
    path = tmp_path / "a.safetensors"
    os.truncate(path, num_bytes)
    assert cache.load("a") is None
    assert f"{path} is damaged" in caplog.text
    assert cache.store("a", TENSORS)
    assert_same(cache.load("a"), TENSORS)


@pytest.mark.parametrize("name", ["panels", "norm", "router"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_changed_byte_is_found(tmp_path: Path, name: str, place: int) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)
    path = tmp_path / "a.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin = 8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][0]
    content[begin + place % TENSORS[name].nbytes] ^= 16
    path.write_bytes(content)
    entry = cache.load("a")
    assert entry is not None
    assert entry.damaged_tensor(lambda: False) == name
    assert entry.damaged_tensor(lambda: True) is None


@pytest.mark.parametrize("change", [lambda text: text.replace(b"__metadata__", b"__netadata__"), bytes.upper])
def test_changed_checksums_are_damage(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)
    path = tmp_path / "a.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    path.write_bytes(content[:8] + change(content[8 : 8 + size]) + content[8 + size :])
    assert cache.load("a") is None
    assert not path.exists()


def test_an_entry_that_others_could_have_written_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)
    path = tmp_path / "a.safetensors"
    path.chmod(0o666)
    assert cache.load("a") is None
    assert "belongs to another user, or others may write it; the weights are packed again" in caplog.text
    path.chmod(0o644)
    assert cache.load("a") is not None
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert cache.load("a") is None


@pytest.mark.parametrize("spare_mib", [32, 96], ids=["first mapping", "second mapping"])
def test_without_address_space_an_entry_is_absent_and_a_shard_is_an_error(
    tmp_path: Path, spare_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PackedWeightCache(tmp_path, 2**30)
    assert cache.store("key", {"panels": torch.zeros(2**26, dtype=torch.uint8)})
    (path,) = tmp_path.iterdir()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + spare_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, usual[1]))
    try:
        assert cache.load("key") is None
        with pytest.raises(CheckpointError, match="RLIMIT_AS"):
            open_shard(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    assert "packed again" in caplog.text
    assert cache.load("key") is not None


def test_an_existing_entry_is_not_written_again(tmp_path: Path) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)
    assert cache.store("a", {"panels": torch.zeros(3)})
    assert_same(cache.load("a"), TENSORS)
    cache.remove("a")
    assert cache.load("a") is None


def test_an_entry_in_a_read_only_folder_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PackedWeightCache(tmp_path, 2**20)
    cache.store("a", TENSORS)

    def refuse(path: Path) -> NoReturn:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert_same(cache.load("a"), TENSORS)
    assert caplog.text == ""


def test_the_limit_counts_whole_files(tmp_path: Path) -> None:
    PackedWeightCache(tmp_path, 2**20).store("a", TENSORS)
    size = bytes_in(tmp_path)
    assert not PackedWeightCache(tmp_path, size - 1).store("b", TENSORS)
    assert files_in(tmp_path) == ["a.safetensors"]
    assert PackedWeightCache(tmp_path, size).store("b", TENSORS)
    assert files_in(tmp_path) == ["b.safetensors"]


@pytest.mark.parametrize("num_polls", range(5))
def test_a_cancelled_entry_leaves_no_file(
    tmp_path: Path, num_polls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_cache, "BLOCK_BYTES", 100_000)
    caplog.set_level(logging.INFO)
    polls = iter([False] * num_polls)
    cache = PackedWeightCache(tmp_path, 2**20)
    assert not cache.store("a", TENSORS, lambda: next(polls, True))
    assert files_in(tmp_path) == []
    assert "shut down" in caplog.text


def test_a_folder_that_cannot_be_written_causes_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not PackedWeightCache(tmp_path / "file" / "packed", 2**20).store("a", TENSORS)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("age", "is_written", "is_removed"),
    [(0, False, False), (NEW_SECONDS + 60, True, False), (NEW_SECONDS + 60, False, True)],
)
def test_the_partial_file_of_a_process_that_has_ended_is_removed(
    tmp_path: Path, age: float, is_written: bool, is_removed: bool
) -> None:
    partial = tmp_path / f"a.0123{PARTIAL}"
    with partial.open("wb") as file:
        if is_written:
            fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(partial, (time.time() - age,) * 2)
        cache = PackedWeightCache(tmp_path, 2**20)
        assert cache.load("a") is None
        assert cache.store("b", TENSORS)
        assert partial.exists() != is_removed


def test_concurrent_writers_leave_whole_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer completes an entry while the first is in the middle of it."""
    monkeypatch.setattr(packed_cache, "BLOCK_BYTES", 100_000)
    cache, stored = PackedWeightCache(tmp_path, 2**20), []

    def write_in_between() -> bool:
        if not stored:
            stored.append(None)
            assert all(cache.store(key, TENSORS) for key in "ab")
        return False

    assert cache.store("a", TENSORS, write_in_between)
    for key in "ab":
        assert_same(cache.load(key), TENSORS)
    assert files_in(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_a_fingerprint_depends_on_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(b"x" * 3_000_000)
    second.write_bytes(b"y" * 10)
    before = fingerprint([first, second])
    assert fingerprint([second, first]) == before
    assert fingerprint([first]) != before
    second.rename(tmp_path / "3.safetensors")
    assert fingerprint([first, tmp_path / "3.safetensors"]) != before


@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize("position", [5, 2_000_000])
def test_a_fingerprint_changes_with_a_byte_even_if_the_time_was_restored(
    tmp_path: Path, position: int, has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the file's entry cannot be set back. Without any times, the first bytes are compared."""
    path = tmp_path / "1.safetensors"
    path.write_bytes(bytes(3_000_000))
    before, status = fingerprint([path]), path.stat()
    time.sleep(0.05)  # the resolution of file times
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"z")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    if not has_times:
        monkeypatch.setattr(os, "fstat", lambda _: status)
    assert (fingerprint([path]) != before) == (has_times or position == 5)
