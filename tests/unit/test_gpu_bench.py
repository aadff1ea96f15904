"""What bench/gpu counts, budgets and says, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.bench.gpu import costs, limits, run, throughput
from moeserve.bench.gpu.costs import Bar, GpuLimits, Work
from moeserve.bench.gpu.part import Diary, work_through
from moeserve.bench.gpu.report import bar_text, peer_text, row_text, summary_text
from moeserve.bench.gpu.shapes import MOE_SHAPES, AttentionShape, LatentShape, MoEShape
from moeserve.bench.gpu.supervise import PARTS, RANKS, Done, Part, Told, budget, missing_rows, run_part

LIMITS = GpuLimits(copy_bandwidth=1e12, bf16_rate=4e14, fp8_rate=None)  # made up, easy to divide by
ENVIRONMENT = {"gpu": {"name": "No GPU 9000", "driver": "1.2"}, "versions": {}}


# What a call must move and multiply, counted by hand.


def test_products_of_a_layer() -> None:
    """2 tokens, each with 2 of 4 experts; 3 experts have rows. 10 wide, experts of 6."""
    shape = MoEShape(num_experts=4, hidden=10, width=6, top_k=2)
    work = costs.products_work(shape, num_tokens=2, num_hit=3, format="bf16")
    gate_up = 3 * 12 * 10 * 2 + 2 * 10 * 2 + 4 * 6 * 2  # weights, the tokens once, a result for each row
    down = 3 * 10 * 6 * 2 + 4 * 6 * 2 + 4 * 10 * 2
    assert work.num_bytes == gate_up + down
    assert work.operations == 2 * 4 * (12 * 10 + 10 * 6)
    with_bias = MoEShape(num_experts=4, hidden=10, width=6, top_k=2, has_bias=True)
    biased = costs.products_work(with_bias, num_tokens=2, num_hit=3, format="bf16")
    assert biased.num_bytes == work.num_bytes + 3 * (12 + 10) * 2


def test_products_of_8_bit_blocks() -> None:
    """One byte for a weight and a row's number, two for a result, four for each scale."""
    shape = MoEShape(num_experts=4, hidden=256, width=200, top_k=2)
    work = costs.products_work(shape, num_tokens=3, num_hit=2, format="fp8")
    gate_up = 2 * 400 * 256 + 3 * 256 + 4 * (2 * 2 * 2 * 2 + 3 * 2) + 6 * 200 * 2  # gates and ups: 2 x 2 blocks each
    down = 2 * 256 * 200 + 6 * 200 + 4 * (2 * 2 * 2 + 6 * 2) + 6 * 256 * 2
    assert work.num_bytes == gate_up + down
    assert work.operations == 2 * 6 * (400 * 256 + 256 * 200)


def test_a_whole_layer_adds_the_order_and_the_sum() -> None:
    shape = MoEShape(num_experts=4, hidden=10, width=6, top_k=2)
    products = costs.products_work(shape, num_tokens=2, num_hit=3, format="bf16")
    whole = costs.experts_work(shape, num_tokens=2, num_hit=3)
    assert whole.num_bytes == products.num_bytes + 2 * 8 * 4 + (4 + 2) * 10 * 2 + 4 * (8 + 4)
    assert whole.operations == products.operations


