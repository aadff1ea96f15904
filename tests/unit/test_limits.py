"""One request cannot exhaust memory: bounds on prompts, their log-probabilities, and copies of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logprob_rows import packed
from test_frontend import CODEC, EOS, byte_codec, new_frontend
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from moeserve.api.frontend import Frontend
from moeserve.api.logprobs import PromptLogprobs
from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError
from moeserve.kv.requests import RequestCache
from moeserve.models.checkpoint.tokenizer_files import LoadedTokenizer
from moeserve.outputs import Logprob
from moeserve.protocol import AddRequest, ChunkResult, RankReport, Request, Sample, StepPlan, StepResult, TokenLogprobs
from moeserve.sampling_params import RequestParams, SamplingParams
from moeserve.scheduling.request import LiveRequest
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.scheduler_config import SchedulerConfig
from moeserve.worker.request_table import RequestTable


class Tokenizing(Exception):
    """The tokenizer was called."""


class NeverEncodes(TextCodec):
    def encode(self, text: str) -> list[int]:
        raise Tokenizing


def sentencepiece_like(**changes: Any) -> TextCodec:
    """A tokenizer with byte fallback, and with parts that a test replaces."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁▁": 257, "a": 258, "aa": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("a", "a")], byte_fallback=True))
    tokenizer.normalizer = changes.get("normalizer", normalizers.Replace(" ", "▁"))
    if "pre_tokenizer" in changes:
        tokenizer.pre_tokenizer = changes["pre_tokenizer"]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=changes.get("lstrip", False))])
    make: Any = PreTrainedTokenizerFast
    return TextCodec(LoadedTokenizer.from_transformers(make(tokenizer_object=tokenizer)))


NORMAL = sentencepiece_like(normalizer=normalizers.NFC())
PLAIN = sentencepiece_like()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    frontend = new_frontend(NeverEncodes(CODEC.tokenizer), max_model_len=10)
    fits = CODEC.least_tokens
    longest = next(length for length in range(1, 1000) if fits("a" * length) == 10) - 1
    with pytest.raises(RequestError, match=f"{longest + 1} characters.*at least 10 tokens.*max_model_len=10"):
        frontend.encode("a" * (longest + 1), SamplingParams())
    with pytest.raises(Tokenizing):
        frontend.encode("a" * longest, SamplingParams())
    with pytest.raises(RequestError, match="the conversation has"):
        frontend.check_conversation("a" * (longest + 1))


@given(st.text(st.sampled_from("a é e\u0301\u0308 ᾂ\u1f00\u0300\u0345 漢 \U0001f600"), max_size=60))
def test_the_bound_never_exceeds_the_number_of_tokens(text: str) -> None:
    for codec in (CODEC, NORMAL, PLAIN):
        assert codec.least_tokens(text) <= len(codec.encode(text))
    assert PLAIN.least_tokens("a" * 1000) > 0


