"""kt-kernel's BF16 experts, with the kernel that it selects on a processor with AVX512-BF16."""

from __future__ import annotations

from typing import Any

from .experts import Shape, experts_method
from .protocol import Loader, serve

MAX_ROWS = 4096


def load_experts(shape: dict[str, int], num_threads: int) -> Loader:
    import kt_kernel  # type: ignore[import-not-found, unused-ignore]
    import torch

    kernels = kt_kernel.kt_kernel_ext
    torch.set_num_threads(num_threads)
    sizes = Shape(**shape)
    pool = kernels.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [num_threads]
    workers = kernels.CPUInfer(pool)
    on_gpu = torch.zeros(sizes.num_experts, dtype=torch.bool)

    def make_layer(gate_up: Any, down: Any) -> Any:
        experts = range(sizes.num_experts)
        parts = [
            [gate_up[expert, : sizes.width].contiguous() for expert in experts],
            [gate_up[expert, sizes.width :].contiguous() for expert in experts],
            [down[expert] for expert in experts],
        ]
        config = kernels.moe.MOEConfig(sizes.num_experts, sizes.top_k, sizes.hidden, sizes.width, on_gpu.data_ptr())
        config.layer_idx = 0
        config.pool = workers.backend_
        config.max_len = MAX_ROWS
        config.gate_projs, config.up_projs, config.down_projs = (
            [[weight.data_ptr() for weight in part]] for part in parts
        )
        config.gate_scales = config.up_scales = config.down_scales = [[0] * sizes.num_experts]
        layer = kernels.moe.AMXBF16_MOE(config)
        order = torch.arange(sizes.num_experts)
        workers.submit(layer.load_weights_task(order.data_ptr()))
        workers.sync()

        def run(rows: Any, weights: Any, expert_ids: Any) -> Any:
            output = torch.empty_like(rows)
            num_rows = torch.tensor([rows.shape[0]], dtype=torch.int32)
            ids = expert_ids.to(torch.int64)
            tensors = (ids, weights, rows, output)
            addresses = [tensor.data_ptr() for tensor in tensors]
            workers.submit(layer.forward_task(num_rows.data_ptr(), sizes.top_k, *addresses, False))
            workers.sync()
            return output

        return run

    return Loader(
        f"kt-kernel {kt_kernel.__version__}", {"threads": num_threads}, lambda: experts_method(sizes, make_layer)
    )


if __name__ == "__main__":
    serve(load_experts=load_experts)