def test_attention() -> None:
    """4 query heads, 2 of keys and values, 8 wide; a row after 9 others, and 3 rows of a prompt."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8)
    work = costs.attention_work(shape, [(1, 10), (3, 3)])
    assert work.num_bytes == (10 + 3) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (10 + 1 + 2 + 3)
    windowed = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8, window=2)
    work = costs.attention_work(windowed, [(1, 10), (3, 7)])
    assert work.num_bytes == (2 + 4) * 2 * 2 * 8 * 2 + (1 + 3) * 2 * 4 * 8 * 2
    assert work.operations == 4 * 4 * 8 * (2 + 3 * 2)


def test_latent_attention() -> None:
    """Vectors of 16 + 4 numbers: read twice for 100 heads of one row."""
    shape = LatentShape(num_heads=100, latent_size=16, rotary_size=4)
    work = costs.latent_work(shape, [(1, 10)])
    assert work.num_bytes == 2 * 10 * 20 * 2 + 100 * (20 + 16) * 2
    assert work.operations == 2 * 100 * (20 + 16) * 10


def test_rows() -> None:
    assert costs.norm_work(3, 10, adds=False).num_bytes == 2 * (2 * 30 + 10)
    assert costs.norm_work(3, 10, adds=True).num_bytes == 2 * (4 * 30 + 10)
    assert costs.activation_work(3, 10).num_bytes == 2 * 3 * 30
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8)
    assert costs.rotary_work(shape, 3).num_bytes == (4 * 3 * 4 * 4 + 4 * 3 * 2 * 8) * 2 + 8 * 3 * 4
    assert costs.quantize_work(3, 200).num_bytes == 600 * 2 + 600 + 4 * 3 * 2
    assert costs.route_work(3, 16, 2).num_bytes == 3 * (64 + 24)
    assert costs.weigh_work(3, 100).num_bytes == 3 * (200 + 200 + 4)
    assert costs.greedy_work(3, 100).num_bytes == 600
    assert costs.draw_work(3, 100).num_bytes == 1200


def test_bounds() -> None:
    work = Work(num_bytes=2e9, operations=4e11)
    assert work.memory_seconds(LIMITS) == 2e-3
    assert work.bound_seconds(LIMITS) == 2e-3
    assert Work(2e9, 4e12).bound_seconds(LIMITS) == 1e-2
    assert Work(2e9, 4e12, "fp8").bound_seconds(LIMITS) == 5e-3, "twice the rate of bf16, where none was measured"
    assert LIMITS.rate("bf16") == 4e14
    assert GpuLimits(1.0, 2.0, 3.0).rate("fp8") == 3.0


def test_bars() -> None:
    bars = {tokens: costs.products_bar(tokens, "bf16") for tokens in (1, 16, 64, 128, 4096, 16384)}
    memory = "fraction_of_memory_bound"
    assert bars[1] == bars[16] == Bar(memory, 0.70)
    assert bars[64] is None
    assert bars[128] == Bar(memory, 0.85)
    assert bars[4096] == bars[16384] == Bar("operations_per_second", 500e12)
    assert costs.products_bar(4096, "fp8") == Bar("operations_per_second", 1000e12)
    assert [(bar.figure, bar.least) for bar in throughput.DECODE_BARS] == [("times_transformers", 4.0), (memory, 0.60)]


@pytest.mark.parametrize(("reached", "is_met"), [(0.70, True), (0.699, False), (None, False)])
def test_a_bar_is_met_or_not(reached: float | None, is_met: bool) -> None:
    figures = {} if reached is None else {"fraction_of_memory_bound": reached}
    verdict = Bar("fraction_of_memory_bound", 0.70).verdict(figures)
    assert verdict == {"figure": "fraction_of_memory_bound", "least": 0.70, "reached": reached, "is_met": is_met}
    assert bar_text(verdict).endswith(": met" if is_met else ": NOT MET")


def test_figures_of_a_time() -> None:
    pytest.importorskip("triton")
    from moeserve.bench.gpu.kernels import figures

    told = figures(4e-3, Work(2e9, 4e11), LIMITS)
    assert told["bytes_per_second"] == 5e11
    assert told["operations_per_second"] == 1e14
    assert told["fraction_of_memory_bound"] == 0.5
    assert told["fraction_of_bound"] == 0.5


def test_what_is_measured_is_told_by_name_alone() -> None:
    """Names are unlike, and nothing is made before its turn."""
    pytest.importorskip("triton")
    from moeserve.bench.gpu.kernels import NUM_TOKENS, items

    names = [item.name for item in items()]
    assert len(set(names)) == len(names)
    for shape in MOE_SHAPES:
        for num_tokens in NUM_TOKENS:
            for kind in ("products bf16", "experts bf16", "products fp8"):
                assert f"{kind} {shape}, {num_tokens} tokens" in names


# Draws beside exact numbers.


def drawn(scores_RV: Tensor, temperature_R: Tensor, top_p: float, numbers_R: Tensor) -> Tensor:
    """Row by row, in float64."""
    tokens = []
    for scores, temperature, number in zip(scores_RV.double(), temperature_R, numbers_R, strict=True):
        ordered, order = (scores / temperature).softmax(-1).sort(descending=True, stable=True)
        cumulative = ordered.cumsum(-1)
        total = cumulative[int(torch.searchsorted(cumulative, top_p * cumulative[-1:]))]
        tokens.append(int(order[int(torch.searchsorted(cumulative, (number * total)[None], right=True))]))
    return torch.tensor(tokens)


def test_draws_next_to_a_border_are_right_on_either_side() -> None:
    """In a flat row of a large vocabulary, the bound of `top_p` is next to some border almost always."""
    pytest.importorskip("triton")
    from moeserve.bench.gpu.check_attention import SAMPLING_SLACK, _draw_error

    generator = torch.Generator().manual_seed(0)
    scores_RV = 3 * torch.randn(6, 151936, generator=generator)
    scores_RV[:, ::7] = -torch.inf
    temperature_R = torch.full((6,), 1.8, dtype=torch.float64)
    numbers_R = torch.rand(6, generator=generator, dtype=torch.float64)

    def error(top_p: float, numbers_R: Tensor = numbers_R, drawn_by: Tensor | None = None) -> float:
        tokens_R = drawn(scores_RV, temperature_R, top_p, numbers_R if drawn_by is None else drawn_by)
        return _draw_error(scores_RV, temperature_R, 0, 0.9, 0.0, numbers_R, tokens_R)

    near = 0.9 * SAMPLING_SLACK
    last_R = torch.full_like(numbers_R, 1 - 2.0**-53)  # the last token that is kept
    for numbers in (numbers_R, last_R):
        assert error(0.9, numbers) <= 1e-3
        assert error(0.9 + near, numbers) <= 1
        assert error(0.9 - near, numbers) <= 1
    assert not torch.equal(*(drawn(scores_RV, temperature_R, 0.9 + off, last_R) for off in (-near, near)))
    assert error(0.9, drawn_by=(numbers_R + 0.02) % 1) > 1
    assert error(0.8) > 1
    assert error(1.0) > 1


# Decoding of whole models.


def test_bytes_of_a_decode_step(tmp_path: Path) -> None:
    """Mixtral's with 2 layers: each token reads 2 of 8 experts, and 64 of them nearly all."""
    mixtral = next(model for model in throughput.MODELS if model.name == "Mixtral-8x7B")
    throughput.write_config(mixtral, 2, tmp_path)
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    experts = 8 * 3 * 4096 * 14336
    rest = 2 * (attention + 8 * 4096 + 2 * 4096) + 4096 + 32000 * 4096
    cache = 2 * 2 * 8 * 128 * 2  # layers, keys and values, heads, their size, bytes
    one = 2 * (rest + 2 * experts * 2 / 8) + 512 * cache
    assert throughput.decode_bytes(tmp_path, 1, 512) == pytest.approx(one, rel=1e-6)
    many = 2 * (rest + 2 * experts * (1 - 0.75**64)) + 64 * 512 * cache
    assert throughput.decode_bytes(tmp_path, 64, 512) == pytest.approx(many, rel=1e-6)


