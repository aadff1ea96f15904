"""Load of experts as one HTML page that needs nothing else: no network, no other file, no library.

The page has its numbers as JSON, draws from them with a small script, and says the figures of all layers in a table
that needs none. What is shown of ranks over time may be coarser than the records, so that the page stays small.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

from moeserve.telemetry.expert_load import LoadWindow, coarsened, evenness, max_over_mean, summed
from moeserve.telemetry.heat import (
    BINARY_STEPS,
    DECIMAL_STEPS,
    NO_LOAD,
    OF_EXPERTS,
    OF_RANKS,
    Colour,
    Scale,
    colours,
    ticks,
)
from moeserve.telemetry.load_table import counted, summary

MAX_WINDOWS_SHOWN = 240
MAX_COUNTS_SHOWN = 1_000_000  # by layer, by rank, over all windows shown; some 5 MB

_MAP_HEIGHT, _LARGEST_ROW, _LABEL_HEIGHT, _LINE_HEIGHT = 620, 30, 18, 120  # pixels
_DOTS_WIDTH, _DOTS_LEFT, _DOTS_RIGHT = 720, 56, 24


def as_html(
    windows: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None = None, *, title: str = "expert load"
) -> str:
    """The page.

    Args:
        windows: of one model, in their order.
        planned: by layer, by rank: what ranks would have been given with another placement; None: not shown.
        title: names what was recorded, such as by its file.
    """
    total = summed(windows)
    assert planned is None or [len(of_layer) for of_layer in planned] == [total.num_ranks] * len(total.layers)
    num_counts = len(total.layers) * total.num_ranks
    shown = coarsened(windows, max(1, min(MAX_WINDOWS_SHOWN, MAX_COUNTS_SHOWN // num_counts)))
    merged = math.ceil(len(windows) / len(shown))
    sections = (
        _experts_section(total),
        _time_section(total, shown, merged),
        _ranks_section(total, planned),
        _table_section(total, planned),
    )
    sentences = "".join(f"<li>{html.escape(_capitalised(each))}.</li>" for each in summary(windows, total, planned))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{html.escape(title)}</h1>
<ul>{sentences}</ul>
<p class="note">A token counts once for each expert it was given to. Colours show tokens over the mean, always on the
same scale: <em>1</em> is as many as the average.</p>
</header>
<main>
{"".join(sections)}</main>
<div id="tip" aria-hidden="true" hidden></div>
<script type="application/json" id="data">{_data(total, shown, planned)}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _data(total: LoadWindow, shown: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None) -> str:
    """What the script draws, as JSON. It has no text but its keys, so nothing in it can end its element."""
    content = {
        "layers": total.layers,
        "experts": total.tokens_of_expert,
        "ranks": total.tokens_of_rank,
        "planned": None if planned is None else [[round(each, 1) for each in row] for row in planned],
        "windows": [
            {
                "first": window.first_step,
                "steps": window.num_steps,
                "placement": window.placement_epoch,
                "ranks": window.tokens_of_rank,
            }
            for window in shown
        ],
        "scales": {name: {"low": scale.low, "high": scale.high} for name, scale in _SCALES.items()},
        "colours": colours(),
        "nothing": NO_LOAD,
    }
    return msgspec.json.encode(content).decode()


_SCALES = {"experts": OF_EXPERTS, "ranks": OF_RANKS}


def _experts_section(total: LoadWindow) -> str:
    columns = _column_labels(range(total.num_experts))
    return _section(
        "Experts",
        "Each row is a layer, each column an expert.",
        _map("experts-map", "Tokens of each expert of each layer", total.layers, DECIMAL_STEPS, columns, OF_EXPERTS),
    )


def _time_section(total: LoadWindow, shown: Sequence[LoadWindow], merged: int) -> str:
    options = "".join(f'<option value="{place}">layer {layer}</option>' for place, layer in enumerate(total.layers))
    each = "a window" if merged == 1 else f"up to {merged} windows"
    choice = f"""<p><label>Layers <select id="layer"><option value="all">all together</option>{options}</select></label>
