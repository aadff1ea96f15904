"""`moeserve viz`: the table, the picture and the page, read back and compared with recounts of the windows."""

from __future__ import annotations

import html.parser
import itertools
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from load_windows import drawn, of_counts

from moeserve import cli
from moeserve.errors import SettingsError
from moeserve.expert_placement.eplb import eplb
from moeserve.planner.views import plan, show
from moeserve.telemetry import load_page
from moeserve.telemetry.expert_load import LoadWindow, summed, write_window
from moeserve.telemetry.heat import NO_LOAD, OF_EXPERTS, OF_RANKS, Scale, colours, over_mean, ticks
from moeserve.telemetry.load_image import MAX_WINDOWS_SHOWN, PALETTE, PAPER, Chart, Map, as_png, charts, placed
from moeserve.telemetry.load_page import as_html
from moeserve.telemetry.load_table import as_text, sparkline

# Elements without an end.
VOID = {"meta", "br", "path", "line"}


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


# Colours


def lightness(colour: tuple[int, int, int]) -> float:
    """CIE L*, from 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def test_colours_get_lighter_from_cold_to_hot_in_steps_alike() -> None:
    values = [lightness(colour) for colour in colours()]
    steps = [after - before for before, after in itertools.pairwise(values)]
    assert min(steps) > 0.5
    assert max(steps) < 3 * min(steps)
    assert values[0] < 12
    assert values[-1] > 90
    assert NO_LOAD not in colours()


@pytest.mark.parametrize("scale", [OF_EXPERTS, OF_RANKS])
def test_shades_are_spread_over_the_logarithm(scale: Scale) -> None:
    ratios = np.array([0.0, scale.low / 100, scale.low, 1.0, scale.high * 0.999, scale.high, scale.high * 100])
    assert scale.shades(ratios).tolist() == [-1, 0, 0, 32, 63, 63, 63]
    assert [scale.position(ratio) for ratio, _ in scale.ticks] == pytest.approx(
        [place / (len(scale.ticks) - 1) for place in range(len(scale.ticks))]
    )


def test_over_mean() -> None:
    assert over_mean([[1, 3], [0, 0], [2, 2]]).tolist() == [[0.5, 1.5], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("numbers", "at_most", "expected"),
    [
        (range(8), 10, [0, 1, 2, 3, 4, 5, 6, 7]),
        (range(256), 5, [0, 64, 128, 192]),
        (range(3, 61), 7, [7, 17, 27, 37, 47, 57]),
        ([7], 1, [0]),
        (range(4096), 2, [0, 2048]),
    ],
)
def test_ticks(numbers: list[int], at_most: int, expected: list[int]) -> None:
    steps = (1, 2, 5, 10) if len(numbers) == 58 else (1, 2, 4, 8)
    assert ticks(numbers, at_most, steps) == expected


# Picture


def decoded(content: bytes) -> npt.NDArray[np.uint8]:
    """[height, width, 3] of a PNG file, of the few kinds that are met here; every checksum is checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + size]
        assert struct.unpack(">I", content[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = chunks.get(kind, b"") + body
        at += 12 + size
    assert at == len(content)
    kinds = list(chunks)
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height, bits, kind_of_colour, *others = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (bits, kind_of_colour, others) == (8, 3, [0, 0, 0])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()  # no filters
    return np.frombuffer(chunks[b"PLTE"], dtype=np.uint8).reshape(-1, 3)[lines[:, 1:]]


def expected_colour(windows: tuple[LoadWindow, ...], layer: int, expert: int) -> tuple[int, int, int]:
    """From the counts, one cell at a time."""
    count = given(windows, layer, expert)
    num_experts = len(windows[0].tokens_of_expert[layer])
    mean = sum(given(windows, layer, other) for other in range(num_experts)) / num_experts
    if count == 0:
        return NO_LOAD
    octaves = math.log2(count / mean)  # -3 to 3
    return colours()[min(63, max(0, math.floor((octaves + 3) / 6 * 64)))]


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 1), (4, 8), (58, 256), (3, 1100), (800, 2)])
def test_cells_of_the_picture_have_the_colours_of_their_counts(num_layers: int, num_experts: int) -> None:
    windows = drawn(2, num_layers, num_experts, 1)
    picture = decoded(as_png(windows))
    cells = Map.of(num_layers, num_experts)
    for layer in range(0, num_layers, 1 + num_layers // 6):
        for expert in range(0, num_experts, 1 + num_experts // 7):
            left, top = cells.left + expert * cells.cell_width, cells.top + layer * cells.cell_height
            cell = picture[top : top + cells.cell_height - cells.gap, left : left + cells.cell_width - cells.gap]
            assert cell.size
            assert (cell == expected_colour(windows, layer, expert)).all()
    # Beyond the last cell there is paper.
    right, bottom = cells.left + num_experts * cells.cell_width, cells.top + num_layers * cells.cell_height
    assert (picture[cells.top : bottom, right] == PALETTE[PAPER]).all()
    assert (picture[bottom, cells.left : right] == PALETTE[PAPER]).all()


def test_the_picture_has_cells_that_can_be_seen_and_sizes_that_can_be_shown() -> None:
    for num_layers, num_experts in [(1, 1), (4, 8), (61, 256), (61, 4096), (1024, 4096)]:
        cells = Map.of(num_layers, num_experts)
        assert cells.cell_width >= 1
        assert cells.cell_height >= 1
        assert num_experts * cells.cell_width <= 4096
        assert num_layers * cells.cell_height <= 1024


def colours_of_cells(picture: npt.NDArray[np.uint8], cells: Map, num_rows: int, num_columns: int) -> list[list[Any]]:
    """By row, by column: the one colour that the cell has."""
    found = []
    for row in range(num_rows):
        found.append([])
        for column in range(num_columns):
            left, top = cells.left + column * cells.cell_width, cells.top + row * cells.cell_height
            cell = picture[top : top + cells.cell_height - cells.gap, left : left + cells.cell_width - cells.gap]
            (colour,) = {tuple(pixel.tolist()) for pixel in cell.reshape(-1, 3)}
            found[-1].append(colour)
    return found


def colours_of_ranks(counts: list[list[float]]) -> list[list[tuple[int, int, int]]]:
    """By row, by rank: from 1/2 of the row's mean to twice."""
    found = []
    for row in counts:
        octaves = [math.log2(count * len(row) / sum(row)) if count else None for count in row]
        found.append(
            [NO_LOAD if at is None else colours()[min(63, max(0, math.floor((at + 1) * 32)))] for at in octaves]
        )
    return found


@pytest.mark.parametrize("has_plan", [False, True])
def test_the_picture_shows_ranks_by_layer_before_and_after_and_over_time(has_plan: bool) -> None:
    windows = drawn(5, 3, 8, 4)
    planned = plan(summed(windows), 4) if has_plan else None
    picture = decoded(as_png(windows, planned))
    by_layer = [[float(rank_given(windows, layer, rank)) for rank in range(4)] for layer in range(3)]
    over_time = [[float(sum(row[rank] for row in each.tokens_of_rank)) for rank in range(4)] for each in windows]
    maps, height = placed(charts(windows, planned))
    assert picture.shape[0] == height
    assert len(maps) == (4 if has_plan else 3)
    assert colours_of_cells(picture, maps[1], 3, 4) == colours_of_ranks(by_layer)
    of_windows = colours_of_cells(picture, maps[-1], 4, 5)
    assert [list(column) for column in zip(*of_windows, strict=True)] == colours_of_ranks(over_time)
    if planned is not None:
        assert colours_of_cells(picture, maps[2], 3, 4) == colours_of_ranks([list(row) for row in planned])


def test_what_is_written_beside_the_maps() -> None:
    even, uneven = of_counts([[4, 4]], [[4, 4]]), of_counts([[8, 0]], [[8, 0]])

    def texts(found: tuple[Chart, ...]) -> list[tuple[str, str, str]]:
        return [(chart.note, chart.rows.name, chart.columns.name) for chart in found]

    assert texts(charts([even, uneven], [[9.0, 7.0]])) == [
        ("1 layers, 2 experts, 2 ranks, 16 tokens", "Layer", "Expert"),
        ("Fullest rank / mean: 1.50 in all layers together", "Layer", "Rank"),
        ("Fullest rank / mean: 1.12 in all layers together", "Layer", "Rank"),
        ("Fullest rank / mean: 1.00 to 2.00 in all layers together", "Rank", "Window"),
    ]
    *_, (note, _, columns) = texts(charts([even] * (2 * MAX_WINDOWS_SHOWN + 1)))
    assert note == "Fullest rank / mean: 1.00 to 1.00 in all layers together"
    assert columns == "3 windows"
    assert charts([even] * (2 * MAX_WINDOWS_SHOWN + 1))[-1].ratios.shape == (2, 171)


def test_the_picture_names_its_axes_and_colours() -> None:
    """All ink is accounted for by letters of the font: the picture of the words is found where they should be."""
    picture = decoded(as_png(drawn(1, 4, 8, 2)))
    ink = (picture == PALETTE[1]).all(axis=2)
    layer = np.array(
        [[bit == "#" for bit in row] for row in ("#....", "#....", "#....", "#....", "#....", "#....", "#####")]
    )
    large = layer.repeat(2, axis=0).repeat(2, axis=1)  # an L
    found = [
        (top, left)
        for top in range(ink.shape[0] - 14)
        for left in range(40)
        if (ink[top : top + 14, left : left + 10] == large).all()
    ]
    cells = Map.of(4, 8)
    assert any(cells.top - 30 < top < cells.top and left < cells.left for top, left in found)  # LAYER, above its axis
    legend = [(picture == colour).all(axis=2).any() for colour in (*colours(), NO_LOAD)]
    assert all(legend)


# Table


def test_figures_of_the_table_are_those_of_a_recount() -> None:
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


def test_the_summary_of_the_table() -> None:
    window = of_counts(
        [[6, 2], [6, 2]], [[6, 2], [4, 4]], num_tokens=8, num_padding_tokens=2, bytes_dispatched=2048, layers=(5, 9)
    )
    first, second, third, *_ = as_text([window] * 2, ((4.0, 4.0), (5.0, 3.0))).splitlines()
    assert first == "2 layers with 2 experts on 2 ranks: 2 windows, 20 steps, 4.0 s, placement 0"
    assert second == "16 tokens, 20.0% padding, 4.00 KiB dispatched, 12.5% of the time spent waiting for slow ranks"
    assert third == ("fullest rank over mean: 1.25 in all layers together, 1.50 in layer 5; 1.12 if placed as planned")


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (40, 58, 256, 32), (500, 3, 8, 2), (2, 80, 4096, 64)])
def test_the_table_fits_a_terminal(sizes: tuple[int, int, int, int], with_plan: bool) -> None:
    num_windows, num_layers, num_experts, num_ranks = sizes
    windows = drawn(1, num_layers, num_experts, num_ranks) * num_windows
    planned = tuple((1.0,) * num_ranks for _ in range(num_layers)) if with_plan else None
    lines = as_text(windows, planned).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120


