"""llama.cpp, through the C interface that llama-cpp-python loads: all requests of a batch in one `llama_decode`.

Settings: its defaults (mapped file, `n_batch` 2048, `n_ubatch` 512, flash attention where it chooses it), one cache
stream per request, as its own batched benchmark has it, and as many threads as it is told. The prompts of a batch go in
pieces of `n_batch` tokens.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from .protocol import generation, serve


class Engine:
    def __init__(self, model: str, num_threads: int, max_requests: int, max_request_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}; it says why above")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_requests * (-(-max_request_tokens // 256) * 256)  # it rounds a stream up to 256
        params.n_seq_max = max_requests
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens; it says why above")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._max_batch = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._max_batch, 0, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        last_tokens = self._prefill(prompts)
        outputs = [[token] for token in last_tokens]
        for step in range(num_tokens - 1):
            rows = [
                (output[-1], len(prompt) + step, request, True)
                for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            for output, token in zip(outputs, self._decode(rows), strict=True):
                output.append(token)
        return outputs

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first new token of each prompt."""
        rows = [
            (token, position, request, position == len(prompt) - 1)
            for request, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: list[int] = []
        for start in range(0, len(rows), self._max_batch):
            tokens += self._decode(rows[start : start + self._max_batch])
        return tokens

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs rows of (token, position, request, wants a next token); the next tokens, for those that want one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, request, is_wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = request
            batch.logits[index] = is_wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} tokens")
        return [int(self._logits_row(index).argmax()) for index, row in enumerate(rows) if row[3]]

    def _logits_row(self, index: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))


def main() -> None:
    def only_complaints(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        if level in (3, 4):  # warnings and errors
            print(text.decode(errors="replace"), end="", flush=True)

    log_callback = llama_cpp.llama_log_callback(only_complaints)  # kept: the engine holds only its address
    llama_cpp.llama_log_set(log_callback, ctypes.c_void_p(0))
    methods: dict[str, Any] = {}

    def load(
        model: str, num_threads: int, max_requests: int, max_request_tokens: int, first_prompt: list[int]
    ) -> Mapping[str, Any]:
        start = time.perf_counter()
        engine = Engine(model, num_threads, max_requests, max_request_tokens)
        engine.generate([first_prompt], 1)
        seconds = time.perf_counter() - start
        methods["generate"] = generation(engine.generate)
        version = f"llama-cpp-python {llama_cpp.__version__}"
        return {"startup_seconds": seconds, "version": version, "settings": {"threads": num_threads}}

    methods["load"] = load
    serve(methods)


if __name__ == "__main__":
    main()
