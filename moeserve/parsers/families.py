"""The table of parsers by model family, and the detection of a checkpoint's family."""

# ruff: noqa: RUF001  # DeepSeek's markers contain full-width bars and other blanks

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.errors import SettingsError, nearest
from moeserve.parsers.answers import AnswerParser, AnswerSyntax, MarkedAnswer, ParserOptions
from moeserve.parsers.calls import JsonCalls, NamedCall, TaggedCall
from moeserve.parsers.deltas import new_call_id
from moeserve.parsers.harmony import HarmonyAnswer

THINK = ("<think>", "</think>")
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


@dataclass(frozen=True)
class ForcedCalls:
    """The text of an answer that consists only of tool calls, for a grammar that forces a model to call functions.

    The text is `begin`, then calls joined by `separator`, then `end`. A call is `before_name`, the name of the
    function, `before_arguments`, its arguments as JSON, and `after_arguments`.

    Attributes:
        separator: the text between two calls; None if an answer has only one call.
        before_arguments: may contain "{index}", which stands for the index of the call, from 0.
    """

    before_name: str
    before_arguments: str
    after_arguments: str = ""
    separator: str | None = ""
    begin: str = ""
    end: str = ""


@dataclass(frozen=True)
class ParserFamily:
    """Models that share an answer format.

    Attributes:
        name: name of the family in the setting that selects it.
        syntax: the answer format.
        template_marks: texts that all occur in a chat template of this family.
        model_types: model types in config.json, which are used if the template has the marks of no family.
        keeps_special_tokens: markers are special tokens: detokenize with skip_special_tokens=False.
        stop_tokens: tokens that end an answer in addition to those that the checkpoint names.
        new_id: returns an id for a call to which the model gave none.
    """

    name: str
    syntax: AnswerSyntax
    forced_calls: ForcedCalls
    template_marks: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    keeps_special_tokens: bool = False
    stop_tokens: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The markers around reasoning; None if the family does not mark it in this way."""
        return self.syntax.reasoning

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Return True if a prompt, as rendered by the chat template, has already begun the reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def make(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        starts_in_reasoning: bool,
        parse_tools: bool,
        parse_reasoning: bool,
    ) -> AnswerParser:
        """Return the parser of one answer.

        Args:
            tools: the request's tools: `{"type": "function", "function": {"name": ..., "parameters": JSON schema}}`.
            starts_in_reasoning: the result of the method `starts_in_reasoning` for the prompt.
            parse_tools: False: tool calls stay in the content, as written by the model.
            parse_reasoning: False: reasoning stays in the content, with its markers.
        """
        options = ParserOptions(tools, starts_in_reasoning, parse_tools, parse_reasoning)
        return AnswerParser(self.syntax, options, self.new_id)


def find_parser(name: str | None, *, model_type: str, chat_template: str | None) -> ParserFamily:
    """Return the family with a name, or the family of a checkpoint if the name is None.

    The family of a checkpoint that is not known is hermes, whose format `template_messages` describes to the model.

    Args:
        model_type: the model type in config.json.
        chat_template: the chat template of the checkpoint, or the one that replaces it.

    Raises:
        SettingsError: no family has this name.
    """
    if name is not None:
        name = OTHER_NAMES.get(name, name)
        if name not in FAMILIES:
            raise SettingsError(f"no parser has the name {name!r}; {nearest(name, FAMILIES)}")
        return FAMILIES[name]
    for family in FAMILIES.values():
        if chat_template is not None and all(mark in chat_template for mark in family.template_marks):
            return family
    return next((family for family in FAMILIES.values() if model_type in family.model_types), FAMILIES["hermes"])


def _mistral_id() -> str:
    """Return a random id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _by_name(*families: ParserFamily) -> dict[str, ParserFamily]:
    return {family.name: family for family in families}


