"""`moeserve plan --hardware`: memory, cache, exchange and times of layouts, recomputed from config.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from moeserve import cli
from moeserve.errors import SettingsError
from moeserve.machine import shown_bytes
from moeserve.models.expert_store.budget import AUTO_SHARE, ROUTED_EXPERTS
from moeserve.models.experts_beside_gpu import host_outlook
from moeserve.models.registry import describe
from moeserve.models.summary import Part, summarize
from moeserve.planner.estimate import Estimate, PhaseEstimate, as_text, estimate_layouts
from moeserve.planner.formula import shown_seconds
from moeserve.planner.hardware import TABLE, Hardware
from moeserve.planner.layout import find_layouts
from moeserve.planner.settings import Assumptions, Speed
from moeserve.planner.traffic import fixed_traffic

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published_configs.json").read_text())
PERFECT = Assumptions(memory_efficiency=1, compute_efficiency=1, link_efficiency=1, exchange_latency=0)
H800 = TABLE["h800"]


def folder_of(tmp_path: Path, model: str, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model] | changes))
    return tmp_path


def estimate(
    folder: Path,
    num_ranks: int,
    *,
    tp: int = 1,
    hardware: Hardware = H800,
    assumptions: Assumptions = PERFECT,
    traffic: tuple[int, int] = (4096, 2),
    ranks_per_node: int = 8,
    decode_requests: int = 128,
    prefill_tokens: int = 4096,
    **placement: Any,
) -> Estimate:
    found = find_layouts(folder, num_ranks, None, tp, **placement)
    (layout,) = estimate_layouts(
        found,
        hardware,
        fixed_traffic(*traffic),
        assumptions,
        ranks_per_node=ranks_per_node,
        decode_requests=decode_requests,
        prefill_tokens=prefill_tokens,
    ).layouts
    return layout


def test_experts_of_deepseek_v4_stay_in_mxfp4(tmp_path: Path) -> None:
    """8 ranks with 32 of 256 experts each, in 43 layers of width 4096, experts 2048 wide."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    folder = folder_of(tmp_path, "DeepSeek-V4-Flash", quantization_config=fp8)
    kept = estimate(folder, 8)
    in_fp8 = estimate(folder, 8, assumptions=dataclasses.replace(PERFECT, weights="fp8"))
    num_weights = 43 * 32 * 3 * 4096 * 2048
    assert in_fp8.weight_bytes - kept.weight_bytes == num_weights * 15 // 32  # 8 bits, or 4 and a scale for 32


def test_mixtral_by_hand(tmp_path: Path) -> None:
    """8 ranks of one node, an expert each. 32 layers, 4096 wide, 32 heads of 128, 8 of keys, experts 14336 wide."""
    found = estimate(folder_of(tmp_path, "Mixtral-8x7B"), 8, decode_requests=16)
    expert, attention = 3 * 4096 * 14336, 4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096
    vocabulary = 32000 * 4096
    norms, router = 65 * 4096, 32 * 8 * 4096
    bytes_held = 2 * (32 * (expert + attention) + 2 * vocabulary + norms)
    assert found.weight_bytes == pytest.approx(bytes_held + 4 * router, rel=1e-3)
    cache_bytes = 32 * 2 * 8 * 128 * 2
    assert found.cache_tokens == pytest.approx((80e9 * 0.9 - found.weight_bytes) / cache_bytes, abs=1)
    assert found.cache_requests == found.cache_tokens // 4097

    decode = found.decode
    assert decode is not None
    assert decode.tokens_per_replica == 16
    assert decode.tokens_per_s == pytest.approx(8 * 16 / decode.step_s)
    # Reading takes longer than computing everywhere. Nearly every step of 128 tokens uses each expert.
    reading = 32 * (attention + expert) * 2 + 16 * 4097 * cache_bytes + 32 * 4096 * 8 * 2 + vocabulary * 2
    sent = 16 * 2 * (7 / 8) * 4096 * (2 + 2)
    assert decode.sent_bytes == pytest.approx(sent)
    exchange = sent * decode.fullest_rank / 200e9
    assert decode.exchange_s == pytest.approx(exchange)
    assert decode.step_s == pytest.approx(reading / 3.35e12 + 32 * exchange, rel=1e-3)

    prefill = found.prefill
    assert prefill is not None
    operations = 32 * 2 * 4096 * (attention + 2 * expert * prefill.fullest_rank)
    operations += 32 * 4096 * (4097 / 2) * 4 * 32 * 128 + 32 * 2 * 4096 * 8 * 4096
    exchange = 4096 * 2 * (7 / 8) * 4096 * 4 * prefill.fullest_rank / 200e9
    head = vocabulary * 2 / 3.35e12
    assert prefill.step_s == pytest.approx(operations / 989e12 + 32 * exchange + head, rel=1e-3)