</p>
<figure><figcaption>Fullest rank over mean. All layers together: their maxima are added up, since in each
layer all ranks wait for its fullest one. A dashed line: experts were placed anew.</figcaption>
<div class="frame" style="grid-template-rows:{_LINE_HEIGHT}px"><div class="rows" aria-hidden="true">
<span id="line-top" style="top:0"></span><span style="top:100%">1</span></div>
<svg id="line" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="Fullest rank over mean">
<path id="line-epochs"/><path id="line-path"/></svg></div></figure>
"""
    columns = _labels([(place, f"step {shown[place].first_step:,}") for place in _spread(len(shown), 6)], len(shown))
    ranks = range(total.num_ranks)
    return _section(
        "Ranks over time",
        f"Each row is a rank, each column {each}.",
        choice + _map("time-map", "Tokens of each rank in each window", ranks, BINARY_STEPS, columns, OF_RANKS),
    )


def _ranks_section(total: LoadWindow, planned: Sequence[Sequence[float]] | None) -> str:
    columns = _column_labels(range(total.num_ranks))

    def rank_map(name: str, label: str) -> str:
        note = '<p class="note">Each row is a layer, each column a rank.</p>'
        return f"<h3>{label}</h3>{note}\n" + _map(name, label, total.layers, DECIMAL_STEPS, columns, OF_RANKS)

    if planned is None:
        note = "As it was. <code>moeserve viz</code> with <code>--num-redundant-experts</code> also shows a better one."
        return _section("Placement", note, _dots(total, None) + rank_map("today-map", "Tokens of each rank, as it was"))
    return _section(
        "Placement, as it was and as planned",
        "Planned: experts placed by these very loads, the copies of an expert sharing its tokens evenly.",
        _dots(total, planned)
        + rank_map("today-map", "Tokens of each rank, as it was")
        + rank_map("planned-map", "Tokens of each rank, as planned"),
    )


def _dots(total: LoadWindow, planned: Sequence[Sequence[float]] | None) -> str:
    """One line for each layer, from its fullest rank over the mean as planned to that as it was."""
    before = [max_over_mean(counts) for counts in total.tokens_of_rank]
    after = before if planned is None else [max_over_mean(counts) for counts in planned]
    high = max(1.1, *before, *after)
    row = max(3, min(18, 900 // len(before)))
    height = 30 + row * len(before)
    radius = min(5.0, row / 2)

    def across(value: float) -> float:
        return _DOTS_LEFT + (value - 1) / (high - 1) * (_DOTS_WIDTH - _DOTS_LEFT - _DOTS_RIGHT)

    parts = []
    step = next(step for step in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if (high - 1) / step < 9)
    for number in range(int((high - 1) / step) + 1):
        x = across(1 + number * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{height - 6}"/>')
        parts.append(f'<text x="{x:.1f}" y="11" text-anchor="middle">{1 + number * step:g}</text>')
    written = set(ticks(total.layers, max(1, height // _LABEL_HEIGHT), DECIMAL_STEPS))
    for place, layer in enumerate(total.layers):
        y = 24 + row * (place + 0.5)
        if place in written:
            parts.append(f'<text x="{_DOTS_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{layer}</text>')
        tip = f"layer {layer}: {before[place]:.2f}"
        if planned is not None:
            tip += f" as it was, {after[place]:.2f} as planned"
            start, end = across(after[place]), across(before[place])
            parts.append(f'<line class="way" x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_dot("planned", start, y, radius, tip))
        parts.append(_dot("today", across(before[place]), y, radius, tip))
    key = '<span class="key today"></span> as it was'
    key += "" if planned is None else ' <span class="key planned"></span> as planned'
    return f"""<h3>Fullest rank over mean, by layer</h3>
<figure><figcaption>{key}. Further left is better: at 1, all ranks have the same.</figcaption>
<svg class="dots" viewBox="0 0 {_DOTS_WIDTH} {height}" role="img" aria-label="Fullest rank over mean, by layer">
{"".join(parts)}</svg></figure>
"""


def _dot(kind: str, x: float, y: float, radius: float, tip: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{tip}</title></circle>'


def _table_section(total: LoadWindow, planned: Sequence[Sequence[float]] | None) -> str:
    heads = ["Layer", "Tokens to experts", "Hottest expert", "Its share", "Experts, max / mean", "Ranks, max / mean"]
    heads += ["Ranks as planned, max / mean"] if planned is not None else []
    heads += ["Evenness of experts, 0 to 1"]
    lines = []
    for place, layer in enumerate(total.layers):
        of_experts = total.tokens_of_expert[place]
        num_tokens, most = sum(of_experts), max(of_experts)
        cells = [
            f"{num_tokens:,}",
            f"{of_experts.index(most)}" if most else "none",
            f"{most / num_tokens:.2%}" if most else "",
            f"{max_over_mean(of_experts):.2f}",
            f"{max_over_mean(total.tokens_of_rank[place]):.2f}",
            *([f"{max_over_mean(planned[place]):.2f}"] if planned is not None else []),
            f"{evenness(of_experts):.3f}",
        ]
        lines.append(f'<tr><th scope="row">{layer}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    newline = "\n"
    table = f"""<div class="scroll"><table><caption>{counted(len(lines), "layer")}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{newline.join(lines)}
