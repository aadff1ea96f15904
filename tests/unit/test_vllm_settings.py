"""Settings of vLLM that do not exist here, and values that vLLM writes differently."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.config import vllm_options
from moeserve.config.settings import Settings
from moeserve.config.validation import parse_length, parse_settings
from moeserve.config.vllm_names import NAMES
from moeserve.errors import SettingsError

ACCEPTED: list[dict[str, Any]] = [
    {"enable_lora": False, "max_loras": 4},
    {"cpu_offload_gb": 0},
    {"cpu_offload_gb": 0.0},
    {"tokenizer_mode": "auto", "skip_tokenizer_init": False},
    {"served_model_name": "x", "disable_log_requests": True, "max_logprobs": 20},
    {"compilation_config": 3},
    {"compilation_config": {"level": 0}},
    {"limit_mm_per_prompt": {}, "mm_processor_kwargs": None},
    {"prefix_caching_hash_algo": "sha256", "scheduling_policy": "fcfs"},
    {"additional_config": {}, "override_pooler_config": None, "task": "generate", "runner": "auto"},
    {"load_format": "safetensors", "model_impl": "vllm"},
    {"enable_prefix_caching": None, "async_scheduling": None, "dtype": None},
    {"data_parallel_backend": "mp", "chat_template": None},
    {"swap_space": 4, "enable_chunked_prefill": True, "disable_log_stats": False},
]


@pytest.mark.parametrize("options", ACCEPTED, ids=lambda options: ",".join(options))
def test_values_that_change_nothing_are_accepted(options: dict[str, Any]) -> None:
    settings, defaults = parse_settings(options), Settings()
    for group in Settings.groups():
        changed = {"load_format", "model_impl"} & {*options}
        if not (group == "model" and changed):
            assert getattr(settings, group) == getattr(defaults, group)
    if "load_format" in options:
        assert (settings.model.load_format, settings.model.model_impl) == ("auto", "moeserve")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_lora", True),
        ("cpu_offload_gb", 4),
        ("tokenizer_mode", "slow"),
        ("mm_processor_kwargs", {"num_crops": 4}),
        ("scheduling_policy", "priority"),
        ("task", "embed"),
        ("worker_cls", "x.Worker"),
        ("kv_transfer_config", {"kv_connector": "x"}),
        ("data_parallel_rank", 1),
        ("num_gpu_blocks_override", 100),
    ],
)
def test_values_that_would_change_something_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse_settings({name: value})
    assert str(refusal.value).startswith(f"{name}={value!r} is not supported")


def test_no_name_has_two_meanings() -> None:
    own = {name for group in Settings.groups().values() for name in group.__dataclass_fields__}
    assert not vllm_options.SETTINGS.keys() & (own | NAMES)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(4096, 4096), ("4096", 4096), ("2k", 2000), ("2K", 2048), ("25.6k", 25600), ("1M", 2**20), ("1m", 10**6),
     (-1, None), ("auto", None), (None, None), ("-1", None)],
)  # fmt: skip
def test_lengths_may_have_a_unit(length: Any, expected: int | None) -> None:
    assert parse_length("max_model_len", length) == expected
    assert parse_settings({"max_model_len": length}).model.max_model_len == length


@pytest.mark.parametrize("length", [0, 1, -2, 2**31, "k", "2 G", "1e5", "", "2kk", True, "9" * 50])
def test_wrong_lengths_are_refused_by_value(length: Any) -> None:
    with pytest.raises(SettingsError, match="max_model_len="):
        parse_length("max_model_len", length)
