"""Load windows: measures by hand, and files, valid and not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from load_windows import drawn, of_counts

from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import (
    LoadWindow,
    coarsened,
    evenness,
    max_over_mean,
    ranks_max_over_mean,
    read_windows,
    summed,
    write_window,
)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([4, 4], 1.0), ([6, 2], 1.5), ([8, 0], 2.0), ([0, 0], 1.0), ([5], 1.0), ([0.5, 1.5, 1.0], 1.5)],
)
def test_max_over_mean(counts: list[float], expected: float) -> None:
    assert max_over_mean(counts) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([7, 7, 7], 1.0),
        ([9, 0, 0, 0], 0.0),
        ([5, 5, 0, 0], 0.5),  # one bit of two
        ([2, 1, 1, 0], 0.75),  # 1.5 bits of two
        ([0, 0], 1.0),
        ([3], 1.0),
        ([0], 1.0),
    ],
)
def test_evenness(counts: list[int], expected: float) -> None:
    assert evenness(counts) == pytest.approx(expected, abs=1e-12)


def test_layers_add_their_fullest_ranks() -> None:
    # The ranks are even in sum, but in no layer.
    window = of_counts([[6, 2], [2, 6]], [[6, 2], [2, 6]])
    assert ranks_max_over_mean(window) == 1.5
    assert ranks_max_over_mean(of_counts([[0, 0]], [[0, 0]])) == 1.0
    # A layer with few tokens weighs little.
    assert ranks_max_over_mean(of_counts([[100, 100], [2, 0]], [[100, 100], [2, 0]])) == pytest.approx(102 / 101)


def test_summed() -> None:
    first = of_counts(
        [[1, 2], [3, 0]], [[3], [3]], first_step=40, num_padding_tokens=5, num_idle_steps=4, layers=(1, 7)
    )
    second = of_counts(
        [[10, 20], [0, 30]], [[30], [30]], first_step=50, num_steps=7, ended_at=9.0, placement_epoch=3, layers=(1, 7)
    )
    assert summed([first, second]) == LoadWindow(
        first_step=40,
        num_steps=17,
        ended_at=9.0,
        seconds=4.0,
        placement_epoch=3,
        num_tokens=33,
        num_padding_tokens=5,
        num_idle_steps=4,
        bytes_dispatched=2000,
        straggler_seconds=0.5,
        layers=(1, 7),
        tokens_of_expert=((11, 22), (3, 30)),
        tokens_of_rank=((33,), (33,)),
    )
    assert summed([first]) == first


@given(st.integers(1, 30), st.integers(1, 12))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_coarser_windows_hold_the_same_tokens(num_windows: int, at_most: int) -> None:
    windows = drawn(num_windows, 2, 3, 2)
    coarse = coarsened(windows, at_most)
    assert 1 <= len(coarse) <= at_most
    assert summed(coarse) == summed(windows)
    assert [window.first_step for window in coarse] == sorted({window.first_step for window in coarse})
    if num_windows <= at_most:
        assert coarse == windows


def write(path: Path, windows: tuple[LoadWindow, ...]) -> Path:
    with path.open("ab") as file:
        for window in windows:
            write_window(file, window)
    return path


def test_windows_are_read_as_written(tmp_path: Path) -> None:
    windows = drawn(3, 2, 5, 3, layers=(1, 4))
    path = write(tmp_path / "loads.jsonl", windows)
    assert read_windows(path) == windows
    later = drawn(2, 2, 5, 3, seed=9, layers=(1, 4))  # a restarted engine begins at step 0
    assert read_windows(write(path, later)) == windows + later


def test_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    windows = drawn(2, 1, 4, 2)
    path = write(tmp_path / "loads.jsonl", windows)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_windows(path) == windows[:1]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SettingsError, match=r"loads\.jsonl"):
        read_windows(path)


GOOD: dict[str, Any] = json.loads(msgspec.json.encode(of_counts([[3, 1], [2, 2]], [[4, 0], [1, 3]])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 5}, "tokens"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_tokens": 2**60}, "num_tokens"),
        ({"num_tokens": 1.5}, "num_tokens"),
        ({"seconds": None}, "seconds"),
        ({"layers": [], "tokens_of_expert": [], "tokens_of_rank": []}, "layers"),
        ({"layers": [0]}, "tokens_of_expert"),
        ({"tokens_of_rank": [[4, 0]]}, "tokens_of_rank"),
        ({"tokens_of_expert": [[3, 1], [4]]}, "tokens_of_expert"),
        ({"tokens_of_rank": [[], []]}, "tokens_of_rank"),
        ({"tokens_of_rank": [[4, -1], [1, 3]]}, r"tokens_of_rank\[0\]\[1\]"),
    ],
)
def test_invalid_records(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n")
    with pytest.raises(SettingsError, match=rf"loads\.jsonl, line 2 .*{message}"):
        read_windows(path)


@pytest.mark.parametrize("line", ["", "[]", "[" * 100_000, "\ud800"])
def test_invalid_lines(line: str, tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    path.write_bytes(f"{line}\n".encode(errors="surrogatepass"))
    with pytest.raises(SettingsError, match=r"loads\.jsonl, line 1 "):
        read_windows(path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (drawn(1, 3, 4, 2), r"line 3 .*\[0, 1, 2\].*line 1 .*\[0, 1\]"),
        (drawn(1, 2, 5, 2), "5 experts"),
        (drawn(1, 2, 4, 3), "3 ranks"),
    ],
)
def test_records_of_two_models_are_refused(other: tuple[LoadWindow, ...], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "loads.jsonl", drawn(2, 2, 4, 2) + other)
    with pytest.raises(SettingsError, match=message):
        read_windows(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.jsonl"):
        read_windows(tmp_path / "nothing.jsonl")
    with pytest.raises(SettingsError, match="Is a directory"):
        read_windows(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SettingsError, match=r"empty\.jsonl"):
        read_windows(tmp_path / "empty.jsonl")


def test_telemetry_imports_no_optional_package() -> None:
    modules = "expert_load, metrics, load_table, load_image"
    unwanted = "{'torch', 'prometheus_client', 'matplotlib'} & {*sys.modules}"
    program = f"import sys; from moeserve.telemetry import {modules}; print({unwanted})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