@pytest.mark.slow
def test_latent_attention_in_fp8(tmp_path: Path) -> None:
    """DeepSeek-V3's checkpoint is fp8, so its matrices count a byte; a position of its cache has 576 values."""
    folder = folder_of(tmp_path, "DeepSeek-V3")
    found = estimate(folder, 32, decode_requests=64)
    parts = summarize(describe(folder), "bfloat16").parts
    one_rank = {part.name: part.num_parameters for part in parts} | {"routed experts": 58 * 8 * 3 * 7168 * 2048}
    plain = sum(one_rank[name] for name in ("embedding", "norms", "output head"))
    small = sum(part.num_bytes for part in parts if part.name == "routers")
    in_fp8 = sum(one_rank[name] for name in ("attention", "dense networks", "shared experts", "routed experts"))
    assert found.weight_bytes == in_fp8 + 2 * plain + small
    assert found.cache_tokens == (72_000_000_000 - found.weight_bytes) // (61 * 576 * 2)
    assert found.decode is not None
    absorbed = 128 * 2 * (576 + 512)
    expected = 64 * 4097 * max(576 * 2 / 3.35e12, absorbed / 989e12)
    (shown,) = (text for text in found.decode.formulas if text.startswith("attention:"))
    assert shown.startswith(f"attention: {shown_seconds(expected)}")
    bfloat16 = estimate(folder, 32, assumptions=Assumptions(weights="dtype"), hardware=TABLE["h200"])
    assert bfloat16.weight_bytes == 2 * (in_fp8 + plain) + small
    assert estimate(folder, 32, tp=2).weight_bytes < found.weight_bytes


@pytest.mark.slow
def test_gain_of_halves(tmp_path: Path) -> None:
    """The estimate compares both ways with and without overlap in the assumptions, and has the least tokens for it."""
    folder = folder_of(tmp_path, "DeepSeek-V3")

    def decode_of(num_tokens: int, **assumed: Any) -> PhaseEstimate:
        assumptions = Assumptions(speed="calibrated", **assumed)
        found = estimate(folder, 32, hardware=TABLE["h200"], assumptions=assumptions, decode_requests=num_tokens).decode
        assert found is not None
        return found

    whole, halves = decode_of(192), decode_of(192, overlap=True)
    assert whole.overlap == halves.overlap
    gain = whole.calibrated_overlap
    assert gain == halves.calibrated_overlap
    assert (gain.whole_s, gain.halves_s) == (whole.calibrated_step_s, halves.calibrated_step_s)
    assert gain.halves_s < gain.whole_s
    least = gain.least_tokens
    assert least is not None
    assert 1 < least < 192
    for num_tokens, is_faster in ((least, True), (least * 9 // 10, False)):
        fewer = decode_of(num_tokens).calibrated_overlap
        assert (fewer.halves_s < fewer.whole_s) == is_faster
        assert (fewer.least_tokens is not None) == is_faster
    assert decode_of(192, overlap=True, overlap_decode_tokens=193).calibrated_step_s == gain.whole_s


def test_windows_limit_the_positions_read(tmp_path: Path) -> None:
    """Half of gpt-oss's layers attend to 128 positions."""
    folder = folder_of(tmp_path, "gpt-oss-20b")
    decode = estimate(folder, 1, ranks_per_node=1).decode
    assert decode is not None
    shown = {text.split(":")[0]: text for text in decode.formulas}
    assert f"{128 * 128} x 2048" in shown["attention to 128 positions"]
    assert f"{128 * 4097} x 2048" in shown["attention"]
    assert shown["attention to 128 positions"].splitlines()[-1].startswith("    x 12 = ")


@pytest.mark.slow
def test_an_indexer_limits_the_positions_read(tmp_path: Path) -> None:
    """It reads a key of 128 values of all positions itself."""
    decode = estimate(folder_of(tmp_path, "GLM-5"), 64, decode_requests=16).decode
    assert decode is not None
    shown = {text.split(":")[0]: text for text in decode.formulas}
    assert f"{16 * 2048} x {576 * 2}" in shown["attention to 2048 positions"]
    assert f"{16 * 4097} x {128 * 2}" in shown["indexers"]
    assert "attention" not in shown


def test_loads_determine_the_balance(tmp_path: Path) -> None:
    """Known hot experts are placed apart; without loads, experts are placed in order."""
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"loads": [[9, 9, 1, 1, 1, 1, 1, 1]]}))
    (layout,) = find_layouts(folder, 4, None, 1, loads=loads).layouts
    assert layout.fullest_rank == pytest.approx((9 + 1) / 6)
    (layout,) = find_layouts(folder, 4, None, 1, loads=loads, num_redundant=4).layouts
    assert layout.fullest_rank < 1.2
    # 12 slots in order: ranks have 3 of them, and those of experts 0 to 3 are halves.
    (layout,) = find_layouts(folder, 4, None, 1, num_redundant=4).layouts
    assert layout.fullest_rank == pytest.approx(2.5 / 2)
    assert [holder.experts for holder in layout.holders] == [(0, 1, 2), (3, 4, 5), (6, 7, 0), (1, 2, 3)]
    (routed,) = (part for part in layout.stages[0].parts if part.name == "routed experts")
    assert routed.num_parameters == 32 * 3 * 3 * 4096 * 14336


