"""The page `docs/python_api.md`, from the signatures and docstrings of what `moeserve` exports.

`python tests/api_page.py` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import moeserve
from moeserve import errors, sampling_params
from moeserve.config.descriptions import default_of

DOCUMENT = Path(__file__).parent.parent / "docs" / "python_api.md"
HEAD = """# Python API

```python
from moeserve import LLM, SamplingParams

with LLM() as llm:  # the default model; keyword arguments are settings
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4)):
        print(output.outputs[0].text)
```

Keyword arguments of `LLM` and `AsyncLLM` are the [settings](settings.md). Names are [vLLM's](coming_from_vllm.md) where
both have the same thing. [The tutorial](tutorial.md) has programs; `help(moeserve.LLM.generate)` has all arguments.

Written by `python tests/api_page.py`.
"""
ENGINES = (moeserve.LLM, moeserve.AsyncLLM)
DESCRIBED = ("generate", "chat_prompt")  # methods whose arguments are listed
RECORDS = (
    *(moeserve.RequestOutput, moeserve.CompletionOutput, moeserve.Logprob, moeserve.RequestOutputKind),
    *(moeserve.TextPrompt, moeserve.TokensPrompt, moeserve.StructuredOutputsParams, moeserve.BeamSearchParams),
)
WITHOUT_EFFECT = re.compile(r"^ {4}([\w, ]+): (?:not supported|no effect|must be 0)", re.MULTILINE)
FIELD = re.compile(r"^    (\w+)(?:: [^#\n]*| = \d+) *(?:# (.*))?$", re.MULTILINE)


def paragraph(owner: Any) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(owner) or "").partition("\n\n")[0].split())


def arguments(method: Any) -> Iterator[str]:
    """Yield the arguments that a docstring describes and that have an effect."""
    _, _, section = (inspect.getdoc(method) or "").partition("Args:\n")
    for entry in re.split(r"\n {4}(?! )", "\n" + section.partition("\n\n")[0])[1:]:
        names, _, meaning = " ".join(entry.split()).partition(": ")
        if not without_effect() & set(names.split(", ")):
            yield f"    - `{names}`: {meaning}\n"


@functools.cache
def without_effect() -> set[str]:
    """Return the parameters of vLLM that methods accept without an effect, as their docstrings say."""
    docstrings = [inspect.getdoc(member) or "" for engine in ENGINES for member in vars(engine).values()]
    return {name for text in docstrings for names in WITHOUT_EFFECT.findall(text) for name in names.split(", ")}


def signature(method: Any) -> str:
    """Return the parameters of a method that have an effect, with their defaults and without annotations."""
    parameters = inspect.signature(method).parameters
    named = [each for name, each in parameters.items() if name not in without_effect() | {"self"}]
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in named]))


def is_as_in_llm(cls: type, name: str) -> bool:
    text = paragraph(vars(cls)[name])
    is_equal = bool(text) and text == paragraph(vars(moeserve.LLM).get(name))
    return cls is not moeserve.LLM and (is_equal or text.startswith("See `LLM"))


def members(cls: type) -> Iterator[str]:
    """Yield the lines of the public methods and properties of a class that say what they do."""
    equal = {name: member for name, member in vars(cls).items() if name[0] != "_" and is_as_in_llm(cls, name)}
    awaited = (f"`{'await ' * inspect.iscoroutinefunction(member)}{name}`" for name, member in equal.items())
    yield f"- {', '.join(awaited)}: as in `LLM`\n" if equal else ""
    for name, member in vars(cls).items():
        text = paragraph(member)
        if name.startswith("_") or not text or name in ("from_engine_args", "of_session") or is_as_in_llm(cls, name):
            continue
        function = inspect.unwrap(getattr(member, "__func__", member))
        if not inspect.isfunction(function):
            yield f"- `{name}`: {text}\n"
            continue
        is_awaited = inspect.iscoroutinefunction(function)
        yield f"- `{'await ' * is_awaited}{name}{signature(function)}`: {text}\n"
        if cls is moeserve.LLM and name in DESCRIBED:
            yield from arguments(function)


def fields(cls: type) -> Iterator[str]:
    """Yield the lines of the fields of a class, with the comments of its source."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__ == cls.__module__]
    bases += [base for base in getattr(cls, "__orig_bases__", ()) if base.__module__ == cls.__module__]
    for base in dict.fromkeys([*bases, cls]):
        for name, comment in FIELD.findall(inspect.getsource(base)):
            yield f"`{name}`" + (f" ({comment})" if comment else "")


def sampling_rows() -> Iterator[str]:
    for field in dataclasses.fields(sampling_params.SamplingParams):
        default = default_of(field)
        shown = str(default) if isinstance(default, Enum) else repr(default)
        yield f"| `{field.name}` | `{shown}` | {field.metadata['help']} |\n"


def document() -> str:
    parts = [HEAD]
    for engine in ENGINES:
        parts += [f"\n## {engine.__name__}\n\n{paragraph(engine)}\n\n", *members(engine)]
    parts += ["\n## SamplingParams\n\n| parameter | default | meaning |\n|---|---|---|\n", *sampling_rows()]
    parts.append("\n## Outputs, prompts and other parameters\n\n")
    parts += [f"- **{record.__name__}**: {paragraph(record)} {', '.join(fields(record))}\n" for record in RECORDS]
    parts.append("\n## Errors\n\n")
    exported = [getattr(errors, name) for name in moeserve.__all__ if name.endswith("Error")]
    parts += [f"- `{error.__name__}` ({error.__bases__[0].__name__}): {paragraph(error)}\n" for error in exported]
    return "".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
