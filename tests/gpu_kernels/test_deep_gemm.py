"""Products by DeepGEMM: a stand-in of its contract computes as our kernels do, and calls fit the package's sources."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.bench.gpu import page
from moeserve.bench.gpu.inputs import Source, draw_rows, draw_weights
from moeserve.errors import SettingsError
from moeserve.ops import measured
from moeserve.ops.backend import TRITON
from moeserve.ops.products import GROUPED, SINGLE
from moeserve.ops.products.deep_gemm import (
    NEEDS,
    DeepGemmGroupedProduct,
    DeepGemmProduct,
    LibraryUnusable,
    open_deep_gemm,
    pad_rows,
    why_unavailable,
    with_deep_gemm,
)
from moeserve.ops.products.interface import Gather, OpenWeights, RowGroups
from moeserve.ops.rows.activations import SwiGLU

pytestmark = pytest.mark.usefixtures("torch_conversions")

CPU = torch.device("cpu")
ALIGNMENT = 16
Quantized = tuple[Tensor, Tensor]


def dequantized(codes: Tensor, scales: Tensor, rows_of_scale: int) -> Tensor:
    rows, inputs = codes.shape[-2:]
    assert scales.dtype == torch.float32
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous()
    assert scales.shape == (*codes.shape[:-2], -(-rows // rows_of_scale), -(-inputs // 128))
    every = scales.repeat_interleave(rows_of_scale, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :inputs]
    return codes.float() * every


class StandIn(ModuleType):
    """The functions of csrc/apis/gemm.hpp on sm_90, with its assertions. What it does not compute becomes NaN."""

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return ALIGNMENT

    def fp8_gemm_nt(self, a: Quantized, b: Quantized, d: Tensor) -> None:
        assert d.dtype == torch.bfloat16
        d.copy_(dequantized(*a, 1) @ dequantized(*b, 128).T)

    def m_grouped_fp8_gemm_nt_contiguous(self, a: Quantized, b: Quantized, d: Tensor, grouped_layout: Tensor) -> None:
        assert d.dtype == torch.bfloat16
        assert grouped_layout.dtype == torch.int32
        assert grouped_layout.is_contiguous()
        assert grouped_layout.shape == (len(d),)
        assert len(d) % ALIGNMENT == 0
        rows, weights = dequantized(*a, 1), dequantized(*b, 128)
        d.fill_(torch.nan)
        for tile in range(0, len(d), ALIGNMENT):  # a kernel reads the first number of a tile
            layout = grouped_layout[tile : tile + ALIGNMENT].tolist()
            assert set(layout) <= {layout[0], -1}
            if layout[0] >= 0:
                d[tile : tile + ALIGNMENT] = rows[tile : tile + ALIGNMENT] @ weights[layout[0]].T

    def m_grouped_fp8_gemm_nt_masked(
        self, a: Quantized, b: Quantized, d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        assert d.dtype == torch.bfloat16
        assert masked_m.dtype == torch.int32
        assert expected_m > 0
        rows, weights = dequantized(*a, 1), dequantized(*b, 128)
        d.fill_(torch.nan)
        for each, count in enumerate(masked_m.tolist()):
            d[each, :count] = (rows[each, :count] @ weights[each].T).to(d.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    package = StandIn("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    return package


def source() -> Source:
    return Source(CPU, torch.Generator().manual_seed(2), torch.bfloat16)


def weights_of(num_weights: int, *, is_gated: bool) -> OpenWeights:
    sizes = (256, 128) if is_gated else (192, 128)
    return draw_weights(source(), num_weights, *sizes, is_fp8=True, activation=SwiGLU() if is_gated else None)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare bf16 results: two roundings to bf16 where an activation follows the product."""
    assert found.dtype == expected.dtype == torch.bfloat16
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=scale * 2**-7)


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("is_gated", [False, True])
def test_products_equal_those_of_our_kernels(is_gated: bool, stand_in: StandIn) -> None:
    """Weights without rows, spare rows, gathered rows, and slots."""
    backend = with_deep_gemm(TRITON, CPU, torch.bfloat16)
    weights = weights_of(3, is_gated=is_gated)
    ours, theirs = (GROUPED.make(each, weights) for each in (TRITON, backend))
    assert isinstance(theirs, DeepGemmGroupedProduct)
    rows, groups = draw_rows(source(), 23, 128, is_fp8=True), RowGroups(torch.tensor([4, 0, 17]), has_spare_rows=True)
    assert_close(theirs.multiply(rows, groups)[:21], ours.multiply(rows, groups)[:21])
    indices = torch.cat([torch.randperm(42, generator=source().generator)[:21], torch.tensor([-1, -1])])
    gather = Gather(indices, 2)
    assert_close(theirs.multiply(rows, groups, gather)[:21], ours.multiply(rows, groups, gather)[:21])
    slots, counts = draw_rows(source(), 3 * 5, 128, is_fp8=True).unflatten(0, (3, 5)), torch.tensor([5, 0, 2])
    found, expected = (each.multiply_slots(slots, RowGroups(counts, expected_rows=7)) for each in (theirs, ours))
    for each, count in enumerate(counts.tolist()):
        if count:
            assert_close(found[each, :count], expected[each, :count])
    single = weights_of(1, is_gated=is_gated)
    one, other = (SINGLE.make(each, single) for each in (backend, TRITON))
    assert isinstance(one, DeepGemmProduct)
    assert_close(one.multiply(rows), other.multiply(rows))


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 16], [33, 1, 7], [16, 16, 0]])
def test_padded_rows(counts: list[int]) -> None:
    """Each row has one place, in a tile of its weight alone."""
    num_rows = sum(counts) + 2
    padded = pad_rows(torch.tensor(counts), num_rows, ALIGNMENT)
    assert len(padded.weight_Q) % ALIGNMENT == 0
    weight_of_row = [each for each, count in enumerate(counts) for _ in range(count)]
    places = padded.place_R[: len(weight_of_row)]
    assert len(set(places.tolist())) == len(weight_of_row)
    assert padded.row_Q[places].tolist() == list(range(len(weight_of_row)))
    assert padded.weight_Q[places].tolist() == weight_of_row
    assert int((padded.weight_Q >= 0).sum()) == len(weight_of_row)
    for tile in padded.weight_Q.view(-1, ALIGNMENT).tolist():
        used = [each for each in tile if each >= 0]
        assert tile == used + [-1] * (ALIGNMENT - len(used))
        assert len(set(used)) <= 1
    assert bool((padded.place_R < len(padded.weight_Q)).all())


