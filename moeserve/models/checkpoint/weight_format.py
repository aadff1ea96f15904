"""Weight formats: the stored tensors that represent a weight, for each kind of quantization_config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from moeserve.errors import shown
from moeserve.models.checkpoint import block_tensors
from moeserve.models.checkpoint.block_tensors import BlockTensor
from moeserve.models.checkpoint.float4_tensors import FP4_CODES, Fp4Tensor, Mxfp4Part, Mxfp4Tensor
from moeserve.models.checkpoint.float8_tensors import ScaledTensor
from moeserve.models.checkpoint.integer_tensors import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    NUM_BITS,
    IntegerStorage,
    IntegerTensor,
)
from moeserve.models.checkpoint.tensors import CheckpointTensor, PlainTensor, ReadRows, StoredTensor
from moeserve.models.config_values import ConfigValues, read_json

MXFP4_PARTS = {"blocks": "_blocks", "scales": "_scales"}
MXFP8_BLOCK = (1, 32)
MXFP4_OF_COMPRESSED_TENSORS = "mxfp4 of compressed-tensors"


@dataclass(frozen=True)
class Encoding:
    """An encoding of weights. A weight named P + `suffix` is stored as parts named P + each part's own suffix."""

    words: str  # description, such as "int4 of GPTQ"
    build: Callable[..., CheckpointTensor]  # takes the parts as keyword arguments
    parts: Mapping[str, str]  # argument of `build` -> suffix; the last suffix is not empty
    optional_parts: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # suffixes of additional tensors that need not be read
    suffix: str = ""
    # Variants of the encoding in one checkpoint, such as numbers of bits. `build` takes them as `options`, and chooses
    # one for each weight by the shapes of the parts. So the config's lists of modules need not be read, whose names
    # often differ from those of tensors.
    options: tuple[Any, ...] = ()
    # Suffixes of small tensors that `build` takes as lists of numbers, needed only if there are several options.
    tables: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()  # dtypes of the first part, if other encodings use the same names; empty: any dtype

    @property
    def is_int4(self) -> bool:
        """True if some of the weights are int4 codes that packed weights can keep."""
        return self.words.startswith("int") and 4 in self.options

    def joined(self, other: Encoding) -> Encoding:
        """Return an encoding with the options of both encodings, which must have the same parts."""
        words = self.words if self.words == other.words else f"{self.words} and {other.words}"
        return dataclasses.replace(
            self,
            words=words,
            options=tuple(dict.fromkeys(self.options + other.options)),
        )


_BLOCKS = Encoding(
    "blocks of 4 to 6 bits",
    BlockTensor.build,
    {"blocks": block_tensors.BLOCKS},
    options=tuple(block_tensors.BLOCK_BYTES),
    tables={"shape": block_tensors.SHAPE},
    dtypes=("U8",),
)
STACKED_MXFP4 = Encoding("mxfp4", Mxfp4Tensor, MXFP4_PARTS)  # gpt-oss: all experts of a layer


