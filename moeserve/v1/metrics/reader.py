"""Names that vLLM has in `vllm.v1.metrics.reader`."""

from moeserve.api.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
