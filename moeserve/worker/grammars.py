"""Grammars of outputs, which llguidance compiles for one tokenizer, and the tokens that they allow next.

llguidance limits the work of compilations and masks by counts, so a hostile grammar fails with an error, at the same
token on every machine. See docs/structured_outputs.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from moeserve.errors import RequestError, missing_extra
from moeserve.json_schemas import inner_schemas
from moeserve.structured_outputs import OutputGrammar
from moeserve.worker.grammar_checker import GrammarChecker, TokenizerText

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 32  # maximum number of compiled grammars in the cache
# Limits of llguidance. A state of its lexer takes up to 2 kB, and 1,000 units of fuel take 70 us.
MAX_LEXER_STATES = 10_000
MAX_GRAMMAR_SYMBOLS = 100_000
COMPILE_FUEL = 300_000
STEP_FUEL = 50_000
STEP_ITEMS = 5_000
# Limits of the CPU time of a grammar: for its compilation, and on average for the masks of a request.
COMPILE_SECONDS = 1.0
PLACE_SECONDS = 0.2  # maximum seconds of the search for the refused part of a schema
MAX_PLACE_LENGTH = 200
SECONDS_PER_REQUEST, SECONDS_PER_TOKEN = 1.0, 0.001
# Meanings of llguidance's errors that name its own options or states.
MEANINGS = {
    "oneOf constraints are not supported": "the branches of oneOf may overlap; write anyOf",
    "NoExtensionBias": "no text satisfies it",
}
# Without "no_forcing", the mask of a text with only one continuation allows only the usual tokenisation of this
# continuation, and a text that must continue infinitely is followed forever.
START = '%llguidance {"no_forcing": true}\nstart: @output'


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that may come next, or the reason why no token can be chosen."""

    bits: npt.NDArray[np.uint8]  # bit i % 8 of byte i // 8 is set if token i is allowed
    error: str | None = None


class CompiledGrammars:
    """A cache of compiled grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: TokenizerText) -> None:
        """
        Raises:
            RequestError: llguidance cannot use the tokenizer.
        """
        import llguidance

        try:
            self.tokens = llguidance.LLTokenizer(
                tokenizer.json, n_vocab=tokenizer.num_tokens, eos_token=tokenizer.eos_token_id
            )
        except ValueError as error:
            raise RequestError(str(error)) from None
        self._vocab_size = tokenizer.vocab_size
        self._compiled: OrderedDict[OutputGrammar, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # protects `_compiled`

    def refusal(self, grammar: OutputGrammar) -> str | None:
        """Compile a grammar, and compute its first masks. Return why it cannot be served; None if it can."""
        started = time.thread_time()
        try:
            matcher = Matcher(self._compile(grammar), self.tokens.eos_tokens)
        except _RefusedError as refused:
            is_schema = grammar.notation == "json"
            return f"{refused}, at {self._place(json.loads(grammar.text))}" if is_schema else str(refused)
        first = matcher.allowed_tokens([], ())
        possible = np.flatnonzero(np.unpackbits(first.bits, bitorder="little")[: self._vocab_size])
        error = first.error
        if error is None and len(possible):
            error = matcher.allowed_tokens([int(possible[0])], ()).error
        if error is None and not len(possible) and not matcher.is_complete:
            error = "no token of this model can begin such an output"
        if error is None and time.thread_time() - started > COMPILE_SECONDS:
            error = f"it takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        if error is None:
            return None
        reason = _reason(error).removeprefix("structured_outputs: ")
        return f"{reason}, at #" if grammar.notation == "json" else reason

    def matcher(self, grammar: OutputGrammar) -> Matcher:
        """Return a matcher at the start of an output.

        Raises:
            RequestError: the grammar is malformed or too large.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            try:
                compiled = self._compile(grammar)
            except _RefusedError as refused:
                raise _refusal(grammar, str(refused)) from None
            with self._lock:
                self._compiled[grammar] = compiled
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), self.tokens.eos_tokens)

    def _place(self, schema: Any) -> str:
        """Return the innermost part of a refused schema that is refused by itself, as a JSON pointer."""
        if not isinstance(schema, dict):
            return "#"
        place, candidates = "#", inner_schemas(schema)
        shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
        ends_at = time.thread_time() + PLACE_SECONDS
        while (found := next(candidates, None)) is not None and time.thread_time() < ends_at:
            key, part = found
            try:
                self._compile(OutputGrammar("json", json.dumps({**shared, **part}), "json"))
            except _RefusedError:
                place, candidates = f"{place}/{key}", inner_schemas(part)
        return place[:MAX_PLACE_LENGTH]

    def _compile(self, grammar: OutputGrammar) -> llguidance.LLMatcher:
        import llguidance

        try:
            text = json.dumps({"grammars": [{"lark_grammar": START}, {"name": "output"} | _rules(grammar)]})
        except (ValueError, RecursionError) as error:
            raise _RefusedError(_reason(str(error))) from None
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )
        compiled = llguidance.LLMatcher(self.tokens, text, log_level=0, limits=limits)
        if compiled.is_error():
            raise _RefusedError(_reason(compiled.get_error()))
        return compiled


