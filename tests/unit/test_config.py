"""Settings: values that are refused, and the config that each "auto" resolves to."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import cache_folder, environment_of_rank, openmp_threads
from moeserve.config.expert_layout import ExpertShape
from moeserve.config.facts import CheckpointFacts, MachineFacts
from moeserve.config.needs import Needs
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_bytes, parse_settings
from moeserve.config.vllm_names import NAMES
from moeserve.errors import SettingsError

FACTS = CheckpointFacts(
    path="somewhere",
    dtype="bfloat16",
    vocab_size=100,
    max_position_embeddings=512,
    tensor_parallel_sizes=(1, 2, 4),
    tensor_parallel_sizes_alike=(1, 2),
    num_layers=7,
    num_sparse_layers=2,
    num_experts=5,
)
MACHINE = {field.name for field in dataclasses.fields(MachineFacts)}
ON_GPU: dict[str, Any] = dict(device="cuda", has_cuda=True, num_gpus=1)
ON_GPUS: dict[str, Any] = dict(device="cuda", has_cuda=True, num_gpus=2, data_parallel_size=2)


def decide(checkpoint: CheckpointFacts = FACTS, **options: Any) -> EngineConfig:
    """Resolve settings, on a machine whose facts are among the options."""
    machine = {name: options.pop(name) for name in MACHINE & {*options}}
    return resolve(parse_settings(options), checkpoint, MachineFacts(**{"num_cores": 3, **machine}))


def assert_refused(*named: str, **options: Any) -> None:
    """Assert that settings are refused with a message that contains some texts."""
    with pytest.raises(SettingsError) as refusal:
        decide(**options)
    for text in named:
        assert text in str(refusal.value)
    assert "Expected" not in str(refusal.value)  # no text of msgspec's


def test_defaults_come_from_the_checkpoint_and_the_machine() -> None:
    config = decide()
    assert (config.weights.dtype, config.compute.device, config.compute.num_threads) == ("bfloat16", "cpu", 3)
    assert (config.parallel.executor, config.experts.dispatcher, config.compute.attention_backend) == (
        "uniproc",
        "local",
        "triton",
    )
    assert (config.schedule.max_model_len, config.schedule.max_model_len_may_shrink) == (512, True)
    assert config.texts.tokenizer_path == "somewhere"
    assert decide(has_cuda=True).compute.device == "cpu"  # a GPU is used only on request
    in_float16 = dataclasses.replace(FACTS, dtype="float16")  # as checkpoints of GPTQ and AWQ often are
    assert decide(in_float16).weights.dtype == decide(in_float16, quantization="int4").weights.dtype == "bfloat16"
    assert decide(in_float16, has_kernels=False).weights.dtype == "float32"
    assert decide(in_float16, dtype="float16").weights.dtype == decide(in_float16, **ON_GPU).weights.dtype == "float16"
    on_gpu = decide(quantization="fp8", has_kernels=False, attention_backend="flashinfer", **ON_GPU)
    assert (on_gpu.compute.device, on_gpu.weights.quantization, on_gpu.compute.attention_backend) == (
        "cuda",
        "fp8",
        "flashinfer",
    )
    assert on_gpu.compute.product_backend == "measured"
    on_gpu = decide(quantization="fp8", has_kernels=False, product_backend="deep_gemm", **ON_GPU)
    assert on_gpu.compute.product_backend == "deep_gemm"
    assert_refused("product_backend='deep_gemm'", "quantization=None", product_backend="deep_gemm", **ON_GPU)
    assert_refused("product_backend='deep_gemm'", "device='cpu'", product_backend="deep_gemm")
    assert "auto" not in {value for name, value in config.settings().items() if name != "load_format"}


def test_the_name_of_the_checkpoints_own_format_may_be_given() -> None:
    for stored, given in [("awq", "awq"), ("gptq", "gptq_marlin"), ("modelopt", "modelopt_fp4"), ("fp8", "fp8")]:
        checkpoint = dataclasses.replace(FACTS, quantization=stored)
        assert decide(checkpoint, quantization=given) == decide(checkpoint)
    in_float8 = dataclasses.replace(FACTS, quantization="fp8")
    assert decide(in_float8, quantization="fp8", **ON_GPU).weights.quantization == "fp8"
    in_awq = dataclasses.replace(FACTS, quantization="awq")
    assert_refused("quantization='gptq'", "'awq'", checkpoint=in_awq, quantization="gptq")
    assert_refused("quantization='awq'", "not quantised", quantization="awq")
    assert_refused("quantization='awqq'", "'awq'", quantization="awqq")


def test_experts_on_the_host_of_a_gpu_may_be_quantised() -> None:
    for quantization in ("int8", "int4"):
        weights = decide(expert_device="cpu", quantization=quantization, **ON_GPU).weights
        assert (weights.experts_on_host, weights.quantization) == (True, quantization)
    three = decide(expert_device="cpu", expert_memory="25%", **ON_GPU).weights
    assert (three.experts_on_host, three.expert_memory) == (True, 0.25)
    assert not decide(expert_device="cpu").weights.experts_on_host, "the device of the model is the CPU"
    assert decide(expert_device="cpu", num_cpu_layers=1, **ON_GPU).weights.num_cpu_layers == 1
    assert not decide(**ON_GPU).weights.experts_on_host


def test_experts_in_mxfp4_stay_so_where_kernels_read_them() -> None:
    in_mxfp4 = dataclasses.replace(FACTS, has_mxfp4=True)
    assert decide(in_mxfp4).weights.quantization == "mxfp4"
    assert decide(in_mxfp4, quantization="mxfp4").weights.quantization == "mxfp4"
    assert decide(in_mxfp4, quantization="int8").weights.quantization == "int8"
    assert decide(in_mxfp4, dtype="float32").weights.quantization is None
    assert decide(in_mxfp4, dtype="float32", quantization="mxfp4").weights.quantization == "mxfp4"
    assert decide(in_mxfp4, has_kernels=False).weights.quantization is None
    assert decide(in_mxfp4, has_kernels=False, **ON_GPU).weights.quantization == "mxfp4"
    assert decide(in_mxfp4, has_triton=False, **ON_GPU).weights.quantization is None
    assert_refused("'mxfp4'", "somewhere", quantization="mxfp4")
    assert_refused("'float16'", checkpoint=in_mxfp4, quantization="mxfp4", dtype="float16")


def test_given_values_are_kept() -> None:
    options = dict(dtype="float32", max_model_len=100, max_num_seqs=3, max_num_batched_tokens=9, num_threads=1, seed=4)
    config = decide(**options)
    assert config.settings().items() >= options.items()
    assert not config.schedule.max_model_len_may_shrink
    assert decide(tokenizer=Path("elsewhere")).texts.tokenizer_path == "elsewhere"
    assert decide(data_parallel_size=2, num_threads=5).compute.num_threads == 5
    assert decide(executor="mp").parallel.executor == "mp"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("max_nm_seqs", 3, "'max_num_seqs'"),
        ("block-size", 3, "'block_size'"),
        ("gpu_memory_utilisation", 0.9, "'gpu_memory_utilization'"),
        ("quux", 3, "help(moeserve.LLM"),
        ("max_num_seqs", 0, "max_num_seqs=0 must be an integer from 1 to 2**31 - 1"),
        ("max_num_seqs", "many", "max_num_seqs='many'"),
        ("max_num_seqs", True, "max_num_seqs=True"),
        ("block_size", -1, "block_size=-1"),
        ("block_size", 1.5, "block_size=1.5"),
        ("block_size", 10**12, "4096"),
        ("num_threads", 10**10, "1024"),
        ("max_model_len", 1, "from 2"),
        ("max_model_len", 513, "512"),
        ("seed", 2**70, "seed="),
        ("dtype", "fp8", "'float32', 'bfloat16'"),
        ("attention_backend", "flash_attn", "'flashinfer'"),
        ("attention_backend", "triton", "'auto'"),
        ("enable_prefix_caching", "yes", "enable_prefix_caching='yes' must be True or False"),
        ("kv_cache_memory", "lots", "512MiB"),
        ("kv_cache_memory", 0, "from 1 to"),
        ("kv_cache_memory", "9" * 400 + "GB", "from 1 to"),
        ("device", "cuda", "device='cpu'"),
        ("tensor_parallel_size", 3, "1, 2, 4"),
        ("tensor_parallel_size", 8, "1, 2, 4"),
        ("data_parallel_size", 13, "12 ranks"),
        ("pipeline_parallel_size", 8, "use at most 7"),
        ("pipeline_layers", [7, 1], "pipeline_parallel_size=1"),
        ("pipeline_layers", [0], "from 1 to"),
        ("pipeline_layers", 7, "a list"),
        ("executor", "slurm", "executor='slurm'"),
        ("num_redundant_experts", 1, "use at most 0"),
        ("num_redundant_experts", -1, "from 0"),
        ("rebalance", "auto", "rebalance='off'"),
        ("dispatcher", "deepep", "'auto'"),
    ],
)
def test_wrong_values_are_refused_by_name(option: str, value: object, named: str) -> None:
    assert_refused(option, named, **{option: value})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"method": "eagle"}, "method='eagle', which must be one of 'ngram', 'mtp'"),
        ({"method": None, "num_speculative_tokens": 4}, "method=None"),
        (
            {"method": "ngram", "num_speculative_tokens": 65},
            "num_speculative_tokens=65, which must be",
        ),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens='4'"),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ({"methd": "ngram"}, "'methd': did you mean 'method'?"),
        ({"model": "draft", "num_speculative_tokens": 4}, "'model': known are: method, "),
        ({"method": "ngram"}, "lacks num_speculative_tokens"),
        ({}, "lacks method, num_speculative_tokens"),
        ({5: 6}, "unknown key 5"),
        ("ngram", "must be a dict"),
        ([], "must be a dict"),
    ],
)
def test_wrong_keys_of_nested_settings_are_named(value: object, named: str) -> None:
    assert_refused("speculative_config=", named, speculative_config=value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(quantization="int4", has_kernels=False), ["quantization='int4'", "C++17 compiler"]),
        (dict(quantization="int8", **ON_GPU), ["quantization='int8'", "'fp8'"]),
        (dict(quantization="int8", dtype="float16"), ["dtype='float16'"]),
        (dict(quantization="fp8"), ["quantization='fp8'", "'int8' or 'int4'"]),
        (dict(quantization="fp8", has_float8=False, **ON_GPU), ["triton", "8.9"]),
        (dict(num_cpu_layers=1, **ON_GPU), ["num_cpu_layers=1", "expert_device='cpu'"]),
        (dict(num_cpu_layers=1, expert_device="cpu"), ["num_cpu_layers=1", "device='cuda'"]),
        (dict(num_cpu_layers=1000, expert_device="cpu", **ON_GPU), ["num_cpu_layers=1000", "layers"]),
        (
            dict(
                num_cpu_layers=3,
                expert_device="cpu",
                checkpoint=dataclasses.replace(FACTS, first_sparse_layer=3),
                **ON_GPU,
            ),
            ["num_cpu_layers=3", "is number 3", "at least 4"],
        ),
        (dict(expert_device="cpu", has_kernels=False, **ON_GPU), ["expert_device='cpu'", "C++ kernels"]),
        (dict(expert_device="cpu", quantization="fp8", **ON_GPU), ["quantization='fp8'", "'int4'"]),
        (dict(expert_device="cpu", **ON_GPUS), ["expert_device='cpu'", "2 ranks"]),
        (dict(expert_device="cpu", model_impl="transformers", **ON_GPU), ["model_impl='transformers'"]),
        (dict(has_bfloat16=False, **ON_GPU), ["dtype='bfloat16', the checkpoint's,", "8.0", "dtype='float16'"]),
        (dict(dtype="bfloat16", has_bfloat16=False, **ON_GPU), ["dtype='bfloat16' needs", "8.0", "dtype='float16'"]),
        (dict(data_parallel_size=2, executor="uniproc"), ["executor='uniproc'", "executor='mp'"]),
        (dict(on_failure="restart", executor="uniproc"), ["on_failure='restart'", "executor='mp'"]),
        (
            dict(pipeline_parallel_size=2, executor="uniproc"),
            ["executor='uniproc'", "pipeline_parallel_size=2", "'mp'"],
        ),
        (dict(pipeline_parallel_size=2, pipeline_layers=[7]), ["pipeline_layers=[7]", "1 stage", "one number"]),
        (dict(pipeline_parallel_size=2, pipeline_layers=[4, 4]), ["pipeline_layers=[4, 4]", "8 layers", "has 7"]),
        (dict(pipeline_parallel_size=2, rebalance="auto"), ["rebalance='off'"]),
        (dict(pipeline_parallel_size=2, dispatcher="allgather", num_redundant_experts=1), ["at most 0"]),
        (dict(data_parallel_size=2, dispatcher="local"), ["dispatcher='local'", "'all_to_all'"]),
        (dict(data_parallel_size=2, dispatcher="deepep"), ["dispatcher='deepep'", "device='cpu'"]),
        (dict(dispatcher="deepep", **ON_GPU), ["dispatcher='deepep'", "1 rank"]),
        (dict(deepep_float8=True, data_parallel_size=2), ["deepep_float8=True", "'shared_memory'"]),
        (dict(deepep_api="legacy", dispatcher="all_to_all", **ON_GPUS), ["deepep_api='legacy'", "'all_to_all'"]),
        (dict(deepep_low_latency_tokens=0), ["deepep_low_latency_tokens=0", "'local'"]),
        (dict(dispatcher="shared_memory"), ["dispatcher='shared_memory'", "1 rank"]),
        (dict(dispatcher="shared_memory", **ON_GPUS), ["dispatcher='shared_memory'", "device='cuda'"]),
        (dict(tensor_parallel_size=4, data_parallel_size=4, num_cores=2), ["16 ranks", "2 CPU cores", "at most 8"]),
        (dict(data_parallel_size=3, num_redundant_experts=11), ["num_redundant_experts=11", "at most 10"]),
        (dict(ON_GPUS, num_gpus=1), ["data_parallel_size=2", "2 ranks", "CUDA_VISIBLE_DEVICES"]),
        (dict(ON_GPUS, has_nccl=False), ["data_parallel_size=2", "NCCL"]),
        (
            dict(data_parallel_size=2, rebalance="places.json", expert_loads="loads.json"),
            ["rebalance='places.json'", "expert_loads='loads.json'"],
        ),
        (dict(metrics_port=9, checkpoint=dataclasses.replace(FACTS, num_sparse_layers=0)), ["metrics_port"]),
    ],
)
def test_settings_that_contradict_each_other_or_the_machine_are_refused(
    options: dict[str, Any], named: list[str]
) -> None:
    assert_refused(*named, **options)


def test_numbers_too_long_to_print_are_refused() -> None:
    assert_refused("seed=", seed=10**5000)


def test_layers_are_divided_into_stages() -> None:
    one = decide()
    assert (one.parallel.pipeline_layers, one.schedule.async_scheduling, one.schedule.max_concurrent_batches) == (
        (7,),
        True,
        2,
    )
    three = decide(pipeline_parallel_size=3)
    assert (three.parallel.pipeline_layers, three.schedule.async_scheduling, three.schedule.max_concurrent_batches) == (
        (3, 2, 2),
        False,
        3,
    )
    assert (three.parallel.executor, three.parallel.num_ranks, three.compute.num_threads, three.experts.dispatcher) == (
        "mp",
        3,
        1,
        "local",
    )
    given = decide(pipeline_parallel_size=2, pipeline_layers=[1, 6], data_parallel_size=2, tensor_parallel_size=2)
    assert (given.parallel.pipeline_layers, given.parallel.num_ranks, given.experts.dispatcher) == (
        (1, 6),
        8,
        "shared_memory",
    )
    assert decide(pipeline_parallel_size=2, max_concurrent_batches=1).schedule.max_concurrent_batches == 1


@pytest.mark.parametrize(
    ("tp", "dp", "num_cores", "num_threads"), [(1, 1, 8, 8), (2, 2, 8, 2), (1, 3, 8, 2), (4, 2, 2, 1)]
)
def test_ranks_share_the_cores(tp: int, dp: int, num_cores: int, num_threads: int) -> None:
    config = decide(tensor_parallel_size=tp, data_parallel_size=dp, num_cores=num_cores)
    assert (config.parallel.num_ranks, config.compute.num_threads) == (tp * dp, num_threads)
    assert config.parallel.executor == ("uniproc" if tp * dp == 1 else "mp")


@pytest.mark.parametrize(
    ("dp", "max_threads", "given", "num_threads"), [(1, 2, None, 2), (2, 3, None, 3), (4, 3, None, 2), (1, 2, 5, 5)]
)
def test_openmp_limits_the_threads_of_ranks(dp: int, max_threads: int, given: int | None, num_threads: int) -> None:
    config = decide(data_parallel_size=dp, num_cores=8, max_threads=max_threads, num_threads=given)
    assert config.compute.num_threads == num_threads


@pytest.mark.parametrize(("value", "expected"), [("4", 4), ("4,2", 4), ("0", None), ("x", None), ("", None)])
def test_threads_of_openmp_are_those_of_the_outermost_level(
    value: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert openmp_threads() == expected


def test_a_single_rank_that_may_restart_has_a_process() -> None:
    assert decide(on_failure="restart").parallel.executor == "mp"


def test_experts_are_placed_by_loads_or_by_a_file() -> None:
    assert decide(data_parallel_size=3, num_redundant_experts=10).experts.num_redundant_experts == 10
    assert decide(data_parallel_size=2, rebalance="places.json").experts.rebalance == "off"
    for rebalance in ("off", "auto"):
        assert (
            decide(data_parallel_size=2, rebalance=rebalance, expert_loads="loads.json").experts.rebalance == rebalance
        )
    assert decide(**ON_GPUS).experts.rebalance == "off"
    assert decide(**ON_GPUS, rebalance="auto").experts.rebalance == "auto"


def test_each_rank_needs_its_own_gpu_except_with_ray() -> None:
    assert decide(**dict(ON_GPUS, num_gpus=4), tensor_parallel_size=2).parallel.num_ranks == 4
    assert decide(**ON_GPU, has_nccl=False).parallel.num_ranks == 1  # has no other rank to communicate with
    assert decide(num_gpus=0, has_nccl=False, data_parallel_size=2).compute.device == "cpu"
    config = decide(**dict(ON_GPUS, num_gpus=1), executor="ray", cores_of_nodes=[8, 8])
    assert (config.parallel.num_ranks, config.parallel.executor) == (2, "ray")


def test_dispatcher_follows_device_and_ranks() -> None:
    assert decide(**ON_GPUS).experts.dispatcher == "deepep"
    assert decide(**ON_GPUS).experts.dispatcher_may_change
    assert not decide(**ON_GPUS, dispatcher="deepep").experts.dispatcher_may_change
    assert decide(**ON_GPUS, dispatcher="all_to_all").experts.dispatcher == "all_to_all"
    assert decide(**ON_GPU).experts.dispatcher == "local"
    assert decide(data_parallel_size=2).experts.dispatcher == "shared_memory"
    assert decide(**ON_GPUS).experts.deepep_api is None
    assert decide(**ON_GPUS, deepep_api="legacy").experts.deepep_api == "legacy"


def test_threads_wait_passively_if_they_outnumber_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config = decide(data_parallel_size=2, num_threads=2)
    assert environment_of_rank(config, num_cores=3)["OMP_WAIT_POLICY"] == "passive"
    assert environment_of_rank(config, num_cores=4) == dict(os.environ)


def test_several_ranks_do_not_bind_their_threads_to_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0-3")
    assert environment_of_rank(decide(data_parallel_size=2, num_threads=1), num_cores=4) == before
    assert environment_of_rank(decide(num_threads=1), num_cores=4) == dict(os.environ)


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [(7, 7), ("7", 7), ("2KB", 2000), ("2 KiB", 2048), ("1.5GiB", 3 * 2**29), ("3M", 3_000_000), ("512MiB", 2**29)],
)
def test_amounts_of_memory(amount: int | str, num_bytes: int) -> None:
    assert parse_bytes("kv_cache_memory", amount) == num_bytes
    assert decide(packed_cache=amount).weights.packed_cache == num_bytes
    assert decide(packed_cache=0).weights.packed_cache == 0


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", "here")
    assert cache_folder() == Path("here")
    monkeypatch.delenv("MOESERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert cache_folder() == Path("there") / "moeserve"


# --- names of vLLM


@pytest.mark.parametrize(
    ("option", "value", "ours"),
    [
        ("dtype", "half", {"dtype": "float16"}),
        ("dtype", "float", {"dtype": "float32"}),
        ("dtype", torch.bfloat16, {"dtype": "bfloat16"}),
        ("seed", None, {"seed": 0}),
        ("trust_remote_code", False, {}),
        ("distributed_executor_backend", "mp", {"executor": "mp"}),
        ("distributed_executor_backend", "uni", {"executor": "uniproc"}),
        ("distributed_executor_backend", None, {"executor": "uniproc"}),
        ("kv_cache_memory_bytes", 4096, {"kv_cache_memory": 4096}),
    ],
)
def test_names_and_values_of_vllm_are_translated(option: str, value: object, ours: dict[str, Any]) -> None:
    config = decide(**{option: value})
    assert config.settings().items() >= ours.items()


def test_overlap() -> None:
    """vLLM's thresholds count with enable_dbo only. On GPUs the halves must not need other collectives or plans.

    A rank without others has nothing to overlap.
    """

    def limits(**options: Any) -> tuple[int | None, int | None]:
        config = decide(data_parallel_size=2, executor="mp", **options)
        return config.experts.overlap_decode_tokens, config.experts.overlap_prefill_tokens

    assert limits() == limits(dbo_decode_token_threshold=8) == limits(enable_dbo=False) == (None, None)
    assert limits(overlap_prefill_tokens=7) == (None, 7)
    assert limits(enable_dbo=True) == (32, 512)
    assert limits(enable_dbo=True, dbo_decode_token_threshold=8, overlap_decode_tokens=8) == (8, 512)
    assert_refused("overlap_decode_tokens=9", enable_dbo=True, overlap_decode_tokens=9)
    for options in (dict(overlap_decode_tokens=9), dict(enable_dbo=True, pipeline_parallel_size=2)):
        assert_refused("overlap_decode_tokens", "single rank", **options)
    assert decide(overlap_decode_tokens=9, **ON_GPUS).experts.overlap_decode_tokens == 9
    assert_refused("'flashinfer'", attention_backend="flashinfer", overlap_prefill_tokens=9, **ON_GPUS)
    tp = ON_GPUS | dict(tensor_parallel_size=2, data_parallel_size=1)
    assert_refused("tensor_parallel_size=2", overlap_decode_tokens=9, **tp)


def test_a_stage_begins_with_a_layer_that_chooses_its_own_positions() -> None:
    sharing = dataclasses.replace(FACTS, first_layers=frozenset({0, 1, 3, 6}))
    assert decide(sharing).parallel.pipeline_layers == (7,)
    assert decide(sharing, pipeline_parallel_size=2, pipeline_layers=[3, 4]).parallel.pipeline_layers == (3, 4)
    with pytest.raises(SettingsError, match=r"pipeline_layers=\[4, 3\]: .* layer 4.* layers 0, 1, 3, 6"):
        decide(sharing, pipeline_parallel_size=2)


def test_kv_cache_dtype() -> None:
    assert not decide(kv_cache_dtype="auto").cache.has_float8_cache
    assert decide(kv_cache_dtype="fp8").cache.has_float8_cache
    assert decide(kv_cache_dtype="fp8_e4m3").cache.has_float8_cache
    assert_refused("'fp8_e5m2'", "'fp8_e4m3'", kv_cache_dtype="fp8_e5m2")
    assert_refused(
        "attention_backend='flashinfer'",
        "kv_cache_dtype='fp8'",
        kv_cache_dtype="fp8",
        attention_backend="flashinfer",
        **ON_GPU,
    )
    latent = dataclasses.replace(FACTS, needs=Needs(fits_float8_cache=False))
    assert not decide(latent).cache.has_float8_cache
    with pytest.raises(SettingsError, match=r"kv_cache_dtype='fp8' .* latent attention"):
        decide(latent, kv_cache_dtype="fp8")


def test_models_without_kernels_for_gpus_are_refused_there() -> None:
    facts = dataclasses.replace(FACTS, needs=Needs(without_gpu_kernels="a part"))
    assert decide(facts).compute.device == "cpu"
    with pytest.raises(SettingsError, match=r"device='cuda': a part"):
        decide(facts, **ON_GPU)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(tensor_parallel_size=4), "tensor_parallel_size=4, .* use one of 1, 2"),
        (dict(dtype="float16"), "dtype='float16'"),
        (dict(has_kernels=False), "without the C\\+\\+ kernels"),
        (ON_GPU | dict(has_triton=False), "moeserve\\[cuda\\]"),
        (ON_GPU | dict(quantization="fp8"), "quantization='fp8'"),
        (ON_GPU | dict(attention_backend="flashinfer"), "attention_backend='flashinfer'"),
        (ON_GPU | dict(quantization="fp8", product_backend="deep_gemm"), "quantization='fp8'"),
        (ON_GPUS | dict(dispatcher="deepep"), "dispatcher='deepep'"),
    ],
)
def test_batch_invariant_refuses_what_excludes_it(options: dict[str, Any], named: str) -> None:
    decide(**options)
    with pytest.raises(SettingsError, match=f"batch_invariant=True does not allow .*{named}"):
        decide(batch_invariant=True, **options)


def test_batch_invariant_excludes_compressed_entries_on_gpus() -> None:
    facts = dataclasses.replace(FACTS, needs=Needs(without_gpu_order="hyper-connections"))
    assert decide(facts, **ON_GPU, has_triton=True).compute.device == "cuda"
    assert_refused("batch_invariant=True", checkpoint=facts, batch_invariant=True, **ON_GPU)


def test_batch_invariant_uses_no_kernels_with_an_order_of_their_own() -> None:
    assert decide(batch_invariant=True, tensor_parallel_size=2, executor="mp").compute.batch_invariant
    assert decide(**ON_GPUS).experts.dispatcher == "deepep"
    assert decide(batch_invariant=True, dtype="float16", **ON_GPUS).experts.dispatcher == "all_to_all"


@pytest.mark.parametrize(
    ("option", "silent", "warned"),
    [
        ("gpu_memory_utilization", None, 0.9),  # on CPUs
        ("swap_space", 0, 4),
        ("enable_chunked_prefill", None, False),
        ("enable_eplb", False, True),
        ("all2all_backend", None, "pplx"),
        ("disable_log_stats", True, False),
    ],
)
def test_settings_of_vllm_without_effect_are_accepted_with_a_warning(
    option: str, silent: object, warned: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert decide(**{option: silent}) == decide()
        assert not caplog.records
        assert decide(**{option: warned}) == decide()
    assert [record.args[:2] for record in caplog.records if record.args] == [(option, warned)]


def test_gpu_memory_utilization_has_an_effect_on_gpus_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert decide(**ON_GPU).cache.memory_share == 0.9
        assert decide(gpu_memory_utilization=0.5, **ON_GPU).cache.memory_share == 0.5
        assert not caplog.records
        decide(gpu_memory_utilization=0.5)
    assert "gpu_memory_utilization=0.5" in caplog.text


def test_a_gpu_without_bfloat16_computes_in_other_dtypes() -> None:
    for dtype in ("float16", "float32"):
        assert decide(dtype=dtype, has_bfloat16=False, **ON_GPU).weights.dtype == dtype
    assert decide(dataclasses.replace(FACTS, dtype="float16"), has_bfloat16=False, **ON_GPU).weights.dtype == "float16"
    assert decide(has_bfloat16=False).weights.dtype == "bfloat16", "that of a CPU"


def test_slices_of_experts_need_no_other_dispatcher() -> None:
    shape = ExpertShape(num_experts=8, top_k=2, hidden_size=4096, width=14336, slices_alike=(1, 2, 4, 8))
    checkpoint = dataclasses.replace(FACTS, expert_shape=shape)
    on_two = dict(tensor_parallel_size=2, executor="mp")
    for named in ({}, dict(expert_parallel=False), dict(enable_expert_parallel=False)):
        sliced = decide(checkpoint, **on_two, **named)
        assert (sliced.experts.expert_parallel, sliced.experts.dispatcher) == (False, "allgather")
    for named in (dict(expert_parallel=True), dict(enable_expert_parallel=True)):
        whole = decide(checkpoint, **on_two, **named)
        assert (whole.experts.expert_parallel, whole.experts.dispatcher) == (True, "shared_memory")
    assert_refused("data_parallel_size=2", checkpoint=checkpoint, data_parallel_size=2, expert_parallel=False)


def test_a_setting_and_its_name_in_vllm_must_agree() -> None:
    agreeing = {"kv_cache_memory": "4KiB", "kv_cache_memory_bytes": 4096, "distributed_executor_backend": None}
    config = decide(**agreeing, executor="mp")
    assert (config.cache.kv_cache_memory, config.parallel.executor) == (4096, "mp")
    assert_refused("executor='mp'", executor="mp", distributed_executor_backend="uni")
    assert_refused("expert_parallel=False", expert_parallel=False, enable_expert_parallel=True)
    assert_refused("kv_cache_memory='4KiB'", **(agreeing | {"kv_cache_memory_bytes": 4097}))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("trust_remote_code", True, "trust_remote_code=True"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization=1.5 must be a number above 0"),
        ("distributed_executor_backend", "external_launcher", "'mp'"),
        ("swap_space", "much", "swap_space='much'"),
        ("enable_expert_parallel", 1, "True or False"),
    ],
)
def test_wrong_values_of_vllm_settings_are_refused(option: str, value: object, named: str) -> None:
    assert option in {*NAMES, "gpu_memory_utilization"}
    assert_refused(option, named, **{option: value})
