"""The values that packed weights stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.ops.products.interface import PackedFormat, PackedWeights
from moeserve.ops.rows.activations import num_parts_of

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = torch.tensor(MAGNITUDES + [-magnitude for magnitude in MAGNITUDES], dtype=torch.float64)


def unpacked(packed: PackedWeights) -> Tensor:
    """[e, O, I] float64, read from the panels as csrc/cpu/weight_format.h describes them."""
    return torch.stack([_unpacked_one(panels, packed) for panels in packed.panels])


def _unpacked_one(panels: Tensor, packed: PackedWeights) -> Tensor:
    parts = panels.view(num_parts_of(packed.activation), -1)
    num_outputs = packed.num_columns
    num_panels = -(-num_outputs // 32)
    rows = [_unpacked_panel(panel, packed.format) for part in parts for panel in part.view(num_panels, -1)]
    whole_POI = torch.stack(rows).view(num_parts_of(packed.activation), num_panels * 32, -1)
    assert not whole_POI[:, num_outputs:].any(), "outputs must be filled up with zeros"
    if packed.format != "int4":  # which has no zero
        assert not whole_POI[:, :, packed.num_inputs :].any(), "inputs must be filled up with zeros"
    return whole_POI[:, :num_outputs, : packed.num_inputs].flatten(0, 1)


def _unpacked_panel(panel: Tensor, packed_format: PackedFormat) -> Tensor:
    match packed_format:
        case "float32":
            return panel.view(torch.float32).view(-1, 32).T.double()
        case "bfloat16":
            return panel.view(torch.bfloat16).view(-1, 32, 2).permute(1, 0, 2).flatten(1).double()
        case "int8":
            values, scales = panel[:-128].int() - 128, panel[-128:].clone().view(torch.float32)
            return values.view(-1, 32, 4).permute(1, 0, 2).flatten(1).double() * scales[:, None].double()
        case "int4":
            groups_gB = panel.view(-1, 512 + 64 + 32)
            bytes_gqci = groups_gB[:, :512].int().view(-1, 8, 16, 4)
            scales_gO = groups_gB[:, 512:576].contiguous().view(torch.float16).double()
            zeros_gO = (groups_gB[:, 576:].double() - 64) / 8
            codes_gOK = _codes(bytes_gqci).double()
            return ((codes_gOK - zeros_gO[:, :, None]) * scales_gO[:, :, None]).permute(1, 0, 2).flatten(1)
        case "mxfp4":
            groups_gB = panel.view(-1, 512 + 32)
            values_gOK = E2M1[_codes(groups_gB[:, :512].int().view(-1, 8, 16, 4))]
            scales_gO = torch.exp2(groups_gB[:, 512:].double() - 127)
            return (values_gOK * scales_gO[:, :, None]).permute(1, 0, 2).flatten(1)


def _codes(bytes_gqci: Tensor) -> Tensor:
    """[g, O, K], of outputs in the low halves and then of outputs in the high halves."""
    codes_ghqci = torch.stack([bytes_gqci & 15, bytes_gqci >> 4], dim=1)
    return codes_ghqci.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2)
