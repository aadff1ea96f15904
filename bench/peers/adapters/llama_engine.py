"""An engine with the C interface of llama.cpp: all requests of a batch in one `llama_decode`.

Settings: the engine's defaults (mapped file, `n_batch` 2048, `n_ubatch` 512), and a context that holds all requests.
    The prompts of a batch are split into pieces of `n_batch` tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np


class Engine:
    """Decodes greedily.

    Args:
        llama: the module of Python bindings.
        clear: clears the KV cache of a context.
        settings: fields of the context's parameters that differ from their defaults.
    """

    def __init__(
        self,
        llama: Any,
        clear: Callable[[Any], None],
        model: str,
        num_threads: int,
        max_requests: int,
        max_request_tokens: int,
        **settings: Any,
    ) -> None:
        llama.llama_backend_init()
        loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = max_requests * (-(-max_request_tokens // 256) * 256)  # llama.cpp rounds streams up to 256
        params.n_seq_max = max_requests
        params.n_threads = params.n_threads_batch = num_threads
        for name, value in settings.items():
            setattr(params, name, value)
        self._context = loaded and llama.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError(f"{model} cannot be loaded with {params.n_ctx} tokens of context; see the log")
        self._llama, self._clear = llama, clear
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
        self._max_batch = min(params.n_batch, params.n_ctx)
        self._batch = llama.llama_batch_init(self._max_batch, 0, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        self._clear(self._context)
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
            code = self._llama.llama_decode(self._context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code} for {len(piece)} tokens")
            for index in (index for index, row in enumerate(piece) if row[3]):
                pointer = self._llama.llama_get_logits_ith(self._context, index)
                logits = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
                tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
        return tokens