# Detection selects the first family whose marks are all in the template.
FAMILIES = _by_name(
    # Qwen3-Coder.
    ParserFamily(
        name="qwen3_coder",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=("<tool_call>", "</tool_call>"),
            call=TaggedCall(
                begin="<function=",
                name_end=">",
                key_begin="<parameter=",
                key_end=(">",),
                value_end="</parameter>",
                end="</function>",
                has_value_lines=True,
            ),
        ),
        forced_calls=ForcedCalls('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
        template_marks=("<tool_call>", "<function="),
    ),
    # GLM-4.5 to 4.7.
    ParserFamily(
        name="glm45",
        syntax=MarkedAnswer(
            reasoning=THINK,
            call=TaggedCall(
                begin="<tool_call>",
                name_end="",
                key_begin="<arg_key>",
                key_end=("</arg_key>", "<arg_value>"),
                value_end="</arg_value>",
                end="</tool_call>",
            ),
        ),
        forced_calls=ForcedCalls('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>", "\n"),
        template_marks=("<tool_call>", "<arg_key>"),
        model_types=("glm4_moe",),
    ),
    # Hermes, Qwen2.5, Qwen3, and models whose format is not known.
    ParserFamily(
        name="hermes",
        syntax=MarkedAnswer(reasoning=THINK, call=JsonCalls("<tool_call>", "</tool_call>")),
        forced_calls=ForcedCalls('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
        template_marks=("<tool_call>",),
        model_types=("qwen3_moe",),
    ),
    # DeepSeek-V3 and R1.
    ParserFamily(
        name="deepseek_v3",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=DEEPSEEK_CALLS,
            call=NamedCall(
                begin=DEEPSEEK_CALL[0],
                name_begin="function<｜tool▁sep｜>",
                arguments_begin="```json",
                arguments_end="```",
                end=DEEPSEEK_CALL[1],
            ),
        ),
        forced_calls=ForcedCalls(
            DEEPSEEK_CALL[0] + "function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```" + DEEPSEEK_CALL[1],
            "\n",
            *DEEPSEEK_CALLS,
        ),
        template_marks=(DEEPSEEK_CALLS[0], "```json"),
        model_types=("deepseek_v3",),
    ),
    ParserFamily(
        name="deepseek_v31",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=DEEPSEEK_CALLS,
            call=NamedCall(
                begin=DEEPSEEK_CALL[0],
                arguments_begin="<｜tool▁sep｜>",
                end=DEEPSEEK_CALL[1],
            ),
        ),
        forced_calls=ForcedCalls(
            DEEPSEEK_CALL[0],
            "<｜tool▁sep｜>",
            DEEPSEEK_CALL[1],
            "",
            *DEEPSEEK_CALLS,
        ),
        template_marks=DEEPSEEK_CALLS[:1],
    ),
    ParserFamily(
        name="kimi_k2",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=KIMI_CALLS,
            call=NamedCall(
                begin="<|tool_call_begin|>",
                name_in_id=r"(?:functions\.)?([\w./-]+)(?::\d+)?",
                arguments_begin="<|tool_call_argument_begin|>",
                end="<|tool_call_end|>",
            ),
        ),
        forced_calls=ForcedCalls(
            "<|tool_call_begin|>functions.",
            ":{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            *KIMI_CALLS,
        ),
        template_marks=KIMI_CALLS[:1],
        model_types=("kimi_k2",),
        keeps_special_tokens=True,
    ),
    # `[TOOL_CALLS][{...}]`, and since version 11 of the tokenizer `[TOOL_CALLS]name[ARGS]{...}`.
    ParserFamily(
        name="mistral",
        syntax=MarkedAnswer(
            reasoning=("[THINK]", "[/THINK]"),
            call=NamedCall(
                begin="[TOOL_CALLS]",
                id_begin="[CALL_ID]",
                arguments_begin="[ARGS]",
            ),
        ),
        forced_calls=ForcedCalls('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
        template_marks=("[TOOL_CALLS]",),
        keeps_special_tokens=True,
        new_id=_mistral_id,
    ),
    ParserFamily(
        name="gpt_oss",
        syntax=HarmonyAnswer(),
        forced_calls=ForcedCalls(
            "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", separator=None
        ),
        template_marks=("<|channel|>", "<|message|>"),
        model_types=("gpt_oss",),
        keeps_special_tokens=True,
        stop_tokens=("<|return|>", "<|call|>"),
    ),
    ParserFamily(
        name="minimax_m2",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=("<minimax:tool_call>", "</minimax:tool_call>"),
            call=TaggedCall(
                begin='<invoke name="',
                name_end='">',
                key_begin='<parameter name="',
                key_end=('">',),
                value_end="</parameter>",
                end="</invoke>",
            ),
        ),
        forced_calls=ForcedCalls(
            '{"name": "', '", "arguments": ', "}\n", "", "<minimax:tool_call>\n", "</minimax:tool_call>"
        ),
        template_marks=("<minimax:tool_call>",),
        model_types=("minimax_m2",),
        keeps_special_tokens=True,
    ),
    ParserFamily(
        name="minimax_m1",
        syntax=MarkedAnswer(reasoning=THINK, call=JsonCalls("<tool_calls>", "</tool_calls>")),
        forced_calls=ForcedCalls('{"name": "', '", "arguments": ', "}\n", "", "<tool_calls>\n", "</tool_calls>"),
        template_marks=("<tool_calls>",),
        model_types=("minimax_m1",),
    ),
)
# Further names of families, most of them those of parsers in vLLM.
OTHER_NAMES = {
    "deepseek_r1": "hermes",
    "glm47": "glm45",
    "minimax": "minimax_m1",
    "minimax_m2_append_think": "minimax_m2",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "think": "hermes",
}
