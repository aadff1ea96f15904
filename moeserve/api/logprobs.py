"""Log-probabilities in the form that users see, converted from the engine's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

from moeserve.api.tokenizer import TextCodec
from moeserve.outputs import Logprob
from moeserve.protocol import LogprobRows, TokenLogprobs


def logprob_of_token(logprobs: TokenLogprobs, codec: TextCodec | None) -> dict[int, Logprob]:
    """Return the log-probabilities at one position by token id: the sampled token first, then the most likely ones."""
    by_token: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True):
        if token_id not in by_token:  # the sampled token may also be among the most likely
            by_token[token_id] = Logprob(logprob, rank, None if codec is None else codec.token_text(token_id))
    return by_token


class PromptLogprobs(Sequence["dict[int, Logprob] | None"]):
    """The log-probabilities of a prompt, by position. Equal to a list of dicts, which are created when read.

    The first position is None, because no token precedes it.
    """

    def __init__(self, pieces: Sequence[LogprobRows], codec: TextCodec | None) -> None:
        self._pieces = pieces
        self._ends = list(accumulate((piece.num_rows for piece in pieces), initial=1))[1:]
        self._codec = codec

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 1

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        yield None
        for piece in self._pieces:
            for index in range(piece.num_rows):
                yield logprob_of_token(piece.row(index), self._codec)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position == 0:
            return None
        place = bisect_right(self._ends, position)
        piece = self._pieces[place]
        return logprob_of_token(piece.row(position - self._ends[place] + piece.num_rows), self._codec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # pickled and copied as a list, without the tokenizer
