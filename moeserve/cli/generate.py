"""`moeserve generate`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from moeserve.cli.parser import Parser, add_engine_flags, add_flags, engine_settings, given, reader
from moeserve.sampling_params import SamplingParams

MAX_TOKENS = 256


def add_arguments(command: Parser) -> None:
    command.usage = "moeserve generate [MODEL] PROMPT [flags]\n       moeserve generate [MODEL] --prompt TEXT [flags]"
    command.add_argument(
        "--prompt", action="append", metavar="TEXT", help="message to the model; may be given several times"
    )
    command.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    command.add_argument(
        "--chat-template-kwargs",
        type=reader(dict[str, Any]),
        metavar="JSON",
        help="""further variables of the chat template, such as '{"enable_thinking": false}'""",
    )
    sampling = command.add_argument_group(
        "Sampling",
        "Defaults come from the checkpoint's generation_config.json. With the default model, --temperature is 0: it "
        "always generates the most likely token.",
    )
    sampling.add_argument(
        "--max-tokens",
        type=reader(int),
        default=MAX_TOKENS,
        metavar="TOKENS",
        help=f"maximum tokens to generate (default: {MAX_TOKENS})",
    )
    # The command prints one text, from one engine, so it has no flags for several outputs. --seed is the engine's.
    without = {"max_tokens", "n", "logprobs", "prompt_logprobs", "seed", "output_kind", "kv_transfer_params"}
    add_flags(sampling, SamplingParams, without, shows_defaults=False)
    add_engine_flags(command)
    command.add_argument("last", nargs="?", metavar="PROMPT", help="the same as --prompt")
    command.arrange = _find_prompt


def _find_prompt(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Move the last positional argument to the prompts unless --prompt is given, and return the other arguments.

    argparse takes positional arguments from one place of a command line; `rest` has the arguments from other places.
    """
    positional = [each for each in (options.model_folder, options.last) if each is not None]
    if rest and not any(each.startswith("-") for each in rest):
        positional, rest = [*positional, *rest], []
    if not options.prompt and positional:
        *positional, prompt = positional
        if not positional and _is_model(prompt):
            options.parser.error(f"a prompt is missing: moeserve generate {prompt} PROMPT")
        options.prompt = [prompt]
    options.model_folder = positional[0] if positional else None
    return positional[1:] + rest


def _is_model(text: str) -> bool:
    """Return True if a text is the path of a file or folder, or looks like a path or an id of the Hugging Face Hub."""
    return os.path.exists(text) or (not any(map(str.isspace, text)) and "/" in text)


def run(options: argparse.Namespace) -> None:
    if not any(options.prompt or []):
        options.parser.error("a prompt is missing")
    settings = engine_settings(options)
    sampling = given(options, SamplingParams)
    SamplingParams(**sampling)  # refuses invalid values before a model is loaded
    if settings.get("model") is None:
        sampling = {"temperature": 0.0} | sampling

    from moeserve import LLM  # imports torch

    with LLM(**settings) as llm:
        if not (llm.has_chat_template or options.raw):
            print("moeserve: the model has no chat template, so prompts are sent as they are (--raw)", file=sys.stderr)
        params = dataclasses.replace(llm.get_default_sampling_params(), **sampling)
        for text in options.prompt:
            prompt = text
            if llm.has_chat_template and not options.raw:
                messages = [{"role": "user", "content": text}]
                prompt = llm.chat_prompt(messages, chat_template_kwargs=options.chat_template_kwargs)
            num_printed = 0
            for output in llm.stream(prompt, params):
                answer = output.outputs[0].text
                print(answer[num_printed:], end="", flush=True)
                num_printed = len(answer)
            print()
