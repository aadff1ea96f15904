"""Constant load on an engine, whose outputs are checked."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from reference_models import Reference

from moeserve import LLM, SamplingParams

NUM_TOKENS = 60


class Load:
    """Requests that follow each other in several threads until the end of the context. All outputs are checked."""

    def __init__(self, llm: LLM, reference: Reference, num_threads: int = 4) -> None:
        self.llm = llm
        self.prompts = reference.prompts(*[3, 17, 9, 30], seed=2)
        self.params = [
            SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True)
            for index in range(len(self.prompts))
        ]
        outputs = llm.generate(self.prompts, self.params, use_tqdm=False)
        self.expected = [output.outputs[0].token_ids for output in outputs]
        self.num_ended = 0
        self.updates: list[float] = []  # when they came
        self._num_threads = num_threads
        self._has_ended = threading.Event()

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(self._num_threads)
        self._results = [self._threads.submit(self._run, index) for index in range(self._num_threads)]
        self.wait_for(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._threads.shutdown()
        for result in self._results:
            result.result()

    def wait_for(self, num_requests: int) -> None:
        """Wait until further requests have ended."""
        target = self.num_ended + num_requests
        while self.num_ended < target:
            assert not any(result.done() for result in self._results), [each.exception() for each in self._results]
            time.sleep(0.01)

    def longest_pause_s(self, since: float) -> float:
        """Return the longest time without any update."""
        times = [since, *(each for each in self.updates if each > since)]
        return max(after - before for before, after in itertools.pairwise(times))

    def _run(self, index: int) -> None:
        while not self._has_ended.is_set():
            index = (index + 1) % len(self.prompts)
            token_ids: list[int] = []
            for output in self.llm.stream(self.prompts[index], self.params[index]):
                found = output.outputs[0].token_ids
                assert found[: len(token_ids)] == token_ids
                token_ids = found
                self.updates.append(time.monotonic())
            assert token_ids == self.expected[index]
            self.num_ended += 1
