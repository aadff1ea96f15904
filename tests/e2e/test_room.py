"""Settings that need more memory than there is: refused before the memory is taken, by name, value and what fits."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from reference_models import Reference

ADDRESS_SPACE = 3 * 2**30
# Tries settings one after another in one process, which serves a request afterwards.
TRY = """
import json, sys
from moeserve import LLM
from moeserve.machine import free_memory
options = dict(dtype="float32", num_threads=1, show_progress=False)
errors = []
for settings in json.loads(sys.argv[2]):
    if settings.get("kv_cache_memory") == "nearly all":
        settings["kv_cache_memory"] = free_memory() * 97 // 100
    try:
        LLM(sys.argv[1], **options, **settings)
    except Exception as error:
        errors.append([type(error).__name__, str(error)])
with LLM(sys.argv[1], **options, max_model_len=64) as llm:
    llm.generate([[5, 6]])
print(json.dumps(errors))
"""
# Each is too large by itself, or fits by itself but not beside the others. The error has all of these texts.
TOO_LARGE: list[tuple[dict[str, Any], list[str]]] = [
    ({"kv_cache_memory": "4GiB"}, ["kv_cache_memory=4294967296", "4.00 GiB", "are free"]),
    ({"kv_host_memory": "500GiB"}, ["kv_host_memory=536870912000", "500 GiB", "are free"]),
    ({"max_num_seqs": 2**31 - 1}, ["max_num_seqs=2147483647", "are free", "requests fit"]),
    (
        {"max_num_batched_tokens": 10**8, "max_num_seqs": 10**5},
        ["max_num_batched_tokens=100000000", "are free", "tokens fit"],
    ),
    ({"max_num_seqs": 50000, "kv_cache_memory": "nearly all"}, ["max_num_seqs=50000", "kv_cache_memory=", "together"]),
]


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


@pytest.mark.slow
def test_settings_are_refused_by_name(plain: Reference) -> None:
    settings = json.dumps([each for each, _ in TOO_LARGE])
    command = [sys.executable, "-X", "dev", "-c", TRY, str(plain.folder), settings]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, preexec_fn=limit_address_space)
    assert run.returncode == 0, run.stderr
    for (_, texts), (kind, message) in zip(TOO_LARGE, json.loads(run.stdout), strict=True):
        assert kind == "SettingsError", message
        assert all(text in message for text in texts), message
    assert "nanobind" not in run.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_and_a_server_end_with_the_error_alone(plain: Reference) -> None:
    flags = "--dtype float32 --num-threads 1 -tp 2 --executor mp --kv-cache-memory 500GiB --port 0"
    command = [sys.executable, "-m", "moeserve", "serve", str(plain.folder), *flags.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 1
    assert "--kv-cache-memory 536870912000" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
