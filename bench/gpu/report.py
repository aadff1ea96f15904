"""The rows of a run as text for people. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIGURE_NAMES = {
    "fraction_of_memory_bound": "of the memory bound",
    "operations_per_second": "TFLOP/s",
    "times_transformers": "x transformers",
}


def row_text(row: Mapping[str, Any]) -> str:
    """One row, with what it was measured by and whether that is met."""
    lines = [f"  {row['status']:9} {row['name']}: {_figures(row)}"]
    bars = row.get("bars") or ([row["bar"]] if row.get("bar") else [])
    lines += [f"{'':12}{bar_text(bar)}" for bar in bars]
    for name, peer in (row.get("peers") or {}).items():
        lines.append(f"{'':12}{peer_text(name, peer)}")
    if peer := row.get("transformers"):
        told = f"{peer['rate']:,.0f} tokens/s ({peer['form']})" if "rate" in peer else peer["error"]
        lines.append(f"{'':12}transformers: {told}")
    lines += [f"{'':12}{note}" for note in row.get("notes") or ()]
    lines += [f"{'':12}wrong: {each}" for each in row.get("wrong") or ()]
    for key in ("left_out", "reason", "error"):
        if key in row:
            lines.append(f"{'':12}{row[key]}")
    return "\n".join(lines)


def _figures(row: Mapping[str, Any]) -> str:
    if "error_ratio" in row:
        return f"{row['num_cases']} cases, worst {row['error_ratio']:.3g} of what rounding allows ({row['worst']})"
    if "equal_tokens" in row:
        return _tokens(row)
    if "limits" in row:
        limits = row["limits"]
        fp8 = "none" if limits["fp8_rate"] is None else f"{limits['fp8_rate'] / 1e12:.0f}"
        return (
            f"{limits['copy_bandwidth'] / 1e9:,.0f} GB/s copied, {limits['bf16_rate'] / 1e12:.0f} TFLOP/s in bf16, "
            f"{fp8} in fp8"
        )
    if "rate" in row:
        layers = f"{row['num_layers']} of {row['layers_of_the_published']} layers, " if "num_layers" in row else ""
        share = row.get("fraction_of_memory_bound", row.get("fraction_of_bound"))
        return f"{layers}{row['rate']:,.0f} {row['unit']}, {share:.0%} of the bound"
    if "seconds" in row:
        rates = [f"{row['bytes_per_second'] / 1e9:,.0f} GB/s"]
        if row["operations"]:
            rates.append(f"{row['operations_per_second'] / 1e12:,.1f} TFLOP/s")
        return f"{row['seconds'] * 1e6:,.1f} us, {', '.join(rates)}, {row['fraction_of_bound']:.0%} of the bound"
    return "no figures"


def _tokens(row: Mapping[str, Any]) -> str:
    text = f"{row['equal_tokens']:.1%} of the tokens equal"
    if "max_logprob_difference" in row:
        text += f", log-probabilities differ by up to {row['max_logprob_difference']:.3g}"
    return text


def bar_text(bar: Mapping[str, Any]) -> str:
    """Met or not, both are said."""
    verdict = "met" if bar["is_met"] else "NOT MET"
    least, reached = (_value(bar["figure"], bar[key]) for key in ("least", "reached"))
    return f"bar: at least {least}, reached {reached}: {verdict}"


def _value(figure: str, value: float | None) -> str:
    if value is None:
        return "nothing"
    if figure == "operations_per_second":
        return f"{value / 1e12:.0f} {FIGURE_NAMES[figure]}"
    if figure == "times_transformers":
        return f"{value:.2f} {FIGURE_NAMES[figure]}"
    return f"{value:.1%} {FIGURE_NAMES[figure]}"


def peer_text(name: str, peer: Mapping[str, Any]) -> str:
    if "error" in peer:
        return f"{name}: could not ({peer['error']})"
    return f"{name}: {peer['seconds'] * 1e6:,.1f} us, so ours is {peer['times_as_fast']:.2f} times as fast"


def summary_text(row: Mapping[str, Any]) -> str:
    """The end of a run: what failed, which bars are met, what was left out."""
    rows = [each for part in row["parts"] for each in part["rows"]]
    failed = [each["name"] for each in rows if each["status"] == "failed"]
    left_out = [each["name"] for each in rows if each["status"] == "left out" or "left_out" in each]
    bars = [bar for each in rows for bar in each.get("bars") or ([each["bar"]] if each.get("bar") else [])]
    num_met = sum(bar["is_met"] for bar in bars)
    lines = [f"{row['environment']['gpu']['name']}, seed {row['seed']}, {row['seconds']:.0f} s"]
    lines.append(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    lines.append(f"bars: {num_met} of {len(bars)} met")
    lines.append(f"left out for time: {', '.join(left_out)}" if left_out else "nothing was left out for time")
    return "\n".join(lines)
