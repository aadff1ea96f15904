"""Weight formats: the stored tensors that represent a weight, for each kind of quantization_config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve.models.config_values import ConfigValues, read_json
from moeserve.models.int4_tensors import AWQ, COMPRESSED_TENSORS, GPTQ, GPTQ_V2, Int4Storage, Int4Tensor
from moeserve.models.quantization import (
    FP4_CODES,
    CheckpointTensor,
    Fp4Tensor,
    Fp8Tensor,
    Mxfp4Part,
    Mxfp4Tensor,
    PlainTensor,
    StoredTensor,
)

MXFP4_PARTS = {"blocks": "_blocks", "scales": "_scales"}


@dataclass(frozen=True)
class Encoding:
    """An encoding of weights. The parts of a weight named P + `suffix` are stored under P + the suffix of each part."""

    words: str  # description, such as "int4 of GPTQ"
    build: Callable[..., CheckpointTensor]  # takes the parts as keyword arguments
    parts: Mapping[str, str]  # argument of `build` -> suffix; the last suffix is not empty
    optional_parts: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # suffixes of additional tensors that need not be read
    suffix: str = ""


STACKED_MXFP4 = Encoding("mxfp4", Mxfp4Tensor, MXFP4_PARTS)  # gpt-oss: all experts of a layer


@dataclass(frozen=True)
class WeightFormat:
    """The form in which a checkpoint stores its weights. Some or all weights may be encoded in several tensors."""

    encodings: tuple[Encoding, ...] = ()  # a weight has the first encoding whose parts are all stored
    is_int4: bool = False  # weights are int4 codes that packed weights can keep
    is_mxfp4: bool = False  # experts are in MXFP4, as in gpt-oss or DeepSeek-V4
    is_gguf: bool = False  # weights are in GGUF files instead of safetensors
    keeps_mxfp4: bool = False  # codes and scales of MXFP4 are loaded without decoding

    @property
    def words(self) -> tuple[str, ...]:
        """The description of each encoding; empty for weights that are not encoded."""
        return ("GGUF",) if self.is_gguf else tuple(dict.fromkeys(encoding.words for encoding in self.encodings))

    @property
    def stored_as(self) -> str | None:
        """The descriptions of all encodings as one text; None for weights that are not encoded."""
        return " and ".join(self.words) or None

    def with_mxfp4_kept(self) -> WeightFormat:
        """Return the format changed so that codes and scales of MXFP4 are loaded without decoding."""
        assert self.is_mxfp4
        return dataclasses.replace(self, keeps_mxfp4=True)

    def group(self, stored: Mapping[str, StoredTensor]) -> dict[str, CheckpointTensor]:
        """Return the model's tensors by name. A part stays a separate tensor if other parts are missing."""
        tensors: dict[str, CheckpointTensor] = {name: PlainTensor(tensor) for name, tensor in stored.items()}
        if self.keeps_mxfp4 and STACKED_MXFP4 in self.encodings:
            ends = tuple(MXFP4_PARTS.values())
            return tensors | {name: Mxfp4Part(tensor) for name, tensor in stored.items() if name.endswith(ends)}
        grouped: dict[str, CheckpointTensor] = {}
        for encoding in self.encodings:
            *_, last_suffix = encoding.parts.values()
            for name in stored:
                prefix = name.removesuffix(last_suffix)
                suffixes = {**encoding.parts, **encoding.optional_parts}
                # A tensor that belongs to an earlier encoding is not part of another weight.
                found = {part: stored[prefix + end] for part, end in suffixes.items() if prefix + end in tensors}
                if prefix == name or not found.keys() >= encoding.parts.keys():
                    continue
                for used in [*(tensor.name for tensor in found.values()), *(prefix + end for end in encoding.unused)]:
                    tensors.pop(used, None)
                grouped[prefix + encoding.suffix] = encoding.build(**found)
        return tensors | grouped