def test_the_balance_is_the_mean_of_the_layers(tmp_path: Path) -> None:
    """In three layers one of two ranks has all tokens, in one both have the same."""
    folder = folder_of(tmp_path, "Mixtral-8x7B", num_hidden_layers=4)
    loads = tmp_path / "loads.json"
    hot, cold = [5, 0, 0, 0, 0, 0, 0, 0], [1] * 8
    loads.write_text(json.dumps({"loads": [hot, cold, hot, hot]}))
    assert find_layouts(folder, 2, None, 1, loads=loads).layouts[0].fullest_rank == pytest.approx((3 * 2 + 1) / 4)


@pytest.mark.parametrize(
    ("options", "mentioned"), [({"num_redundant": 99}, "8 experts on 4 ranks"), ({"loads": Path("none.json")}, "none")]
)
def test_impossible_placements(options: dict[str, Any], mentioned: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=mentioned):
        find_layouts(folder_of(tmp_path, "Mixtral-8x7B"), 4, None, 1, **options)


def test_layouts_that_do_not_fit_say_what_reading_from_disk_gives(tmp_path: Path) -> None:
    """Qwen3-30B-A3B in fp8 and 20 GB: experts of 3 x 2048 x 768, 8 of 128 in each of 48 layers."""
    hardware = msgspec.structs.replace(H800, memory=20e9)
    layout = estimate(folder_of(tmp_path, "Qwen3-30B-A3B-FP8"), 1, hardware=hardware, ranks_per_node=1)
    expert_bytes = 3 * 2048 * 768
    experts = 48 * 128 * expert_bytes
    room = 20e9 * PERFECT.memory_share * (1 - AUTO_SHARE) - (layout.weight_bytes - experts)
    assert 0.3 < room / experts < 0.6
    read_bytes = 48 * 8 * expert_bytes * (1 - room / experts)
    assert layout.refusal is not None
    assert f"keeps {room / 2**30:.1f} GiB of {experts / 2**30:.1f} GiB of routed experts" in layout.refusal
    assert f"{2e9 / read_bytes:.2g} tokens/s from a disk" in layout.refusal


def test_one_gpu_that_is_too_small_may_leave_experts_to_its_host(tmp_path: Path) -> None:
    """Mixtral in bfloat16, with the experts of 20 of 32 layers."""
    folder, of_layer = folder_of(tmp_path, "Mixtral-8x7B"), 8 * 3 * 4096 * 14336 * 2
    whole = estimate(folder, 1, ranks_per_node=1)
    memory = whole.weight_bytes - 20 * of_layer + of_layer // 2
    hardware = msgspec.structs.replace(H800, memory=memory / PERFECT.memory_share / (1 - AUTO_SHARE))
    refusal = estimate(folder, 1, hardware=hardware, ranks_per_node=1).refusal or ""
    assert f"num_cpu_layers=20 leaves {20 * of_layer / 2**30:.1f} GiB of experts to the host" in refusal
    assert "num_cpu_layers" not in (estimate(folder, 2, hardware=hardware, ranks_per_node=2).refusal or "")


@pytest.mark.parametrize(("num_left", "num_cpu_layers"), [(-1, None), (0, 6), (1, 4), (2, 2), (3, None)], ids=str)
def test_layers_whose_experts_stay_on_the_host(num_left: int, num_cpu_layers: int | None) -> None:
    """Layers 1, 3 and 5 have experts, of which the last `num_left` fit beside the other weights."""
    parts = [Part(ROUTED_EXPERTS, "bfloat16", 30, 3, 3000), Part("attention", "bfloat16", 10, 10, 1000)]
    text = host_outlook(parts, (1, 3, 5), int((1000 + num_left * 1000 + 500) / (1 - AUTO_SHARE)))
    if num_cpu_layers is None:
        assert text is None
    else:
        assert f"num_cpu_layers={num_cpu_layers} leaves {shown_bytes(3000 - 1000 * num_left)} of experts" in (
            text or ""
        )


