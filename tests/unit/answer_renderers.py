"""Random answers of models, and how each family writes them: the other direction of `moeserve/parsers/`."""

# ruff: noqa: RUF001  # DeepSeek's markers have bars and blanks of their own

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from moeserve.parsers.deltas import ParsedDelta


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]
    json_text: str  # of the arguments, in formats that contain JSON


@dataclass(frozen=True)
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def hermes(answer: Answer) -> str:
    calls = [f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.json_text}}}\n</tool_call>' for c in answer.calls]
    return _thoughts(answer, "\n", "\n\n") + "\n".join(([answer.content] if answer.content else []) + calls)


def qwen3_coder(answer: Answer) -> str:
    text = _thoughts(answer, "\n", "\n\n") + answer.content
    for call in answer.calls:
        text += f"\n<tool_call>\n<function={call.name}>\n"
        for key, value in call.arguments.items():
            text += f"<parameter={key}>\n{_plain(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def glm45(answer: Answer) -> str:
    text = _thoughts(answer, "", "\n") + answer.content
    for call in answer.calls:
        text += f"\n<tool_call>{call.name}\n"
        for key, value in call.arguments.items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
        text += "</tool_call>"
    return text


def glm47(answer: Answer) -> str:
    return glm45(answer).replace("</arg_key>\n", "</arg_key>").replace("</arg_value>\n", "</arg_value>")