def test_layers_are_left_out_where_they_do_not_fit() -> None:
    mixtral = next(model for model in throughput.MODELS if model.name == "Mixtral-8x7B")
    layer = 2 * (8 * 3 * 4096 * 14336 + 4096 * (2 * 4096 + 2 * 1024) + 2 * 4096) + 4 * 8 * 4096  # float32 routers
    outside = 2 * (2 * 32000 * 4096 + 4096)
    assert throughput.layers_that_fit(mixtral, outside + 5 * layer) == 5
    assert throughput.layers_that_fit(mixtral, outside + 5 * layer - 1) == 4
    assert throughput.layers_that_fit(mixtral, 0) == 2
    assert throughput.layers_that_fit(mixtral, 1e15) == 32


def test_decode_figures() -> None:
    told = throughput.decode_figures([900.0, 1100.0, 1000.0], 10, 5e9, LIMITS)
    assert told["rate"] == 1000.0
    assert told["bound"] == 2000.0  # 200 steps of 10 tokens in a second
    assert told["fraction_of_memory_bound"] == 0.5


def test_the_engine_may_be_as_far_from_float32_as_transformers_is() -> None:
    from moeserve.bench.gpu.engine import bf16_figures, why_wrong

    exact = torch.tensor([-1.0, -2.0])
    near = bf16_figures(exact + 0.02, exact + torch.tensor([0.01, -0.01]), exact)
    assert near["max_logprob_difference"] == pytest.approx(0.03)
    assert why_wrong(near) == []
    far = bf16_figures(exact + 0.04, exact + 0.01, exact)
    (reason,) = why_wrong(far)
    assert "off by 0.04 on average, and may be by 0.031" in reason
    assert why_wrong(near | {"mean_error": float("nan")})