def test_layouts_that_do_not_fit_show_the_reason(tmp_path: Path) -> None:
    found = find_layouts(folder_of(tmp_path, "DeepSeek-V3"), 8, None, 8)
    traffic, memory = fixed_traffic(4096, 512), Assumptions(memory_share=0.5)
    estimates = estimate_layouts(found, H800, traffic, memory, ranks_per_node=8)
    (layout,) = estimates.layouts
    assert layout.decode is None
    assert layout.refusal is not None
    assert f"{layout.weight_bytes / 2**30:.1f} GiB" in layout.refusal
    text = as_text(estimates)
    assert f"does not fit: {layout.refusal}" in text
    assert "tokens of prompts" not in text  # no header of an empty table
    # With a few bytes more than the weights there is no room for a request.
    share = (layout.weight_bytes + 1000) / 200e9
    large = msgspec.structs.replace(H800, memory=200e9)
    (layout,) = estimate_layouts(found, large, traffic, Assumptions(memory_share=share), ranks_per_node=8).layouts
    assert "KV cache" in (layout.refusal or "")
    assert estimate_layouts(found, large, traffic, PERFECT, ranks_per_node=8).layouts[0].refusal is None


def test_a_small_cache_limits_the_requests(tmp_path: Path) -> None:
    found = estimate(folder_of(tmp_path, "DeepSeek-V3"), 32, traffic=(60_000, 2))
    assert found.decode is not None
    assert found.decode.tokens_per_replica == found.cache_requests < 128


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of(tmp_path, "DeepSeek-V3", num_hidden_layers=5))
    assert cli.main(["plan", folder, "--nodes", "4", "--hardware", "h200"]) == 0
    text = capsys.readouterr().out
    assert "4 x 8 h200, weights in fp8" in text
    assert "13911 + 357 tokens (the 200 requests that come with moeserve" in text
    assert "tokens of prompts" in text
    assert max(map(len, text.splitlines())) < 180
    assert "A step of" not in text
    assert cli.main(["plan", folder, "--nodes", "4", "--hardware", "h200", "--tp", "1", "--traffic", "4096:512"]) == 0
    text = capsys.readouterr().out
    assert "that come with moeserve" not in text
    for wanted in ("Memory:", "A step of decode:", "A step of prefill:", "dispatch: ", "tokens per second"):
        assert wanted in text


def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(folder_of(tmp_path, "Mixtral-8x7B")), "--ranks", "8", "--hardware", "h100", "--json"]
    assert cli.main([*command, "--overlap", "--compute-efficiency", "0.5", "--decode-requests", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    estimates = found["estimates"]
    assert [(each["tp"], each["dp"]) for each in estimates["layouts"]] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert len(found["layouts"]) == 4
    assert (estimates["num_nodes"], estimates["ranks_per_node"], estimates["hardware"]) == (1, 8, "h100")
    assert estimates["assumptions"]["overlap"] is True
    assert estimates["assumptions"]["compute_efficiency"] == 0.5
    assert {each["decode"]["tokens_per_replica"] for each in estimates["layouts"]} == {4}
    for step in (each[phase] for each in estimates["layouts"] for phase in ("decode", "prefill")):
        assert step["tokens_per_s"] / step["calibrated_tokens_per_s"] == pytest.approx(
            step["calibrated_step_s"] / step["step_s"]
        )
        assert not any("passes" in formula for formula in step["formulas"])


def test_formulas_of_the_calibrated_estimate(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    optimum, calibrated = (estimate(folder, 8, assumptions=Assumptions(speed=speed)) for speed in get_args(Speed))
    assert optimum.decode is not None
    assert calibrated.decode is not None
    assert optimum.decode.step_s == calibrated.decode.step_s < calibrated.decode.calibrated_step_s
    assert optimum.decode.fullest_rank < calibrated.decode.fullest_rank
    assert any("passes" in formula for formula in calibrated.decode.formulas)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--gpus-per-node"),
        (["--ranks", "8", "--nodes", "1"], "--nodes"),
        (["--ranks", "8", "--gpus-per-node", "2"], "--gpus-per-node 2"),
        (["--nodes", "0"], "--nodes 0"),
        (["--ranks", "8", "--traffic", "1:1"], "--traffic"),
        (["--ranks", "8", "--overlap"], "--overlap"),
        (["--ranks", "8", "--hardware", "h99"], "h99"),
        (["--ranks", "0", "--hardware", "h100"], "--ranks 0"),
    ],
)
def test_impossible_commands(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(folder_of(tmp_path, "Mixtral-8x7B")), *arguments]) == 1
    assert message in capsys.readouterr().err