def test_of_many_layers_the_least_even_are_listed() -> None:
    experts = [[50 + layer % 50, 50] for layer in range(100)]
    text = as_text([of_counts(experts, experts)])
    listed = [int(line.split()[0]) for line in text.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert listed == [layer for layer in range(100) if layer % 50 >= 26]
    assert "The 48 layers of 100 whose ranks are least even." in text


def test_time_goes_from_left_to_right() -> None:
    even, uneven = of_counts([[4, 4]], [[4, 4]]), of_counts([[8, 0]], [[8, 0]])
    *_, of_all, of_layer, padding = as_text([even, uneven, even, uneven]).splitlines()
    assert of_all == "all layers      1.00 to 2.00  ▁█▁█"
    assert of_layer == "layer 0         1.00 to 2.00  ▁█▁█"
    assert padding == "padding         0.0% to 0.0%  ▁▁▁▁"


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 8) == "▁▂▃▄▅▆▇███"
    assert sparkline([5, 5], 5, 5) == "▁▁"


def test_counts_of_zero_are_shown_as_such() -> None:
    text = as_text([of_counts([[0, 0]], [[0]], num_tokens=0, seconds=0.0, bytes_dispatched=0)])
    assert "none     1.00     1.00  1.000  ··" in text
    assert "0 tokens, 0.0% padding, 0 bytes dispatched, 0.0% of the time" in text


