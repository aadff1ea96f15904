"""Names that vLLM has in `vllm.platforms`."""

from __future__ import annotations


class Platform:
    """The kind of device that engines use by default, with device="auto": the CPU, also on hosts with a GPU."""

    device_type = "cpu"

    def is_cpu(self) -> bool:
        """Return True."""
        return True

    def is_cuda(self) -> bool:
        """Return False: GPUs are used only with device="cuda"."""
        return False

    def is_cuda_alike(self) -> bool:
        """Return False; see `is_cuda`."""
        return False

    def is_rocm(self) -> bool:
        """Return False: AMD GPUs are not supported."""
        return False


current_platform = Platform()
