"""Requests that schemathesis makes from the server's own description: no failures, no answers beside it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running_server import MODEL, RunningServer
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_OPERATIONS = 21
CASES = 150  # of each operation, valid ones and invalid ones: more than 2,000 together


def check_all(server: RunningServer, num_cases: int) -> int:
    """Return the number of requests that were sent."""
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in description.get_all_operations()]
    assert len(operations) == NUM_OPERATIONS
    num_sent = 0
    for operation in operations:
        for mode in schemathesis.GenerationMode if operation.body else [schemathesis.GenerationMode.POSITIVE]:

            @settings(
                max_examples=num_cases,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal num_sent
                num_sent += 1
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = MODEL  # others are refused at once
                case.call_and_validate(checks=CHECKS, timeout=60)

            check()
    assert server.service.admission.num_running == 0
    return num_sent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_requests(tiny_server: RunningServer) -> None:
    assert check_all(tiny_server, CASES) >= 2_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_generated_requests(tiny_server: RunningServer) -> None:
    assert check_all(tiny_server, 5 * CASES) >= 10_000


def test_a_tiny_model_answers(tiny_server: RunningServer) -> None:
    answer = tiny_server.openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 64
