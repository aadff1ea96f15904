"""The mesh of ranks, its groups, and the collectives by which they exchange tensors."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and with it the engines that no variable names any more. The name is vLLM's.

    Args:
        shutdown_ray: no effect.
    """
    gc.collect()
