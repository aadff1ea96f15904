"""The tiles of grouped products on a GPU: from a measured table, otherwise by rule; and the tuner without a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from moeserve.triton_kernels import tune, tuning
from moeserve.triton_kernels.tuning import (
    FP8_BLOCK,
    MAX_SHARED_BYTES,
    SM_SHARED_BYTES,
    Config,
    Problem,
    choose_config,
    config_by_rule,
    load_table,
    save_table,
)

SMALL = Config(16, 64, 64, num_warps=4, num_stages=3, programs_per_sm=2)
LARGE = Config(128, 128, 64, num_warps=8, num_stages=3, programs_per_sm=1, group_m=8)
LAYERS = [
    tune.Layer(kind, *shape)
    for kind in ("bf16", "fp8", "mxfp4")
    for shape in [(8, 4096, 14336, 2), (64, 2048, 1408, 6), (256, 7168, 2048, 8), (128, 2048, 768, 8), (1, 64, 64, 1)]
]


def problem(num_rows: int, **changed: object) -> Problem:
    default = Problem("bf16", is_gated=True, num_experts=8, num_outputs=512, num_inputs=256, num_rows=num_rows)
    return dataclasses.replace(default, **changed)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TUNED_FOLDER", tmp_path)
    monkeypatch.setattr(tune, "TUNED_FOLDER", tmp_path)
    choose_config.cache_clear()
    yield
    choose_config.cache_clear()


def test_the_nearest_number_of_rows_by_ratio(tmp_path: Path) -> None:
    path = tmp_path / "NVIDIA_H100_80GB_HBM3.json"
    save_table(path, [(problem(10), SMALL), (problem(1000), LARGE)])
    chosen = {
        num_rows: choose_config(problem(num_rows), "NVIDIA H100 80GB HBM3") for num_rows in (0, 1, 99, 101, 10**6)
    }
    assert chosen == {0: SMALL, 1: SMALL, 99: SMALL, 101: LARGE, 10**6: LARGE}


def test_a_table_is_for_one_gpu_and_for_weights_of_one_shape(tmp_path: Path) -> None:
    odd = Config(32, 64, 64, num_warps=4, num_stages=2, programs_per_sm=1, group_m=3)
    save_table(tmp_path / "NVIDIA_H200.json", [(problem(10), odd)])
    assert choose_config(problem(10), "NVIDIA H200") == odd
    assert choose_config(problem(10), "NVIDIA H100") == config_by_rule(problem(10)) != odd
    for changed in ({"kind": "fp8"}, {"is_gated": False}, {"num_experts": 4}, {"num_outputs": 256}, {"num_inputs": 64}):
        assert choose_config(problem(10, **changed), "NVIDIA H200") != odd


def test_saving_keeps_existing_entries(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "table.json"
    assert load_table(path) == {}
    save_table(path, [(problem(10), SMALL), (problem(9), SMALL)])
    save_table(path, [(problem(10), LARGE), (problem(10, is_gated=False), SMALL)])
    assert load_table(path) == {
        problem(10).weights_key: {9: SMALL, 10: LARGE},
        problem(10, is_gated=False).weights_key: {10: SMALL},
    }
    assert list(json.loads(path.read_text())["bf16 gated 8x512x256"]) == ["9", "10"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 128, 65536])
def test_candidates(layer: tune.Layer, num_tokens: int) -> None:
    """There are enough to choose from, few enough to measure, and all fit the GPU."""
    for one in layer.problems(num_tokens):
        found = tune.candidates(one)
        assert 4 <= len(found) <= 150
        assert len(set(found)) == len(found)
        assert found[0] == config_by_rule(one)
        assert tune.is_possible(found[0], one)
        for config in found:
            shared_bytes = config.shared_bytes(one.element_size)
            assert shared_bytes < MAX_SHARED_BYTES
            assert config.programs_per_sm * (shared_bytes + 1024) < SM_SHARED_BYTES
            assert config.block_n >= 64 if config.is_swapped else config.block_m >= 64
            assert one.kind != "fp8" or config.block_n <= (256 if one.is_gated else 128)
            assert one.kind != "fp8" or config.block_k == FP8_BLOCK, "another order of additions is other bytes"


@pytest.mark.parametrize(("kind", "most_in_low_tiles"), [("bf16", 80), ("fp8", 190), ("mxfp4", 48)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_of_more_rows_have_higher_tiles(kind: str, most_in_low_tiles: int, is_gated: bool) -> None:
    heights = [
        config_by_rule(problem(8 * rows, kind=kind, is_gated=is_gated)).block_m
        for rows in (8, 16, 48, most_in_low_tiles, most_in_low_tiles + 1, 4096)
    ]
    assert heights == [16, 32, 64, 64, 128, 128]


def test_inputs_of_a_single_weight_are_split() -> None:
    """As the product of one token with DeepSeek-V3's compressed queries: 56 iterations, and few tiles."""
    (_, down) = tune.Layer("fp8", 1, 1536, 7168, 1).problems(1)
    found = tune.candidates(down)
    assert down.can_split
    assert config_by_rule(down) == found[0]
    assert {1, found[0].num_splits} < {config.num_splits for config in found}
    assert all(config.num_splits == 1 for config in tune.candidates(problem(10, kind="fp8", is_gated=False)))


def test_tiles_that_do_not_fit_are_not_candidates() -> None:
    assert not tune.is_possible(dataclasses.replace(LARGE, num_stages=8), problem(1))  # shared memory of one
    assert not tune.is_possible(dataclasses.replace(LARGE, programs_per_sm=3), problem(1))  # of all together
    wide = Config(128, 256, 64, num_warps=4, num_stages=3, programs_per_sm=1)
    assert not tune.is_possible(wide, problem(1))  # 256 registers of accumulators
    assert tune.is_possible(dataclasses.replace(wide, num_warps=8), problem(1))
    assert not tune.is_possible(dataclasses.replace(wide, num_warps=8), problem(1, kind="fp8"))  # twice as many


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    required = ["--experts", "8", "--hidden", "4096", "--width", "14336", "--top-k", "2"]
    options = tune.parse(required)
    assert (options.dtype, options.rows, options.out) == ("bf16", tune.DEFAULT_TOKENS, None)
    options = tune.parse([*required, *["--dtype", "fp8", "--rows", "1", "64", "--out", "here.json"]])
    assert (options.dtype, options.rows, options.out) == ("fp8", [1, 64], Path("here.json"))
    for wrong in (["--top-k", "9"], ["--rows", "0"], ["--dtype", "int4"]):
        with pytest.raises(SystemExit):
            tune.parse([*required, *wrong])
    assert "--top-k 9" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--experts", "8", "--hidden", "64", "--width", "64", "--top-k", "2"]) == 1
    assert "GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
