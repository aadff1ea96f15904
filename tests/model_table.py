"""The tables in `docs/models.md`: the memory of published models, and the families, from test shapes of them.

`python tests/model_table.py` writes the tables.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_models import SHAPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moeserve.machine import shown_bytes
from moeserve.models.config_defaults import defaults_of
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.gguf.architectures import ARCHITECTURES
from moeserve.models.inspection import inspect
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import FAMILIES

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
CONFIGS = Path(__file__).parent / "unit" / "published_configs.json"
END = "<!-- end of table -->\n"
HEADER = "| models | architectures | runs | GGUF |\n|---|---|---|---|\n"
MEMORY_HEADER = (
    "| model | parameters | per token | bf16 | int8 | int4 | cache of 8192 tokens |\n|---|---|---|---|---|---|---|\n"
)
MODELS_WITH_MEMORY = (
    *("OLMoE-1B-7B", "LFM2-8B-A1B", "DeepSeek-V2-Lite", "gpt-oss-20b", "Qwen3-30B-A3B", "Mixtral-8x7B"),
    *("Qwen3-Next-80B-A3B", "GLM-4.5-Air", "gpt-oss-120b", "Qwen3-235B-A22B", "DeepSeek-V3"),
)
# GGUF architectures that serve other families too, because they compute the same
SHARED = {
    "deepseek2": ("DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration"),
    "glm4moe": ("Glm4vMoeForConditionalGeneration", "SolarOpenForCausalLM"),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "qwen3vlmoe": ("Qwen3OmniMoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
}
MTP = {"num_nextn_predict_layers": 1}


@functools.cache
def configs() -> dict[str, list[Any]]:
    """Return the configs of the test shapes of language models, by their type."""
    found: dict[str, list[Any]] = {}
    for shape in SHAPES.values():
        text = shape.config().get_text_config()
        found.setdefault(text.model_type, []).append(text)
    return found


def models_of(family: Family) -> list[ModelSpec]:
    """Return the models of a family's test shapes, with an MTP layer where the family has one."""
    # A model for images whose language model has no shapes of its own: transformers' default
    texts = configs().get(family.model_type) or [CONFIG_MAPPING[family.model_type](head_dim=128)]
    values = [json.loads(text.to_json_string()) | MTP for text in texts]
    defaults = defaults_of(family.model_type)
    return [family.read(ConfigValues(Path("config.json"), each).with_defaults(defaults)) for each in values]


def row(family: Family) -> str:
    """Return the line of a family."""
    models = models_of(family)
    reads_mtp = not any(name.startswith("mtp") for name in family.left_out)
    names = (family.architecture, *family.other_architectures)
    files = [name for name, each in ARCHITECTURES.items() if {each.model, *SHARED.get(name, ())} & set(names)]
    marks = {
        "GPU": all(not model.needs.without_gpu_kernels for model in models),
        "no PP": all(len(model.first_layers) == 1 for model in models),
        "MTP": reads_mtp and any(model.draft is not None for model in models),
        "FP8 cache": all(model.needs.fits_float8_cache for model in models),
    }
    cells = (
        family.models or family.name,
        " ".join(f"`{name}`" for name in names),
        ", ".join(mark for mark, has_it in marks.items() if has_it),
        " ".join(f"`{name}`" for name in files),
    )
    return f"| {' | '.join(cells)} |\n"


def families() -> Iterator[Family]:
    seen = set()
    for family in sorted(FAMILIES.values(), key=lambda each: each.name.lower()):
        if family.architecture not in seen:
            seen.add(family.architecture)
            yield family


def table() -> str:
    """Return the lines of all families."""
    return HEADER + "".join(map(row, families()))


def memory_table(folder: Path) -> str:
    """Return the lines of published models: parameters and memory, as `moeserve inspect` counts them.

    Args:
        folder: an empty folder for their configs.
    """
    configs = json.loads(CONFIGS.read_text())
    lines = []
    for name in MODELS_WITH_MEMORY:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(configs[name]))
        seen = inspect(folder / name, "bfloat16")
        memory = (
            seen.weight_bytes,
            *seen.quantised_bytes.values(),
            seen.cache.bytes_of_tokens(8192) + seen.cache.row_bytes,
        )
        counts = (f"{number / 1e9:.1f} B" for number in (seen.num_parameters, seen.num_active_parameters))
        lines.append(f"| {' | '.join((name, *counts, *map(shown_bytes, memory)))} |\n")
    return MEMORY_HEADER + "".join(lines)


def with_tables(document: str) -> str:
    """Return the document with the tables of today."""
    with tempfile.TemporaryDirectory() as folder:
        tables = {"memory": memory_table(Path(folder)), "families": table()}
    for name, lines in tables.items():
        begin = f"<!-- {name}: python tests/model_table.py -->\n"
        before, _, rest = document.partition(begin)
        document = before + begin + lines + END + rest.partition(END)[2]
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
