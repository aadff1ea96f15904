"""Hardware from the table and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import SettingsError
from moeserve.planner.hardware import TABLE, read_hardware

OWN: dict[str, Any] = {
    "name": "my host",
    "memory": 64e9,
    "memory_bandwidth": 2e11,
    "bf16_rate": 4e12,
    "fp8_rate": 4e12,
    "node_bandwidth": 1e10,
    "network_bandwidth": 1e9,
}


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "own.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_table_has_plausible_entries() -> None:
    """Rates are dense, and links in one direction. Both are easily wrong by a factor of two."""
    for name, hardware in TABLE.items():
        assert hardware.name == name
        assert hardware.fp8_rate in (hardware.bf16_rate, pytest.approx(2 * hardware.bf16_rate, rel=1e-3))
        # In each generation, some hundred bfloat16 operations take as long as reading one byte.
        assert 100 < hardware.bf16_rate / hardware.memory_bandwidth < 350
        assert hardware.network_bandwidth < hardware.node_bandwidth < hardware.memory_bandwidth
    assert TABLE["h100"].node_bandwidth == 450e9
    assert TABLE["h800"].node_bandwidth == 200e9


def test_hardware_from_the_table_and_from_a_file(tmp_path: Path) -> None:
    assert read_hardware("H200") is TABLE["h200"]
    hardware = read_hardware(written(tmp_path, OWN))
    assert {name: getattr(hardware, name) for name in OWN} == OWN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "'h200'"),
        ("abacus", "a100, b200, gb200, h100, h200, h800"),
        ("cpu", "docs/planning.md"),
        ("none.json", "none.json"),
    ],
)
def test_unknown_hardware(name: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_hardware(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON object with name, memory, memory_bandwidth, bf16_rate"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "must be a JSON object"),
        (OWN | {"memory": 0}, "`$.memory`"),
        (OWN | {"memory_bandwith": 1}, "memory_bandwith"),
        ({"name": "x"}, "memory"),
    ],
)
def test_files_that_describe_no_hardware(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        read_hardware(written(tmp_path, content))
    assert message in str(error.value)
