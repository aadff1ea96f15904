"""Copies of packed weights: complete or not there, bounded, and shared by processes that know nothing of each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.models.packed_copies import PackedCopies, fingerprint, key_of

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
    return sorted(path.name for path in folder.iterdir())


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
    assert f"{path} cannot be read" in caplog.text
    assert copies.keep("a", TENSORS)
    assert_same(copies.find("a"), TENSORS)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not PackedCopies(tmp_path / "file" / "packed", 2**20).keep("a", TENSORS)
    assert "no packed copy could be kept" in caplog.text


WRITE = """
import sys, torch
from pathlib import Path
from moeserve.models import packed_copies
copies = packed_copies.PackedCopies(Path(sys.argv[1]), 2**30)
pieces = packed_copies._pieces

def slow_pieces(tensors):
    for number, piece in enumerate(pieces(tensors)):
        if number == 1:
            print("half", flush=True)
            sys.stdin.readline()
        yield piece

packed_copies._pieces = slow_pieces
print(copies.keep("a", {"panels": torch.arange(256, dtype=torch.uint8).repeat(1000)}), flush=True)
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    """A process that stops in the middle of writing until it is told to go on."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def test_a_process_that_dies_half_way_leaves_nothing_for_long(tmp_path: Path) -> None:
    process = writer(tmp_path)
    process.kill()
    process.wait()
    (partial,) = files_in(tmp_path)
    assert partial.endswith(".partial")
    copies = PackedCopies(tmp_path, 2**20)
    assert copies.find("a") is None
    copies.keep("b", TENSORS)
    assert files_in(tmp_path) == ["b.safetensors"]


def test_processes_may_write_the_same_copy_at_once(tmp_path: Path) -> None:
    processes = [writer(tmp_path) for _ in range(2)]
    copies = PackedCopies(tmp_path, 2**30)
    copies.keep("b", TENSORS)  # which removes no file that is being written
    assert len(files_in(tmp_path)) == 3
    for process in processes:
        given, _ = process.communicate("go on\n", timeout=60)
        assert given == "True\n"
    assert files_in(tmp_path) == ["a.safetensors", "b.safetensors"]
    found = copies.find("a")
    assert found is not None
    assert torch.equal(found["panels"], TENSORS["panels"])


def test_a_fingerprint_is_of_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    first.write_bytes(b"x" * 3_000_000)
    second.write_bytes(b"y" * 10)
    before = fingerprint([first, second])
    assert fingerprint([second, first]) == before
    time.sleep(0.01)
    first.write_bytes(b"x" * 2_999_999 + b"z")
    os.utime(first, ns=(0, first.stat().st_mtime_ns))
    after = fingerprint([first, second])
    assert after != before
    assert fingerprint([first]) != after


def test_a_key_is_of_all_facts() -> None:
    assert key_of("a", None, [1, 2]) == key_of("a", None, [1, 2])
    assert len({key_of("a", None, [1, 2]), key_of("a", "b", [1, 2]), key_of("a", None, [2, 1])}) == 3
