"""Settings: what is refused, and what each "auto" becomes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from moeserve.config.environment import cache_folder, environment_of_rank
from moeserve.config.resolve import CheckpointFacts, resolve
from moeserve.config.settings import EngineConfig, Settings, parse_bytes
from moeserve.errors import SettingsError

FACTS = CheckpointFacts(
    path="somewhere",
    dtype="bfloat16",
    vocab_size=100,
    max_position_embeddings=512,
    tensor_parallel_sizes=(1, 2, 4),
    num_sparse_layers=2,
    num_experts=5,
)


def decide(
    has_cuda: bool = False,
    num_cores: int = 3,
    has_kernels: bool = True,
    has_float8: bool = True,
    num_gpus: int | None = None,
    has_nccl: bool = True,
    **options: Any,
) -> EngineConfig:
    return resolve(
        Settings.from_options(options),
        FACTS,
        has_cuda=has_cuda,
        num_cores=num_cores,
        num_gpus=num_gpus,
        has_nccl=has_nccl,
        has_kernels=has_kernels,
        has_float8=has_float8,
    )


def test_auto_becomes_what_the_checkpoint_and_the_machine_say() -> None:
    config = decide()
    assert (config.dtype, config.device, config.num_threads) == ("bfloat16", "cpu", 3)
    assert (config.executor, config.dispatcher) == ("uniproc", "local")
    assert (config.max_model_len, config.max_model_len_may_shrink) == (512, True)
    assert config.tokenizer_path == "somewhere"
    assert decide(has_cuda=True).device == "cpu"  # a GPU must be asked for
    assert decide(has_cuda=True, device="cuda").device == "cuda"


def test_nothing_undecided_is_left() -> None:
    values = dataclasses.asdict(decide())
    assert "auto" not in {value for name, value in values.items() if name != "load_format"}
    assert [name for name, value in values.items() if value is None] == [
        "quantization",
        "kv_cache_memory",
        "network_interface",
        "expert_load_file",
        "metrics_port",
    ]


def test_what_is_given_is_kept() -> None:
    config = decide(dtype="float32", max_model_len=100, max_num_seqs=3, max_num_batched_tokens=9, num_threads=1, seed=4)
    assert (config.dtype, config.max_model_len, config.max_model_len_may_shrink) == ("float32", 100, False)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.num_threads, config.seed) == (3, 9, 1, 4)
    assert decide(has_cuda=True, device="cpu").device == "cpu"
    assert decide(tokenizer=Path("elsewhere")).tokenizer_path == "elsewhere"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("max_nm_seqs", 3, "did you mean 'max_num_seqs'"),
        ("block-size", 3, "did you mean 'block_size'"),
        ("quux", 3, "known are: "),
        ("max_num_seqs", 0, "max_num_seqs=0"),
        ("max_num_seqs", "many", "max_num_seqs='many'"),
        ("max_num_seqs", True, "max_num_seqs=True"),
        ("block_size", -1, "block_size=-1"),
        ("block_size", 10**12, "<= 4096"),
        ("seed", 2**70, "seed="),
        ("num_threads", 10**10, "<= 1024"),
        ("max_model_len", 1, ">= 2"),
        ("kv_cache_memory", "9" * 400 + "GB", "must be from 1 to"),
        ("block_size", 1.5, "block_size=1.5"),
        ("dtype", "fp8", "'float32', 'bfloat16'"),
        ("enable_prefix_caching", "yes", "enable_prefix_caching='yes'"),
        ("kv_cache_memory", "lots", "512MiB"),
        ("kv_cache_memory", 0, "from 1 to"),
        ("device", "cuda", "no CUDA device"),
        ("max_model_len", 513, "max_position_embeddings (512)"),
        ("tensor_parallel_size", 3, "so many ranks; use one of 1, 2, 4"),
        ("tensor_parallel_size", 8, "cannot be divided over so many ranks"),
        ("data_parallel_size", 13, "use at most 12 ranks"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("executor", "slurm", "executor='slurm'"),
        ("num_redundant_experts", 1, "copies of experts are for several ranks, and there is one"),
        ("num_redundant_experts", -1, ">= 0"),
    ],
)
def test_wrong_settings_are_refused_with_their_value(option: str, value: object, says: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        decide(**{option: value})
    assert says in str(refusal.value)
    assert option in str(refusal.value)


def test_quantization_is_refused_where_nothing_reads_it() -> None:
    assert decide(quantization="int4").quantization == "int4"
    with pytest.raises(SettingsError, match=r"quantization='int4' needs the C\+\+ kernels.*Install a C\+\+17 compiler"):
        decide(quantization="int4", has_kernels=False)
    with pytest.raises(SettingsError, match=r"quantization='int8' is a format for CPUs.*'fp8' on GPUs"):
        decide(quantization="int8", device="cuda", has_cuda=True)
    with pytest.raises(SettingsError, match="does not go with dtype='float16'"):
        decide(quantization="int8", dtype="float16")
    assert decide(has_kernels=False).quantization is None
    assert decide(quantization="fp8", device="cuda", has_cuda=True, has_kernels=False).quantization == "fp8"
    with pytest.raises(SettingsError, match=r"quantization='fp8' is a format for GPUs.*'int8' or 'int4' on CPUs"):
        decide(quantization="fp8")
    with pytest.raises(SettingsError, match="quantization='fp8' needs triton and a GPU of compute capability"):
        decide(quantization="fp8", device="cuda", has_cuda=True, has_float8=False)


def test_ranks_share_the_cores() -> None:
    for tp, dp, num_cores, num_threads in ((1, 1, 8, 8), (2, 1, 8, 4), (2, 2, 8, 2), (1, 3, 8, 2), (4, 2, 2, 1)):
        config = decide(tensor_parallel_size=tp, data_parallel_size=dp, num_cores=num_cores)
        assert (config.num_ranks, config.num_threads) == (tp * dp, num_threads)
        assert config.executor == ("uniproc" if tp * dp == 1 else "mp")
    assert decide(data_parallel_size=2, num_threads=5).num_threads == 5
    assert decide(executor="mp").executor == "mp"


def test_copies_of_experts_are_no_more_than_ranks_can_hold() -> None:
    assert decide(data_parallel_size=3, num_redundant_experts=10).num_redundant_experts == 10
    with pytest.raises(SettingsError, match=r"num_redundant_experts=11: .* use at most 10"):
        decide(data_parallel_size=3, num_redundant_experts=11)


def test_experts_are_placed_by_loads_or_by_a_file() -> None:
    assert decide(data_parallel_size=2, rebalance="places.json").rebalance == "off"
    for rebalance in ("off", "auto"):
        assert decide(data_parallel_size=2, rebalance=rebalance, expert_loads="loads.json").rebalance == rebalance
    with pytest.raises(SettingsError) as refusal:
        decide(data_parallel_size=2, rebalance="places.json", expert_loads="loads.json")
    assert str(refusal.value) == (
        "rebalance='places.json' says where experts are, and so does expert_loads='loads.json'; leave one of them out"
    )


def test_layouts_that_nothing_runs_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"executor='uniproc'.*asks for 2; use executor='mp'"):
        decide(data_parallel_size=2, executor="uniproc")
    with pytest.raises(SettingsError, match=r"asks for 16 ranks.* may use 2 CPU cores; use at most 8 "):
        decide(tensor_parallel_size=4, data_parallel_size=4, num_cores=2)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    on_gpus: dict[str, Any] = dict(has_cuda=True, device="cuda")
    assert decide(num_gpus=4, tensor_parallel_size=2, data_parallel_size=2, **on_gpus).num_ranks == 4
    assert decide(num_gpus=1, has_nccl=False, **on_gpus).num_ranks == 1  # which talks to nobody
    words = (
        "tensor_parallel_size=2, data_parallel_size=2 asks for 4 ranks, .* torch sees 3 on this host; "
        "use at most 3 ranks.*CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(SettingsError, match=words):
        decide(num_gpus=3, tensor_parallel_size=2, data_parallel_size=2, **on_gpus)
    with pytest.raises(SettingsError, match=r"size=2: torch was built without NCCL.*install one for CUDA"):
        decide(num_gpus=8, has_nccl=False, data_parallel_size=2, **on_gpus)
    assert decide(num_gpus=0, has_nccl=False, data_parallel_size=2).device == "cpu"


def test_ray_may_have_gpus_on_other_hosts() -> None:
    settings = Settings.from_options(dict(device="cuda", data_parallel_size=4, executor="ray"))
    config = resolve(settings, FACTS, has_cuda=True, num_cores=3, num_gpus=1, cores_of_nodes=[8, 8])
    assert (config.num_ranks, config.executor) == (4, "ray")


def test_threads_of_ranks_wait_asleep_where_they_outnumber_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    config = decide(data_parallel_size=2, num_threads=2)
    assert environment_of_rank(config, num_cores=3)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in environment_of_rank(config, num_cores=4)
    assert environment_of_rank(config, num_cores=4) == dict(os.environ)


def test_numbers_too_long_to_write_out_are_refused_all_the_same() -> None:
    with pytest.raises(SettingsError, match="seed=a int too large to show"):
        decide(seed=10**5000)
    with pytest.raises(SettingsError, match="kv_cache_memory="):
        decide(kv_cache_memory=10**5000)


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [(7, 7), ("7", 7), ("2KB", 2000), ("2 KiB", 2048), ("1.5GiB", 3 * 2**29), ("3M", 3_000_000), ("512MiB", 2**29)],
)
def test_amounts_of_memory(amount: int | str, num_bytes: int) -> None:
    assert parse_bytes("kv_cache_memory", amount) == num_bytes


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", "here")
    assert cache_folder() == Path("here")
    monkeypatch.delenv("MOESERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert cache_folder() == Path("there") / "moeserve"


@pytest.mark.parametrize(("given", "num_bytes"), [(0, 0), ("0", 0), ("16GiB", 2**34), (5_000, 5_000)])
def test_packed_cache_may_be_nothing(given: int | str, num_bytes: int) -> None:
    assert decide(packed_cache=given).packed_cache == num_bytes


def test_moving_experts_is_for_cpus() -> None:
    with pytest.raises(SettingsError, match=r"decides by how long ranks wait.* on CPUs only"):
        decide(device="cuda", has_cuda=True, num_gpus=2, data_parallel_size=2, rebalance="auto")
    assert decide(device="cuda", has_cuda=True, num_gpus=2, data_parallel_size=2).rebalance == "off"


def test_who_carries_tokens_between_gpus() -> None:
    on_gpus: dict[str, Any] = dict(device="cuda", has_cuda=True, num_gpus=2, data_parallel_size=2)
    assert decide(**on_gpus).dispatcher == "deepep"
    assert decide(**on_gpus).dispatcher_may_change
    assert not decide(**on_gpus, dispatcher="deepep").dispatcher_may_change
    assert decide(**on_gpus, dispatcher="all_to_all").dispatcher == "all_to_all"
    assert decide(device="cuda", has_cuda=True, num_gpus=1).dispatcher == "local"
    assert decide(data_parallel_size=2).dispatcher == "all_to_all"
    with pytest.raises(SettingsError, match="'deepep' carries tokens between GPUs, and device='cpu'"):
        decide(data_parallel_size=2, dispatcher="deepep")
    with pytest.raises(SettingsError, match="'deepep' carries tokens between GPUs, but there is 1 rank"):
        decide(dispatcher="deepep", device="cuda", has_cuda=True, num_gpus=1)


def test_attention_is_chosen_on_gpus_alone() -> None:
    on_gpus: dict[str, Any] = dict(device="cuda", has_cuda=True, num_gpus=1)
    assert decide().attention_backend == "measured"
    assert decide(**on_gpus).attention_backend == "measured"
    for name in ("triton", "flashinfer", "varlen"):
        assert decide(attention_backend=name, **on_gpus).attention_backend == name
        with pytest.raises(
            SettingsError, match=f"attention_backend='{name}' is for GPUs, and device='cpu'; use 'auto'"
        ):
            decide(attention_backend=name)
    with pytest.raises(SettingsError, match="attention_backend='flash_attn': must be one of"):
        decide(attention_backend="flash_attn", **on_gpus)