def deepseek_v3(answer: Answer) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.json_text}\n```<｜tool▁call▁end｜>"
        for call in answer.calls
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return _thoughts(answer, "\n", "\n\n") + answer.content + section


def deepseek_v31(answer: Answer) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.json_text}<｜tool▁call▁end｜>" for call in answer.calls
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return _thoughts(answer, "", "") + answer.content + section


def kimi_k2(answer: Answer) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>{call.json_text}<|tool_call_end|>"
        for index, call in enumerate(answer.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return _thoughts(answer, "", "") + answer.content + section


def mistral_list(answer: Answer) -> str:
    calls = ", ".join(
        f'{{"name": "{call.name}", "arguments": {call.json_text}, "id": "{_mistral_id(index)}"}}'
        for index, call in enumerate(answer.calls)
    )
    return _mistral_thoughts(answer) + answer.content + (f"[TOOL_CALLS] [{calls}]" if calls else "")


def mistral_with_ids(answer: Answer) -> str:
    text = _mistral_thoughts(answer) + answer.content
    for index, call in enumerate(answer.calls):
        text += f"[TOOL_CALLS]{call.name}[CALL_ID]{_mistral_id(index)}[ARGS]{call.json_text}"
    return text


def mistral(answer: Answer) -> str:
    calls = "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.json_text}" for call in answer.calls)
    return _mistral_thoughts(answer) + answer.content + calls


def gpt_oss(answer: Answer) -> str:
    """As the model writes calls, with the recipient in the channel."""
    return _harmony(answer, "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>")


def gpt_oss_of_template(answer: Answer) -> str:
    """As the chat template writes calls, with the recipient in the role."""
    return _harmony(answer, " to=functions.{}<|channel|>commentary json<|message|>")


def minimax_m2(answer: Answer) -> str:
    text = _thoughts(answer, "\n", "\n\n") + answer.content
    if answer.calls:
        text += "\n<minimax:tool_call>\n"
        for call in answer.calls:
            parameters = [
                f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in call.arguments.items()
            ]
            text += f'<invoke name="{call.name}">\n{"".join(parameters)}</invoke>\n'
        text += "</minimax:tool_call>"
    return text


def minimax_m1(answer: Answer) -> str:
    calls = "".join(f'{{"name": "{call.name}", "arguments": {call.json_text}}}\n' for call in answer.calls)
    section = f"\n<tool_calls>\n{calls}</tool_calls>" if calls else ""
    return _thoughts(answer, "\n", "\n\n") + answer.content + section


def hy_v3(answer: Answer) -> str:
    return _hunyuan(answer, "<tool_sep>\n")


def hy_v4(answer: Answer) -> str:
    return _hunyuan(answer, "")


def _hunyuan(answer: Answer, separator: str) -> str:
    text = _thoughts(answer, "", "") + answer.content
    if answer.calls:
        text += "<tool_calls>\n"
        for call in answer.calls:
            text += f"<tool_call>{call.name}{separator}"
            for key, value in call.arguments.items():
                text += f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            text += "</tool_call>\n"
        text += "</tool_calls>"
    return text


def deepseek_v32(answer: Answer) -> str:
    return _dsml(answer, "function_calls")


def deepseek_v4(answer: Answer) -> str:
    return _dsml(answer, "tool_calls")


def _dsml(answer: Answer, section: str) -> str:
    text = _thoughts(answer, "", "") + answer.content
    if answer.calls:
        text += f"\n\n<｜DSML｜{section}>\n"
        for call in answer.calls:
            text += f'<｜DSML｜invoke name="{call.name}">\n'
            for key, value in call.arguments.items():
                is_text = "true" if isinstance(value, str) else "false"
                text += f'<｜DSML｜parameter name="{key}" string="{is_text}">{_plain(value)}</｜DSML｜parameter>\n'
            text += "</｜DSML｜invoke>\n"
        text += f"</｜DSML｜{section}>"
    return text


def minimax_m3(answer: Answer) -> str:
    text = f"<mm:think>{answer.reasoning}</mm:think>" if answer.reasoning else ""
    text += answer.content
    prefix = "]<]minimax[>["
    if answer.calls:
        text += f"{prefix}<tool_call>\n"
        for call in answer.calls:
            parameters = [f"{prefix}<{key}>{_plain(value)}{prefix}</{key}>" for key, value in call.arguments.items()]
            text += f'{prefix}<invoke name="{call.name}">{"".join(parameters)}{prefix}</invoke>\n'
        text += f"{prefix}</tool_call>"
    return text


def longcat(answer: Answer) -> str:
    text = f"<longcat_think>\n{answer.reasoning}\n</longcat_think>\n" if answer.reasoning else ""
    calls = [
        f'<longcat_tool_call>{{"name": "{c.name}", "arguments": {c.json_text}}}</longcat_tool_call>'
        for c in answer.calls
    ]
    return text + answer.content + "".join(calls)


def dots(answer: Answer) -> str:
    text, *calls = minimax_m2(answer).rsplit("<minimax:tool_call>\n", 1)
    return text + "".join(
        f"<dots_function_call>\n{each[: -len('</minimax:tool_call>')]}</dots_function_call>" for each in calls
    )


def gemma4(answer: Answer) -> str:
    text = f"<|channel>thought\n{answer.reasoning}\n<channel|>" if answer.reasoning else ""
    text += answer.content
    for call in answer.calls:
        fields = [f"{key}:{_notation(value)}" for key, value in call.arguments.items()]
        text += f"<|tool_call>call:{call.name}{{{','.join(fields)}}}<tool_call|>"
    return text


def _notation(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_notation, value))}]"
        case dict():
            return "{" + ",".join(f"{_notation(key)}:{_notation(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def cohere(answer: Answer) -> str:
    text = f"<|START_THINKING|>{answer.reasoning}<|END_THINKING|>" if answer.reasoning else ""
    text += f"<|START_RESPONSE|>{answer.content}<|END_RESPONSE|>" if answer.content else ""
    calls = [
        f'    {{"tool_call_id": "{index}", "tool_name": "{call.name}", "parameters": {call.json_text}}}'
        for index, call in enumerate(answer.calls)
    ]
    return text + (f"<|START_ACTION|>[\n{(',' + chr(10)).join(calls)}\n]<|END_ACTION|>" if calls else "")


def inkling(answer: Answer) -> str:
    messages = [f"<|content_thinking|>{answer.reasoning}"] if answer.reasoning else []
    messages += [f"<|content_text|>{answer.content}"] if answer.content else []
    for call in answer.calls:
        messages.append(f'{call.name}<|content_invoke_tool_json|>{{"name": "{call.name}", "args": {call.json_text}}}')
    return "<|message_model|>".join(f"{message}<|end_message|>" for message in messages)


def _thoughts(answer: Answer, inside: str, after: str) -> str:
    return f"<think>{inside}{answer.reasoning}{inside}</think>{after}" if answer.reasoning else ""


def _mistral_thoughts(answer: Answer) -> str:
    return f"[THINK]{answer.reasoning}[/THINK]" if answer.reasoning else ""


def _mistral_id(index: int) -> str:
    return f"abcDEF{index:03}"


def _harmony(answer: Answer, call_header: str) -> str:
    """Return the messages behind the prompt's `<|start|>assistant`. Without calls, the content is the final message."""
    messages = []
    if answer.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{answer.reasoning}<|end|>")
    if answer.content:
        channel = "commentary" if answer.calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{answer.content}<|end|>")
    messages += [f"{call_header.format(call.name)}{call.json_text}<|call|>" for call in answer.calls]
    return "<|start|>assistant".join(messages)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Style:
    """One way in which a family writes answers.

    Attributes:
        family: the parser's name.
        markers: texts that neither content nor reasoning can contain.
        value_end: what ends a parameter's value, if values are plain text and not JSON.
    """

    family: str
    render: Callable[[Answer], str]
    markers: tuple[str, ...]
    value_end: str | None = None


_THINK = ("<think>", "</think>")
_DEEPSEEK = (*_THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI = (*_THINK, "<|tool_calls_section_begin|>", "<|tool_call_begin|>")
_MISTRAL = ("[THINK]", "[/THINK]", "[TOOL_CALLS]")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_COHERE = ("THINKING", "RESPONSE", "TEXT", "ACTION")
STYLES = [
    Style("hermes", hermes, (*_THINK, "<tool_call>")),
    Style("qwen3_coder", qwen3_coder, (*_THINK, "<tool_call>", "<function="), "\n</parameter>"),
    Style("glm45", glm45, (*_THINK, "<tool_call>"), "</arg_value>"),
    Style("glm45", glm47, (*_THINK, "<tool_call>"), "</arg_value>"),
    Style("deepseek_v3", deepseek_v3, _DEEPSEEK),
    Style("deepseek_v31", deepseek_v31, _DEEPSEEK),
    Style("kimi_k2", kimi_k2, _KIMI),
    Style("mistral", mistral_list, _MISTRAL),
    Style("mistral", mistral_with_ids, _MISTRAL),
    Style("mistral", mistral, _MISTRAL),
    Style("gpt_oss", gpt_oss, _HARMONY),
    Style("gpt_oss", gpt_oss_of_template, _HARMONY),
    Style("minimax_m2", minimax_m2, (*_THINK, "<minimax:tool_call>", '<invoke name="'), "</parameter>"),
    Style("minimax_m1", minimax_m1, (*_THINK, "<tool_calls>")),
    Style("hy_v3", hy_v3, (*_THINK, "<tool_calls>", "<tool_call>"), "</arg_value>"),
    Style("hy_v4", hy_v4, (*_THINK, "<tool_calls>", "<tool_call>"), "</arg_value>"),
    Style("deepseek_v32", deepseek_v32, (*_THINK, "<｜DSML｜"), "</｜DSML｜parameter>"),
    Style("deepseek_v4", deepseek_v4, (*_THINK, "<｜DSML｜"), "</｜DSML｜parameter>"),
    Style("minimax_m3", minimax_m3, ("<mm:think>", "</mm:think>", "]<]minimax[>["), "]<]minimax[>["),
    Style("longcat", longcat, ("<longcat_think>", "</longcat_think>", "<longcat_tool_call>")),
    Style("dots", dots, (*_THINK, "<dots_function_call>", '<invoke name="'), "</parameter>"),
    Style("gemma4", gemma4, ("<|channel>", "<channel|>", "<|tool_call>"), '<|"|>'),
    Style("cohere", cohere, tuple(f"<|{end}_{part}|>" for end in ("START", "END") for part in _COHERE)),
    Style("inkling", inkling, ("<|message_model|>", "<|end_message|>", "<|content_")),
]

# Parts of texts, among them some that look like the start of a marker.
_PIECES = st.sampled_from(
    [
        *(
            "a",
            "word",
            " ",
            "\n",
            "\n\n",
            "é",
            "日本",
            "😀",
            "{",
            "}",
            '"',
            "\\",
            "<",
            "</",
            "<|",
            "<｜",
            "[",
            "```",
            "```json",
        ),
        *(
            "<think",
            "</thin",
            "<tool_call",
            "<tool",
            "<｜tool▁calls▁beg",
            "<|tool_calls_section",
            "[TOOL_CALL",
            "[THIN",
        ),
        *("<|channel", "<|start", "<minimax:", "<function", "<invoke", "</tool_call>", "</tool_calls>", "</function>"),
        *('{"name": "f", "arguments": {}}', "to=functions.f", "<arg_key>", "</parameter"),
    ]
)
_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


