"""Recorded traffic: arrival times, lengths and common prefixes of requests.

Two published formats are read:

- Mooncake's (https://github.com/kvcache-ai/Mooncake, FAST25-release), a JSON object in each line: `timestamp` in
  milliseconds, `input_length` and `output_length` in tokens, `hash_ids` with one id per block of 512 prompt tokens.
  Equal ids stand for equal blocks after equal prefixes.
- Azure's of 2023 (https://github.com/Azure/AzurePublicDataset), CSV with `TIMESTAMP`, `ContextTokens` and
  `GeneratedTokens`. It does not record common prefixes.
"""

from __future__ import annotations

import csv
import importlib.resources
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec

from moeserve.errors import SettingsError, shown

TOKENS_PER_BLOCK = 512  # prompt tokens per id in Mooncake's format
MAX_TOKENS = 2**24
SAMPLE = "sample_traffic.jsonl"


@dataclass(frozen=True)
class RecordedRequest:
    """The time and lengths of a request, without its text."""

    arrival_s: float  # seconds after the first request in the file
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...]  # ids of the prompt's blocks; the last block may be partial; empty: not recorded


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival; at least one."""

    requests: tuple[RecordedRequest, ...]
    tokens_per_block: int  # tokens per id in `prefix_blocks`
    note: str = field(default="", compare=False)  # the origin of the traffic, if the user has not named a file

    @property
    def lengths(self) -> Lengths:
        return Lengths.of(self.requests)

    def scaled(self, *, rate: float = 1.0, length: float = 1.0) -> Traffic:
        """Return the same traffic at `rate` times the request rate and `length` times the lengths.

        Blocks are scaled with the prompts, so common prefixes remain. Each request keeps at least one prompt token and
        one output token.

        Raises:
            SettingsError: a request becomes too long.
        """
        longest = max(max(each.prompt_tokens, each.output_tokens) for each in self.requests)
        if longest * length > MAX_TOKENS:
            raise SettingsError(f"length={shown(length)} makes a request of {longest} tokens longer than {MAX_TOKENS}")

        def scaled_tokens(tokens: int) -> int:
            return max(1, round(tokens * length))

        requests = (
            RecordedRequest(
                each.arrival_s / rate,
                scaled_tokens(each.prompt_tokens),
                scaled_tokens(each.output_tokens),
                each.prefix_blocks,
            )
            for each in self.requests
        )
        return Traffic(tuple(requests), scaled_tokens(self.tokens_per_block))


@dataclass(frozen=True)
class Lengths:
    """Mean lengths of requests, and the attention work they cause."""

    prompt_tokens: float
    output_tokens: float
    decode_context: float  # mean number of positions that an output token attends to
    pairs_per_prompt_token: float  # mean number of positions that a prompt token attends to, itself included

    @classmethod
    def of(cls, requests: tuple[RecordedRequest, ...]) -> Lengths:
        """Return the mean lengths. No prefix caching is assumed: every prompt is computed and cached in full."""
        prompts, outputs = [each.prompt_tokens for each in requests], [each.output_tokens for each in requests]
        positions = sum(output * (prompt + output / 2) for prompt, output in zip(prompts, outputs, strict=True))
        return cls(
            prompt_tokens=sum(prompts) / len(requests),
            output_tokens=sum(outputs) / len(requests),
            decode_context=positions / sum(outputs),
            pairs_per_prompt_token=sum(prompt * (prompt + 1) / 2 for prompt in prompts) / sum(prompts),
        )


def repeated_tokens(traffic: Traffic, block_size: int) -> int:
    """Return the number of prompt tokens, in full blocks, that repeat the beginning of an earlier prompt.

    This is the maximum that a prefix cache could find. The last token of a prompt does not count, because it is always
    computed.
    """
    ends: dict[tuple[int, int], list[int]] = {}  # (parent, block id) to [number, end in tokens]
    total = 0
    for request in traffic.requests:
        parent = shared = end = 0
        is_known = True
        for block in request.prefix_blocks:
            end = min(end + traffic.tokens_per_block, request.prompt_tokens)
            node = ends.setdefault((parent, block), [len(ends) + 1, 0])
            if is_known:
                shared = max(shared, min(node[1], end))
                is_known = node[1] == end
            parent, node[1] = node[0], max(node[1], end)
        total += min(shared, request.prompt_tokens - 1) // block_size * block_size
    return total


def choose_traffic(text: str | None) -> Traffic:
    """Return the traffic in a file, a single request for "4096:512" (prompt and output tokens), or the sample for None.

    Raises:
        SettingsError: see `read_traffic` and `fixed_traffic`.
    """
    if text is None:
        return sample_traffic()
    if match := re.fullmatch(r"(\d{1,12}):(\d{1,12})", text, re.ASCII):
        return fixed_traffic(int(match[1]), int(match[2]))
    return read_traffic(Path(text))


def read_traffic(path: Path) -> Traffic:
    """Read a `.jsonl` file in Mooncake's format or a `.csv` file in Azure's format.

    Raises:
        SettingsError: the file does not exist, has an unknown format, or has an invalid line. The message names the
            line.
    """
    readers: dict[str, tuple[Callable[[Path], Iterator[RecordedRequest]], int]] = {
        ".jsonl": (_read_mooncake, TOKENS_PER_BLOCK),
        ".csv": (_read_azure, 1),
    }
    if path.suffix not in readers:
        raise SettingsError(
            f"traffic={shown(str(path))} must be a .jsonl file (Mooncake's) or a .csv file (Azure's), or "
            f"PROMPT:OUTPUT in tokens, such as 4096:512"
        )
    read, tokens_per_block = readers[path.suffix]
    try:
        requests = sorted(read(path), key=lambda request: request.arrival_s)
    except OSError as error:
        raise SettingsError(f"cannot read the traffic in {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SettingsError(f"{path} is not a file of traffic: {error}") from None
    if not requests:
        raise SettingsError(f"{path} holds no requests")
    first_s = requests[0].arrival_s
    return Traffic(tuple(replace(each, arrival_s=each.arrival_s - first_s) for each in requests), tokens_per_block)


def sample_traffic() -> Traffic:
    """Return the first 200 requests of Mooncake's conversation trace, which come with the package.

    The requests are licensed under Apache-2.0, like moeserve (see sample_traffic.LICENSE.md): Qin et al., "Mooncake:
    Trading More Storage for Less Computation", FAST 2025.
    """
    with importlib.resources.as_file(importlib.resources.files(__package__) / SAMPLE) as path:
        traffic = read_traffic(path)
    return replace(traffic, note=f"the {len(traffic.requests)} requests that come with moeserve")


def fixed_traffic(prompt_tokens: int, output_tokens: int) -> Traffic:
    """Return traffic with a single request of these lengths.

    Raises:
        SettingsError: a length is out of range.
    """
    for name, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise SettingsError(f"traffic: {name} of {shown(tokens)} tokens; choose from 1 to {MAX_TOKENS}")
    return Traffic((RecordedRequest(0.0, prompt_tokens, output_tokens, ()),), 1)


_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[_BlockId, ...] = ()


class _AzureRow(msgspec.Struct, frozen=True):
    TIMESTAMP: datetime
    ContextTokens: _Tokens
    GeneratedTokens: _Tokens


def _read_mooncake(path: Path) -> Iterator[RecordedRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                content = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SettingsError(f"{path}, line {number} is not a request of Mooncake's format: {error}") from None
            yield RecordedRequest(
                content.timestamp / 1000, content.input_length, content.output_length, content.hash_ids
            )


def _read_azure(path: Path) -> Iterator[RecordedRequest]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.DictReader(lines)
        for row in rows:
            try:
                content = msgspec.convert(row, _AzureRow, strict=False)
            except msgspec.ValidationError as error:
                raise SettingsError(
                    f"{path}, line {rows.line_num} is not a request of Azure's format: {error}"
                ) from None
            yield RecordedRequest(
                content.TIMESTAMP.replace(tzinfo=timezone.utc).timestamp(),
                content.ContextTokens,
                content.GeneratedTokens,
                (),
            )