class Grammars:
    """The grammars of one tokenizer: checked in a process of their own, and compiled here if they have passed.

    The tokenizer is loaded when it is first needed, which takes about a second. Thread-safe.
    """

    def __init__(self, tokenizer_folder: str, vocab_size: int) -> None:
        """
        Args:
            vocab_size: vocabulary size of the model. Larger token ids of the tokenizer cannot be sampled.
        """
        self._tokenizer_folder = tokenizer_folder
        self._vocab_size = vocab_size
        self._loaded: CompiledGrammars | None = None
        self._loading = threading.Lock()
        self.checker = GrammarChecker(self._tokenizer)

    def check(self, grammar: OutputGrammar) -> None:
        """Refuse a grammar that the engine cannot serve. The grammar is compiled in a separate process.

        Raises:
            RequestError: the grammar is malformed, takes too much time or memory, or allows no text.
            SettingsError: llguidance is not installed.
        """
        refusal = self.checker.refusal(grammar)
        if refusal is not None:
            raise _refusal(grammar, refusal)

    def matcher(self, grammar: OutputGrammar) -> Matcher:
        """Return a matcher at the start of an output, for a grammar that has passed `check`.

        Raises:
            RequestError: the grammar is malformed or too large.
        """
        with self._loading:
            if self._loaded is None:
                self._loaded = CompiledGrammars(self._tokenizer())
        return self._loaded.matcher(grammar)

    def _tokenizer(self) -> TokenizerText:
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise missing_extra("structured_outputs need llguidance", "structured", error) from None
        from moeserve.models.checkpoint.tokenizer_files import (
            load_tokenizer,  # imports tokenizers, which ranks need only here
        )

        tokenizer = load_tokenizer(self._tokenizer_folder)
        assert tokenizer is not None, f"{self._tokenizer_folder} has no tokenizer"
        num_tokens = 1 + max(tokenizer.backend.get_vocab().values())
        return TokenizerText(
            source=f"the tokenizer in {self._tokenizer_folder}",
            json=tokenizer.backend.to_str(),
            num_tokens=max(self._vocab_size, num_tokens),
            eos_token_id=tokenizer.token_id("eos_token"),
            vocab_size=self._vocab_size,
        )


class _RefusedError(Exception):
    """A grammar cannot be compiled."""


_SHARED: WeakValueDictionary[tuple[str, int], Grammars] = WeakValueDictionary()


def grammars_of(tokenizer_folder: str, vocab_size: int) -> Grammars:
    """Return the grammars of a tokenizer, which a frontend and a rank in one process share."""
    return _SHARED.setdefault((tokenizer_folder, vocab_size), Grammars(tokenizer_folder, vocab_size))


class Matcher:
    """The position of one output in its grammar, which depends only on the output's tokens."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            eos_token_ids: tokens that llguidance treats as ends. The actual end tokens depend on the request.
        """
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_consumed = 0
        self._seconds = 0.0

    @property
    def is_complete(self) -> bool:
        """True if the output may end here."""
        return self._matcher.is_accepting()

    def allowed_tokens(self, output_token_ids: list[int], end_token_ids: Sequence[int]) -> AllowedTokens:
        """Return the tokens that may come next.

        Args:
            output_token_ids: all tokens of the output, which continue the tokens of earlier calls.
            end_token_ids: tokens that end the output. They are allowed when the output is complete.
        """
        started = time.thread_time()
        if new := output_token_ids[self._num_consumed :]:
            self._matcher.consume_tokens(new)
            self._num_consumed = len(output_token_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        for token_id in self._eos_token_ids:
            bits[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        if self._matcher.is_error():
            return AllowedTokens(bits, f"structured_outputs: {_reason(self._matcher.get_error())}")
        if self.is_complete:
            for token_id in end_token_ids:
                bits[token_id // 8] |= np.uint8(1 << token_id % 8)
        self._seconds += time.thread_time() - started
        if self._seconds > SECONDS_PER_REQUEST + SECONDS_PER_TOKEN * self._num_consumed:
            return AllowedTokens(bits, "structured_outputs: the grammar takes too long for each token; simplify it")
        return AllowedTokens(bits)

    def allowed_after(
        self, output_token_ids: list[int], drafts: Sequence[int], end_token_ids: Sequence[int]
    ) -> list[AllowedTokens]:
        """Return the tokens that may come after the output, and after each draft up to the first that is not allowed.

        Args:
            output_token_ids, end_token_ids: see `allowed_tokens`.
        """
        allowed = [self.allowed_tokens(output_token_ids, end_token_ids)]
        if not drafts or allowed[0].error is not None:
            return allowed
        ahead = Matcher(self._matcher.deep_copy(), self._eos_token_ids)  # a copy, which a wrong draft may leave stuck
        ahead._num_consumed = self._num_consumed
        for number, draft in enumerate(drafts, 1):
            if draft in end_token_ids or not allowed[-1].bits[draft // 8] >> draft % 8 & 1:
                break
            allowed.append(ahead.allowed_tokens([*output_token_ids, *drafts[:number]], end_token_ids))
            if allowed[-1].error is not None:
                break
        return allowed


def _rules(grammar: OutputGrammar) -> dict[str, object]:
    """Return a grammar in llguidance's form.

    Raises:
        ValueError: the grammar is neither Lark nor GBNF.
    """
    import llguidance

    if grammar.notation == "json":
        return {"json_schema": json.loads(grammar.text)}
    if grammar.notation == "lark":
        return {"lark_grammar": llguidance.grammar_from("grammar", grammar.text)}
    (rules,) = json.loads(llguidance.grammar_from("regex", grammar.text))["grammars"]
    return {"lark_grammar": rules["lark_grammar"]}


def _refusal(grammar: OutputGrammar, reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {grammar.name} cannot be served: {_reason(reason)}")


def _reason(error: str) -> str:
    """Return the reason of an error, without the state and the grammar that llguidance appends to it."""
    for words, meaning in MEANINGS.items():
        if words in error:
            return meaning
    lines = error.partition("\n<")[0].splitlines() or [""]
    return next((line for line in lines if line.startswith("error: ")), lines[0])[:300]
