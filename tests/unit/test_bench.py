"""The harness of the benchmarks: checkpoints, rounds, ratios, work of a step, rates without fixed costs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralForCausalLM

from moeserve.bench import decode, harness
from moeserve.bench.checkpoints import CheckpointName, find_checkpoint, make_checkpoint, model_config
from moeserve.bench.costs import FORMATS, step_work
from moeserve.bench.decode import Workload
from moeserve.bench.harness import Round
from moeserve.bench.limits import LimitProbe, MachineLimits, Work, measure_limits
from moeserve.errors import CheckpointError

TINY_SHARD_BYTES = 50_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "mixtral-tiny"
    return make_checkpoint("mixtral-tiny", folder, max_shard_bytes=TINY_SHARD_BYTES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_transformers_finds_every_tensor_and_no_other(tiny: Path) -> None:
    model, report = MixtralForCausalLM.from_pretrained(tiny, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(1e6 ** (-2 / 16))
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


@pytest.mark.parametrize(("name", "billions"), [("mixtral-mini", 1.52), ("deepseek-mini", 1.74), ("qwen3-mini", 1.32)])
def test_transformers_reads_every_configuration(name: CheckpointName, billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(name)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.dtype == torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(billions * 1e9, rel=0.005)


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    again = make_checkpoint("mixtral-tiny", tmp_path / "again", max_shard_bytes=TINY_SHARD_BYTES)
    other = make_checkpoint("mixtral-tiny", tmp_path / "other", seed=1, max_shard_bytes=TINY_SHARD_BYTES)
    assert contents(again) == contents(tiny)
    assert len(list(tiny.glob("*.safetensors"))) > 1
    for name, shard in contents(other).items():
        if name.endswith(".safetensors"):
            assert shard != (tiny / name).read_bytes()


def test_complete_checkpoint_is_reused_and_an_interrupted_one_is_not(tmp_path: Path) -> None:
    interrupted = tmp_path / ".model.partial"
    interrupted.mkdir()
    (interrupted / "model-00001-of-00009.safetensors").write_bytes(b"half a shard")

    folder = make_checkpoint("mixtral-tiny", tmp_path / "model")
    assert not interrupted.exists()
    assert not (folder / "model-00001-of-00009.safetensors").exists()

    shard = next(folder.glob("*.safetensors"))
    written_at = shard.stat().st_mtime_ns
    assert make_checkpoint("mixtral-tiny", folder) == folder
    assert shard.stat().st_mtime_ns == written_at


def test_another_checkpoint_in_the_way_is_refused_and_left_alone(tiny: Path, tmp_path: Path) -> None:
    before = contents(tiny)
    with pytest.raises(CheckpointError, match="seed 7"):
        make_checkpoint("mixtral-tiny", tiny, seed=7)
    with pytest.raises(CheckpointError, match="mixtral-tiny"):
        make_checkpoint("mixtral-mini", tiny)
    assert contents(tiny) == before

    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        make_checkpoint("mixtral-tiny", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_named_checkpoint_is_made_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    folder = find_checkpoint("mixtral-tiny")
    assert folder == tmp_path / "bench" / "mixtral-tiny"
    assert (folder / "config.json").exists()
    with pytest.raises(CheckpointError, match="mixtral-huge"):
        find_checkpoint("mixtral-huge")


def test_limits_are_plausible() -> None:
    probe = LimitProbe(buffer_bytes=1 << 22, matmul_size=128, num_passes=2)
    for limits in (probe.measure(), probe.measure(), measure_limits(buffer_bytes=1 << 22, matmul_size=128)):
        assert 0 < limits.read_bandwidth < 100_000
        assert 0 < limits.matmul_rate < 1_000_000
        assert limits.num_threads == torch.get_num_threads()


def test_environment_records_machine_commit_and_versions() -> None:
    facts = json.loads(json.dumps(harness.environment()))
    assert facts["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["date"].endswith("+00:00")
    assert facts["cores"] >= 1
    assert facts["memory"] > 2**28
    assert facts["cpu"]
    assert facts.keys() >= {"commit", "isa", "kernel_isa"}


def test_every_second_round_runs_in_reverse() -> None:
    calls: list[str] = []

    def measure(name: str, figure: float) -> float:
        calls.append(name)
        return figure + len(calls)

    samples = harness.interleave({"a": lambda: measure("a", 10), "b": lambda: measure("b", 20)}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [11, 14, 15], "b": [22, 23, 26]}
    assert harness.ratio_of_medians(samples["b"], samples["a"]) == 23 / 14


class Readings(LimitProbe):
    """The limits of a machine whose memory becomes faster with every measurement."""

    def __init__(self) -> None:
        self.num_taken = 0

    def measure(self) -> MachineLimits:
        self.num_taken += 1
        return MachineLimits(read_bandwidth=10.0 * self.num_taken, matmul_rate=1000, num_threads=1)


def test_limits_are_measured_between_any_two_rates() -> None:
    probe = Readings()
    rounds = harness.interleave_with_limits({"a": lambda: 1.0, "b": lambda: 2.0}, 2, probe)
    assert probe.num_taken == 5
    seen = {name: [(each.before.read_bandwidth, each.after.read_bandwidth) for each in rounds[name]] for name in "ab"}
    assert seen == {"a": [(10, 20), (40, 50)], "b": [(20, 30), (30, 40)]}
    assert [each.limits.read_bandwidth for each in rounds["a"]] == [15, 45]


def test_fractions_and_ratios_are_taken_within_a_round() -> None:
    def rounds(*pairs: tuple[float, float]) -> list[Round]:
        limits = [MachineLimits(bandwidth, 1000, 1) for _, bandwidth in pairs]
        return [Round(rate, limit, limit) for (rate, _), limit in zip(pairs, limits, strict=True)]

    def bandwidth(limits: MachineLimits) -> float:
        return limits.read_bandwidth

    engines = {
        "own": harness.figures(rounds((5, 10), (30, 50), (28, 40)), bandwidth),
        "peer": harness.figures(rounds((4, 10), (10, 50), (40, 50)), bandwidth),
    }
    assert engines["own"]["rate"] == 28
    assert engines["own"]["fraction_of_limit"] == pytest.approx(0.6)  # of .5, .6 and .7
    assert [each["limit_rate"] for each in engines["own"]["rounds"]] == [10, 50, 40]
    ratio = harness.ratio(engines, "own", "peer")
    assert ratio["rounds"] == pytest.approx([1.25, 3, 0.7])
    assert ratio["median"] == pytest.approx(1.25)  # not 28 / 10
    assert ratio["median_of_fractions"] == pytest.approx(1.25)  # of 1.25, 3 and 0.875


def test_rows_are_appended_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "results" / "decode.jsonl"
    harness.save(path, [{"figure": 1}, {"figure": 2}])
    harness.save(path, [{"figure": 3}])
    harness.save(None, [{"figure": 4}])
    assert [row["figure"] for row in harness.read_jsonl(path)] == [1, 2, 3]


def test_work_of_a_step_is_a_recount_of_the_weights(tiny: Path) -> None:
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
    assert int4.num_bytes == 2 * (norms + routers) + 4.5 / 8 * (attention + layers * 2 * expert) + head


def test_limit_is_the_slower_of_reading_and_computing() -> None:
    limits = MachineLimits(read_bandwidth=10, matmul_rate=100, num_threads=1)
    assert Work(num_bytes=2e9, operations=1e9).seconds(limits) == pytest.approx(0.2)
    assert Work(num_bytes=2e9, operations=80e9).seconds(limits) == pytest.approx(0.8)


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
    assert {len(prompt) for prompt in seen["slow start"]} == {8}

    prefill = decode.rate_measure("prefill", lambda prompts, num_tokens: 0.5 * num_tokens, workload)
    assert prefill() == pytest.approx(3 * 8 / 0.5)
    with pytest.raises(RuntimeError, match="new tokens"):
        decode.rate_measure("decode", lambda prompts, num_tokens: 0.1, workload)()


def test_percentile_is_a_measured_value() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [harness.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [100, 198, 200]
    assert harness.percentile([7.0], 0.99) == 7


def test_call_timer_returns_seconds_of_one_call() -> None:
    measure = harness.call_timer(lambda _: time.sleep(0.002), 0.01)
    assert 0.002 <= measure() < 0.2
