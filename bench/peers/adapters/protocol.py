"""The protocol between `peers.py` and an adapter: one JSON object per line.

A request is `{"do": NAME, ...}`; the answer is the result of the method NAME as a JSON object, or `{"error": TEXT}`.
Answers are sent to the standard output that the process was started with. The engine's own output goes to standard
error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Method = Callable[..., Mapping[str, Any]]
Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts, new tokens of each -> the new tokens


@dataclass(frozen=True)
class Loader:
    """An engine that has been imported and configured, but not created."""

    version: str
    settings: dict[str, Any]
    make: Callable[[], Any]  # loads the model and returns `Generate`, or the experts' method
    keep: list[Any] = field(default_factory=list)  # objects that must live as long as the process


def serve(
    load: Callable[..., Loader] | None = None,
    load_experts: Callable[..., Loader] | None = None,
) -> None:
    """Answer requests until standard input ends.

    Args:
        load: (model, num_threads, max_requests, max_request_tokens) -> a loader of `Generate`.
        load_experts: (shape, num_threads) -> a loader of the method "experts" (see `experts.py`).
    """
    methods: dict[str, Method] = {}

    def do_load(first_prompt: list[int], **options: Any) -> Mapping[str, Any]:
        assert load is not None
        loader = load(**options)
        start = time.perf_counter()
        generate: Generate = loader.make()
        generate([first_prompt], 1)
        seconds = time.perf_counter() - start

        def do_generate(prompts: list[list[int]], num_tokens: int) -> Mapping[str, Any]:
            start = time.perf_counter()
            outputs = generate(prompts, num_tokens)
            return {"seconds": time.perf_counter() - start, "tokens": outputs}

        methods["generate"] = do_generate
        return {"startup_seconds": seconds, "version": loader.version, "settings": loader.settings}

    def do_load_experts(**options: Any) -> Mapping[str, Any]:
        assert load_experts is not None
        loader = load_experts(**options)
        methods["experts"] = loader.make()
        return {"version": loader.version, "settings": loader.settings}

    methods |= {"load": do_load, "load_experts": do_load_experts}
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = dict(methods[request.pop("do")](**request))
        except Exception as error:  # the parent process decides what to do about it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
