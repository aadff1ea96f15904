"""`/metrics` counts what clients counted."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL, RunningServer


def samples(server: RunningServer) -> dict[tuple[str, str], float]:
    """Return the value of each series, by its name and its label other than the model's name."""
    with server.http() as http:
        text = http.get("/metrics").text
    return {
        (sample.name, next((value for value in sample.labels.values() if value != MODEL), MODEL)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels
    }


def test_metrics_equal_the_counts_of_clients(server: RunningServer) -> None:
    client = server.openai()
    before = samples(server)
    prompts = [f"Question {number}: what comes after {number}? " * 20 for number in range(6)]
    answers = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=7, n=2) for prompt in prompts * 2]
    after = samples(server)

    def gained(name: str, label: str = MODEL) -> float:
        return after[f"moeserve_{name}", label] - before[f"moeserve_{name}", label]

    usages = [answer.usage for answer in answers]
    assert gained("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages if usage)
    assert gained("generation_tokens_total") == sum(usage.completion_tokens for usage in usages if usage)
    details = [usage.prompt_tokens_details for usage in usages if usage]
    num_cached = sum(detail.cached_tokens or 0 for detail in details if detail)
    assert gained("prefix_cache_hits_total") == num_cached > 0
    reasons = [choice.finish_reason for answer in answers for choice in answer.choices]
    for reason in ("stop", "length"):
        assert gained("request_success_total", reason) == reasons.count(reason)
    assert gained("time_to_first_token_seconds_count") == 24  # outputs
    assert gained("request_prompt_tokens_count") == 12  # prompts
    num_later = gained("generation_tokens_total") - 24
    assert gained("inter_token_latency_seconds_count") == num_later
    assert gained("e2e_request_latency_seconds_sum") > 0
    assert after["moeserve_num_requests_running", "0"] == 0
    assert 0 <= after["moeserve_kv_cache_usage_perc", "0"] < 1
