"""The errors that moeserve raises on purpose, and parts of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class MoeserveError(Exception):
    """Base of all errors that moeserve raises on purpose."""

    # If `LLM.generate` raised this: the outputs of all its prompts, complete except for those that failed.
    outputs: Sequence[Any] = ()  # RequestOutput


class SettingsError(MoeserveError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or does not fit the model or the machine."""


class CheckpointError(MoeserveError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or of a kind that moeserve does not serve."""


class RequestError(MoeserveError, ValueError):
    """A prompt or a sampling parameter cannot be served. The engine is unchanged and continues."""

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        """
        Args:
            parameter: name of the sampling parameter that is wrong, or "prompt".
            code: stable name of the error, for programs.
        """
        super().__init__(message)
        self.parameter, self.code = parameter, code


class PromptTooLongError(RequestError):
    """A prompt has more tokens than max_model_len allows."""

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int) -> None:
        """
        Args:
            num_tokens: number of tokens in the prompt, or a lower bound of this number.
            max_tokens: maximum number of tokens in a prompt.
        """
        super().__init__(message, parameter="prompt", code="context_length_exceeded")  # OpenAI's code of this error
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class UnsupportedError(MoeserveError, AttributeError):
    """A method of vLLM that moeserve does not have. The message says what to do instead."""


class CacheTooSmallError(SettingsError):
    """The KV cache cannot hold one request of max_model_len tokens."""


class QueueFullError(MoeserveError, RuntimeError):
    """Too many requests are in flight, so no further request was accepted. The engine is unchanged: try again later."""


class EngineError(MoeserveError, RuntimeError):
    """A step failed, or a process of the engine died. The requests in flight have ended.

    The cause is chained to this error, or part of its message if it happened in another process.
    """


class WeightsChangedError(EngineError, ValueError):
    """Files of the model have changed since the engine has read them, so its ranks cannot be started again."""


class ScaleError(MoeserveError, RuntimeError):
    """The number of replicas was not changed: new replicas did not start, or the engine failed or ended meanwhile."""


class ScalingInProgressError(ScaleError):
    """The number of replicas is being changed already. Try again when that is over."""


class StaleWeightsError(EngineError):
    """The weights are of several versions, or older than requests expect. Send a whole update, or reload them."""


class WeightUpdateError(MoeserveError, RuntimeError):
    """An update of the weights was refused. The message says what is missing or wrong."""


class DistributedError(MoeserveError, RuntimeError):
    """A rank did not start, died, hung, or ran a collective that others did not. Its groups cannot be used again."""


class LockstepError(MoeserveError, RuntimeError):
    """Replicas that must run the same steps did not. No replica can continue."""


class RankStateError(MoeserveError, RuntimeError):
    """A rank and the scheduler have different states of a request. Raised with debug_rank_state=True only."""


def missing_extra(what: str, extra: str, error: ImportError) -> SettingsError:
    """Return the error for a package that is not installed, with the extra of moeserve that installs it.

    Args:
        what: the beginning of the message, such as "metrics need prometheus_client".
    """
    return SettingsError(f"{what} ({error}): pip install 'moeserve[{extra}]'")


MAX_NEAR = 3  # if more known names than this are near, none is suggested


def nearest(
    word: str, known: Iterable[str], *, shown_as: Mapping[str, str] | None = None, otherwise: str | None = None
) -> str:
    """Return the end of an error message about an unknown word: the nearest known words, or all if none is near.

    Args:
        shown_as: text that the message shows for each known word; None: the word in quotes.
        otherwise: returned instead of all known words if none is near.
    """
    names = {name: repr(name) if shown_as is None else shown_as[name] for name in sorted(known)}
    if near := near_names(word, names):
        return f"did you mean {' or '.join(names[name] for name in near)}?"
    return otherwise or f"known are: {', '.join(names if shown_as is None else names.values())}"


def near_names(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a user may have meant by a word, at most three; empty if none is near.

    They are, in this order of preference: the same name in another spelling (upper or lower case, "-" or "_"); names
    with the fewest typing errors; names that contain the word as a whole word and are at most twice as long; names that
    begin with the word. For up to three letters, names with the whole word precede names with typing errors, because
    nearly all short words are typing errors of each other.
    """
    word = _normalised(word)
    names = {name: _normalised(name) for name in known}
    most = min(len(word) // 3, 1 + len(word) // 8, 3)  # maximum number of errors that leaves no doubt
    errors = {name: _num_typing_errors(word, text, most) for name, text in names.items()}
    fewest = min(errors.values(), default=0)
    near = [name for name, text in names.items() if f"_{word}_" in f"_{text}_" and 2 * len(word) >= len(text)]
    if fewest <= most and (fewest == 0 or len(word) > 3 or not near):
        near = [name for name, number in errors.items() if number == fewest]
    if not near and len(word) > 3:
        near = [name for name, text in names.items() if text.startswith(word)]
    return near if len(near) <= MAX_NEAR else []


def _normalised(name: str) -> str:
    return name.replace("-", "_").lower()


def _num_typing_errors(word: str, name: str, most: int) -> int:
    """Return how many letters are missing, added, wrong or swapped with the next letter; at most `most + 1`.

    This number is the optimal string alignment distance, by dynamic programming over prefixes of both texts.
    """
    if abs(len(word) - len(name)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(name) + 1))
    for i, letter in enumerate(word, start=1):
        current = [i]
        for j, other in enumerate(name, start=1):
            number = min(last[j] + 1, current[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == name[j - 2] and word[i - 2] == other:
                number = min(number, before[j - 2] + 1)
            current.append(number)
        if min(current) > most:
            return most + 1
        before, last = last, current
    return min(last[-1], most + 1)


def shown(value: object) -> str:
    """Return a value as an error message shows it, cut off if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