@pytest.mark.parametrize(
    ("weights", "value"),
    [
        (OpenWeights(torch.zeros(2, 128, 128)), "8-bit blocks"),
        (draw_weights(source(), 1, 128, 192, is_fp8=True), "not 192"),
        (draw_weights(source(), 1, 160, 128, is_fp8=True), "not 160"),
        (draw_weights(source(), 1, 320, 128, is_fp8=True, activation=SwiGLU()), "160 of each"),
        (draw_weights(source(), 1, 128, 128, is_fp8=True, has_bias=True), "no bias"),
    ],
)
def test_shapes_that_run_on_our_kernels(weights: OpenWeights, value: str, stand_in: StandIn) -> None:
    assert value in str(why_unavailable(weights))
    backend = with_deep_gemm(TRITON, CPU, torch.bfloat16)
    assert not isinstance(SINGLE.make(backend, weights), DeepGemmProduct)
    assert not isinstance(GROUPED.make(backend, weights), DeepGemmGroupedProduct)


def test_measured_products_run_where_they_were_the_fastest(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of this device, which the page of a benchmark writes, decides by shape and number of rows."""
    weights, unknown = (draw_weights(source(), num, 128, 128, is_fp8=True) for num in (1, 2))
    monkeypatch.setattr(measured, "MEASURED_FOLDER", tmp_path)
    run = {"benchmark": "gpu", "identity": "1", "seed": 1}
    start = run | {"kind": "start", "commit": "1", "environment": {"gpu": {"name": "CPU"}}}
    row = run | {"kind": "row", "run": 1, "part": "kernels", "status": "measured"}
    rows = [
        row | {"item": name, "name": name, "choices": [[measured.product_key(weights), num_rows]], "fastest": fastest}
        for name, num_rows, fastest in (("few", 4, "triton"), ("many", 64, "deep_gemm"))
    ]
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(map(json.dumps, [start, *rows])))

    def make_product(weights: OpenWeights, *, dtype: torch.dtype = torch.bfloat16, kind: Any = SINGLE) -> Any:
        return kind.make(with_deep_gemm(TRITON, CPU, dtype, only_fastest=True), weights)

    own = type(SINGLE.make(TRITON, weights))
    assert isinstance(make_product(weights), own), "there is no table"
    page.main([str(path), "--save"])
    product = make_product(weights)
    fastest = [measured.fastest_of(product.of_rows, num_rows) for num_rows in (0, 15, 17)]
    assert [type(product.products[name]) for name in fastest] == [own, own, DeepGemmProduct]
    assert isinstance(make_product(unknown), own)
    assert isinstance(make_product(weights, dtype=torch.float16), own), "the library cannot be used"
    rows_RI = torch.randn(17, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = SINGLE.make(with_deep_gemm(TRITON, CPU, torch.bfloat16), weights).multiply(rows_RI)
    assert torch.equal(product.multiply(rows_RI), expected)
    grouped, groups = make_product(weights, kind=GROUPED), RowGroups(torch.tensor([17]))
    assert torch.equal(grouped.multiply(rows_RI, groups), expected)
    assert torch.equal(grouped.multiply_slots(rows_RI[None], groups)[0], expected)


def test_reasons_why_it_cannot_be_used(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"product_backend='deep_gemm'.*float16"):
        with_deep_gemm(TRITON, CPU, torch.float16)
    for older in ("m_grouped_fp8_gemm_nt_masked", "fp8_gemm_nt"):
        with monkeypatch.context() as patch:
            patch.setattr(StandIn, older, lambda self, lhs, rhs, out: None)
            with pytest.raises(LibraryUnusable, match=rf"no {older}\(a=\)"):
                open_deep_gemm(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        with pytest.raises(LibraryUnusable, match=r"10\.0"):
            open_deep_gemm(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(LibraryUnusable, match="pip install sgl-deep-gemm"):
        open_deep_gemm(CPU)


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="sgl-deep-gemm is not installed")
def test_calls_and_rules_are_those_of_the_package() -> None:
    """By its sources and the assertions in its machine code, since it cannot be imported without CUDA's driver."""
    spec: Any = importlib.util.find_spec("deep_gemm")
    functions: dict[str, Any] = {}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = {each.arg for each in node.args.args}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            functions.setdefault(node.targets[0].id, functions.get(getattr(node.value, "id", ""), set()))
    for name, needed in NEEDS.items():
        assert needed <= functions[name], name
    code = (Path(spec.origin).parent / "_C.so").read_bytes()
    for rule in (
        b"sf.size(-1) == ceil_div(k, gran_k * (sf_dtype == torch::kFloat ? 1 : 4))",
        b"sf.size(-2) == ceil_div(mn, gran_mn)",
        b"masked_m.scalar_type() == torch::kInt",
        b"grouped_layout.scalar_type() == torch::kInt",
        b"expected_m > 0 and m > 0 and n > 0 and k > 0 and num_groups > 0",
        b"d.scalar_type() == torch::kBFloat16",
    ):
        assert rule in code, rule
    if not torch.cuda.is_available():
        with pytest.raises(LibraryUnusable, match=r"cannot be imported"):
            open_deep_gemm(CPU)
