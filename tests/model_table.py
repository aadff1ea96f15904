"""The table of model families in `docs/models.md`, made from the families and from test shapes of them.

`python tests/model_table.py` writes the table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_models import SHAPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moeserve.models.config_defaults import defaults_of
from moeserve.models.config_values import ConfigValues
from moeserve.models.family import Family
from moeserve.models.gguf.architectures import ARCHITECTURES
from moeserve.models.model_config import ModelConfig
from moeserve.models.registry import FAMILIES

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- table: python tests/model_table.py -->\n", "<!-- end of table -->\n"
HEADER = "| architectures | models | GPU | PP | MTP | FP8 cache | GGUF |\n|---|---|---|---|---|---|---|\n"
NO = "no"
MTP = {"num_nextn_predict_layers": 1}


@functools.cache
def configs() -> dict[str, list[Any]]:
    """Return the configs of the test shapes of language models, by their type."""
    found: dict[str, list[Any]] = {}
    for shape in SHAPES.values():
        text = shape.config().get_text_config()
        found.setdefault(text.model_type, []).append(text)
    return found


def models_of(family: Family) -> list[ModelConfig]:
    """Return the models of a family's test shapes, with an MTP layer where the family has one."""
    # A model for images whose language model has no shapes of its own: transformers' default
    texts = configs().get(family.model_type) or [CONFIG_MAPPING[family.model_type](head_dim=128)]
    values = [json.loads(text.to_json_string()) | MTP for text in texts]
    defaults = defaults_of(family.model_type)
    return [family.read(ConfigValues(Path("config.json"), each).with_defaults(defaults)) for each in values]


def mark(works: bool) -> str:
    return "yes" if works else NO


def row(family: Family) -> str:
    """Return the line of a family."""
    models = models_of(family)
    reads_mtp = not any(name.startswith("mtp") for name in family.left_out)
    names = (family.architecture, *family.other_architectures)
    files = [name for name, each in ARCHITECTURES.items() if each.model in names]
    cells = (
        " ".join(f"`{name}`" for name in names),
        family.models or family.name,
        mark(all(not model.needs.without_gpu_kernels for model in models)),
        mark(any(len(model.first_layers) > 1 for model in models)),
        mark(reads_mtp and any(model.draft_layer is not None for model in models)),
        mark(all(model.needs.fits_float8_cache for model in models)),
        " ".join(f"`{name}`" for name in files) or NO,
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


def with_table(document: str) -> str:
    """Return the document with the table of today."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
