"""Copies of packed weights: complete or not there, bounded, and shared by processes that know nothing of each other."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from moeserve.models import packed_copies
from moeserve.models.packed_copies import (
    HEADER_BYTES,
    LOCK,
    SAMPLE_BYTES,
    SAMPLES_PER_FILE,
    PackedCopies,
    fingerprint,
    key_of,
)

TENSORS = {
    "panels": torch.arange(256, dtype=torch.uint8).repeat(1000),
    "norm": torch.randn(33, dtype=torch.bfloat16),
    "empty": torch.empty(0),
    "router": torch.randn(4, 7),
}


def assert_same(found: dict[str, Tensor] | None, tensors: dict[str, Tensor]) -> None:
    assert found is not None
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        assert stored.nbytes - tensor.nbytes in range(64)
        assert stored.data_ptr() % 64 == found["panels"].data_ptr() % 64  # as aligned as the whole file is
        assert torch.equal(stored[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path / "packed", 2**20)
    assert copies.find("a") is None
    assert copies.keep("a", TENSORS)
    assert_same(copies.find("a"), TENSORS)
    assert_same(PackedCopies(tmp_path / "packed", 0).find("a"), TENSORS)
    assert copies.find("b") is None
    assert files_in(tmp_path / "packed") == ["a.safetensors"]


def test_a_mapped_copy_may_be_written_to_and_stays_as_it_was_on_disk(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path, 2**20)
    copies.keep("a", TENSORS)
    found = copies.find("a")
    assert found is not None
    found["panels"].zero_()
    assert_same(copies.find("a"), TENSORS)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path, 800_000)  # room for three
    for index, key in enumerate("abc"):
        copies.keep(key, TENSORS)
        os.utime(tmp_path / f"{key}.safetensors", (index, index))
    assert copies.find("a") is not None  # used now
    copies.keep("d", TENSORS)
    assert files_in(tmp_path) == ["a.safetensors", "c.safetensors", "d.safetensors"]


def test_nothing_is_kept_that_is_larger_than_the_bound(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path, 300_000)
    copies.keep("a", TENSORS)
    assert not copies.keep("b", {"panels": torch.zeros(300_001, dtype=torch.uint8)})
    assert files_in(tmp_path) == ["a.safetensors"]


def test_a_copy_that_was_deleted_stays_readable_where_it_is_mapped(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path, 2**20)
    copies.keep("a", TENSORS)
    found = copies.find("a")
    (tmp_path / "a.safetensors").unlink()
    assert_same(found, TENSORS)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 200_000])
def test_a_damaged_copy_is_made_anew(tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    copies = PackedCopies(tmp_path, 2**20)
    copies.keep("a", TENSORS)
    path = tmp_path / "a.safetensors"
    os.truncate(path, num_bytes)
    assert copies.find("a") is None
    assert f"{path} is damaged" in caplog.text
    assert copies.keep("a", TENSORS)
    assert_same(copies.find("a"), TENSORS)


def test_a_copy_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    copies = PackedCopies(tmp_path, 2**20)
    copies.keep("a", TENSORS)
    assert copies.keep("a", {"panels": torch.zeros(3)})
    assert_same(copies.find("a"), TENSORS)
    copies.remove("a")
    assert copies.find("a") is None


def test_a_copy_in_a_folder_that_may_only_be_read_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = PackedCopies(tmp_path, 2**20)
    copies.keep("a", TENSORS)

    def refuse(path: Path) -> NoReturn:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert_same(copies.find("a"), TENSORS)
    assert caplog.text == ""


def test_the_bound_is_of_whole_files(tmp_path: Path) -> None:
    PackedCopies(tmp_path, 2**20).keep("a", TENSORS)
    size = bytes_in(tmp_path)
    assert not PackedCopies(tmp_path, size - 1).keep("b", TENSORS)
    assert PackedCopies(tmp_path, size).keep("b", TENSORS)
    assert files_in(tmp_path) == ["b.safetensors"]


@pytest.mark.parametrize("num_looks", range(6))
def test_a_copy_that_is_given_up_leaves_nothing(
    tmp_path: Path, num_looks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After so many times that the writer has looked whether it is to stop: before the lock, and between blocks."""
    monkeypatch.setattr(packed_copies, "BLOCK_BYTES", 100_000)
    caplog.set_level(logging.INFO)
    looks = iter([False] * num_looks)
    copies = PackedCopies(tmp_path, 2**20)
    assert not copies.keep("a", TENSORS, lambda: next(looks, True))
    assert files_in(tmp_path) == []
    assert "no packed copy is kept: the model was shut down" in caplog.text
    assert copies.keep("a", TENSORS, lambda: False)
    assert_same(copies.find("a"), TENSORS)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not PackedCopies(tmp_path / "file" / "packed", 2**20).keep("a", TENSORS)
    assert "no packed copy could be kept" in caplog.text


