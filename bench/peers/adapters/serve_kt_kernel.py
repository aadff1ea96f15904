"""kt-kernel's BF16 experts: the kernel that it chooses on a processor with AVX512-BF16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .experts import Shape, experts_method
from .protocol import serve

MAX_ROWS = 4096


def main() -> None:
    methods: dict[str, Any] = {}

    def load_experts(shape: dict[str, int], num_threads: int) -> Mapping[str, Any]:
        import kt_kernel  # type: ignore[import-not-found, unused-ignore]
        import torch

        kernels = kt_kernel.kt_kernel_ext
        torch.set_num_threads(num_threads)
        dimensions = Shape(**shape)
        pool_config = kernels.WorkerPoolConfig()
        pool_config.subpool_count = 1
        pool_config.subpool_numa_map = [0]
        pool_config.subpool_thread_count = [num_threads]
        workers = kernels.CPUInfer(pool_config)
        on_gpu = torch.zeros(dimensions.num_experts, dtype=torch.bool)

        def make(gate_up: Any, down: Any) -> Any:
            width = dimensions.width
            parts = [
                [gate_up[expert, :width].contiguous() for expert in range(dimensions.num_experts)],
                [gate_up[expert, width:].contiguous() for expert in range(dimensions.num_experts)],
                [down[expert] for expert in range(dimensions.num_experts)],
            ]
            config = kernels.moe.MOEConfig(
                dimensions.num_experts, dimensions.top_k, dimensions.hidden, width, on_gpu.data_ptr()
            )
            config.layer_idx = 0
            config.pool = workers.backend_
            config.max_len = MAX_ROWS
            config.gate_projs, config.up_projs, config.down_projs = (
                [[weight.data_ptr() for weight in part]] for part in parts
            )
            no_scales = [[0] * dimensions.num_experts]
            config.gate_scales = config.up_scales = config.down_scales = no_scales
            layer = kernels.moe.AMXBF16_MOE(config)
            order = torch.arange(dimensions.num_experts)
            workers.submit(layer.load_weights_task(order.data_ptr()))
            workers.sync()

            def run(rows: Any, weights: Any, expert_ids: Any) -> Any:
                output = torch.empty_like(rows)
                num_rows = torch.tensor([rows.shape[0]], dtype=torch.int32)
                ids = expert_ids.to(torch.int64)
                workers.submit(
                    layer.forward_task(
                        num_rows.data_ptr(),
                        dimensions.top_k,
                        ids.data_ptr(),
                        weights.data_ptr(),
                        rows.data_ptr(),
                        output.data_ptr(),
                        False,
                    )
                )
                workers.sync()
                return output

            return run

        methods["experts"] = experts_method(dimensions, make)
        return {"version": f"kt-kernel {kt_kernel.__version__}", "settings": {"threads": num_threads}}

    methods["load_experts"] = load_experts
    serve(methods)


if __name__ == "__main__":
    main()
