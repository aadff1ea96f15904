"""The table of machine code: launches are recorded at production shapes and compiled without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from moeserve.bench.gpu.machine_code import MachineCode

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter hides the compiler"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    from moeserve.bench.gpu import compiled

    compiled.main(arguments)
    names, _, *lines = capsys.readouterr().out.splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in (names, *lines)]
    return [dict(zip(split[0], cells, strict=True)) for cells in split[1:]]


@pytest.mark.parametrize(("capability", "matrix"), [("90", "wgmma"), ("100", "tcgen05")])
def test_experts_of_qwen3(capability: str, matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "--capability", capability, "--only", "experts bf16 Qwen3-30B-A3B, 128 tokens")
    assert [row["kernel"] for row in rows] == [
        *("rank_pairs_kernel", "grouped_matmul_kernel", "grouped_matmul_kernel", "weighted_sum_kernel")
    ]
    assert rows[0]["operation"] == "experts bf16 Qwen3-30B-A3B, 128 tokens"
    weights = 128 * 3 * 2048 * 768 * 2 / 1e6  # nearly all experts have rows
    assert 0.99 * weights < float(rows[0]["MB"].replace(",", "")) < 1.05 * weights
    assert float(rows[0]["GFLOP"]) == pytest.approx(128 * 8 * 3 * 2 * 2048 * 768 / 1e9, rel=0.01)
    products = [row for row in rows if row["kernel"] == "grouped_matmul_kernel"]
    assert all(int(row[matrix]) > 0 and int(row["blocks"]) > 0 for row in products)
    assert capability == "100" or {row["spilled"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "blocks"),
    [
        (255, 0, 8, 1),  # 8192 registers for each warp
        (128, 0, 8, 2),
        (129, 0, 4, 3),  # 17 units of 256 for each warp: 4352
        (32, 0, 4, 16),  # 64 warps
        (16, 0, 1, 32),
        (32, 227 * 1024, 4, 1),
        (32, 75 * 1024, 4, 3),
        (32, 76 * 1024, 4, 2),  # with the reserved kibibyte
    ],
)
def test_blocks_that_fit(registers: int, shared: int, num_warps: int, blocks: int) -> None:
    assert MachineCode("", registers, 0, shared, num_warps).blocks_per_sm == blocks
