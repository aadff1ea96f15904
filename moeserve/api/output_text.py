"""`OutputText`: the text of one output up to its first stop string."""

from __future__ import annotations

from moeserve.api.tokenizer import TextCodec
from moeserve.sampling_params import SamplingParams


class OutputText:
    """The text of one output as tokens are added. The first stop string ends it.

    The output ends with the stop string whose last character comes first, or with the longest of several that end
    there. The result therefore does not depend on how the text is divided into tokens. As in vLLM, a stop string must
    end within the text of tokens after the first `min_tokens`.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams) -> None:
        self._detokenizer = codec.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._released: list[str] = []
        self._pending = ""  # text that may begin a stop string
        self._num_exempt = 0  # characters at the start of `_pending` in which no stop string may end

    @property
    def text(self) -> str:
        """The text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def add(self, token_id: int) -> str | None:
        """Add the next token. Return the stop string that now ends the output, if any."""
        self._num_tokens += 1
        self._pending += self._detokenizer.feed(token_id)
        if not self._stops:
            self._release(len(self._pending))
            return None

        text = self._pending + self._detokenizer.held_text
        if self._num_tokens <= self._min_tokens:
            self._num_exempt = max(self._num_exempt, len(text))
        found = _first_stop(text, self._stops, self._num_exempt)
        if found is not None:
            start, stop = found
            self._pending = text
            self._release(start + len(stop) if self._keeps_stop else start)
            return stop
        self._release(_start_of_partial_stop(self._pending, self._stops))
        return None

    def finish(self) -> None:
        """Release the remaining text of an output that no stop string has ended."""
        self._pending += self._detokenizer.finish()
        self._release(len(self._pending))

    def _release(self, num_characters: int) -> None:
        if num_characters:
            self._released.append(self._pending[:num_characters])
            self._pending = self._pending[num_characters:]
            self._num_exempt = max(0, self._num_exempt - num_characters)


def _first_stop(text: str, stops: list[str], num_exempt: int) -> tuple[int, str] | None:
    """Return start and text of the stop string that ends first after the exempt characters, or None."""
    first: tuple[int, int, str] | None = None  # end, start, stop string
    for stop in stops:
        start = text.find(stop, max(0, num_exempt - len(stop) + 1))
        if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
            first = (start + len(stop), start, stop)
    return None if first is None else (first[1], first[2])


def _start_of_partial_stop(text: str, stops: list[str]) -> int:
    """Return the start of the longest suffix that begins a stop string; the length of the text if there is none."""
    longest = max(map(len, stops))
    for start in range(max(0, len(text) - longest + 1), len(text)):
        suffix = text[start:]
        if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in stops):
            return start
    return len(text)