def read_weight_format(config: ConfigValues) -> WeightFormat:
    """Return the format named by `quantization_config`, or by hf_quant_config.json in the same folder.

    Raises:
        CheckpointError: the format is not supported.
    """
    config.refuse("compression_config")  # the key of compressed-tensors before quantization_config
    quantization = config.values.get("quantization_config")
    beside = config.path.with_name("hf_quant_config.json")  # a file that TensorRT Model Optimizer writes
    if quantization is None and beside.is_file():
        found = read_json(beside).get("quantization")
        quantization = {"quant_method": "modelopt", **found} if isinstance(found, dict) else found
        config = ConfigValues(beside, {"quantization_config": quantization})
    if quantization is None:
        return WeightFormat()
    if isinstance(quantization, dict):  # transformers moves this key of DeepSeek-V4 into the quantization_config
        quantization = {"expert_dtype": config.values.get("expert_dtype"), **quantization}
    return _format_of(quantization) or _refuse(config)


def _refuse(config: ConfigValues) -> WeightFormat:
    raise config.wrong(
        "quantization_config",
        "is not supported; supported: fp8 (e4m3; scales per tensor, row or block), mxfp4, gptq (4 bits), awq (4 "
        "bits, version gemm), auto-round (packed as gptq or awq), compressed-tensors (pack-quantized with 4 bits and "
        "weights only, float-quantized with 8 bits, nvfp4-pack-quantized, mxfp4-pack-quantized), modelopt (FP8, "
        "NVFP4), or none (float32, bfloat16 or float16 weights)",
    )


def _format_of(quantization: Any) -> WeightFormat | None:
    """Return the format of a quantization_config, or None if it is not supported."""
    match quantization:
        case {"quant_method": "gguf"}:  # a folder that `gguf_checkpoint` wrote
            return WeightFormat(is_gguf=True, is_int4=True)
        case {"quant_method": "mxfp4"}:
            return WeightFormat((STACKED_MXFP4,), is_mxfp4=True)
        # Matrices in fp8 are recognised by their scales, so the list of matrices that are not quantised is not needed.
        case {"quant_method": "fp8"} if quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
            match quantization.get("weight_block_size"):
                case None:
                    return WeightFormat((_fp8("_scale"), _fp8("_scale_inv")))
                case [int(height), int(width)] if height >= 1 and width >= 1:
                    usual = _fp8("_scale_inv", (height, width))
                    is_mxfp4 = quantization.get("expert_dtype") == "fp4"
                    of_v4 = Encoding(
                        "experts in mxfp4" if is_mxfp4 else usual.words,
                        functools.partial(_fp8_or_mxfp4, block_size=(height, width)),
                        {"weight": ".weight", "scale": ".scale"},
                        suffix=".weight",
                    )
                    return WeightFormat((usual, of_v4), is_mxfp4=is_mxfp4)
        case {"quant_method": "auto-round" | "intel/auto-round", "packing_format": str(packing)}:
            method = packing.removeprefix("auto_round:").removeprefix("auto_")  # that of GPTQ or AWQ
            return _format_of({**quantization, "quant_method": method}) if method in ("gptq", "awq") else None
        case {"quant_method": "gptq", "bits": 4} if (storage := _gptq_storage(quantization)) is not None:
            of_gptq = Encoding(
                "int4 of GPTQ",
                functools.partial(Int4Tensor, storage),
                _QWEIGHT,
                optional_parts={"group_of_input": ".g_idx"} if quantization.get("desc_act", True) else {},
                unused=(".g_idx",),
                suffix=".weight",
            )
            return WeightFormat((of_gptq,), is_int4=True)
        case {"quant_method": "awq", "bits": 4} if str(quantization.get("version", "gemm")).lower() == "gemm":
            of_awq = Encoding("int4 of AWQ", functools.partial(Int4Tensor, AWQ), _QWEIGHT, suffix=".weight")
            return WeightFormat((of_awq,), is_int4=True)
        case {"quant_method": "compressed-tensors", "config_groups": dict(groups)} if _are_objects(groups):
            # Groups without weights quantise activations, and a checkpoint without groups only the KV cache.
            of_weights = [group for group in groups.values() if group.get("weights") is not None]
            if not of_weights and (groups or quantization.get("kv_cache_scheme") is not None):
                return WeightFormat()
            return _joined(_of_compressed_tensors(group, quantization.get("format")) for group in of_weights)
        case {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": dict(layers)}:
            return _joined(map(_of_modelopt, layers.values()))
        case {"quant_method": "modelopt" | "modelopt_fp4", "quant_algo": str()}:
            return _joined([_of_modelopt(quantization)])
    return None


def _are_objects(groups: Mapping[str, Any]) -> bool:
    return all(isinstance(group, dict) for group in groups.values())


def _joined(encodings: Iterable[Encoding | None]) -> WeightFormat | None:
    """Return the format of a checkpoint with weights in these encodings, or None if one of them is not supported."""
    found = list(encodings)
    known = {tuple(encoding.parts.items()): encoding for encoding in found if encoding is not None}
    if not found or None in found:
        return None
    # Encodings with more parts come first: NVFP4 has the parts of other encodings and a global scale.
    ordered = sorted(known.values(), key=lambda encoding: -len(encoding.parts))
    return WeightFormat(tuple(ordered), is_int4=all(encoding.words.startswith("int4") for encoding in ordered))


_QWEIGHT = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}


