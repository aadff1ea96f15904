"""`moeserve viz`: the table and the picture, compared with recounts of the windows."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from load_windows import drawn, of_counts

from moeserve import cli
from moeserve.cli.viz import plan
from moeserve.errors import SettingsError
from moeserve.layers.moe.placement.eplb import eplb, rank_loads
from moeserve.telemetry.expert_load import LoadWindow, summed, write_window
from moeserve.telemetry.load_image import load_figure
from moeserve.telemetry.load_table import as_text


def given(windows: tuple[LoadWindow, ...], layer: int, expert: int) -> int:
    return sum(window.tokens_of_expert[layer][expert] for window in windows)


def rank_given(windows: tuple[LoadWindow, ...], layer: int, rank: int) -> int:
    return sum(window.tokens_of_rank[layer][rank] for window in windows)


def saved(folder: Path, windows: tuple[LoadWindow, ...]) -> Path:
    path = folder / "loads.jsonl"
    with path.open("wb") as file:
        for window in windows:
            write_window(file, window)
    return path


def test_table_equals_a_recount() -> None:
    windows = drawn(5, 6, 8, 4, layers=(2, 3, 5, 8, 13, 21))
    planned = tuple(tuple(float(10 + rank * layer) for rank in range(4)) for layer in range(6))
    lines = as_text(windows, planned).splitlines()
    for place, number in enumerate((2, 3, 5, 8, 13, 21)):
        experts = [given(windows, place, expert) for expert in range(8)]
        ranks = [rank_given(windows, place, rank) for rank in range(4)]
        total = sum(experts)
        (line,) = [line.split() for line in lines if line.startswith(f"{number:>5} ")]
        entropy = -sum(count / total * math.log2(count / total) for count in experts if count) / 3
        assert line[:8] == [
            str(number),
            f"{total:,}",
            f"{experts.index(max(experts))}:",
            f"{100 * max(experts) / total:.2f}%",
            f"{max(experts) / (total / 8):.2f}",
            f"{max(ranks) / (total / 4):.2f}",
            f"{max(planned[place]) / (sum(planned[place]) / 4):.2f}",
            f"{entropy:.3f}",
        ]
        bars_of_experts, bars_of_ranks = line[8:]
        assert len(bars_of_experts) == 8
        assert len(bars_of_ranks) == 4
        assert bars_of_experts[0] == "·"  # no tokens
        assert bars_of_experts[experts.index(max(experts))] == "█"
        assert bars_of_ranks[ranks.index(max(ranks))] == "█"


def test_summary() -> None:
    window = of_counts(
        [[6, 2], [6, 2]], [[6, 2], [4, 4]], num_tokens=8, num_padding_tokens=2, bytes_dispatched=2048, layers=(5, 9)
    )
    lines = as_text([window] * 2, ((4.0, 4.0), (5.0, 3.0))).splitlines()
    found = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)] for line in lines[:3]]
    assert found == [[2, 2, 2, 2, 20, 4.0, 0], [16, 20.0, 4.0, 12.5], [1.25, 1.5, 5, 1.12]]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (500, 3, 8, 2), (2, 80, 4096, 64)])
def test_table_fits_a_terminal(sizes: tuple[int, int, int, int]) -> None:
    num_windows, num_layers, num_experts, num_ranks = sizes
    windows = drawn(1, num_layers, num_experts, num_ranks) * num_windows
    planned = tuple((1.0,) * num_ranks for _ in range(num_layers))
    lines = as_text(windows, planned).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


def test_least_even_layers_are_listed() -> None:
    experts = [[50 + layer % 50, 50] for layer in range(100)]
    text = as_text([of_counts(experts, experts)])
    listed = [int(line.split()[0]) for line in text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert listed == [layer for layer in range(100) if layer % 50 >= 26]
    assert "least even 48 of 100 layers" in text


def test_course_over_time() -> None:
    even, uneven = of_counts([[4, 4]], [[4, 4]]), of_counts([[8, 0]], [[8, 0]])
    *_, of_all, of_layer, padding = as_text([even, uneven, even, uneven]).splitlines()
    assert of_all == "all layers      1.00 to 2.00  ▁█▁█"
    assert of_layer == "layer 0         1.00 to 2.00  ▁█▁█"
    assert padding == "padding         0.0% to 0.0%  ▁▁▁▁"


def test_zero_counts() -> None:
    text = as_text([of_counts([[0, 0]], [[0]], num_tokens=0, seconds=0.0, bytes_dispatched=0)])
    assert "none     1.00     1.00  1.000  ··" in text


def test_picture_shows_loads_over_their_means() -> None:
    windows = drawn(5, 3, 8, 4)
    planned = plan(summed(windows), 4)
    placements = [eplb(loads, 4, 12) for loads in summed(windows).tokens_of_expert]
    assert planned == tuple(map(rank_loads, summed(windows).tokens_of_expert, placements))
    experts = np.array([[given(windows, layer, expert) for expert in range(8)] for layer in range(3)])
    ranks = np.array([[rank_given(windows, layer, rank) for rank in range(4)] for layer in range(3)])
    over_time = np.array([np.sum(window.tokens_of_rank, axis=0) for window in windows])
    expected = [experts, ranks, np.array(planned), over_time]
    figure = load_figure(windows, planned)
    maps = [axes for axes in figure.axes if axes.get_title()]
    found = [axes.images[0].get_array() for axes in maps]
    found[-1] = found[-1].T
    for shown, counts in zip(found, expected, strict=True):
        np.testing.assert_allclose(shown.filled(0), counts / counts.mean(axis=1, keepdims=True))
    assert found[0].mask[:, 0].all(), "expert 0 has no tokens"
    fullest = ranks.max(axis=1).sum() / ranks.mean(axis=1).sum()
    assert f"{fullest:.2f}" in maps[1].get_title()


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingsError, match=r"moeserve\[viz\]"):
        load_figure(drawn(1, 1, 2, 2))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = drawn(2, 2, 8, 2)
    path = saved(tmp_path, windows)
    assert cli.main(["viz", str(path)]) == 0
    assert capsys.readouterr().out == as_text(windows) + "\n"
    assert cli.main(["viz", str(path), "--num-redundant-experts", "0"]) == 0
    assert "planned" in capsys.readouterr().out
    picture = tmp_path / "picture.png"
    assert cli.main(["viz", str(path), "--png", str(picture), "--num-redundant-experts", "8"]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--num-redundant-experts", "9"], "8 experts on 2 ranks"),
        (["--png", "no/such/folder/x.png"], "no/such/folder/x.png"),
    ],
)
def test_errors_of_the_command(
    arguments: list[str], mentioned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["viz", str(saved(tmp_path, drawn(1, 1, 8, 2))), *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("moeserve: ")
    assert mentioned in shown
