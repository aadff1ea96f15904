"""Rows of mapped files are those that the safetensors library reads, also where tensors are not aligned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeserve.models.checkpoint.mapped_files import MappedFiles
from moeserve.models.checkpoint.shards import Shards, read_header


def test_rows_are_those_of_the_library(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    tensors = {
        f"{dtype} {shape}": (100 * torch.randn(shape, generator=generator)).to(dtype)
        for dtype in dtypes
        for shape in ((), (7,), (5, 3), (4, 3, 2), (0, 4))
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    files, shards = MappedFiles(), Shards()
    for stored in read_header(path).values():
        for start, stop in ((0, 1),) if not stored.shape else ((0, stored.shape[0]), (1, 3), (2, 2)):
            if stored.shape[:1] == (0,) and stop:
                continue
            rows = files.read_rows(stored, start, stop)
            assert torch.equal(rows, shards.read_rows(stored, start, stop)), (stored, start, stop)


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_tensors_that_are_not_aligned_are_copied(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + b" " * num_bytes
    values = torch.tensor([1.5, -2.5])
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (stored,) = read_header(path).values()
    assert MappedFiles().read_rows(stored, 0, 2).tolist() == [1.5, -2.5]
