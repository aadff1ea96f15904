"""`/metrics` counts what clients counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

Samples = dict[tuple[str, ...], float]


def samples(server: RunningServer) -> Samples:
    """Return the value of each series, by its name and its labels other than the model's name."""
    with server.http() as http:
        text = http.get("/metrics").text
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", data_parallel_size=2, max_model_len=64, max_num_seqs=4, show_progress=False)
    with running(llm) as server:
        yield server
    llm.shutdown()


@pytest.mark.slow
def test_metrics_equal_the_counts_of_clients(server: RunningServer) -> None:
    client = server.openai()
    before = samples(server)
    prompts = [f"Question {number}: what comes after {number}? " * 20 for number in range(6)]
    answers = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=7, n=2) for prompt in prompts * 2]
    after = samples(server)

    def gained(name: str, *labels: str) -> float:
        series = (f"moeserve_{name}", "0", *labels)
        return after[series] - before[series]

    usages = [answer.usage for answer in answers]
    assert gained("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages if usage)
    assert gained("generation_tokens_total") == sum(usage.completion_tokens for usage in usages if usage)
    details = [usage.prompt_tokens_details for usage in usages if usage]
    num_cached = sum(detail.cached_tokens or 0 for detail in details if detail)
    assert gained("prefix_cache_hits_total") == num_cached > 0
    reasons = [choice.finish_reason for answer in answers for choice in answer.choices]
    for reason in ("stop", "length"):
        assert gained("request_success_total", reason) == reasons.count(reason)
    assert gained("iteration_tokens_total_count") >= 7 * 2  # steps
    assert gained("replica_idle_steps_total") == 0
    assert gained("time_to_first_token_seconds_count") == 24  # outputs
    assert gained("request_prompt_tokens_count") == 12  # prompts
    num_later = gained("generation_tokens_total") - 24
    assert gained("inter_token_latency_seconds_count") == num_later
    assert gained("e2e_request_latency_seconds_sum") > 0
    assert after["moeserve_num_requests_running", "0"] == 0
    assert 0 <= after["moeserve_kv_cache_usage_perc", "0"] < 1


def test_a_request_whose_client_hangs_up_counts_as_aborted(server: RunningServer) -> None:
    series = ("moeserve_request_success_total", "0", "abort")
    before = samples(server)[series]
    with server.openai().completions.create(model=MODEL, prompt="One", max_tokens=900, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 200
    while samples(server)[series] == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert samples(server)[series] - before == 1


@pytest.mark.ranks
def test_replicas_have_metrics_of_their_own(two_replicas: RunningServer) -> None:
    """All replicas take part in each step, so their steps with tokens and without add up to the same number."""
    client = two_replicas.async_openai()

    async def answers() -> list[int]:
        made = [
            client.completions.create(
                model=MODEL, prompt=[7, number], max_tokens=30 + 2 * number, extra_body={"ignore_eos": True}
            )
            for number in range(5)
        ]
        answers = await asyncio.gather(*made)
        answers.append(await client.completions.create(model=MODEL, prompt=[7], max_tokens=3))  # the other one is idle
        return [answer.usage.prompt_tokens + answer.usage.completion_tokens for answer in answers]

    num_tokens = sum(asyncio.run(answers()))
    found = samples(two_replicas)

    def of_replicas(name: str) -> list[float]:
        return [found[f"moeserve_{name}", engine] for engine in "01"]

    def num_steps() -> set[float]:
        counts = zip(of_replicas("iteration_tokens_total_count"), of_replicas("replica_idle_steps_total"), strict=True)
        return {with_tokens + idle for with_tokens, idle in counts}

    deadline = time.monotonic() + 200
    while len(num_steps()) > 1 and time.monotonic() < deadline:  # an idle replica sends its totals once in a second
        time.sleep(0.1)
        found = samples(two_replicas)
    (steps,) = num_steps()
    assert steps >= 30 + 2 * 4
    assert sum(of_replicas("replica_idle_steps_total")) > 0
    assert sum(of_replicas("prompt_tokens_total") + of_replicas("generation_tokens_total")) == num_tokens
    for name in ("prompt_tokens_total", "time_to_first_token_seconds_count", "agreement_seconds_total"):
        assert all(of_replicas(name)), name
    # Each token is in a step, except for the last one of each output.
    assert sum(of_replicas("iteration_tokens_total_sum")) == num_tokens - 6
    assert of_replicas("replica_padding_tokens_total") == [0, 0]  # nothing is padded on a CPU