@dataclass(frozen=True)
class WeightFormat:
    """The form in which a checkpoint stores its weights. Some or all weights may be encoded in several tensors."""

    encodings: tuple[Encoding, ...] = ()  # a weight has the first encoding whose parts are all stored
    method: str | None = None  # the `quant_method` in the config; None: weights are not quantised
    is_int4: bool = False  # weights are int4 codes that packed weights can keep
    is_mxfp4: bool = False  # experts are in MXFP4, as in gpt-oss or DeepSeek-V4; preliminary for compressed-tensors
    is_gguf: bool = False  # weights are in GGUF files instead of safetensors
    has_blocks: bool = False  # weights are in blocks that packed weights can keep, as `moeserve quantize` writes them
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
        """Return this format, changed so that codes and scales of MXFP4 are loaded without decoding."""
        assert self.is_mxfp4
        return dataclasses.replace(self, keeps_mxfp4=True)

    def group(self, stored: Mapping[str, StoredTensor], read_rows: ReadRows) -> dict[str, CheckpointTensor]:
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
                if encoding.dtypes and found[next(iter(encoding.parts))].dtype not in encoding.dtypes:
                    continue
                others = [prefix + end for end in (*encoding.unused, *encoding.tables.values())]
                for used in [*(tensor.name for tensor in found.values()), *others]:
                    tensors.pop(used, None)
                settings: dict[str, Any] = {"options": encoding.options} if encoding.options else {}
                if len(encoding.options) > 1:
                    for argument, end in encoding.tables.items():
                        if (table := stored.get(prefix + end)) is not None:
                            settings[argument] = read_rows(table, 0, max(table.shape, default=1)).flatten().tolist()
                grouped[prefix + encoding.suffix] = encoding.build(**settings, **found)
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
    weight_format = _format_of(quantization)
    if weight_format is None:
        _refuse(config)
    method = quantization["quant_method"].removeprefix("intel/").removesuffix("_fp4")
    return dataclasses.replace(weight_format, method=method)


def _refuse(config: ConfigValues) -> NoReturn:
    quantization = config.values["quantization_config"]
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise config.wrong(
        "quantization_config",
        f"with quant_method={shown(method)} is not supported in this form; supported: fp8 and fbgemm_fp8 (e4m3; scales "
        "per tensor, row or block), mxfp4, gptq (2, 3, 4 and 8 bits, also mixed), awq (4 bits, version gemm), "
        "auto-round (packed as gptq or awq), compressed-tensors (pack-quantized, int-quantized with symmetric weights, "
        "float-quantized with 8 bits, mxfp8-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized), modelopt (FP8, "
        "MXFP8, NVFP4), or none (float32, bfloat16 or float16 weights)",
    )


