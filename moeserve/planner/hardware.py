"""Accelerators in numbers: memory, peak rates, and bandwidth of the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.errors import SettingsError, nearest, shown

_Amount = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The peak values of one accelerator and of its links, as the vendor states them.

    Sizes are in bytes, rates per second, and bandwidths in bytes per second in one direction. `Assumptions` gives the
    fractions of these peaks that an engine reaches.
    """

    name: str
    memory: _Amount
    memory_bandwidth: _Amount
    bf16_rate: _Amount  # operations of dense matrix products; a multiply-add counts two
    fp8_rate: _Amount  # equal to bf16_rate if the hardware has no fp8 units
    node_bandwidth: _Amount  # all links to other accelerators of the node together
    network_bandwidth: _Amount  # link to other nodes


# Vendors quote twice the dense rates ("with sparsity"), and the sum of both directions of a link; the table has half.
# A GB of memory is 1e9 bytes; a driver reports slightly more. The network depends on the server: one 400 Gb/s adapter
# per accelerator is assumed, as in DeepEP's measurements (https://github.com/deepseek-ai/DeepEP:
# H800) and in servers of B200 (https://inferencex.semianalysis.com, "GB200 NVL72 vs B200").
# Columns: name, memory, memory bandwidth, rates in bfloat16 and fp8, bandwidth in the node and of the network.
_ROWS = (
    # https://glennklockwood.com/garden/processors/A100, after NVIDIA's data sheet. No fp8; half the network.
    ("a100", 80e9, 2.039e12, 312e12, 312e12, 300e9, 25e9),
    # SXM. https://lzwjava.github.io/nvidia-h200-gpu-specs-en has NVIDIA's tables of H100 and H200.
    ("h100", 80e9, 3.35e12, 989e12, 1979e12, 450e9, 50e9),
    # H100 with fewer links: 400 GB/s in both directions. https://www.philisun.com, "NVIDIA H800 vs H100".
    ("h800", 80e9, 3.35e12, 989e12, 1979e12, 200e9, 50e9),
    # H100 with more memory: the page above, and MLCommons' H200-SXM-141GBx8 (inference_results_v4.1).
    ("h200", 141e9, 4.8e12, 989e12, 1979e12, 450e9, 50e9),
    # HGX, 1000 W. https://glennklockwood.com/garden/processors/B200; 1440 GB of 8 by NVIDIA's page of DGX B200.
    ("b200", 180e9, 8e12, 2250e12, 4500e12, 900e9, 50e9),
    # 1200 W: the page above. Up to 72 in a node of NVLink. Memory: MLCommons' GB200-NVL72_GB200-186GB.
    ("gb200", 186e9, 8e12, 2500e12, 5000e12, 900e9, 50e9),
)
TABLE = {row[0]: msgspec.convert(dict(zip(Hardware.__struct_fields__, row, strict=True)), Hardware) for row in _ROWS}


def read_hardware(name: str) -> Hardware:
    """Return an entry of the table, or read a JSON file with the fields of `Hardware`.

    Raises:
        SettingsError: the name is neither in the table nor a file, or the file's content is invalid.
    """
    if name.lower() in TABLE:
        return TABLE[name.lower()]
    path = Path(name)
    if path.suffix != ".json":
        raise SettingsError(
            f"hardware={shown(name)} is neither a .json file (which can describe a CPU, see docs/planning.md) nor in "
            f"the table: {nearest(name, TABLE)}"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hardware)
    except OSError as error:
        raise SettingsError(f"cannot read the hardware in {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(Hardware.__struct_fields__)
        raise SettingsError(f"{path} must be a JSON object with {fields}: {error}") from None
