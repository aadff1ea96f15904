"""llama.cpp, through llama-cpp-python.

Flash attention where llama.cpp selects it, and one cache stream per request, as in its own batched benchmark.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp  # type: ignore[import-not-found, unused-ignore]

from .llama_engine import Engine
from .protocol import Generate, Loader, serve

WARNING, ERROR = 3, 4  # llama.cpp's log levels


def load(**options: Any) -> Loader:
    def log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        if level in (WARNING, ERROR):
            print(text.decode(errors="replace"), end="", flush=True)

    callback = llama_cpp.llama_log_callback(log)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))

    def clear(context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def make() -> Generate:
        return Engine(llama_cpp, clear, **options).generate

    # The engine holds only the address of the callback, so the callback must be kept alive.
    settings = {"threads": options["num_threads"]}
    return Loader(f"llama-cpp-python {llama_cpp.__version__}", settings, make, keep=[callback])


if __name__ == "__main__":
    serve(load)
