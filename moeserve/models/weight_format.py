"""Weight formats: which stored tensors make up a weight, as a checkpoint's quantization_config names them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve.models.config_values import ConfigValues
from moeserve.models.int4_tensors import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2, Int4Storage, Int4Tensor
from moeserve.models.quantization import CheckpointTensor, Fp8Tensor, Mxfp4Part, Mxfp4Tensor, PlainTensor, StoredTensor


@dataclass(frozen=True)
class WeightFormat:
    """The form in which a checkpoint stores its weights: plain, or some weights encoded in several tensors.

    The parts of a weight P + `suffix` are stored as P + a suffix for each. They are the arguments of `encoded`.
    """

    stored_as: str | None = None  # the encoding in words; None for weights that are not encoded
    encoded: Callable[..., CheckpointTensor] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)  # suffixes by argument; the last one is not empty
    optional_parts: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # suffixes of tensors beside them that need not be read
    suffix: str = ""
    is_int4: bool = False  # in codes that packed weights can keep
    is_mxfp4: bool = False

    def with_mxfp4_kept(self) -> WeightFormat:
        """Return the format of a checkpoint in MXFP4 of which codes and scales are loaded as they are stored."""
        assert self.is_mxfp4
        return dataclasses.replace(self, encoded=None)

    def group(self, stored: Mapping[str, StoredTensor]) -> dict[str, CheckpointTensor]:
        """Return the model's tensors by name. A part whose partner is missing stays a tensor of its own."""
        tensors: dict[str, CheckpointTensor] = {name: PlainTensor(tensor) for name, tensor in stored.items()}
        if self.encoded is None:
            ends = tuple(self.parts.values()) if self.is_mxfp4 else ()
            return tensors | {name: Mxfp4Part(tensor) for name, tensor in stored.items() if name.endswith(ends)}
        *_, last_suffix = self.parts.values()
        for name in stored:
            prefix = name.removesuffix(last_suffix)
            suffixes = {**self.parts, **self.optional_parts}
            found = {part: stored[prefix + end] for part, end in suffixes.items() if prefix + end in stored}
            if prefix != name and found.keys() >= self.parts.keys():
                for stored_name in [tensor.name for tensor in found.values()] + [prefix + end for end in self.unused]:
                    tensors.pop(stored_name, None)
                tensors[prefix + self.suffix] = self.encoded(**found)
        return tensors


def read_weight_format(config: ConfigValues) -> WeightFormat:
    """Return the format that `quantization_config` names.

    Raises:
        CheckpointError: the format is not supported.
    """
    config.refuse("compression_config")  # the key of compressed-tensors before quantization_config
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return WeightFormat()
    match quantization:
        case {"quant_method": "mxfp4"}:
            return WeightFormat("mxfp4", Mxfp4Tensor, {"blocks": "_blocks", "scales": "_scales"}, is_mxfp4=True)
        # Matrices in fp8 have scales, so lists of those that are not converted need not be read.
        case {"quant_method": "fp8", "weight_block_size": [int(height), int(width)]} if (
            height >= 1
            and width >= 1
            and quantization.get("activation_scheme", "dynamic") == "dynamic"
            and quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
        ):
            encoded = functools.partial(Fp8Tensor, block=(height, width))
            parts = {"weight": "", "scale": "_scale_inv"}
            return WeightFormat(f"fp8 in blocks of {height} x {width}", encoded, parts)
        case {"quant_method": "gptq", "bits": 4} if (storage := _gptq_storage(quantization)) is not None:
            return WeightFormat(
                "int4 of GPTQ",
                functools.partial(Int4Tensor, storage),
                _QWEIGHT,
                optional_parts={"group_of_input": ".g_idx"} if quantization.get("desc_act", True) else {},
                unused=(".g_idx",),
                suffix=".weight",
                is_int4=True,
            )
        case {"quant_method": "awq", "bits": 4} if str(quantization.get("version", "gemm")).lower() == "gemm":
            of_awq = functools.partial(Int4Tensor, AWQ)
            return WeightFormat("int4 of AWQ", of_awq, _QWEIGHT, suffix=".weight", is_int4=True)
        case {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": dict(groups)} if (
            groups and all(map(_is_int4, groups.values()))
        ):
            zeros = {"zeros": ".weight_zero_point"}
            has_zeros = not any(group["weights"].get("symmetric", True) for group in groups.values())
            return WeightFormat(
                "int4 of compressed-tensors",
                functools.partial(Int4Tensor, COMPRESSED_TENSORS),
                {"codes": ".weight_packed", **(zeros if has_zeros else {}), "scales": ".weight_scale"},
                optional_parts={**zeros, "group_of_input": ".weight_g_idx"},
                unused=(".weight_shape",),
                suffix=".weight",
                is_int4=True,
            )
    raise config.wrong(
        "quantization_config",
        "is not supported; supported: fp8 (e4m3, dynamic activations, weight_block_size such as [128, 128]), mxfp4, "
        "gptq (4 bits), awq (4 bits, version gemm), compressed-tensors (pack-quantized, 4 bits, weights only), or none "
        "(float32, bfloat16 or float16 weights)",
    )


_QWEIGHT = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}


def _gptq_storage(quantization: Mapping[str, Any]) -> Int4Storage | None:
    match quantization.get("checkpoint_format", "gptq"):
        case "gptq":
            return GPTQ
        case "gptq_v2":
            return GPTQ_V2
    return None


def _is_int4(group: Any) -> bool:
    """Return True if a group of compressed-tensors has weights in int4, and activations that are not quantised."""
    match group:
        case {"weights": {"num_bits": 4, "type": "int", "strategy": "group" | "channel"}}:
            return group.get("input_activations") is None and group.get("output_activations") is None
    return False
