"""The sampling parameters of moeserve, which have vLLM's names."""

from moeserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from moeserve.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