</tbody></table></div>
"""
    return _section("All layers", "Evenness is the entropy of the experts' shares over its largest value.", table)


def _section(title: str, note: str, content: str) -> str:
    return f'<section>\n<h2>{title}</h2>\n<p class="note">{note}</p>\n{content}</section>\n'


def _map(name: str, label: str, rows: Sequence[int], steps: Sequence[int], columns: str, scale: Scale) -> str:
    """A heat map: the script draws its cells into the canvas; labels and legend stand here.

    Args:
        name: of the canvas.
        label: what it shows, for those who do not see it.
        rows: the numbers of its rows.
        steps: of which some are written, see `ticks`.
        columns: labels below it.
        scale: of its colours.
    """
    height = max(len(rows), min(_MAP_HEIGHT, _LARGEST_ROW * len(rows)))
    places = ticks(rows, max(1, height // _LABEL_HEIGHT), steps)
    marks = "".join(f'<span style="top:{(place + 0.5) / len(rows):.2%}">{rows[place]}</span>' for place in places)
    return f"""<figure>
<div class="frame" style="grid-template-rows:{height}px 1.5rem"><div class="rows" aria-hidden="true">{marks}</div>
<canvas id="{name}" role="img" aria-label="{label}"></canvas>
<div class="columns" aria-hidden="true">{columns}</div></div>
{_legend(scale)}</figure>
"""


def _legend(scale: Scale) -> str:
    shades = ", ".join(_hex(colour) for colour in colours()[::3])
    last = len(scale.ticks) - 1
    signs = {0: "\u2264\u2009", last: "\u2265\u2009"}
    marks = "".join(
        f'<span style="left:{scale.position(ratio):.1%}">{signs.get(place, "")}{text}</span>'
        for place, (ratio, text) in enumerate(scale.ticks)
    )
    return f"""<div class="legend" aria-hidden="true"><span>tokens over mean</span>
<span class="bar"><span class="shades" style="background:linear-gradient(to right, {shades})"></span>{marks}</span>
<span><span class="key" style="background:{_hex(NO_LOAD)}"></span> no tokens</span></div>
"""


def _column_labels(numbers: Sequence[int]) -> str:
    return _labels([(place, f"{numbers[place]}") for place in ticks(numbers, 18, BINARY_STEPS)], len(numbers))


def _labels(texts: Sequence[tuple[int, str]], count: int) -> str:
    return "".join(f'<span style="left:{(place + 0.5) / count:.2%}">{text}</span>' for place, text in texts)


def _spread(count: int, at_most: int) -> range:
    return range(0, count, math.ceil(count / at_most))


def _hex(colour: Colour) -> str:
    return "#" + bytes(colour).hex()


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0;
  --before: #c2410c; --after: #1d6fb8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ed; --soft: #9aa5b1; --line: #343b44;
  --before: #ff9a5c; --after: #62b0f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 1rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0; }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
header ul { margin: 0; padding: 0; list-style: none; }
.note, figcaption { color: var(--soft); margin: .2rem 0 .8rem; max-width: 75ch; }
figure { margin: 0 0 1rem; }
.frame { display: grid; grid-template-columns: 4rem minmax(0, 1fr); column-gap: .5rem; }
.rows, .columns { position: relative; } .columns { grid-column: 2; top: .3rem; }
.rows span { position: absolute; right: 0; transform: translateY(-50%); }
canvas, #line { width: 100%; height: 100%; } canvas { image-rendering: pixelated; cursor: crosshair; }
.columns span, .legend .bar > span[style^=left] { position: absolute; white-space: nowrap;
  transform: translateX(-50%); }
.rows, .columns, .legend, svg text, td, th { font-size: 12px; font-variant-numeric: tabular-nums; }
.legend, caption { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; margin: .5rem 0 0 4.5rem; }
.legend .bar { position: relative; width: 260px; height: 2rem; } .legend .bar > span[style^=left] { top: .9rem; }
.shades { display: block; height: .8rem; }
.key { display: inline-block; width: .8rem; height: .8rem; vertical-align: -1px; }
.key.today, .key.planned { border-radius: 50%; } .key.today { background: var(--before); }
.key.planned { background: var(--after); }
#line { border-bottom: 1px solid var(--line); overflow: visible; }
#line path { fill: none; vector-effect: non-scaling-stroke; stroke: var(--before); stroke-width: 2; }
#line #line-epochs { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 4 3; }
.dots { width: 100%; max-width: 860px; } .dots text { fill: var(--soft); }
.dots .grid { stroke: var(--line); } .dots .way { stroke: var(--soft); stroke-width: 1.5; }
.dots .today { fill: var(--before); } .dots .planned { fill: var(--after); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } caption { text-align: left; }
td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; max-width: 8rem; }
select { font: inherit; }
#tip { position: fixed; z-index: 1; pointer-events: none; padding: .25rem .6rem; max-width: 22rem; border-radius: 4px;
  background: var(--ink); color: var(--paper); font-size: 13px; }
"""

