"""Suggestions for misspelt names: each likely typing error finds its name, and other words find none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from moeserve.config.settings import Settings
from moeserve.config.validation import parse_settings
from moeserve.config.vllm_names import VllmSettings
from moeserve.errors import RequestError, SettingsError, near_names, nearest
from moeserve.sampling_params import SamplingParams

GROUPS = (*Settings.groups().values(), VllmSettings)
SETTINGS = [field.name for group in GROUPS for field in dataclasses.fields(group)]
PARAMETERS = [field.name for field in dataclasses.fields(SamplingParams)]


def with_typing_errors(name: str) -> Iterator[str]:
    """Yield a name with every third letter missing, doubled, wrong or swapped with the next, and in other spellings."""
    for place, letter in [*enumerate(name)][::3]:
        yield name[:place] + name[place + 1 :]
        yield name[:place] + letter + name[place:]
        yield name[:place] + ("x" if letter != "x" else "y") + name[place + 1 :]
        yield name[:place] + name[place + 1 : place + 2] + letter + name[place + 2 :]
    yield name.replace("_", "-")
    yield name.title()
    yield name.replace("_", "", 1)


@pytest.mark.parametrize("known", [SETTINGS, PARAMETERS])
def test_every_typing_error_finds_its_name(known: list[str]) -> None:
    for name in known:
        for typed in with_typing_errors(name):
            if len(typed) > 3 and typed not in known:
                assert name in near_names(typed, known), typed


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("modle", ["model"]),
        ("threads", ["num_threads"]),
        ("trust", ["trust_remote_code"]),
        ("max_num_batched", ["max_num_batched_tokens"]),
        ("num_seqs", ["max_num_seqs"]),
        ("tensor_parallel", ["tensor_parallel_size"]),
        ("tensorParallelSize", ["tensor_parallel_size"]),
        ("max_model_length", ["max_model_len"]),
        ("quantisation", ["quantization"]),
        ("gpu_memory_utilisation", ["gpu_memory_utilization"]),
        ("enable_prefix_cache", ["enable_prefix_caching"]),
        ("kv_cache_type", ["kv_cache_dtype"]),
        # Settings of other engines, which no setting here resembles.
        *((name, []) for name in ("enable_lora", "enable_moe", "enable_tp", "cpu_offload_gb", "max_seq_len", "host")),
        *(
            (name, [])
            for name in ("rope_scaling", "device_map", "torch_dtype", "n_gpu_layers", "port", "tp", "lora_path")
        ),
        *((name, []) for name in ("disable_log_requests", "served_model_name", "limit_mm_per_prompt", "max_loras")),
    ],
)
def test_only_near_settings_are_suggested(typed: str, meant: list[str]) -> None:
    assert near_names(typed, SETTINGS) == meant


def test_python_users_read_python_names() -> None:
    with pytest.raises(SettingsError, match="tensor_parallel_size") as error:
        parse_settings({"tensor_paralel_size": 2})
    assert "--" not in str(error.value)
    for name in (field.name for field in dataclasses.fields(VllmSettings)):
        with pytest.raises(SettingsError, match=name) as error:
            parse_settings({name: [None]})
        assert "--" not in str(error.value)


def test_several_equally_near_names_are_suggested() -> None:
    assert near_names("top", PARAMETERS) == ["top_p", "top_k"]
    assert nearest("top_q", PARAMETERS).endswith("'top_k' or 'top_p'?")
    with pytest.raises(RequestError, match="'top_k' or 'top_p'"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]
