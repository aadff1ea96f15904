"""The answers of gpt-oss, which consist of messages in channels, a format that OpenAI calls harmony.

Messages are found by the text of their markers. OpenAI's package openai-harmony was not used, because it parses token
ids and downloads a vocabulary file at its first use, which needs a network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeserve.parsers.answers import ParserOptions
from moeserve.parsers.deltas import Messages, Outlet, Trimmed
from moeserve.parsers.json_text import read_value
from moeserve.parsers.reader import Reader, Step, drop

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_SPACES = re.compile(r"\s+")
# Matches a header whose runs of white space have been replaced by single spaces. Bounded lengths bound the time.
_RECIPIENT = r"(?:to=(?:functions\.)?(?P<{}>[\w.:/-]{{1,256}}))? ?"
_HEADER = re.compile(
    r"(?:<\|start\|>)? ?(?:assistant)? ?"
    + _RECIPIENT.format("first_recipient")
    + r"(?:<\|channel\|> ?(?P<channel>analysis|commentary|final))? ?"
    + _RECIPIENT.format("recipient")
    + r"(?:<\|constrain\|>)? ?[a-z]{0,32} ?<\|message\|>"
)


@dataclass(frozen=True)
class HarmonyAnswer:
    """A sequence of messages, each a header and a text. The prompt ends within the header of the first message.

    A message with a recipient is a tool call, a message in the channel "analysis" is reasoning, and all others are
    content. Reasoning and calls that the options leave unparsed are content too. Headers are dropped. A line break
    separates messages of the same kind.
    """

    reasoning: tuple[str, str] | None = None

    def read(self, reader: Reader, outlet: Outlet, options: ParserOptions) -> Step[None]:
        content = Messages(outlet.add_content)
        reasoning = Messages(outlet.add_reasoning) if options.parse_reasoning else content
        outside = Trimmed(content.write)  # text outside of messages
        reader.record()
        marker = yield from reader.accept(_START, _CHANNEL, _MESSAGE, "to=")
        while True:
            if marker is None:
                outside(reader.stop_record())
                marker = yield from reader.until((_START, _CHANNEL), outside)
                if marker is None:
                    outside.flush()
                    return
                reader.record(marker)
            if marker != _MESSAGE:
                marker = yield from reader.until((_MESSAGE, _START, *_ENDS), drop)
            text = reader.stop_record()
            header = _HEADER.fullmatch(_SPACES.sub(" ", text))
            if header is not None:
                outside.after_marker()
                marker = yield from _read_text(header, reader, outlet, options, content, reasoning)
            elif marker == _START:
                outside(text.removesuffix(_START))
            else:
                outside(text)
                marker = None
            if marker is not None:
                reader.record(marker)


def _read_text(
    header: re.Match[str],
    reader: Reader,
    outlet: Outlet,
    options: ParserOptions,
    content: Messages,
    reasoning: Messages,
) -> Step[str | None]:
    """Read the text of a message. If the next message follows at once, return the marker that begins it."""
    name = header["recipient"] or header["first_recipient"]
    ends = (*_ENDS, _START, _CHANNEL)
    if name is None or not options.parse_tools:
        text = (reasoning if header["channel"] == "analysis" else content).begin()
        marker = yield from reader.until(ends, text)
        if marker is None:
            text.flush()
        return None if marker in _ENDS else marker
    outlet.start_call(name)
    if (yield from reader.peek()) == "{":
        yield from read_value(reader, outlet.add_arguments)
        marker = yield from reader.until(ends, content.begin())
    else:
        pieces: list[str] = []
        marker = yield from reader.until(ends, pieces.append)
        outlet.add_arguments("".join(pieces).strip() or ("" if marker is None else "{}"))
    return None if marker in _ENDS else marker