WRITE = """
import sys, torch
from pathlib import Path
from moeserve.models import packed_copies
folder, key, max_bytes = sys.argv[1:]
copies = packed_copies.PackedCopies(Path(folder), int(max_bytes))
pieces = packed_copies._pieces

def slow_pieces(tensors):
    for number, piece in enumerate(pieces(tensors)):
        if number == 1:
            print("half", flush=True)
            sys.stdin.readline()
        yield piece

packed_copies._pieces = slow_pieces
print("ready", flush=True)
sys.stdin.readline()
print(copies.keep(key, {"panels": torch.arange(256, dtype=torch.uint8).repeat(1000)}), flush=True)
"""


def writers(folder: Path, keys: Sequence[str], max_bytes: int = 2**30) -> list[subprocess.Popen[str]]:
    """Processes that wait to be told to write, and once more in the middle of it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(folder), key, str(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for key in keys
    ]
    for process in processes:
        assert heard(process) == "ready"
    return processes


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell_to_go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def test_a_process_that_dies_half_way_leaves_nothing_for_long(tmp_path: Path) -> None:
    (process,) = writers(tmp_path, "a")
    tell_to_go_on(process)
    assert heard(process) == "half"
    process.kill()
    process.wait()
    (partial,) = files_in(tmp_path)
    assert partial.endswith(".partial")
    copies = PackedCopies(tmp_path, 2**20)
    assert copies.find("a") is None
    copies.keep("b", TENSORS)
    assert files_in(tmp_path) == ["b.safetensors"]


def test_processes_that_write_at_once_keep_to_the_bound_even_if_one_dies(tmp_path: Path) -> None:
    max_bytes = 600_000  # room for two
    first, *others = writers(tmp_path, "abcd", max_bytes)
    tell_to_go_on(first)
    assert heard(first) == "half"
    for process in others:
        tell_to_go_on(process)
        tell_to_go_on(process)  # no stop in the middle
    time.sleep(1.0)
    (partial,) = files_in(tmp_path)  # while it is written, others wait
    assert partial.startswith("a.")
    first.kill()
    first.wait()
    for process in others:
        given, _ = process.communicate(timeout=60)
        assert given == "half\nTrue\n"
    assert len(files_in(tmp_path)) == 2
    assert bytes_in(tmp_path) <= max_bytes
    assert set(files_in(tmp_path)) < {"b.safetensors", "c.safetensors", "d.safetensors"}


def test_processes_may_write_the_same_copy_at_once(tmp_path: Path) -> None:
    processes = writers(tmp_path, "aa")
    for process in processes:
        tell_to_go_on(process)
        tell_to_go_on(process)
    given = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(given) == ["True\n", "half\nTrue\n"]  # only one of them writes
    assert files_in(tmp_path) == ["a.safetensors"]
    found = PackedCopies(tmp_path, 2**30).find("a")
    assert found is not None
    assert torch.equal(found["panels"], TENSORS["panels"])


def test_a_writer_that_is_stopped_does_not_wait_for_others(tmp_path: Path) -> None:
    (process,) = writers(tmp_path, "a")
    tell_to_go_on(process)
    assert heard(process) == "half"
    deadline = time.monotonic() + 0.3
    assert not PackedCopies(tmp_path, 2**30).keep("b", TENSORS, lambda: time.monotonic() > deadline)
    assert process.communicate("go on\n", timeout=60)[0] == "True\n"
    assert files_in(tmp_path) == ["a.safetensors"]


def test_a_fingerprint_is_of_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(b"x" * 3_000_000)
    second.write_bytes(b"y" * 10)
    before = fingerprint([first, second])
    assert fingerprint([second, first]) == before
    assert fingerprint([first]) != before
    second.rename(tmp_path / "3.safetensors")
    assert fingerprint([first, tmp_path / "3.safetensors"]) != before


@pytest.mark.parametrize("place", ["beginning", "sample", "between samples"])
@pytest.mark.parametrize("sees_times", [True, False])
def test_a_fingerprint_sees_one_byte_changed_and_its_time_set_back(
    tmp_path: Path, place: str, sees_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time of the entry, which cannot be set back; without any times, wherever it reads."""
    path, size = tmp_path / "1.safetensors", 3_000_000
    path.write_bytes(bytes(size))
    before, status = fingerprint([path]), path.stat()
    starts = [(size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1) for sample in range(SAMPLES_PER_FILE)]
    sampled = next(start for start in starts if start > HEADER_BYTES)
    time.sleep(0.05)  # the system's clock for files goes in steps
    with path.open("r+b") as file:
        file.seek({"beginning": 5, "sample": sampled, "between samples": sampled + SAMPLE_BYTES}[place])
        file.write(b"z")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    if not sees_times:
        monkeypatch.setattr(os, "fstat", lambda _: status)
    assert (fingerprint([path]) != before) == (sees_times or place != "between samples")


def test_a_key_is_of_all_facts() -> None:
    assert key_of("a", None, [1, 2]) == key_of("a", None, [1, 2])
    assert len({key_of("a", None, [1, 2]), key_of("a", "b", [1, 2]), key_of("a", None, [2, 1])}) == 3
