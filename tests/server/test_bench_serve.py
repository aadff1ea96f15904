"""`moeserve bench serve` against counts of the server, and its figures against arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_server import RunningServer

from moeserve.bench import serve
from moeserve.planner.traffic import RecordedRequest, Traffic, fixed_traffic

RECORDED = Traffic(
    (
        RecordedRequest(0.0, 600, 5, (1, 2)),
        RecordedRequest(2.0, 1024, 7, (1, 3)),
        RecordedRequest(6.0, 100, 3, (9,)),
    ),
    512,
)


@pytest.mark.slow
@pytest.mark.parametrize("load", [["--clients", "3"], ["--rate", "40"]])
def test_it_counts_as_the_server_does(server: RunningServer, tmp_path: Path, load: list[str]) -> None:
    before = server.service.llm.session.frontend.stats[0].num_generated_tokens
    path, picture = tmp_path / "rows.jsonl", tmp_path / "waits.svg"
    arguments = ["--url", f"{server.url}/v1", "--traffic", "40:6", "--requests", "10", *load]
    serve.main([*arguments, "--json", str(path), "--plot", str(picture)])
    row = json.loads(path.read_text())
    assert (row["requests"], row["failed"]) == (10, 0)
    assert round(row["output_tokens_per_second"] * row["seconds"]) == 10 * 6
    assert round(row["prompt_tokens_per_second"] * row["seconds"]) == 10 * 40
    assert server.service.llm.session.frontend.stats[0].num_generated_tokens - before == 10 * 6
    assert 0 < row["first_token"]["median"] <= row["first_token"]["p99"] <= row["whole"]["p99"]
    assert "<svg" in picture.read_text()


def test_failures_are_counted(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(serve.ServerUnusableError, match="status 400"):
        serve.main(["--url", f"{server.url}/v1", "--traffic", "4000:6", "--requests", "3"])
    with pytest.raises(serve.ServerUnusableError, match=r"127\.0\.0\.1:9"):
        serve.main(["--url", "http://127.0.0.1:9/v1"])


def test_recorded_prefixes_become_equal_tokens() -> None:
    first, second, third = serve.draw_prompts(serve.take(RECORDED, 3), 1000)
    assert [len(first), len(second), len(third)] == [600, 1024, 100]
    assert first[:300] == second[:300]
    assert first[300:] != second[300:600]
    assert not set(range(serve.FIRST_TOKEN_ID)) & {*first, *second, *third}
    fixed = serve.draw_prompts(serve.take(fixed_traffic(50, 5), 2), 1000)
    assert fixed[0] != fixed[1]


def test_arrivals_have_the_rate_and_the_recorded_shape() -> None:
    assert serve.arrivals_at(RECORDED.requests, 1.5) == pytest.approx([0.0, 2 / 3, 2.0])
    assert serve.arrivals_at(serve.take(fixed_traffic(5, 5), 4), 2.0) == pytest.approx(
        [0.0, 1.0 / 2, 1.0, 3 / 2], abs=1.0
    )


def test_goodput_counts_requests_within_both_limits() -> None:
    answers = [
        serve.Answer(num_prompt=1, num_output=3, event_times=[0.5, 0.6, 0.7], whole=0.7),
        serve.Answer(num_prompt=1, num_output=3, event_times=[1.5, 1.6, 1.7], whole=1.7),  # late
        serve.Answer(num_prompt=1, num_output=3, event_times=[0.5, 1.0, 1.5], whole=1.5),  # slow
        serve.Answer(error="status 429"),
    ]
    row = serve.summary(answers, 2.0, 1.0, 0.2)
    assert row["goodput"] == 0.5
    assert row["failed"] == 1
    assert row["output_tokens_per_second"] == 4.5
    assert row["between_tokens"]["p99"] == pytest.approx(0.5)