def test_each_process_of_a_part_has_one_checkpoint_and_dtype() -> None:
    """Which it makes once, and whose kernels it compiles once."""
    from moeserve.bench.gpu import engine, ranks

    engine_part = next(part for part in PARTS if part.name == "engine")
    for part, comparisons in ((engine_part, engine.COMPARISONS), (RANKS, ranks.COMPARISONS)):
        assert len({comparison.name for comparison in comparisons}) == len(comparisons)
        for share in range(part.num_processes):
            of_process = comparisons[share :: part.num_processes]
            assert len({(each.family, each.dtype) for each in of_process if not each.is_wide}) == 1
    assert {each.family for each in engine.COMPARISONS} == set(engine.FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_compared_with_transformers(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, all but the GPU; and tokens that are others, or too unlikely, are found."""
    from moeserve.bench.gpu import engine

    comparison = next(each for each in engine.COMPARISONS if each.dtype == dtype)
    row = engine.compare(comparison, "cpu", 3)
    assert row["name"] == f"Mixtral, {dtype}, graphs"
    assert (row["status"], row["wrong"]) == ("passed", []), row
    assert row["num_tokens"] == len(engine.PROMPT_LENGTHS) * engine.NUM_TOKENS
    assert row_text(row).startswith(f"  passed    {comparison.name}: ")

    def shifted(*args: Any, **settings: Any) -> list[engine.Answer]:
        answers = engine_answers(*args, **settings)
        return [engine.Answer([(token + 1) % 160 for token in each.tokens], each.logprobs) for each in answers]

    engine_answers = engine.answers_of
    monkeypatch.setattr(engine, "answers_of", shifted)
    assert engine.compare(comparison, "cpu", 3)["status"] == "failed"


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_two_ranks_are_compared_with_transformers(layout: str) -> None:
    """On a CPU, all but the GPUs."""
    from moeserve.bench.gpu import ranks

    name = f"Mixtral, float32, {layout}, all_to_all"
    comparison = next(each for each in ranks.COMPARISONS if each.name == name)
    row = ranks.compare_ranks(comparison, "cpu", 3)
    assert (row["name"], row["status"], row["equal_tokens"]) == (name, "passed", 1.0), row


def test_what_is_not_installed_is_left_out() -> None:
    from moeserve.bench.gpu import ranks

    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed")
    row = ranks.compare_ranks(ranks.COMPARISONS[-1], "cpu", 3)
    assert row["status"] == "left out"
    assert "the package deep_ep is not installed" in row_text(row)


# Time, processes and what becomes of them.


def test_what_a_part_leaves_goes_to_those_after_it() -> None:
    assert sum(part.share for part in PARTS) == pytest.approx(1)
    left = 460.0
    budgets = []
    for index, part in enumerate(PARTS):
        budgets.append(budget(part, PARTS[index + 1 :], left))
        left -= budgets[-1]
    assert sum(budgets) == pytest.approx(460)
    assert budgets[0] == pytest.approx(460 * PARTS[0].share)
    last = PARTS[-1]
    assert budget(last, (), 300.0) == 300.0
    assert budget(PARTS[2], (last,), 300.0) == pytest.approx(300 * PARTS[2].share / (PARTS[2].share + last.share))
    assert budget(last, (), -3.0) == 0.0


def test_pieces_are_told_as_they_are_done(tmp_path: Path) -> None:
    left = [1.0]

    def fine() -> Any:
        yield {"name": "fine", "status": "passed"}

    def faulty() -> Any:
        yield {"name": "its first row", "status": "told"}
        left[0] = 0.0
        raise ValueError("oh")

    diary = Diary(tmp_path / "rows")
    work_through([("fine", fine), ("faulty", faulty), ("late", fine)], diary, lambda: left[0])
    told = Told()
    rows = told.read(diary.path)
    assert [(row["name"], row["status"]) for row in rows] == [
        ("fine", "passed"),
        ("its first row", "told"),
        ("faulty", "failed"),
        ("late", "left out"),
    ]
    assert rows[2]["error"] == "ValueError: oh"
    assert told.planned == ["fine", "faulty", "late"]
    assert told.ended == {"fine", "faulty", "late"}
    assert told.read(diary.path) == []


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    told = Told()
    assert told.read(path) == []
    path.write_text('{"planned": ["a"]}\n{"done": {"na')
    assert told.read(path) == []
    assert told.planned == ["a"]
    with path.open("a") as file:
        file.write('me": "a"}}\n')
    assert told.read(path) == [{"name": "a"}]


@pytest.mark.parametrize("part", ["checks", "engine", "ranks", "kernels"])
@pytest.mark.parametrize("share", [0.9, 0.3])
def test_what_did_not_end(part: Any, share: float) -> None:
    """What began late may have been compiling: only what had most of the time is taken to be stuck."""
    begun_at = time.monotonic() - 20 * share
    told = Told(planned=["done", "under way", "later"], begun="under way", begun_at=begun_at, ended={"done"})
    stopped = missing_rows(part, told, -15, True, 20.0, "")
    is_stuck = part != "kernels" and share > 0.5
    assert [(row["name"], row["status"]) for row in stopped] == [
        ("under way", "failed" if is_stuck else "left out"),
        ("later", "left out"),
    ]
    if is_stuck:
        assert "still running after 18 of the part's 20 s" in stopped[0]["error"]
    died = missing_rows(part, told, -11, False, 20.0, "Segmentation fault")
    assert [row["status"] for row in died] == ["failed", "failed"]
    assert "exit code -11" in died[0]["error"]
    assert died[0]["log"] == "Segmentation fault"
    (unborn,) = missing_rows(part, Told(), 1, False, 20.0, "ImportError")
    assert unborn["status"] == "failed"
    assert missing_rows(part, Told(planned=["a"], ended={"a"}), 0, False, 20.0, "") == []


PROGRAM = """
import sys, time
from pathlib import Path
from moeserve.bench.gpu.part import Diary

options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
index = int(options["--share"].split("/")[0])
diary = Diary(Path(options["--rows"]))
if index == 0:  # ends as it should
    diary.plan(["a"])
    diary.begin("a")
    diary.tell({"name": "a", "status": "passed", "seed": int(options["--seed"])})
    diary.end("a")
elif index == 1:  # is ended by what it does
    diary.plan(["b", "c"])
    diary.begin("b")
    print("a fault", flush=True)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
else:  # never ends
    diary.plan(["d"])
    diary.begin("d")
    time.sleep(600)
"""


def test_a_part_goes_on_beside_a_process_that_dies_and_one_that_hangs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    heard: list[str] = []
    started = time.monotonic()
    done = run_part(
        Part("checks", 1.0, num_processes=3),
        8.0,
        7,
        lambda row: heard.append(row["name"]),
        (sys.executable, str(program)),
    )
    assert time.monotonic() - started < 30
    rows = {row["name"]: row for row in done.rows}
    assert sorted(heard) == sorted(rows) == ["a", "b", "c", "d"]
    assert rows["a"] == {"name": "a", "status": "passed", "seed": 7}
    assert "exit code -9" in rows["b"]["error"]
    assert rows["b"]["log"] == "a fault\n"
    assert rows["c"]["error"] == "its process ended before it"
    assert "still running" in rows["d"]["error"]
    assert [row["name"] for row in done.failed] == ["b", "c", "d"]


# What is said at the end.

CHECK_ROW = {
    "name": "norms",
    "status": "failed",
    "num_cases": 4,
    "error_ratio": 3.5,
    "worst": "rms_norm bfloat16 1 x 4096",
    "wrong": ["rms_norm bfloat16 1 x 4096"],
    "left_out": "what comes after 'x': no time was left",
}
KERNEL_ROW = {
    "name": "products bf16 Mixtral-8x7B, 16 tokens",
    "status": "told",
    "seconds": 1e-3,
    "bytes": 1e9,
    "operations": 2e9,
    "bytes_per_second": 1e12,
    "operations_per_second": 2e12,
    "fraction_of_memory_bound": 0.5,
    "fraction_of_bound": 0.5,
    "peers": {"torch grouped_mm": {"seconds": 2e-3, "times_as_fast": 2.0}, "other": {"error": "no such"}},
    "bar": {"figure": "fraction_of_memory_bound", "least": 0.7, "reached": 0.5, "is_met": False},
    "notes": ["8 of 8 experts have rows"],
}
DECODE_ROW = {
    "name": "Mixtral-8x7B, decode, batch 64",
    "status": "told",
    "num_layers": 17,
    "layers_of_the_published": 32,
    "rate": 5000.0,
    "unit": "tokens/s",
    "fraction_of_memory_bound": 0.62,
    "transformers": {"rate": 1000.0, "form": "sdpa, eager"},
    "bars": [
        {"figure": "times_transformers", "least": 4.0, "reached": 5.0, "is_met": True},
        {"figure": "fraction_of_memory_bound", "least": 0.6, "reached": 0.62, "is_met": True},
    ],
}


def test_the_line_of_json_is_complete_in_itself() -> None:
    late = {"name": "late", "status": "left out", "reason": "no time was left"}
    done = [Done("checks", 100.0, 90.0, [CHECK_ROW]), Done("kernels", 50.0, 50.0, [KERNEL_ROW, late])]
    row = run.result_row(done, ENVIRONMENT, 5, 480, 141.0)
    assert row["passed"] is False
    assert row["left_out"] == ["norms", "late"]
    assert [part["part"] for part in row["parts"]] == ["checks", "kernels"]
    assert row["parts"][1] == {"part": "kernels", "budget": 50.0, "seconds": 50.0, "rows": [KERNEL_ROW, late]}
    assert row["environment"] == ENVIRONMENT
    assert row["seed"] == 5
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    text = summary_text(row)
    assert text == textwrap.dedent("""\
        No GPU 9000, seed 5, 141 s
        failed: norms
        bars: 0 of 1 met
        left out for time: norms, late""")
    green = run.result_row([Done("kernels", 50.0, 50.0, [KERNEL_ROW, DECODE_ROW])], ENVIRONMENT, 5, 480, 141.0)
    assert green["passed"], "a bar that is not met fails nothing"
    assert "nothing failed" in summary_text(green)
    assert "bars: 2 of 3 met" in summary_text(green)
    assert "nothing was left out for time" in summary_text(green)


def test_text_of_rows() -> None:
    text = row_text(CHECK_ROW)
    assert "failed    norms: 4 cases, worst 3.5 of what rounding allows" in text
    assert "wrong: rms_norm bfloat16 1 x 4096" in text
    assert "no time was left" in text
    text = row_text(KERNEL_ROW)
    assert "1,000.0 us, 1,000 GB/s, 2.0 TFLOP/s, 50% of the bound" in text
    assert "bar: at least 70.0% of the memory bound, reached 50.0% of the memory bound: NOT MET" in text
    assert "torch grouped_mm: 2,000.0 us, so ours is 2.00 times as fast" in text
    assert "other: could not (no such)" in text
    assert "8 of 8 experts have rows" in text
    text = row_text(DECODE_ROW)
    assert "17 of 32 layers, 5,000 tokens/s, 62% of the bound" in text
    assert "transformers: 1,000 tokens/s (sdpa, eager)" in text
    assert "at least 4.00 x transformers, reached 5.00 x transformers: met" in text
    rate = {"figure": "operations_per_second", "least": 500e12, "reached": None, "is_met": False}
    assert bar_text(rate) == "bar: at least 500 TFLOP/s, reached nothing: NOT MET"
    assert "12.0 us" in peer_text("x", {"seconds": 12e-6, "times_as_fast": 1.0})
    told = {"name": "limits before", "status": "told", "limits": {"copy_bandwidth": 3e12, "bf16_rate": 7e14}}
    told["limits"] |= {"fp8_rate": None}  # type: ignore[operator]
    assert "3,000 GB/s copied, 700 TFLOP/s in bf16, none in fp8" in row_text(told)
    told = {"name": "Mixtral, float32, graphs", "status": "passed", "equal_tokens": 1.0, "wrong": []}
    assert row_text(told) == "  passed    Mixtral, float32, graphs: 100.0% of the tokens equal"
    told |= {"equal_tokens": 0.9, "max_logprob_difference": 0.25, "wrong": ["far"]}
    assert "90.0% of the tokens equal, log-probabilities differ by up to 0.25" in row_text(told)
    assert "wrong: far" in row_text(told)
    assert "no figures" in row_text({"name": "x", "status": "left out", "reason": "no time was left"})


# Where it cannot run.


def test_without_a_gpu_it_ends_with_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "moeserve.bench.gpu.run", "--seconds", "30"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"torch": "2.10.1", "triton": "3.5.0", "transformers": "5.0.0"}, "torch 2.10.1 is too old"),
        ({"torch": "2.11.0+cu130", "triton": "", "transformers": "5.0.0"}, "triton is not installed"),
        ({"torch": "2.11.0", "triton": "3.5.0", "transformers": "4.57.1"}, "transformers 4.57.1 is too old"),
        ({"torch": "2.11.0", "triton": "3.5.0", "transformers": "5.0.0"}, "torch sees none"),
    ],
)
def test_why_it_cannot_run(versions: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "installed_version", versions.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = run.why_not()
    assert told is not None
    assert reason in told
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (run.why_not() is None) == ("sees none" in reason)


def test_one_part_alone_has_all_the_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, float]] = []

    def take(part: Part, seconds: float, seed: int, tell: Any) -> Done:
        seen.append((part.name, seconds))
        return Done(part.name, seconds, 0.0, [])

    monkeypatch.setattr(run, "run_part", take)
    run.run_parts("kernels", 1, time.monotonic() + 100, 0)
    assert seen[0][0] == "kernels"
    assert seen[0][1] == pytest.approx(100, abs=1)
    seen.clear()
    run.run_parts(None, 1, time.monotonic() + 100, 0)
    assert [name for name, _ in seen] == ["checks", "engine", "kernels", "throughput"]
    assert seen[-1][1] == pytest.approx(100, abs=1), "nobody before it took any time"
    seen.clear()
    run.run_parts(None, 2, time.monotonic() + 100, 0)
    assert [name for name, _ in seen] == ["checks", "engine", "ranks", "kernels", "throughput"]
    assert seen[-1][1] == pytest.approx(100, abs=1)


def test_ranks_need_two_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "why_not", lambda: None)
    monkeypatch.setattr(run, "count_gpus", lambda: 1)
    assert run.main(["--only", "ranks"]) == 1
    assert "compares two GPUs with one, and torch sees 1" in capsys.readouterr().err


def test_the_driver_is_read_from_where_it_tells(tmp_path: Path) -> None:
    from moeserve.bench.gpu.limits import driver_version

    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    assert driver_version(path) == "580.95.05"


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV2"])
def test_throughput_of_a_tiny_model_on_a_cpu(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU: settings that both take, rows and their bars."""
    published = next(model for model in throughput.PUBLISHED if model.family == family)
    tiny = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)
    latent = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, moe_intermediate_size=16)
    settings = published.settings | tiny | (latent if family == "DeepseekV2" else {})
    for name, value in dict(DEVICE="cpu", BATCHES=(3, 1), COMPARED_BATCH=3, PROMPT_TOKENS=5, NEW_TOKENS=9).items():
        monkeypatch.setattr(throughput, name, value)
    monkeypatch.setattr(throughput, "PREFILL_TOKENS", 40)
    monkeypatch.setattr(throughput, "gpu_memory", lambda: 2**40)
    monkeypatch.setattr(throughput, "synchronize", lambda: None)
    monkeypatch.setattr(throughput, "decode_rate", lambda generate, workload, source: 100.0 * workload.batch)
    model = throughput.Model("tiny", family, 3, settings)
    rows = list(throughput.measure(model, LIMITS, lambda: 100.0))
    assert [(row["name"], row["status"]) for row in rows] == [
        ("tiny, decode, batch 3", "told"),
        ("tiny, decode, batch 1", "told"),
        ("tiny, prefill of 40", "told"),
    ], rows
    assert {(row["num_layers"], row["layers_of_the_published"]) for row in rows} == {(3, 3)}
    peer = rows[0]["transformers"]
    if "rate" in peer:  # which such a short run may not tell
        assert rows[0]["times_transformers"] == pytest.approx(300 / peer["rate"])
    assert not [error for error in peer["errors"].values() if "took" not in error], peer
    assert [bar["figure"] for bar in rows[0]["bars"]] == ["times_transformers", "fraction_of_memory_bound"]
    assert "bars" not in rows[1]
    late = list(throughput.measure(model, LIMITS, lambda: -1.0))
    assert {row["status"] for row in late} == {"left out"}
    assert json.dumps(rows + late, allow_nan=False)