# Page


class Page(html.parser.HTMLParser):
    """What a page consists of; elements must be closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data

    @property
    def ids(self) -> list[str]:
        return [name for _, attributes in self.attributes if (name := attributes.get("id")) is not None]

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])

    @property
    def script(self) -> str:
        return self.texts["script"][1]


def test_the_page_holds_the_counts_of_the_windows() -> None:
    windows = drawn(3, 4, 6, 2, layers=(1, 2, 4, 8), placement_epoch=5)
    planned = tuple((rank + 0.25, 2.0) for rank in range(4))
    data = Page(as_html(windows, planned)).data
    assert data["layers"] == [1, 2, 4, 8]
    assert data["experts"] == [[given(windows, layer, expert) for expert in range(6)] for layer in range(4)]
    assert data["ranks"] == [[rank_given(windows, layer, rank) for rank in range(2)] for layer in range(4)]
    assert data["planned"] == [[round(first, 1), 2.0] for first, _ in planned]
    assert [window["ranks"] for window in data["windows"]] == [[*map(list, each.tokens_of_rank)] for each in windows]
    assert [(window["first"], window["steps"], window["placement"]) for window in data["windows"]] == [
        (0, 10, 5),
        (10, 10, 5),
        (20, 10, 5),
    ]


def test_the_page_has_a_table_for_those_who_see_no_colours() -> None:
    windows = drawn(2, 3, 8, 4, layers=(0, 6, 7))
    planned = ((1.0, 1.0, 1.0, 3.0),) * 3
    page = Page(as_html(windows, planned))
    cells = np.array(page.texts["td"]).reshape(3, -1)
    for place in range(3):
        experts = [given(windows, place, expert) for expert in range(8)]
        ranks = [rank_given(windows, place, rank) for rank in range(4)]
        assert cells[place, :6].tolist() == [
            f"{sum(experts):,}",
            str(experts.index(max(experts))),
            f"{100 * max(experts) / sum(experts):.2f}%",
            f"{8 * max(experts) / sum(experts):.2f}",
            f"{4 * max(ranks) / sum(ranks):.2f}",
            "2.00",
        ]
    heads = [text for text in page.texts["th"] if text in {"0", "6", "7"}]
    assert heads == ["0", "6", "7"]
    assert {attributes.get("scope") for tag, attributes in page.attributes if tag == "th"} == {"row", "col"}
    for tag, attributes in page.attributes:
        if tag in ("canvas", "svg"):
            assert attributes["role"] == "img"
            assert attributes["aria-label"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = as_html(drawn(2, 2, 4, 2))
    page = Page(text)
    for _, attributes in page.attributes:
        assert not {"src", "href", "srcset", "action"} & set(attributes)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    (policy,) = [attributes["content"] for _, attributes in page.attributes if "http-equiv" in attributes]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert "prefers-color-scheme: dark" in text
    assert len(page.ids) == len(set(page.ids))


def test_names_of_files_are_text() -> None:
    title = """</title><script>alert("1")</script> & '"""
    page = Page(as_html(drawn(1, 1, 2, 1), title=title))
    assert page.texts["h1"] == [title]
    assert page.texts["title"][0] == title  # the others are of dots
    assert len(page.texts["script"]) == 2


