"""Trial steps at an engine's start, which measure the memory of a step, and compile kernels before serving."""

from __future__ import annotations

import functools

from moeserve.config.devices import DEVICES
from moeserve.config.engine_config import EngineConfig
from moeserve.errors import SettingsError
from moeserve.kv.layer_cache import CacheNeeds, Places
from moeserve.kv.rank.cache import RankMemory, count_blocks, free_bytes, measure_step_memory
from moeserve.machine import shown_bytes
from moeserve.models.rank_model import RankModel
from moeserve.ops.attention.dense import MAX_MASK_SIZE
from moeserve.sampling_params import RequestParams
from moeserve.worker.drafting import drafter_of
from moeserve.worker.model_runner import ModelRunner
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import Chunk, RequestState, RequestTable
from moeserve.worker.step_runner import EagerSteps

LARGE_STEP_TOKENS = 8192  # steps of at most this size are run without a check
NUM_PREDICTING = 65536  # from this size on, a step takes per token at most twice the memory of the largest step
LEAST_LONG_CHUNK = 256  # number of rows for which latent attention expands the whole context


def make_probe(model: RankModel, context: RankContext, config: EngineConfig) -> ModelRunner:
    """Return a runner of a shallow copy of the model, whose KV cache has one block that all positions share."""
    shallow = model.with_one_layer_of_each_kind()
    caches = shallow.make_caches(Places.equal(context.rules, 1))  # trial steps store no states
    for cache in caches:
        cache.clear()  # because trial steps read positions that were never written
    # All blocks are block 0.
    table = RequestTable(config.schedule.max_num_seqs, context.max_blocks, len(context.rules.tables))
    drafter, steps = drafter_of(config, shallow, caches), EagerSteps(shallow, caches)
    return ModelRunner(shallow, context, steps, table, appends_samples=False, drafter=drafter)


def profile_blocks(config: EngineConfig, probe: ModelRunner, needs: CacheNeeds, reserved_bytes: int) -> int:
    """Return the number of KV cache blocks for which this rank has room. Collective: all ranks.

    Args:
        needs: cache memory that all layers of this rank need.
        reserved_bytes: bytes that only look free, see `count_blocks`.

    Raises:
        CacheTooSmallError: not even one request of the shortest useful length fits.
        SettingsError: the largest step does not fit.
    """
    require_room_for_steps(config, probe)
    run_largest_step = functools.partial(run_for_memory, probe, largest_step(config))
    return count_blocks(config, needs, reserved_bytes, lambda: RankMemory.measured(config, run_largest_step))


def require_room_for_steps(config: EngineConfig, probe: ModelRunner) -> None:
    """Refuse a step so large that its memory does not exist, without running it. Collective: all ranks.

    The number of tokens doubles from one trial step to the next. A step is refused without being run if its memory, in
    proportion to that of the previous step, is not free. Large trial steps also predict the memory of the largest step.

    Raises:
        SettingsError: the largest step does not fit.
    """
    schedule = config.schedule
    num_tokens, most = (
        LARGE_STEP_TOKENS,
        min(schedule.max_num_batched_tokens, schedule.max_num_seqs * schedule.max_model_len),
    )
    while num_tokens < most:
        run = functools.partial(run_for_memory, probe, largest_step(config, num_tokens))
        peak, free = measure_step_memory(run, config.compute.device), free_bytes(config)
        following = min(2 * num_tokens, most)
        cannot_fit = num_tokens >= NUM_PREDICTING and peak * most // num_tokens > 2 * free
        if cannot_fit or peak * following // num_tokens > free:
            raise SettingsError(
                f"max_num_batched_tokens={schedule.max_num_batched_tokens} does not fit in memory: a step of "
                f"{num_tokens} tokens takes {shown_bytes(peak)}, and {shown_bytes(free)} are free; about "
                f"{max(num_tokens, free * num_tokens // max(1, peak))} tokens fit"
            )
        num_tokens = following


def run_all_sizes(probe: ModelRunner, config: EngineConfig) -> None:
    """Run steps of 1, 2, 4 ... tokens up to the largest, so that all kernels are compiled. Collective: all ranks.

    A kernel is compiled once for each of a few ranges of row counts.
    """
    for doublings in range((config.schedule.max_num_batched_tokens - 1).bit_length() + 1):
        _run(probe, largest_step(config, 2**doublings))


def largest_step(config: EngineConfig, max_tokens: int | None = None) -> list[Chunk]:
    """Return a step that takes at least as much memory as any step that the scheduler may plan.

    The step has the maximum number of tokens and of sampled rows. Its first chunk ends the longest context, with about
    the minimum number of rows that fill a piece of attention's work. On a GPU it returns log-probabilities, because the
    copies of scores take considerable memory there.

    Args:
        max_tokens: maximum number of tokens, if less than that of the scheduler.
    """
    greedy = RequestParams(temperature=0.0)
    random = RequestParams(temperature=1.0, top_p=0.9, logprobs=1 if config.compute.device == "cuda" else None)
    num_random = (
        DEVICES[config.compute.device].sampling_piece // config.texts.vocab_size + 1
    )  # rows sampled at once; more take no more memory
    chunks: list[Chunk] = []
    num_left = min(max_tokens or config.schedule.max_num_batched_tokens, config.schedule.max_num_batched_tokens)
    num_chunks = min(config.schedule.max_num_seqs, num_left)
    for index in range(num_chunks):
        length = min(config.schedule.max_model_len, num_left - (num_chunks - index - 1))
        if index == 0:
            length = min(length, max(LEAST_LONG_CHUNK, MAX_MASK_SIZE // config.schedule.max_model_len))
        num_left -= length
        context_len = config.schedule.max_model_len if index == 0 else length
        state = RequestState(
            token_ids=[0] * context_len,
            num_prompt_tokens=context_len,
            num_blocks=-(-context_len // config.cache.block_size),
            params=random if index < num_random else greedy,
            seed=0,
            end_token_ids=[],
        )
        start = context_len - length
        chunks.append(Chunk(index, start, token_ids=[0] * length, request=state, samples=True, prompt_targets=[]))
    return chunks


def _run(probe: ModelRunner, chunks: list[Chunk]) -> None:
    """Run a step, and run it again with two-batch overlap if steps of its size may have it."""
    for chunk in chunks:
        probe.table.add(chunk.slot, chunk.request, [[]] * len(probe.table.tables))
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    may_overlap = any(probe.context.overlap.applies(num_tokens, is_decode_only=each) for each in (False, True))
    for overlaps in (False, True)[: 1 + may_overlap]:
        num_tokens_of, num_sampling = ((count,) * probe.context.mesh.dp for count in (num_tokens, len(chunks)))
        probe.start(chunks, num_tokens_of, overlaps=overlaps, num_sampling=num_sampling).finish()


def run_for_memory(probe: ModelRunner, chunks: list[Chunk]) -> None:
    """Run a step without most of its arithmetic, which would take most of the time of an engine's start."""
    with probe.model.context.backend.measure_memory_only():
        _run(probe, chunks)