@pytest.mark.parametrize(
    "codec",
    [
        sentencepiece_like(lstrip=True),
        sentencepiece_like(normalizer=normalizers.Strip()),
        sentencepiece_like(normalizer=normalizers.Replace("aa", "a")),
        sentencepiece_like(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    ],
    ids=["token that takes spaces", "strip", "shortening", "split that drops spaces"],
)
def test_a_tokenizer_that_drops_characters_has_no_bound(codec: TextCodec) -> None:
    assert codec.least_tokens("a" * 10**6) == 0


def test_the_log_probabilities_of_a_prompt_are_bounded() -> None:
    frontend = Frontend(None, vocab_size=100, max_model_len=2**20, eos_token_ids=[], engine_seed=0)
    most = LIMITS.max_prompt_logprobs_entries // 64
    frontend.encode([[1] * most], SamplingParams(prompt_logprobs=63))
    with pytest.raises(RequestError, match=rf"prompt_logprobs=63.*{most + 1} tokens.*{most * 64} are allowed"):
        frontend.encode([[1] * (most + 1)], SamplingParams(prompt_logprobs=63))
    frontend.encode([[1] * (most + 1)], SamplingParams(logprobs=63))


def test_packed_log_probabilities_take_twelve_bytes_for_each_entry() -> None:
    rows = [TokenLogprobs(list(range(21)), [-1.5] * 21, list(range(21)))] * 64
    (table,) = packed(rows)
    assert len(msgspec.msgpack.encode(table)) <= 12 * 21 * 64 + 64


def test_the_log_probabilities_of_a_prompt_are_a_list_of_dicts_when_they_are_read() -> None:
    rows = [TokenLogprobs([place, 90, 91], [-1.0, -0.5, -0.25], [3, 1, 2]) for place in range(5)]
    shown = [None, *({place: Logprob(-1.0, 3), 90: Logprob(-0.5, 1), 91: Logprob(-0.25, 2)} for place in range(5))]
    found = PromptLogprobs([*packed(rows[:3]), *packed(rows[3:])], None)
    assert found == shown
    assert [found[place] for place in range(-6, 6)] == shown + shown
    assert found[1:5:2] == shown[1:5:2]
    assert (len(found), repr(found)) == (6, repr(shown))
    with pytest.raises(IndexError):
        found[6]
    assert type(pickle.loads(pickle.dumps(found))) is type(copy.deepcopy(found)) is list
    assert PromptLogprobs([], byte_codec()) == [None]


def test_samples_share_their_prompt_in_messages_and_in_memory() -> None:
    params = RequestParams(prompt_logprobs=1)
    first = Request(request_id="0", prompt_token_ids=[7] * 10_000, params=params, seed=1, eos_token_ids=[EOS])
    samples = [Sample(str(index), index) for index in range(1, 128)]
    data = msgspec.msgpack.encode(AddRequest(first, samples))
    assert len(data) < len(msgspec.msgpack.encode(AddRequest(first))) + 128 * 32
    requests = msgspec.msgpack.decode(data, type=AddRequest).requests
    assert [(each.request_id, each.seed) for each in requests[1:]] == [(str(index), index) for index in range(1, 128)]
    assert [each.params.prompt_logprobs for each in requests] == [1] + [None] * 127
    live = [LiveRequest(each, index, RequestCache(b"")) for index, each in enumerate(requests)]
    assert len({id(each.token_ids) for each in live}) == 1
    live[0].append([5], [], 20_000)  # has tokens of its own from now on
    assert (len(live[0].token_ids), len(live[1].token_ids)) == (10_001, 10_000)


def test_ranks_get_the_prompt_of_running_samples_once() -> None:
    """Also when the first of them has ended, and when it ends while the others wait."""
    config = SchedulerConfig(
        num_blocks=1000,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        enable_prefix_caching=True,
    )
    scheduler, table = Scheduler(config, b""), RequestTable(4, 128)
    first = Request(request_id="0", prompt_token_ids=[7] * 1000, params=RequestParams(max_tokens=3), seed=0)
    samples = [Sample(str(index), index) for index in range(1, 12)]
    for request in AddRequest(first, samples).requests:
        scheduler.add(request)
    sent = []
    while (plan := scheduler.schedule()) is not None:
        sent.append(len(msgspec.msgpack.encode(plan)))
        chunks = table.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))
        assert all(chunk.request.token_ids[:1000] == [7] * 1000 for chunk in chunks)
        table.append_tokens(chunks, [8 for chunk in chunks if chunk.samples])
        results = [ChunkResult(token_ids=[8] if chunk.samples else []) for chunk in chunks]
        report = RankReport(0, table.digests(plan.slots))
        scheduler.commit(StepResult(step=plan.step, chunks=results), [report])
    assert len(sent) == 9  # four at a time
    assert sum(size > 1000 for size in sent) == 3
    assert max(sent) < 3000  # one prompt of 1000 bytes, and the parameters of four requests
