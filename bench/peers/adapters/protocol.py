"""How an adapter is asked and how it answers: one JSON object per line. Knows no engine.

A request is `{"do": NAME, ...}`; the answer is what the method NAME returns, as a JSON object, or `{"error": TEXT}`.
Answers go to the standard output that the process was started with. Whatever the engine itself prints goes to standard
error, so that it cannot mix with them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Method = Callable[..., Mapping[str, Any]]


def serve(methods: Mapping[str, Method]) -> None:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = dict(methods[request.pop("do")](**request))
        except Exception as error:  # the process that asked decides what an error means
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def generation(generate: Callable[[list[list[int]], int], list[list[int]]]) -> Method:
    """Makes of an engine's greedy generation the method that runs it against the clock."""

    def method(prompts: list[list[int]], num_tokens: int) -> Mapping[str, Any]:
        start = time.perf_counter()
        outputs = generate(prompts, num_tokens)
        return {"seconds": time.perf_counter() - start, "tokens": outputs}

    return method