def test_a_page_of_many_windows_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = drawn(50, 2, 4, 2)
    monkeypatch.setattr(load_page, "MAX_COUNTS_SHOWN", 2 * 2 * 20)
    text = as_html(windows)
    data = Page(text).data
    assert len(data["windows"]) == 17
    assert sum(window["steps"] for window in data["windows"]) == 500
    ranks = [[sum(window["ranks"][layer][rank] for window in data["windows"]) for rank in (0, 1)] for layer in (0, 1)]
    assert ranks == data["ranks"]
    assert "each column up to 3 windows" in text


STUB = """
const fs = require("fs");
const [json, script] = JSON.parse(fs.readFileSync(0, "utf8"));
const made = {};
const ids = JSON.parse(process.argv[1]);
const make = id => ({ id, textContent: id === "data" ? json : "", style: {}, value: "all", offsetWidth: 0,
  offsetHeight: 0, drawn: {}, setAttribute(name, value) { this.drawn[name] = value; },
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 100, height: 100 }),
  getContext() { return { createImageData: (w, h) => ({ data: new Uint8ClampedArray(4 * w * h) }),
    putImageData: image => { this.pixels = Array.from(image.data); } }; } });
globalThis.innerWidth = 1000;
globalThis.document = { getElementById: id => ids.includes(id) ? made[id] ??= make(id) : null };
(0, eval)(script);
const point = (id, x, y) => { made[id].onpointermove({ clientX: x, clientY: y }); return made.tip.textContent; };
const pixels = id => made[id].pixels;
const answer = { experts: pixels("experts-map"), time: pixels("time-map"), line: made["line-path"].drawn.d,
  epochs: made["line-epochs"].drawn.d, top: made["line-top"].textContent,
  planned: made["planned-map"] ? pixels("planned-map") : null,
  tips: [point("experts-map", 99, 1), point("time-map", 1, 99), point("today-map", 1, 1)] };
made.layer.value = "1";
made.layer.onchange();
answer.topOfLayer = made["line-top"].textContent;
answer.timeOfLayer = pixels("time-map");
console.log(JSON.stringify(answer));
"""


