"""transformers: `generate` with its KV cache and sdpa attention, in bf16, and otherwise its defaults.

The process should have been started with what PyTorch recommends on a CPU preloaded: tcmalloc and Intel's OpenMP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .protocol import generation, serve


def main() -> None:
    methods: dict[str, Any] = {}

    def load(
        model: str, num_threads: int, max_requests: int, max_request_tokens: int, first_prompt: list[int]
    ) -> Mapping[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        start = time.perf_counter()
        engine = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        engine.generation_config.eos_token_id = None  # never stop early
        engine.generation_config.pad_token_id = 0  # never used, but generate asks for one

        def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
            prompt_ids = torch.tensor(prompts)
            output_ids = engine.generate(
                prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=num_tokens, do_sample=False
            )
            return output_ids[:, prompt_ids.shape[1] :].tolist()

        generate([first_prompt], 1)
        seconds = time.perf_counter() - start
        methods["generate"] = generation(generate)
        version = f"transformers {transformers.__version__}"
        return {"startup_seconds": seconds, "version": version, "settings": {"threads": num_threads}}

    methods["load"] = load
    serve(methods)


if __name__ == "__main__":
    main()
