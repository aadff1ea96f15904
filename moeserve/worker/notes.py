"""A note on what the bytes of results depend on."""

from __future__ import annotations

from moeserve.config.engine_config import EngineConfig
from moeserve.models.model_config import ModelSpec
from moeserve.ops.backend import Backend
from moeserve.ops.native import missing_kernels


def note_on_bytes(config: EngineConfig, model: ModelSpec, backend: Backend) -> str | None:
    """Return a note on what the bytes of a request's results depend on besides the request; None if on nothing else.

    Without C++ kernels on a CPU, the note also says how to get them.
    """
    reason = None
    if config.compute.device != "cpu" and not config.compute.batch_invariant:
        reason = f"device={config.compute.device!r}"
    elif config.weights.dtype == "float16" and config.compute.device == "cpu":
        reason = "dtype='float16', in which the C++ kernels do not compute"
    elif not backend.is_batch_invariant:
        what = f"torch computes alone, 3 to 5 times slower than moeserve's C++ kernels, which {missing_kernels()}"
        return f"{what}; also, the last bits of a request's results may depend on what runs beside it and on the layout"
    if reason is not None:
        return f"the last bits of a request's results may depend on what runs beside it and on the layout: {reason}"
    size = config.parallel.tensor_parallel_size
    if model.keeps_bytes(size):
        return None
    alike = ", ".join(str(other) for other in model.tensor_parallel_sizes if model.keeps_bytes(other))
    return (
        f"the last bits of results with tensor_parallel_size={size} differ from those of one rank; they are the same "
        f"with {alike}"
    )
