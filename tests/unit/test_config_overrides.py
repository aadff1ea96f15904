"""`hf_overrides`: a config.json with changes is read as one that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference_models import SHAPES, in_the_style_of_the_hub

from moeserve import LLM, CheckpointError, SettingsError, cli
from moeserve.cli.parser import Parser, add_overrides
from moeserve.models.inspection import inspect
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import describe, read_facts, read_generation_defaults
from moeserve.planner.layout import find_layouts

LINEAR = {"type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def config_of(name: str, *, is_of_hub: bool) -> dict[str, Any]:
    values = json.loads(json.dumps(SHAPES[name].config().to_dict(), default=str)) | {"dtype": "float32"}
    return in_the_style_of_the_hub(values) if is_of_hub else values


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def shape_of(folder: Path, hf_overrides: dict[str, Any] | None = None) -> ModelSpec:
    return describe(folder, hf_overrides=hf_overrides).model


@pytest.mark.parametrize("is_of_hub", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("overrides", "theta", "settings"),
    [
        ({"rope_scaling": YARN}, 1e6, YARN),
        ({"rope_parameters": YARN}, 1e6, YARN),
        ({"rope_theta": 5e4}, 5e4, {"rope_type": "default"}),
        ({"rope_scaling": LINEAR, "rope_theta": 5e4}, 5e4, LINEAR),
        ({"rope_parameters": YARN | {"rope_theta": 5e4}}, 5e4, YARN),
    ],
)
def test_rotary_settings_by_old_and_new_names(
    is_of_hub: bool, overrides: dict[str, Any], theta: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    values = config_of("qwen2-moe", is_of_hub=is_of_hub)
    written = {key: value for key, value in values.items() if key not in ("rope_parameters", "rope_scaling")}
    wanted = write(tmp_path / "written", written | {"rope_theta": theta, "rope_scaling": settings})
    assert shape_of(write(tmp_path / "plain", values), overrides) == shape_of(wanted)


def test_values_are_replaced_and_objects_merged(tmp_path: Path) -> None:
    values = config_of("qwen3.5-moe", is_of_hub=False)
    folder = write(tmp_path / "plain", values)
    changed = write(tmp_path / "written", values | {"text_config": values["text_config"] | {"num_experts_per_tok": 2}})
    overrides = {"text_config": {"num_experts_per_tok": 2}, "unknown_key": {"a": 1}, "eos_token_id": [7, 9]}
    assert shape_of(folder, overrides) == shape_of(changed) != shape_of(folder)
    assert read_generation_defaults(folder, overrides).eos_token_ids == [7, 9]
    assert shape_of(folder, {}) == shape_of(folder, None) == shape_of(folder)


def test_changes_of_a_scaling_keep_its_other_values(tmp_path: Path) -> None:
    values = config_of("qwen3-moe", is_of_hub=True)
    folder = write(tmp_path / "plain", values | {"rope_scaling": YARN})
    assert shape_of(folder, {"rope_scaling": {"factor": 8.0}}) == shape_of(
        write(tmp_path / "written", values | {"rope_scaling": YARN | {"factor": 8.0}})
    )
    assert read_facts(folder, hf_overrides={"rope_scaling": {"factor": 8.0}}).max_position_embeddings == 4096


def test_the_planner_and_inspect_read_the_changed_config(tmp_path: Path) -> None:
    folder = write(tmp_path, config_of("mixtral", is_of_hub=False))
    overrides = {"num_hidden_layers": 5, "num_experts_per_tok": 3}
    found = inspect(folder, None, hf_overrides=overrides)
    assert (found.num_layers, found.num_experts_per_token) == (5, 3)
    (layout,) = find_layouts(folder, 1, None, hf_overrides=overrides).layouts
    assert layout.stages[0].num_layers == 5


@pytest.mark.slow
def test_simulate_reads_the_changed_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = config_of("mixtral", is_of_hub=False)
    folder = write(tmp_path / "plain", values)
    changed = write(tmp_path / "written", values | {"num_hidden_layers": 5})
    outcomes = []
    for flags in ([folder], [folder, "--hf-overrides", '{"num_hidden_layers": 5}'], [changed]):
        flags = ["simulate", *map(str, flags), "--hardware", "h100", "--ranks", "1", "--traffic", "100:10", "--json"]
        assert cli.main(flags) == 0
        outcomes.append(capsys.readouterr().out)
    assert outcomes[0] != outcomes[1] == outcomes[2]


def test_the_command_line_takes_json() -> None:
    parser = Parser()
    add_overrides(parser)
    options = parser.parse_args(["--hf-overrides", '{"rope_scaling": {"factor": 2}}'])
    assert options.hf_overrides == {"rope_scaling": {"factor": 2}}


@pytest.mark.parametrize("wrong", [lambda config: config, "text", ["list"], {"dtype": object()}, {1: 2}])
def test_what_is_no_json_is_refused_by_name(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="hf_overrides"):
        LLM(write(tmp_path, config_of("mixtral", is_of_hub=False)), hf_overrides=wrong)


def test_a_wrong_value_is_refused_like_one_in_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, config_of("mixtral", is_of_hub=False))
    with pytest.raises(CheckpointError, match="num_experts_per_tok=99"):
        LLM(folder, hf_overrides={"num_experts_per_tok": 99})
    with pytest.raises(SettingsError, match="hf_overrides"):
        LLM(folder, hf_overrides={"num_experts_per_tok": 1}, model_impl="transformers")
