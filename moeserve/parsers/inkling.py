"""The answers of Inkling, which consist of messages. A marker gives the kind of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moeserve.parsers.answers import ParserOptions
from moeserve.parsers.calls import JsonCalls
from moeserve.parsers.deltas import Messages, Outlet
from moeserve.parsers.json_text import ParameterTypes
from moeserve.parsers.reader import Reader, Step, drop

MESSAGE, THINKING, TEXT = "<|message_model|>", "<|content_thinking|>", "<|content_text|>"
CALL = "<|content_invoke_tool_json|>"
_OTHERS = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")  # kinds that are shown as text
_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_KINDS = (THINKING, TEXT, CALL, *_OTHERS)
_NAME = re.compile(r"[\w.:/-]*")  # function name that may precede the marker of a call


@dataclass(frozen=True)
class InklingAnswer:
    """A sequence of messages. The prompt ends with the first message's begin marker, or also its kind's marker.

    Reasoning and calls that the options leave unparsed are content. Markers are dropped. A line break separates
    messages of the same kind.
    """

    reasoning: tuple[str, str] | None = None

    def read(self, reader: Reader, outlet: Outlet, options: ParserOptions) -> Step[None]:
        content = Messages(outlet.add_content)
        reasoning = Messages(outlet.add_reasoning) if options.parse_reasoning else content
        marker: str | None = MESSAGE
        while marker is not None:
            header = ""
            if marker == MESSAGE:
                reader.record()
                yield from reader.run(_NAME, drop)
                marker = yield from reader.accept(*_KINDS)
                header = reader.stop_record().removesuffix(marker or "")
            text = (reasoning if marker == THINKING else content).begin()
            if marker == CALL and options.parse_tools:
                reader.record()
                num_calls = outlet.num_calls
                yield from JsonCalls(CALL).read(reader, outlet, ParameterTypes(options.tools))
                rest = reader.stop_record()
                is_name = outlet.num_calls > num_calls and header.strip() == outlet.last_name
                header = rest if is_name else header + rest
            text(header)
            marker = yield from reader.until((MESSAGE, *_KINDS, *_ENDS), text)
            if marker is None:
                text.flush()