def _fp8_or_mxfp4(weight: StoredTensor, scale: StoredTensor, block_size: tuple[int, int]) -> CheckpointTensor:
    """Return a weight of DeepSeek-V4: experts are in MXFP4, and other matrices in fp8."""
    if weight.dtype in FP4_CODES:
        return Fp4Tensor(weight, scale)
    return Fp8Tensor(weight, scale, block_size)


def _fp8(scale: str, block_size: tuple[int, int] | None = None) -> Encoding:
    """Return the encoding of fp8 weights whose scales have the weight's name with the suffix `scale`."""
    words = "fp8" if block_size is None else f"fp8 in blocks of {block_size[0]} x {block_size[1]}"
    return Encoding(words, functools.partial(Fp8Tensor, block_size=block_size), {"weight": "", "scale": scale})


def _gptq_storage(quantization: Mapping[str, Any]) -> Int4Storage | None:
    match quantization.get("checkpoint_format", "gptq"):
        case "gptq":
            return GPTQ
        case "gptq_v2":
            return GPTQ_V2
    return None


def _of_modelopt(layer: Any) -> Encoding | None:
    match layer:
        case {"quant_algo": "FP8" | "FP8_PER_CHANNEL_PER_TOKEN"}:
            return _fp8("_scale")
        case {"quant_algo": "NVFP4" | "NVFP4_AWQ" | "W4A16_NVFP4"}:
            return Encoding("nvfp4", Fp4Tensor, {"codes": "", "global_scale": "_scale_2", "scales": "_scale"})
    return None


def _of_compressed_tensors(group: Mapping[str, Any], format_of_all: Any) -> Encoding | None:
    """Return the encoding of a group of weights, whose own format, if any, replaces the format of all groups."""
    match {"format": format_of_all} | {name: value for name, value in group.items() if value is not None}:
        case {
            "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "strategy": "group" | "channel"},
        } if group.get("input_activations") is None and group.get("output_activations") is None:
            zeros = {"zeros": ".weight_zero_point"}
            has_zeros = not group["weights"].get("symmetric", True)
            return Encoding(
                "int4 of compressed-tensors",
                functools.partial(Int4Tensor, COMPRESSED_TENSORS),
                {"codes": ".weight_packed", **(zeros if has_zeros else {}), "scales": ".weight_scale"},
                optional_parts={**zeros, "group_of_input": ".weight_g_idx"},
                unused=(".weight_shape",),
                suffix=".weight",
            )
        case {"format": "float-quantized" | "naive-quantized", "weights": {"num_bits": 8, "type": "float"} as weights}:
            match weights:
                case {"strategy": "tensor" | "channel"}:
                    return _fp8("_scale")
                case {"strategy": "block", "block_structure": [int(height), int(width)]}:
                    return _fp8("_scale", (height, width))
        case {"format": "nvfp4-pack-quantized"}:
            of_nvfp4 = functools.partial(Fp4Tensor, has_divisor=True)
            parts = {"codes": "_packed", "global_scale": "_global_scale", "scales": "_scale"}
            return Encoding("nvfp4", of_nvfp4, {part: f".weight{end}" for part, end in parts.items()}, suffix=".weight")
        case {"format": "mxfp4-pack-quantized"}:
            return Encoding(
                "mxfp4", Fp4Tensor, {"codes": ".weight_packed", "scales": ".weight_scale"}, suffix=".weight"
            )
    return None