def _format_of(quantization: Any) -> WeightFormat | None:
    """Return the format of a quantization_config, or None if it is not supported."""
    match quantization:
        case {"quant_method": "gguf"}:  # a folder that `gguf.checkpoint` wrote
            return WeightFormat(is_gguf=True, is_int4=True, is_mxfp4=quantization.get("expert_dtype") == "fp4")
        case {"quant_method": block_tensors.METHOD}:
            return WeightFormat((_BLOCKS,), has_blocks=True)
        case {"quant_method": "mxfp4"}:
            return WeightFormat((STACKED_MXFP4,), is_mxfp4=True)
        # Quantised weights are recognised by their scales, so the config's lists of unquantised weights are not needed.
        case {"quant_method": "fp8"} if quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
            match quantization.get("weight_block_size"):
                case None:
                    return _joined([_fp8("_scale"), _fp8("_scale_inv")])
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
        case {"quant_method": "fbgemm_fp8"}:
            return _joined([_fp8("_scale")])
        case {"quant_method": "auto-round" | "intel/auto-round", "packing_format": str(packing)}:
            method = packing.removeprefix("auto_round:").removeprefix("auto_")  # the method is GPTQ or AWQ
            return _format_of({**quantization, "quant_method": method}) if method in ("gptq", "awq") else None
        case {"quant_method": "gptq"} if (storage := _gptq_storage(quantization)) is not None:
            bits = _bits_of(quantization)
            return _joined([_integers("GPTQ", storage, bits, _is_reordered(quantization))]) if bits else None
        case {"quant_method": "awq"} if str(quantization.get("version", "gemm")).lower() == "gemm":
            return _joined([_integers("AWQ", AWQ, (4,))]) if _bits_of(quantization) == (4,) else None
        case {"quant_method": "compressed-tensors", "config_groups": dict(groups)} if _are_objects(groups):
            # Groups without weights only quantise activations. A checkpoint without groups only quantises the KV cache.
            of_weights = [group for group in groups.values() if group.get("weights") is not None]
            if not of_weights and (groups or quantization.get("kv_cache_scheme") is not None):
                return WeightFormat()
            return _joined(_of_compressed_tensors(group, quantization.get("format")) for group in of_weights)
        case {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": dict(layers)}:
            return _joined(encoding for layer in layers.values() for encoding in _of_modelopt(layer))
        case {"quant_method": "modelopt" | "modelopt_fp4", "quant_algo": str()}:
            return _joined(_of_modelopt(quantization))
        case {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": str()}:
            return WeightFormat()
    return None


def _are_objects(groups: Mapping[str, Any]) -> bool:
    return all(isinstance(group, dict) for group in groups.values())


def _joined(encodings: Iterable[Encoding | None]) -> WeightFormat | None:
    """Return the format of a checkpoint with weights in these encodings, or None if an encoding is not supported."""
    known: dict[Any, Encoding] = {}
    for encoding in encodings:
        if encoding is None:
            return None
        key = encoding.build, tuple(encoding.parts.items())
        known[key] = known[key].joined(encoding) if key in known else encoding
    # Encodings with more parts come first: NVFP4 has the parts of other encodings and a global scale.
    ordered = sorted(known.values(), key=lambda encoding: -len(encoding.parts))
    if not ordered:
        return None
    has_mxfp4 = any(each.words == MXFP4_OF_COMPRESSED_TENSORS for each in ordered)
    return WeightFormat(tuple(ordered), is_int4=any(each.is_int4 for each in ordered), is_mxfp4=has_mxfp4)


def _fp8_or_mxfp4(weight: StoredTensor, scale: StoredTensor, block_size: tuple[int, int]) -> CheckpointTensor:
    """Return a weight of DeepSeek-V4: experts are in MXFP4, and other matrices in fp8."""
    if weight.dtype in FP4_CODES:
        return Fp4Tensor(weight, scale)
    return ScaledTensor(weight, scale, block_size=block_size)


def _fp8(scale: str, block_size: tuple[int, int] | None = None) -> Encoding:
    """Return the encoding of fp8 weights whose scales have the weight's name with the suffix `scale`."""
    words = "fp8" if block_size is None else f"fp8 in blocks of {block_size[0]} x {block_size[1]}"
    return _scaled(words, scale, "F8_E4M3", block_size)


def _scaled(words: str, scale: str, dtype: str, block_size: tuple[int, int] | None = None) -> Encoding:
    parts = {"weight": "", "scale": scale}
    return Encoding(words, ScaledTensor.build, parts, options=((dtype, block_size),))


# --- GPTQ, AWQ and auto-round


def _integers(library: str, storage: IntegerStorage, bits: tuple[int, ...], is_reordered: bool = False) -> Encoding:
    """Return the encoding of integer weights whose parts have the suffixes of GPTQ."""
    return Encoding(
        _integer_words(bits, library),
        functools.partial(IntegerTensor.build, storage, is_reordered=is_reordered),
        {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"},
        optional_parts={"group_of_input": ".g_idx"},
        suffix=".weight",
        options=bits,
    )


def _integer_words(bits: Iterable[int], library: str) -> str:
    return " and ".join(f"int{each} of {library}" for each in bits)


def _rules_of(quantization: Mapping[str, Any]) -> list[Any]:
    """Return the values with which gptqmodel or auto-round replace the config's values for some modules."""
    rules = [quantization.get("dynamic"), quantization.get("extra_config")]
    found = [value for each in rules if isinstance(each, dict) for value in each.values()]
    return [{} if value is None else value for value in found]


def _bits_of(quantization: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the numbers of bits of all codes in a checkpoint, the default first; None if a number is not supported."""
    found: dict[int, None] = {}
    for values in (quantization, *_rules_of(quantization)):
        if not isinstance(values, dict):
            return None
        bits = values.get("bits", quantization.get("bits"))
        if isinstance(bits, int) and bits >= 16:  # auto-round lists unquantised modules in this way
            continue
        if bits not in NUM_BITS or not str(values.get("data_type") or "int").startswith("int"):
            return None
        found[bits] = None
    return tuple(found) or None


def _is_reordered(quantization: Mapping[str, Any]) -> bool:
    """Return True if inputs are ordered by their activations (desc_act), so that a group may have any inputs."""
    return any(values.get("desc_act") is True for values in (quantization, *_rules_of(quantization)))


def _gptq_storage(quantization: Mapping[str, Any]) -> IntegerStorage | None:
    match quantization.get("checkpoint_format") or quantization.get("format") or "gptq":
        case "gptq":
            return GPTQ
        case "gptq_v2":
            return GPTQ_V2
    return None


# --- TensorRT Model Optimizer and compressed-tensors


def _of_modelopt(layer: Any) -> list[Encoding | None]:
    """Return the encodings of a layer. The scales of stacked experts are named differently from those of layers."""
    match layer:
        case {"quant_algo": "FP8" | "FP8_PER_CHANNEL_PER_TOKEN"}:
            return [_fp8("_scale"), _fp8("_weight_scale")]
        case {"quant_algo": "MXFP8"}:
            return [_scaled("mxfp8", scale, "F8_E4M3", MXFP8_BLOCK) for scale in ("_scale", "_weight_scale")]
        case {"quant_algo": "NVFP4" | "NVFP4_AWQ" | "W4A16_NVFP4"}:
            return [
                Encoding("nvfp4", Fp4Tensor, {"codes": "", "global_scale": f"{scale}_2", "scales": scale})
                for scale in ("_scale", "_weight_scale")
            ]
    return [None]


def _of_compressed_tensors(group: Mapping[str, Any], format_of_all: Any) -> Encoding | None:
    """Return the encoding of a group of weights. The group's own format takes precedence over `format_of_all`."""
    match {"format": format_of_all} | {name: value for name, value in group.items() if value is not None}:
        case {
            "format": "pack-quantized",
            "weights": {"num_bits": int(bits), "type": "int", "strategy": "group" | "channel"},
        } if bits in NUM_BITS:
            zeros = {"zeros": "_zero_point"}
            has_zeros = not group["weights"].get("symmetric", True)
            return Encoding(
                _integer_words((bits,), "compressed-tensors"),
                _PACKED_INTEGERS,
                {"codes": "_packed", **(zeros if has_zeros else {}), "scales": "_scale"},
                optional_parts={**zeros, "group_of_input": "_g_idx"},
                options=(bits,),
                tables={"shape": "_shape"},
                dtypes=("I32",),
            )
        case {"format": "int-quantized" | "naive-quantized", "weights": {"num_bits": 8, "type": "int"} as weights}:
            is_supported = weights.get("strategy") in ("tensor", "channel") and weights.get("symmetric", True)
            return _scaled("int8 of compressed-tensors", "_scale", "I8") if is_supported else None
        case {"format": "float-quantized" | "naive-quantized", "weights": {"num_bits": 8, "type": "float"} as weights}:
            match weights:
                case {"strategy": "tensor" | "channel"}:
                    return _fp8("_scale")
                case {"strategy": "block", "block_structure": [int(height), int(width)]}:
                    return _fp8("_scale", (height, width))
                case {"strategy": "group", "group_size": int(width)} if width >= 1:
                    return _fp8("_scale", (1, width))
        case {"format": "mxfp8-quantized"}:
            return _scaled("mxfp8", "_scale", "F8_E4M3", MXFP8_BLOCK)
        case {"format": "nvfp4-pack-quantized"}:
            parts = {"codes": "_packed", "global_scale": "_global_scale", "scales": "_scale"}
            return Encoding("nvfp4", _DIVIDED_FP4, parts)
        case {"format": "mxfp4-pack-quantized"}:
            parts = {"codes": "_packed", "scales": "_scale"}
            return Encoding(MXFP4_OF_COMPRESSED_TENSORS, Fp4Tensor, parts, dtypes=("U8",))
    return None


_DIVIDED_FP4 = functools.partial(Fp4Tensor, has_divisor=True)
_PACKED_INTEGERS = functools.partial(IntegerTensor.build, COMPRESSED_TENSORS)
