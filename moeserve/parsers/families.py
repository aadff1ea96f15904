"""The table of parsers by model family, and the detection of a checkpoint's family."""

# ruff: noqa: RUF001  # DeepSeek's markers contain full-width bars and other blanks

from __future__ import annotations

import re
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
from moeserve.parsers.inkling import InklingAnswer
from moeserve.parsers.nested_calls import ElementCall, NotationCall

THINK = ("<think>", "</think>")
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
DSML = "｜DSML｜"
INVOKE = TaggedCall(
    begin='<invoke name="',
    name_end='">',
    key_begin='<parameter name="',
    key_end=('">',),
    value_end="</parameter>",
    end="</invoke>",
)
MINIMAX_M3 = "]<]minimax[>["
KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


@dataclass(frozen=True)
class ForcedCalls:
    """The text of an answer that consists only of tool calls, for a grammar that forces a model to call functions.

    The text is `begin`, then calls joined by `separator`, then `end`. A call is `before_name`, the name of the
    function, `before_arguments`, the arguments as JSON, and `after_arguments`.

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
        name: name of the family in the setting that selects a parser.
        syntax: the answer format.
        forced_calls: the text of answers that a grammar restricts to tool calls.
        template_marks: texts that all occur in a chat template of this family.
        model_types: model types in config.json, used if no family's marks occur in the template.
        keeps_special_tokens: markers are special tokens, so detokenize with skip_special_tokens=False.
        stop_tokens: tokens that end an answer, in addition to the tokens that the checkpoint names.
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
        """The markers around reasoning; None if the family marks reasoning in another way or not at all."""
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
    """Return the parser family named `name`; if this is None, the family of a checkpoint.

    For an unknown checkpoint, this is hermes, whose format `template_messages` describes to the model.

    Args:
        model_type: the model type in config.json.
        chat_template: the checkpoint's chat template, or the template that replaces it.

    Raises:
        SettingsError: no family has this name.
    """
    suffix = re.search(r"<(?:tool_calls|arg_key)(:[\w-]+)>", chat_template or "")
    if chat_template is not None and suffix is not None:
        found = find_parser(name, model_type=model_type, chat_template=chat_template.replace(suffix[1], ""))
        return _hunyuan(suffix[1]).get(found.name, found)
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


def _hunyuan(suffix: str) -> dict[str, ParserFamily]:
    """Return the families of Hy3 and Hy4. In some of their checkpoints, the names of all tags have a suffix."""
    section = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    begin, end, separator = f"<tool_call{suffix}>", f"</tool_call{suffix}>", f"<tool_sep{suffix}>"

    def family(name: str, name_end: str) -> ParserFamily:
        return ParserFamily(
            name=name,
            syntax=MarkedAnswer(
                reasoning=(f"<think{suffix}>", f"</think{suffix}>"),
                section=section,
                call=TaggedCall(
                    begin=begin,
                    name_end=name_end,
                    key_begin=f"<arg_key{suffix}>",
                    key_end=(f"</arg_key{suffix}>", f"<arg_value{suffix}>"),
                    value_end=f"</arg_value{suffix}>",
                    end=end,
                ),
            ),
            forced_calls=ForcedCalls(f'{begin}{{"name": "', '", "arguments": ', f"}}{end}", "\n", *section),
            template_marks=(section[0], name_end or "<arg_key>"),
            model_types=(name,),
            keeps_special_tokens=True,
        )

    return _by_name(family("hy_v3", separator), family("hy_v4", ""))


def _dsml(name: str, section: str) -> ParserFamily:
    """Return a DeepSeek family that writes calls as XML-like elements, in a section with the tag `section`."""
    return ParserFamily(
        name=name,
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=(f"<{DSML}{section}>", f"</{DSML}{section}>"),
            call=TaggedCall(
                begin=f'<{DSML}invoke name="',
                name_end='">',
                key_begin=f'<{DSML}parameter name="',
                key_end=('" string="',),
                flags=('true">', 'false">'),
                value_end=f"</{DSML}parameter>",
                end=f"</{DSML}invoke>",
            ),
        ),
        forced_calls=ForcedCalls(
            '{"name": "', '", "arguments": ', "}\n", "", f"<{DSML}{section}>\n", f"</{DSML}{section}>"
        ),
        template_marks=(DSML, f"{section}>"),
        model_types=(name,),
        keeps_special_tokens=True,
    )


# Detection selects the first family whose marks are all in the template.
FAMILIES = _by_name(
    *_hunyuan("").values(),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    ParserFamily(
        name="minimax_m3",
        syntax=MarkedAnswer(
            reasoning=("<mm:think>", "</mm:think>"),
            section=(f"{MINIMAX_M3}<tool_call>", f"{MINIMAX_M3}</tool_call>"),
            call=ElementCall(prefix=MINIMAX_M3, name_begin='<invoke name="', name_end='">', last="/invoke"),
        ),
        forced_calls=ForcedCalls(
            '{"name": "',
            '", "arguments": ',
            "}\n",
            "",
            f"{MINIMAX_M3}<tool_call>\n",
            f"{MINIMAX_M3}</tool_call>",
        ),
        template_marks=(MINIMAX_M3,),
        model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
        keeps_special_tokens=True,
    ),
    ParserFamily(
        name="longcat",
        syntax=MarkedAnswer(
            reasoning=("<longcat_think>", "</longcat_think>"),
            call=JsonCalls("<longcat_tool_call>", "</longcat_tool_call>"),
        ),
        forced_calls=ForcedCalls(
            '<longcat_tool_call>\n{"name": "', '", "arguments": ', "}\n</longcat_tool_call>", "\n"
        ),
        template_marks=("<longcat_tool_call>",),
        model_types=("longcat_flash",),
        keeps_special_tokens=True,
    ),
    ParserFamily(
        name="dots",
        syntax=MarkedAnswer(
            reasoning=THINK,
            section=("<dots_function_call>", "</dots_function_call>"),
            call=INVOKE,
        ),
        forced_calls=ForcedCalls(
            '{"name": "', '", "arguments": ', "}\n", "", "<dots_function_call>\n", "</dots_function_call>"
        ),
        template_marks=("<dots_function_call>",),
        keeps_special_tokens=True,
    ),
    ParserFamily(
        name="gemma4",
        syntax=MarkedAnswer(
            reasoning=("<|channel>thought", "<channel|>"),
            call=NotationCall("<|tool_call>", name_begin="call:", quote='<|"|>', end="<tool_call|>"),
        ),
        forced_calls=ForcedCalls('<|tool_call>{"name": "', '", "arguments": ', "}<tool_call|>"),
        template_marks=("<|tool_call>call:",),
        model_types=("gemma4", "gemma4_text"),
        keeps_special_tokens=True,
    ),
    # Command A and Cohere2 MoE. Newer models have START_TEXT in place of START_RESPONSE.
    ParserFamily(
        name="cohere",
        syntax=MarkedAnswer(
            reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
            call=JsonCalls("<|START_ACTION|>", "<|END_ACTION|>"),
            dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        forced_calls=ForcedCalls(
            '{"tool_name": "', '", "parameters": ', "}", ", ", "<|START_ACTION|>[", "]<|END_ACTION|>"
        ),
        template_marks=("<|START_ACTION|>",),
        model_types=("cohere2_moe",),
        keeps_special_tokens=True,
    ),
    ParserFamily(
        name="inkling",
        syntax=InklingAnswer(),
        forced_calls=ForcedCalls(
            '<|content_invoke_tool_json|>{"name": "', '", "args": ', "}<|end_message|>", "<|message_model|>"
        ),
        template_marks=("<|message_model|>",),
        model_types=("inkling", "inkling_text", "inkling_mm_model"),
        keeps_special_tokens=True,
    ),
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
    # `[TOOL_CALLS][{...}]`, or since version 11 of the tokenizer `[TOOL_CALLS]name[ARGS]{...}`.
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
            call=INVOKE,
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
# Additional names of families. Most of them are vLLM's names of parsers.
OTHER_NAMES = {
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek_r1": "hermes",
    "glm47": "glm45",
    "hunyuan_a13b": "minimax_m1",
    "jamba": "minimax_m1",
    "kolibri1": "hermes",
    "mimo": "qwen3_coder",
    "minimax": "minimax_m1",
    "minimax_m2_append_think": "minimax_m2",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "poolside_v1": "glm45",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "think": "hermes",
}
