"""The mesh of ranks, its groups, and the collectives by which ranks exchange tensors."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Run Python's garbage collector, which frees engines that nothing refers to. The function is named as in vLLM.

    Args:
        shutdown_ray: ignored.
    """
    gc.collect()
