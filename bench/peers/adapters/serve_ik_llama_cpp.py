"""ik_llama.cpp, through ik-llama-cpp-python, without flash attention, which fails an assertion with several requests.

The wheel's library uses AVX2. IK_LLAMA_CPP_LIB_PATH names a library that was compiled for the processor instead.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import ik_llama_cpp  # type: ignore[import-not-found, unused-ignore]
from ik_llama_cpp import _ctypes_api as llama

from .llama_engine import Engine
from .protocol import Generate, Loader, serve


def load(**options: Any) -> Loader:
    def make() -> Generate:
        return Engine(llama, llama.llama_kv_cache_clear, **options, flash_attn=False).generate

    describe = llama._lib.llama_print_system_info
    describe.restype = ctypes.c_char_p
    settings = {
        "threads": options["num_threads"],
        "library": "compiled here" if os.environ.get("IK_LLAMA_CPP_LIB_PATH") else "of the wheel",
        "features": [each.split(" = ")[0].strip() for each in describe().decode().split("|") if each.endswith(" = 1 ")],
    }
    return Loader(f"ik-llama-cpp-python {ik_llama_cpp.__version__}", settings, make)


if __name__ == "__main__":
    serve(load)
