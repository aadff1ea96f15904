"""llama.cpp, through the C interface of llama-cpp-python: all requests of a batch in one `llama_decode`.

Settings: its defaults (mapped file, `n_batch` 2048, `n_ubatch` 512, flash attention where llama.cpp selects it), and
    one cache stream per request, as in its own batched benchmark. The prompts of a batch are split into pieces of
    `n_batch` tokens.
"""

from __future__ import annotations

import ctypes

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from .protocol import Generate, Loader, serve

WARNING, ERROR = 3, 4  # llama.cpp's log levels


class Engine:
    def __init__(self, model: str, num_threads: int, max_requests: int, max_request_tokens: int) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_requests * (-(-max_request_tokens // 256) * 256)  # it rounds streams up to 256
        params.n_seq_max = max_requests
        params.n_threads = params.n_threads_batch = num_threads
        self._context = loaded and llama_cpp.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {model} with {params.n_ctx} tokens of context; see its log")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._max_batch = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._max_batch, 0, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        rows = [
            (token, position, request, position == len(prompt) - 1)
            for request, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        outputs = [[token] for token in self._decode(rows)]
        for step in range(num_tokens - 1):
            rows = [
                (output[-1], len(prompt) + step, request, True)
                for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            for output, token in zip(outputs, self._decode(rows), strict=True):
                output.append(token)
        return outputs

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run rows of (token, position, request, needs logits). Return the next token of each row with logits."""
        tokens: list[int] = []
        batch = self._batch
        for start in range(0, len(rows), self._max_batch):
            piece = rows[start : start + self._max_batch]
            batch.n_tokens = len(piece)
            for index, (token, position, request, has_logits) in enumerate(piece):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = request
                batch.logits[index] = has_logits
            code = llama_cpp.llama_decode(self._context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code} for {len(piece)} tokens")
            for index in (index for index, row in enumerate(piece) if row[3]):
                pointer = llama_cpp.llama_get_logits_ith(self._context, index)
                logits = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
                tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
        return tokens


def load(model: str, num_threads: int, max_requests: int, max_request_tokens: int) -> Loader:
    def log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        if level in (WARNING, ERROR):
            print(text.decode(errors="replace"), end="", flush=True)

    callback = llama_cpp.llama_log_callback(log)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))

    def make() -> Generate:
        return Engine(model, num_threads, max_requests, max_request_tokens).generate

    # The engine holds only the address of the callback, so the callback must be kept alive.
    return Loader(f"llama-cpp-python {llama_cpp.__version__}", {"threads": num_threads}, make, keep=[callback])


if __name__ == "__main__":
    serve(load)