class FakeGpu:
    """A clock that calls move, and what torch.cuda is asked for in order to read it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_replays = 0

    def take(self, seconds: float) -> None:
        self.seconds += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.seconds

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class Graph:
            length = 0.0

            def replay(self) -> None:
                gpu.num_replays += 1
                gpu.take(self.length)

        @contextmanager
        def record(graph: Graph) -> Iterator[None]:
            began = gpu.seconds
            yield
            graph.length = gpu.seconds - began

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, stand_in in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": record,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda used: nullcontext(),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize("cost", [3e-6, 5e-4, 0.5])
def test_a_call_is_timed_without_what_empties_the_cache(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(limits, "DEVICE", "cpu")
    monkeypatch.setattr(limits.ColdTimer, "_flush", lambda self: gpu.take(4e-5))
    timer = limits.ColdTimer()
    assert timer.seconds(lambda: gpu.take(cost)) == pytest.approx(cost, rel=1e-6)
    assert timer.seconds_without_graph(lambda: gpu.take(cost)) == pytest.approx(cost, rel=1e-6)
    # Two replays of each graph are not counted: of flushes alone, and with the call.
    assert gpu.num_replays == 2 + limits.NUM_REPLAYS + 2 + (3 if cost == 0.5 else limits.NUM_REPLAYS)


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_a_run_from_beginning_to_end(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(part: Part, seconds: float, seed: int, tell: Any) -> Done:
        row = {"name": "a", "status": status if part.name == "engine" else "told", "equal_tokens": 0.5}
        tell(row)
        return Done(part.name, seconds, 1.0, [row])

    monkeypatch.setattr(run, "why_not", lambda: None)
    monkeypatch.setattr(run, "count_gpus", lambda: 1)
    monkeypatch.setattr(limits, "gpu_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(run, "run_part", take)
    path = tmp_path / "gpu.jsonl"
    assert run.main(["--json", str(path), "--seed", "5", "--seconds", "100"]) == (1 if status == "failed" else 0)
    row = json.loads(path.read_text())
    assert row["passed"] == (status == "passed")
    assert [part["part"] for part in row["parts"]] == ["checks", "engine", "kernels", "throughput"]
    assert row["seed"] == 5
    assert row["parts"][0]["budget"] == pytest.approx(90 * PARTS[0].share, abs=1)
    assert f"  {status:9} a: 50.0% of the tokens equal" in capsys.readouterr().out
    assert run.main(["--only", "kernels"]) == 0
