"""The harness of the benchmarks: checkpoints, rounds, ratios, work of a step, rates without fixed costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moeserve.bench import decode, harness
from moeserve.bench.checkpoints import CONFIGS, find_checkpoint, make_checkpoint
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Workload
from moeserve.bench.limits import LimitProbe, MachineLimits, Work, cache_bytes
from moeserve.errors import CheckpointError


@pytest.mark.parametrize(("name", "billions"), [("mixtral-mini", 1.52), ("deepseek-mini", 1.74), ("qwen3-mini", 1.32)])
def test_checkpoints_have_the_documented_sizes(name: str, billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)


def test_checkpoint_is_made_once_and_never_over_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    interrupted = tmp_path / "bench" / ".mixtral-tiny.partial"
    interrupted.mkdir(parents=True)
    (interrupted / "model-00001-of-00009.safetensors").write_bytes(b"half a shard")
    folder = find_checkpoint("mixtral-tiny")
    assert folder == tmp_path / "bench" / "mixtral-tiny"
    (shard,) = folder.glob("*.safetensors")
    written_at = shard.stat().st_mtime_ns
    assert find_checkpoint("mixtral-tiny") == find_checkpoint(str(folder)) == folder
    assert shard.stat().st_mtime_ns == written_at
    again = make_checkpoint("mixtral-tiny", tmp_path / "again")
    assert (again / shard.name).read_bytes() == shard.read_bytes()
    with pytest.raises(CheckpointError, match="mixtral-mini"):
        make_checkpoint("mixtral-mini", folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        make_checkpoint("mixtral-tiny", tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="mixtral-huge"):
        find_checkpoint("mixtral-huge")


def test_limits_are_plausible() -> None:
    limits = LimitProbe(buffer_bytes=1 << 22, num_passes=2).measure()
    assert 0 < limits.read_bandwidth < 100_000
    assert 0 < limits.matmul_rate <= limits.byte_matmul_rate < 1_000_000


def test_caches_that_cores_share_count_once(tmp_path: Path) -> None:
    for core, cores_of_last in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, cores, size) in enumerate([("2", str(core), "2048K"), ("3", cores_of_last, "32768K")]):
            folder = tmp_path / f"cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in {"level": level, "shared_cpu_list": cores, "size": size}.items():
                (folder / name).write_text(f"{text}\n")
    assert cache_bytes(tmp_path) == (4 * 2048 + 2 * 32768) * 1024
    assert cache_bytes(tmp_path / "cpu0") == 0


def test_every_second_round_runs_in_reverse() -> None:
    calls: list[str] = []

    def measure(name: str, figure: float) -> float:
        calls.append(name)
        return figure + len(calls)

    measures = {"a": lambda: measure("a", 10), "b": lambda: measure("b", 20)}
    assert harness.interleave(measures, 3) == {"a": [11, 14, 15], "b": [22, 23, 26]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(each) for each in harness.interleave(measures, 1, warms_up=True).values()] == [1, 1]
    assert len(calls) == 10


class Readings(LimitProbe):
    """The limits of a machine whose memory becomes faster with every measurement."""

    def __init__(self) -> None:
        self.num_taken = 0

    def measure(self) -> MachineLimits:
        self.num_taken += 1
        return MachineLimits(
            read_bandwidth=10.0 * self.num_taken, matmul_rate=1000, byte_matmul_rate=2000, num_threads=1
        )


def test_fractions_and_ratios_are_taken_within_a_round() -> None:
    rates = {"moeserve": iter([5.0, 30.0, 28.0]), "peer": iter([4.0, 10.0, 40.0])}
    measures = {name: of_name.__next__ for name, of_name in rates.items()}
    rounds = harness.interleave_with_limits(measures, 3, Readings())
    seen = [[(each.before.read_bandwidth, each.after.read_bandwidth) for each in taken] for taken in rounds.values()]
    assert seen == [[(10, 20), (40, 50), (50, 60)], [(20, 30), (30, 40), (60, 70)]]
    engines = {name: harness.figures(taken, lambda limits: limits.read_bandwidth) for name, taken in rounds.items()}
    own = engines["moeserve"]
    assert own["rate"] == 28
    assert [each["limit_rate"] for each in own["rounds"]] == [15, 45, 55]
    assert own["fraction_of_limit"] == pytest.approx(28 / 55)  # of 1/3, 2/3 and this
    (ratio,) = harness.ratios(engines)
    assert (ratio["engine"], ratio["baseline"]) == ("moeserve", "peer")
    assert ratio["rounds"] == pytest.approx([1.25, 3, 0.7])
    assert ratio["median"] == pytest.approx(1.25)  # not 28 / 10


def test_work_of_a_step_is_a_recount_of_the_weights(tmp_path: Path) -> None:
    tiny = make_checkpoint("mixtral-tiny", tmp_path / "tiny")
    layers, width, expert = 2, 64, 3 * 64 * 96
    norms, routers, head = layers * 2 * width + width, layers * 4 * width, 160 * width
    attention = layers * (2 * width * width + 2 * width * 32)
    dense = attention + routers + norms

    one = step_work(tiny, num_tokens=1, num_logits=1)
    assert one.num_bytes == 2 * (dense + head + layers * 2 * expert)
    assert one.operations == 2 * (dense + head + layers * 2 * expert)

    two = step_work(tiny, num_tokens=2, num_logits=2)  # each reads 2 of 4 experts, so two read 3 on average
    assert two.num_bytes == 2 * (dense + head + layers * 3 * expert)
    assert two.operations == 2 * one.operations

    prompt = step_work(tiny, num_tokens=100, num_logits=1)  # the head sees one row only
    assert prompt.operations == 2 * (100 * (dense + layers * 2 * expert) + head)

    int4 = step_work(tiny, num_tokens=1, num_logits=1, weights=FORMATS["int4"])
    assert int4.num_bytes == 2 * (norms + routers) + 4.95 / 8 * (attention + layers * 2 * expert) + head


def test_limit_is_the_slower_of_reading_and_computing() -> None:
    limits = MachineLimits(read_bandwidth=10, matmul_rate=100, byte_matmul_rate=400, num_threads=1)
    assert Work(num_bytes=2e9, operations=1e9).seconds(limits) == pytest.approx(0.2)
    assert Work(num_bytes=2e9, operations=80e9).seconds(limits) == pytest.approx(0.8)
    assert Work(num_bytes=1e9, operations=80e9, multiplies_bytes=True).seconds(limits) == pytest.approx(0.2)


def test_rate_is_free_of_fixed_costs_and_prompts_are_never_repeated() -> None:
    seen: dict[str, list[list[int]]] = {"slow start": [], "slow steps": []}

    def engine(name: str, start_seconds: float, step_seconds: float) -> decode.Generate:
        def generate(prompts: list[list[int]], num_tokens: int) -> float:
            seen[name] += prompts
            return start_seconds + num_tokens * step_seconds

        return generate

    workload = Workload(batch=3, prompt_tokens=8, new_tokens=5, vocab_size=1000)
    engines = {"slow start": engine("slow start", 9.0, 0.01), "slow steps": engine("slow steps", 0.1, 0.02)}
    measures = {name: decode.rate_measure("decode", generate, workload) for name, generate in engines.items()}
    rates = harness.interleave(measures, 2)
    assert rates["slow start"] == pytest.approx([300, 300])
    assert rates["slow steps"] == pytest.approx([150, 150])
    assert seen["slow start"] == seen["slow steps"]
    assert len({tuple(prompt) for prompt in seen["slow start"]}) == len(seen["slow start"]) == 2 * 2 * 3

    prefill = decode.rate_measure("prefill", lambda prompts, num_tokens: 0.5 * num_tokens, workload)
    assert prefill() == pytest.approx(3 * 8 / 0.5)
    with pytest.raises(RuntimeError, match="new tokens"):
        decode.rate_measure("decode", lambda prompts, num_tokens: 0.1, workload)()


def test_percentile_is_a_measured_value() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [harness.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [100, 198, 200]
