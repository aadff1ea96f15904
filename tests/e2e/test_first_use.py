"""The first start and the first answers on the default model: nothing heavy is imported, and no step takes long."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeserve import LLM, SamplingParams
from moeserve.executor import uniproc
from moeserve.ops.native import native_kernels
from moeserve.worker.worker import Worker

NUM_STEPS = 100
PROMPTS = ["One, two, three,", "The capital of Italy is", "Red, green,", "Monday, Tuesday,", "North, east,", "a b c"]

# The modules after the start, after a prompt's first token, and after a batch whose requests end one by one.
START = """
import json, sys
from moeserve import LLM, SamplingParams
seen = []
with LLM(show_progress=False) as llm:
    seen.append(list(sys.modules))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in llm.stream(llm.chat_prompt([{"role": "user", "content": "Hello"}]), params):
        if len(seen) == 1:
            seen.append(list(sys.modules))
    llm.generate(["One, two,"] * 4, [SamplingParams(max_tokens=4 * n, ignore_eos=True) for n in range(1, 5)])
    seen.append(list(sys.modules))
print(json.dumps(seen))
"""
# The compiler of torch and what it imports, and libraries that a default start does not need.
HEAVY = {"transformers", "torch._dynamo", "torch._inductor", "sympy", "ray", "triton", "matplotlib", "pandas", "gguf"}


@pytest.mark.slow
@pytest.mark.usefixtures("default_cache")
def test_a_start_imports_little_and_an_answer_nothing() -> None:
    LLM(show_progress=False, max_model_len=256).shutdown()  # builds the default model, which needs gguf
    printed = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True, check=True).stdout
    after_start, after_token, after_batch = map(set, json.loads(printed.splitlines()[-1]))
    assert HEAVY & after_start == set()
    assert HEAVY & after_token == set()
    assert after_batch - after_token == set()


@pytest.mark.usefixtures("default_cache")
def test_overrides_extend_the_context_of_the_default_model() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
    with LLM(show_progress=False, hf_overrides={"rope_scaling": scaling}, kv_cache_memory="512MiB") as llm:
        assert llm.config.schedule.max_model_len == 2 * 8192


@pytest.mark.slow
@pytest.mark.skipif(native_kernels() is None, reason="there are no captured steps without the C++ kernels")
def test_no_step_among_the_first_takes_three_times_the_median(
    default_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time of one thread, and of three starts the median, because other processes use the machine too.

    The rank captures sizes as they occur: it has no idle time before.
    """
    monkeypatch.setattr(uniproc, "IDLE_SECONDS", 3600.0)
    runs = [decode_seconds(monkeypatch) for _ in range(3)]
    steps = [statistics.median(each) for each in zip(*runs, strict=True)]
    assert len(steps) == NUM_STEPS
    assert max(steps) < 3 * statistics.median(steps), [round(seconds, 4) for seconds in steps]


def decode_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Start an engine and return the processor seconds of its first decode steps, of each size up to six."""
    seconds: list[float] = []
    execute = Worker.start

    def timed(worker: Worker, work: Any) -> Any:
        started = time.thread_time()
        outcome = execute(worker, work)
        if work.plan is not None and work.plan.is_decode_only:
            seconds.append(time.thread_time() - started)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", timed)
        with LLM(show_progress=False, num_threads=1, max_model_len=256) as llm:
            params = [SamplingParams(temperature=0, max_tokens=10 * n, ignore_eos=True) for n in range(1, 7)]
            llm.generate(PROMPTS, params, use_tqdm=False)
            llm.generate(PROMPTS, params, use_tqdm=False)
    return seconds[:NUM_STEPS]