def run_script(page: Page, folder: Path) -> Any:
    """What the page's script draws and says, in a stand-in for a browser."""
    script = folder / "page.js"
    script.write_text(page.script)
    subprocess.run(["node", "--check", script], check=True, timeout=60)
    told = json.dumps([page.texts["script"][0], page.script])
    command = ["node", "-e", STUB, json.dumps(page.ids)]
    found = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def pixels(scale: Scale, ratios: npt.NDArray[np.float64]) -> list[int]:
    """Red, green, blue and opacity, cell by cell."""
    table = (*colours(), NO_LOAD)  # -1 is the last
    return [channel for shade in scale.shades(ratios).ravel() for channel in (*table[shade], 255)]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script with node")
def test_the_script_draws_what_python_counts(tmp_path: Path) -> None:
    before, after = drawn(2, 3, 6, 2, placement_epoch=1), drawn(2, 3, 6, 2, seed=1, placement_epoch=2)
    windows = before + after
    planned = ((9.0, 1.0), (2.0, 2.0), (0.0, 4.0))
    found = run_script(Page(as_html(windows, planned)), tmp_path)

    experts = [[given(windows, layer, expert) for expert in range(6)] for layer in range(3)]
    assert found["experts"] == pixels(OF_EXPERTS, over_mean(experts))
    assert found["planned"] == pixels(OF_RANKS, over_mean(planned))

    ranks = np.array([window.tokens_of_rank for window in windows], dtype=np.float64)  # [window, layer, rank]
    assert found["time"] == pixels(OF_RANKS, over_mean(ranks.sum(axis=1).tolist()).T)
    assert found["timeOfLayer"] == pixels(OF_RANKS, over_mean(ranks[:, 1].tolist()).T)
    figures = ranks.max(axis=2).sum(axis=1) / ranks.mean(axis=2).sum(axis=1)
    assert found["top"] == f"{max(1.05, figures.max()):.2f}"
    of_layer = ranks[:, 1].max(axis=1) / ranks[:, 1].mean(axis=1)
    assert found["topOfLayer"] == f"{max(1.05, of_layer.max()):.2f}"
    heights = [float(height) for height in re.findall(r"(?:V|M0 )([\d.]+)", found["line"])]
    top = max(1.05, figures.max())
    assert heights == pytest.approx((100 * (1 - (figures - 1) / (top - 1))).tolist(), abs=0.01)
    assert found["epochs"] == "M500.00 0V100"

    last = experts[0][5]
    rank_1 = ranks[0, :, 1].sum()
    rank_0 = ranks[:, 0, 0].sum()
    assert found["tips"] == [
        f"layer 0, expert 5: {last:,} tokens = {last / (sum(experts[0]) / 6):.2f} times the mean",
        f"rank 1, 10 steps from 0, placement 1: {rank_1:,.0f} tokens = "
        f"{rank_1 / ranks[0].sum(axis=0).mean():.2f} times the mean",
        f"layer 0, rank 0: {rank_0:,.0f} tokens = {rank_0 / ranks[:, 0].sum(axis=0).mean():.2f} times the mean",
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script with node")
def test_the_script_runs_where_nothing_was_counted(tmp_path: Path) -> None:
    nothing = of_counts([[0, 0], [0, 0]], [[0], [0]])
    found = run_script(Page(as_html([nothing])), tmp_path)
    assert found["experts"] == [*NO_LOAD, 255] * 4
    assert found["planned"] is None
    assert found["tips"][0] == "layer 0, expert 1: 0 tokens"
    assert found["top"] == "1.05"


# Plan, files and command line


def test_the_plan_gives_each_rank_its_share_of_its_experts() -> None:
    window = of_counts([[9, 3, 2, 2], [1, 1, 1, 1]], [[16, 0], [2, 2]])
    planned = plan(window, 2)
    for loads, of_ranks in zip(window.tokens_of_expert, planned, strict=True):
        placement = eplb(loads, 2, 6)
        expected = [0.0, 0.0]
        for expert, load in enumerate(loads):
            holders = [rank for rank in (0, 1) if expert in placement.logical_of_slot[rank]]
            for rank in holders:
                expected[rank] += load / len(holders)
        assert of_ranks == pytest.approx(expected)
        assert sum(of_ranks) == pytest.approx(sum(loads))
    assert planned[0] == pytest.approx((8, 8), abs=0.51)


def test_files_and_the_table(tmp_path: Path) -> None:
    windows = drawn(3, 2, 8, 2)
    path = saved(tmp_path, windows)
    assert show(path) == as_text(windows)
    assert "planned" not in show(path)
    assert "planned" in show(path, num_redundant=0)
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    assert show(path, html_path=page, png_path=picture, num_redundant=2) == f"{page}\n{picture}"
    assert picture.read_bytes() == as_png(windows, plan(summed(windows), 2)) != as_png(windows)
    assert Page(page.read_text()).data["planned"] is not None
    assert Page(page.read_text()).texts["h1"] == ["Expert load: loads.jsonl"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = drawn(2, 2, 8, 2)
    path = saved(tmp_path, windows)
    assert cli.main(["viz", str(path)]) == 0
    assert capsys.readouterr().out == as_text(windows) + "\n"
    page = tmp_path / "page.html"
    assert cli.main(["viz", str(path), "--html", str(page), "--num-redundant-experts", "8"]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert Page(page.read_text()).data["planned"] is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-redundant-experts", "9"], "8 experts on 2 ranks need from 8 slots (one copy each) to 16"),
        (["--png", "loads.html"], "the picture cannot be written to loads.html: its name must end in .png"),
        (["--html", "page.png"], "the page cannot be written to page.png: its name must end in .html or .htm"),
        (["--html", "page"], "the page cannot be written to page: its name must end in .html or .htm"),
        (["--png", "no/such/folder/x.png"], "cannot write no/such/folder/x.png: No such file or directory"),
    ],
)
def test_errors_of_the_command(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["viz", str(saved(tmp_path, drawn(1, 1, 8, 2))), *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("moeserve: ")
    assert says in shown


@pytest.mark.parametrize(("flag", "name"), [("--html", "a.htm"), ("--html", "a.HTML"), ("--png", "a.PNG")])
def test_other_names_of_pages_and_pictures(flag: str, name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, drawn(1, 1, 8, 2))
    assert cli.main(["viz", str(path), flag, str(tmp_path / name)]) == 0
    assert (tmp_path / name).exists()


def test_the_page_and_the_picture_are_two_files(tmp_path: Path) -> None:
    path = saved(tmp_path, drawn(1, 1, 8, 2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.png").symlink_to(tmp_path / "x.html")
    for other in (tmp_path / "x.html", tmp_path / "folder" / ".." / "x.html", tmp_path / "x.png"):
        with pytest.raises(SettingsError, match=r"page and the picture cannot both be written to .*; name two files"):
            show(path, html_path=tmp_path / "x.html", png_path=other)
    assert not (tmp_path / "x.html").exists()


def test_records_are_not_overwritten_by_what_shows_them(tmp_path: Path) -> None:
    path = saved(tmp_path, drawn(1, 1, 8, 2))
    content = path.read_bytes()
    (tmp_path / "link.html").symlink_to(path)
    with pytest.raises(SettingsError, match="holds the expert loads that are shown; name another file"):
        show(path, html_path=tmp_path / "link.html")
    assert path.read_bytes() == content