# The scale of colours is that of heat.Scale.shades.
_SCRIPT = """
"use strict";
(() => {
  const element = name => document.getElementById(name);
  const data = JSON.parse(element("data").textContent);
  const tip = element("tip");
  const sum = values => values.reduce((total, value) => total + value, 0);
  const number = value => value.toLocaleString("en", { maximumFractionDigits: 1 });

  function shade(ratio, scale) {
    if (!(ratio > 0)) return data.nothing;
    const place = Math.floor(Math.log(ratio / scale.low) / Math.log(scale.high / scale.low) * data.colours.length);
    return data.colours[Math.min(data.colours.length - 1, Math.max(0, place))];
  }

  // Draws table[row][column] of counts and their means; `tell` says where a cell is, for those who point at it.
  function heatMap(canvas, table, mean, scale, tell) {
    const [height, width] = [table.length, table[0].length];
    canvas.height = height;
    canvas.width = width;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    table.forEach((counts, row) => counts.forEach((count, column) =>
      image.data.set([...shade(count / mean(row, column), scale), 255], 4 * (row * width + column))));
    context.putImageData(image, 0, 0);
    canvas.onpointermove = event => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * width)));
      const row = Math.min(height - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * height)));
      const count = table[row][column];
      const ratio = count ? " = " + (count / mean(row, column)).toFixed(2) + " times the mean" : "";
      tip.textContent = tell(row, column) + ": " + number(count) + " tokens" + ratio;
      tip.hidden = false;
      const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
      const above = event.clientY - tip.offsetHeight - 12;
      tip.style.left = Math.max(0, left) + "px";
      tip.style.top = (above > 0 ? above : event.clientY + 18) + "px";
    };
    canvas.onpointerleave = () => { tip.hidden = true; };
  }

  function layersMap(canvas, table, scale, kind) {
    if (canvas === null || table === null) return;
    const means = table.map(counts => sum(counts) / counts.length);
    heatMap(canvas, table, row => means[row], scale,
      (row, column) => "layer " + data.layers[row] + ", " + kind + " " + column);
  }

  function overTime(places) {
    const ofRanks = data.windows.map(window =>
      window.ranks[0].map((_, rank) => sum(places.map(place => window.ranks[place][rank]))));
    const means = ofRanks.map(counts => sum(counts) / counts.length);
    const byRank = ofRanks[0].map((_, rank) => ofRanks.map(counts => counts[rank]));
    heatMap(element("time-map"), byRank, (_, column) => means[column], data.scales.ranks, (rank, column) => {
      const window = data.windows[column];
      return "rank " + rank + ", " + number(window.steps) + " steps from " + number(window.first) + ", placement " +
        window.placement;
    });
    const figures = data.windows.map((window, column) =>
      means[column] ? sum(places.map(place => Math.max(...window.ranks[place]))) / means[column] : 1);
    const top = Math.max(1.05, ...figures);
    const width = 1000 / figures.length;
    const steps = figures.map((figure, column) => {
      const height = 100 - 100 * (figure - 1) / (top - 1);
      return (column ? "V" : "M0 ") + height.toFixed(2) + "H" + ((column + 1) * width).toFixed(2);
    });
    element("line-path").setAttribute("d", steps.join(""));
    element("line-top").textContent = top.toFixed(2);
  }

  const epochs = data.windows.map((window, column) =>
    column && window.placement !== data.windows[column - 1].placement
      ? "M" + (column * 1000 / data.windows.length).toFixed(2) + " 0V100" : "");
  element("line-epochs").setAttribute("d", epochs.join(""));

  layersMap(element("experts-map"), data.experts, data.scales.experts, "expert");
  layersMap(element("today-map"), data.ranks, data.scales.ranks, "rank");
  layersMap(element("planned-map"), data.planned, data.scales.ranks, "rank");
  const layer = element("layer");
  const draw = () => overTime(layer.value === "all" ? data.layers.map((_, place) => place) : [Number(layer.value)]);
  layer.onchange = draw;
  draw();
})();
"""
