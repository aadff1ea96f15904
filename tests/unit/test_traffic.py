"""Recorded traffic: both formats, what is wrong in them, scaling, and what lengths come to."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.errors import SettingsError
from moeserve.planner.traffic import (
    MAX_TOKENS,
    Lengths,
    RecordedRequest,
    Traffic,
    choose_traffic,
    fixed_traffic,
    read_traffic,
    sample_traffic,
)

MOONCAKE = """\
{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 1500.5, "input_length": 512, "output_length": 20, "more": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.6805900,374,44
2023-11-17 00:00:01.1805900,396,109
"""


def written(tmp_path: Path, name: str, text: str) -> Path:
    (tmp_path / name).write_bytes(text.encode())
    return tmp_path / name


def test_mooncake(tmp_path: Path) -> None:
    traffic = read_traffic(written(tmp_path, "a.jsonl", MOONCAKE))
    assert traffic == Traffic((RecordedRequest(0.0, 512, 20, ()), RecordedRequest(1.4995, 600, 5, (0, 7))), 512)


def test_azure(tmp_path: Path) -> None:
    """Over midnight, with digits that Python's dates do not have, and with the ends of lines of other systems."""
    for text in (AZURE, AZURE.replace("\n", "\r\n"), "\ufeff" + AZURE):
        first, second = read_traffic(written(tmp_path, "a.csv", text)).requests
        assert first == RecordedRequest(0.0, 374, 44, ())
        assert second.arrival_s == pytest.approx(1.5, abs=1e-6)
        assert (second.prompt_tokens, second.output_tokens) == (396, 109)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "a.jsonl holds no requests"),
        ("a.jsonl", MOONCAKE + "{}", "a.jsonl, line 3 is not a request of Mooncake's format"),
        ("a.jsonl", MOONCAKE.replace("600", "0"), "a.jsonl, line 1 is not"),
        ("a.jsonl", MOONCAKE.replace("1500", "-1"), "line 2"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        ("a.csv", AZURE.replace("Context", ""), "line 2 is not a request of Azure's format"),
        ("a.csv", AZURE.split("2023")[0], "a.csv holds no requests"),
        ("a.csv", AZURE + "2023-13-17 00:00:00,1,2", "line 4 is not a request of Azure's format"),
        ("a.csv", AZURE.replace(",109", ",0"), "line 3"),
        ("a.csv", AZURE.replace(",109", ",1e9"), "line 3"),
        ("a.csv", AZURE.replace(",109", ""), "line 3"),
        ("a.txt", AZURE, "must be a .jsonl file (Mooncake's) or a .csv file (Azure's)"),
    ],
)
def test_files_that_are_no_traffic(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        read_traffic(written(tmp_path, name, text))
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the traffic in .*none\.csv: No such file"):
        read_traffic(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is not a file of traffic"):
        read_traffic(tmp_path / "b.csv")


def test_the_sample_is_what_it_is_said_to_be() -> None:
    """Each prompt has an id for every 512 tokens, and many begin alike."""
    traffic = sample_traffic()
    assert len(traffic.requests) == 200
    for request in traffic.requests:
        assert len(request.prefix_blocks) == -(-request.prompt_tokens // traffic.tokens_per_block)
    blocks = [block for request in traffic.requests for block in request.prefix_blocks]
    assert len(set(blocks)) < 0.97 * len(blocks)
    assert (traffic.requests[0].arrival_s, traffic.requests[-1].arrival_s) == (0.0, 72.0)


def test_scaling() -> None:
    scaled = sample_traffic().scaled(rate=2.0, length=0.125)
    assert scaled.tokens_per_block == 64
    assert scaled.requests[-1].arrival_s == 36.0
    for before, after in zip(sample_traffic().requests, scaled.requests, strict=True):
        assert after.prompt_tokens == pytest.approx(before.prompt_tokens / 8, abs=0.5)
        assert after.output_tokens == max(1, round(before.output_tokens / 8))
        assert after.prefix_blocks == before.prefix_blocks
    assert sample_traffic().scaled() == sample_traffic()


def test_requests_that_become_too_long() -> None:
    with pytest.raises(SettingsError, match="length="):
        fixed_traffic(100, 10).scaled(length=1e9)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8))
@settings(derandomize=True, deadline=None)
def test_lengths_equal_an_enumeration(sizes: list[tuple[int, int]]) -> None:
    """Token i of n outputs attends to the prompt and to about i outputs, n / 2 on average."""
    lengths = Lengths.of(tuple(RecordedRequest(0.0, prompt, output, ()) for prompt, output in sizes))
    assert lengths.prompt_tokens == pytest.approx(mean(prompt for prompt, _ in sizes))
    assert lengths.output_tokens == pytest.approx(mean(output for _, output in sizes))
    decoding = [prompt + i + 0.5 for prompt, output in sizes for i in range(output)]
    assert lengths.decode_context == pytest.approx(mean(decoding))
    prefilling = [position + 1 for prompt, _ in sizes for position in range(prompt)]
    assert lengths.pairs_per_prompt_token == pytest.approx(mean(prefilling))


def test_choose_traffic(tmp_path: Path) -> None:
    assert choose_traffic(None) == sample_traffic()
    assert choose_traffic("4096:512").requests == (RecordedRequest(0.0, 4096, 512, ()),)
    assert len(choose_traffic(str(written(tmp_path, "a.csv", AZURE))).requests) == 2
    for wrong in ("0:5", f"{MAX_TOKENS + 1}:5", "5:0"):
        with pytest.raises(SettingsError, match="from 1 to"):
            choose_traffic(wrong)
    with pytest.raises(SettingsError, match=r"traffic='4096'.*PROMPT:OUTPUT"):
        choose_traffic("4096")
