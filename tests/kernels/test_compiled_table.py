"""The table of machine code: launches are recorded at production shapes and compiled without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeserve.bench.gpu.machine_code import AbsentGpu, MachineCode

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
    rows = rows_of(capsys, "--capability", capability, "--only", "experts, bf16, Qwen3-30B-A3B, 128")
    assert [row["kernel"] for row in rows] == [
        *("rank_pairs_kernel", "grouped_matmul_kernel", "grouped_matmul_kernel", "weighted_sum_kernel")
    ]
    assert rows[0]["operation"] == "experts, bf16, Qwen3-30B-A3B, 128"
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


class PlayedGpu(AbsentGpu):
    """A driver that loads machine code and launches nothing."""

    def __init__(self) -> None:
        super().__init__(90)
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**18}, load_binary=self.load
        )
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_device(self) -> int:
        return 0  # kernels are compiled anew for it

    def load(self, name: str, binary: bytes, *arguments: object) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 0, 0, 32, 0, 1024


def test_launches_on_a_gpu_find_what_was_compiled_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved cache folder still has the kernels, for launches with tensors instead of recorded launches."""
    import torch
    from triton import knobs
    from triton.runtime.driver import driver

    from moeserve.bench.gpu.compiled import compile_items, relocate
    from moeserve.triton_kernels.rms_norm import add_rms_norm, rms_norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    (row,) = dict(compile_items(90))["kernels of the check norms"]()
    assert row["status"] == "passed"
    assert row["num_new"] == row["num_kernels"] > 0
    (tmp_path / "made").rename(tmp_path / "carried")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "carried"))
    relocate(tmp_path / "carried")
    gpu = PlayedGpu()
    were_found = []
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: were_found.append(cache_hit))
    x, weight = torch.zeros(129, 2048, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.bfloat16)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    assert gpu.loaded == ["rms_norm_kernel"] * 2
    assert were_found == [True, True]
    rms_norm(x.float(), weight.float(), 1e-5)
    assert were_found == [True, True, False], "the check has no float32 weights"