def _texts(forbidden: Sequence[str]) -> st.SearchStrategy[str]:
    texts = st.lists(_PIECES, max_size=8).map("".join) | st.text(max_size=20)
    return texts.filter(lambda text: not any(marker in text for marker in forbidden))


@st.composite
def answers(draw: st.DrawFn, style: Style) -> Answer:
    """Answers that a style can write. White space around content and reasoning belongs to the format."""
    prose = _texts(style.markers).map(str.strip)
    any_text = _texts(())
    values = st.recursive(
        _SCALARS | any_text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
        max_leaves=6,
    )
    keys = any_text
    if style.value_end is not None:  # a string in place of another type could not be told from it, hence the schemas
        keys = _NAMES
        values = values.filter(lambda value: style.value_end.strip() not in _plain(value))  # type: ignore[union-attr]
    calls = []
    for _ in range(draw(st.integers(0, 3))):
        arguments = draw(st.dictionaries(keys, values, max_size=4))
        json_text = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        calls.append(Call(draw(_NAMES), arguments, json_text))
    return Answer(draw(prose), draw(prose), calls)


def tools_of(answer: Answer) -> list[dict[str, Any]]:
    """Return tools whose schemas have the types of the arguments."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    tools = []
    for name in {call.name for call in answer.calls}:
        types: dict[str, list[str]] = {}
        for call in answer.calls:
            for key, value in call.arguments.items() if call.name == name else ():
                types.setdefault(key, []).append("null" if value is None else names[type(value)])
        properties = {key: {"type": found[0] if len(found) == 1 else found} for key, found in types.items()}
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    return tools


@dataclass
class Parsed:
    """The sum of deltas. Each call is its id, its name, and the text of its arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, delta: ParsedDelta) -> None:
        """Add a delta. Calls begin in order, with id and name."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.index == len(self.calls):
                assert part.id
                assert part.name
                self.calls.append((part.id, part.name, part.arguments))
            else:
                assert part.index == len(self.calls) - 1
                assert part.id is None
                assert part.name is None
                call_id, name, arguments = self.calls[-1]
                self.calls[-1] = call_id, name, arguments + part.arguments

    @property
    def without_ids(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, [call[1:] for call in self.calls]
