"""The model runner, which builds the tensors of a step from its chunks, runs the model, and samples tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.distributed.mesh import share_of, share_sizes
from moeserve.errors import MoeserveError
from moeserve.models.rank_model import RankModel
from moeserve.ops import sampling as sampling_operations
from moeserve.ops.sampling.interface import SamplingOperations
from moeserve.protocol import RouteRows
from moeserve.step_inputs import ChunkSpan, StateRows, StepInputs
from moeserve.worker.device_copies import Array, HostInputs, copies_for
from moeserve.worker.drafting import Drafter, SampledStep
from moeserve.worker.grammars import AllowedTokens, Grammars
from moeserve.worker.overlap import overlapped
from moeserve.worker.pending_step import PendingStep
from moeserve.worker.rank_context import RankContext
from moeserve.worker.request_table import NO_STATES, UNKNOWN_TOKEN, Chunk, RequestState, RequestTable
from moeserve.worker.route_buffer import RouteBuffer
from moeserve.worker.sampler import SampledRows, SampleSpec, needs_tokens, prompt_logprobs, sample, sample_spec
from moeserve.worker.step_runner import StepOutputs, StepRunner

# Number of rows of prompt log-probabilities computed at once, because logits of a long prompt would not fit.
PROMPT_ROWS = 64


class ModelRunner:
    """Executes steps on one rank. The first tp rank of a replica's last pipeline stage samples."""

    def __init__(
        self,
        model: RankModel,
        context: RankContext,
        step_runner: StepRunner,
        table: RequestTable,
        *,
        appends_samples: bool = True,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        routes: RouteBuffer | None = None,
    ) -> None:
        """
        Args:
            table: table of the requests whose chunks are executed.
            appends_samples: append sampled tokens to the table, because later plans do not contain them.
            grammars: grammars of requests; None: no request has a grammar.
            drafter: drafter of tokens for later steps; None: no speculative decoding.
            routes: memory of the experts of a step's tokens; None: experts are not reported.
        """
        self.model = model
        self.context = context
        self.step_runner = step_runner
        self.table = table
        self.appends_samples = appends_samples
        self.grammars = grammars
        self.drafter = drafter
        self.routes = routes
        self.copies = copies_for(table, context.device)

    @functools.cached_property
    def _operations(self) -> SamplingOperations:
        return sampling_operations.make(self.model.context.backend)

    @torch.inference_mode()
    def start(
        self,
        chunks: Sequence[Chunk],
        num_tokens: tuple[int, ...],
        padded_to: int | None = None,
        previous: PendingStep | None = None,
        *,
        overlaps: bool = False,
        num_sampling: tuple[int, ...] = (),
    ) -> PendingStep:
        """Start one step. This waits only for the values of earlier tokens, and only if a request needs them.
        Collective: all ranks.

        Args:
            num_tokens: number of tokens of each replica's chunks, in order of dp rank.
            padded_to: number of rows to which all replicas pad a decode step; None: no padding.
            previous: the previous step, which may still run; None: it has finished. All earlier steps have finished.
            overlaps: run the step with two-batch overlap, if it is not replayed.
            num_sampling: number of chunks of each replica that sample, for a drafter.
        """
        step = self.build_inputs(chunks, num_tokens, padded_to)
        if overlaps:
            step = overlapped(step, tp=self.context.mesh.tp, tp_rank=self.context.tp_rank)
        outputs, routes = self._run(step, chunks)
        raise_failure = self.model.groups.raise_failure
        if self.model.head is None:  # a later pipeline stage samples
            nothing = self.copies.start_reading([torch.zeros(0)])
            return PendingStep(chunks=[], sampling=[], reading=nothing, raise_failure=raise_failure, routes=routes)
        # Computing logits is collective, so all tp ranks do it.
        sampling = [chunk for chunk in chunks if chunk.samples]
        sampled = self._sample(outputs, step, chunks, sampling, previous) if sampling else None
        prompts = [
            self._prompt_logprobs(chunk, outputs.hidden_TD[step.spans[index].first_row :])
            for index, chunk in enumerate(chunks)
            if chunk.prompt_targets
        ]
        is_finite = torch.zeros(0)
        if len(sampling) < len(chunks):
            is_finite = outputs.hidden_TD.index_select(0, step.row_starts[1:] - 1).isfinite().all(dim=1)
        of_drafter = self._start_drafter(step, chunks, outputs, sampled, num_tokens, num_sampling)
        tensors = [
            is_finite,
            *(each for prompt in prompts for each in prompt),
            *(sampled.tensors if sampled else ()),
            *of_drafter,
        ]
        started = PendingStep(
            chunks=chunks if self.context.tp_rank == 0 else [],
            sampling=sampling,
            sampled=sampled,
            drafter=self.drafter,
            num_draft_tensors=len(of_drafter),
            reading=self.copies.start_reading(tensors),
            appends_samples=self.appends_samples,
            raise_failure=raise_failure,
            routes=routes,
        )
        if self.appends_samples:
            self.table.append_tokens(sampling, [UNKNOWN_TOKEN] * len(sampling))
        return started

    def _run(self, step: StepInputs, chunks: Sequence[Chunk]) -> tuple[StepOutputs, RouteRows | None]:
        """Run the layers. Also return the experts of this rank's rows, if they are reported. Collective: all ranks."""
        if self.routes is None:
            return self.step_runner(step), None
        outputs = self.step_runner(self.routes.forced(step, chunks))
        return outputs, self.routes.read(step.tp_sizes[self.context.tp_rank])

    def _start_drafter(
        self,
        step: StepInputs,
        chunks: Sequence[Chunk],
        outputs: StepOutputs,
        sampled: SampledRows | None,
        num_tokens: tuple[int, ...],
        num_sampling: tuple[int, ...],
    ) -> list[Tensor]:
        """Start to draft after a step, and return the tensors that the drafter reads. Collective: all ranks."""
        if self.drafter is None:
            return []
        sampled_step = SampledStep(
            inputs=step,
            chunks=chunks,
            hidden_TD=outputs.hidden_TD,
            tokens_L=sampled.tokens_L if sampled else None,
            num_tokens=num_tokens,
            num_sampling=num_sampling,
        )
        return self.drafter.start(sampled_step, self)

    def skip(self, chunks: Sequence[Chunk]) -> None:
        """Append placeholder tokens after a failed step on the only rank, so that later plans can be run."""
        if self.appends_samples:
            self.table.append_tokens(chunks, [0] * sum(chunk.samples for chunk in chunks))

    def _allowed_tokens(self, request: RequestState, drafts: Sequence[int]) -> list[AllowedTokens]:
        """Return the tokens that the grammar of a request allows next, and after each draft that it allows.

        The list is empty if the request has no grammar.
        """
        if request.params.grammar is None:
            return []
        assert self.grammars is not None, "there is no tokenizer for grammars"
        try:
            request.matcher = request.matcher or self.grammars.matcher(request.params.grammar)
        except MoeserveError as error:  # unexpected, because the grammar was compiled when the request was submitted
            return [AllowedTokens(np.zeros(0, np.uint8), str(error))]
        output = request.token_ids[request.num_prompt_tokens :]
        return request.matcher.allowed_after(output, drafts, request.end_token_ids)

    def _sample(
        self,
        outputs: StepOutputs,
        step: StepInputs,
        chunks: Sequence[Chunk],
        sampling: Sequence[Chunk],
        previous: PendingStep | None,
    ) -> SampledRows:
        """Sample the next tokens on the first tp rank, and keep them for the next step. Collective: tp ranks."""

        def sampled_rows(x_R: Tensor) -> Tensor:  # in a padded decode step, usually all rows except padding
            if step.padding is None:
                return x_R
            return x_R[: len(chunks)] if len(sampling) == len(chunks) else x_R.index_select(0, step.logits_rows)

        assert step.slots is not None
        assert step.settings is not None
        slots_L, settings_LW = sampled_rows(step.slots), sampled_rows(step.settings)
        if outputs.logits_TV is None or outputs.chosen_T is None:
            logits_LV, chosen_L = self.model.logits(step.rows_for_logits(outputs.hidden_TD)), None
            positions_L = step.rows_for_logits(step.positions)
        else:
            highest_T, tokens_T = outputs.chosen_T
            logits_LV, chosen_L = sampled_rows(outputs.logits_TV), (sampled_rows(highest_T), sampled_rows(tokens_T))
            positions_L = sampled_rows(step.positions)
        if self.context.tp_rank == 0:
            specs = self._specs(sampling, previous)
            upload, mode = self.copies.upload, self.context.logprobs_mode
            rows = sample(
                logits_LV, settings_LW, positions_L, specs, self._operations, upload, chosen_L, logprobs_mode=mode
            )
        else:
            rows = SampledRows(tokens_L=torch.empty_like(slots_L), highest_L=slots_L, dtype=logits_LV.dtype)
        if self.appends_samples:
            tokens_L = self.model.groups.tp.broadcast(rows.tokens_L, 0)  # collective: tp ranks
            self.copies.keep_tokens(slots_L, tokens_L)
            rows = dataclasses.replace(rows, tokens_L=tokens_L)
        return rows

    def _specs(self, sampling: Sequence[Chunk], previous: PendingStep | None) -> dict[int, SampleSpec]:
        """Return the specs of the rows whose requests need more than their settings, by index of the row."""
        if not self.table.has_spec.any():
            return {}
        is_special = self.table.has_spec[[chunk.slot for chunk in sampling]]
        special = [sampling[index] for index in np.flatnonzero(is_special).tolist()]
        if previous is not None and any(needs_tokens(chunk.request) for chunk in special):
            previous.finish()
            self.step_runner.on_layers()  # sends the results of the previous step without waiting for this one
        # A GPU computes the logits in the meantime.
        first_rows = itertools.accumulate((chunk.num_sampled for chunk in sampling), initial=0)
        return {
            row: spec
            for chunk, first_row, needs_spec in zip(sampling, first_rows, is_special.tolist(), strict=False)
            if needs_spec
            for row, spec in enumerate(self._specs_of(chunk), first_row)
        }

    def _specs_of(self, chunk: Chunk) -> list[SampleSpec]:
        """Return the spec of each row of a chunk. Rows after a draft that the grammar does not allow are not used."""
        allowed = self._allowed_tokens(chunk.request, chunk.drafts)
        return [
            sample_spec(chunk.request, allowed[number] if number < len(allowed) else None, chunk.drafts[:number])
            for number in range(chunk.num_sampled)
        ]

    def _prompt_logprobs(self, chunk: Chunk, hidden_TD: Tensor) -> list[Tensor]:
        """Return the tensors that `prompt_rows` reads. Collective: tp ranks, because computing logits is."""
        (targets_R,) = self.copies.upload([np.array(chunk.prompt_targets, np.int64)])
        params, mode = chunk.request.params, self.context.logprobs_mode
        pieces = []
        for first in range(0, len(targets_R), PROMPT_ROWS):
            some_R = targets_R[first : first + PROMPT_ROWS]
            logits_RV = self.model.logits(hidden_TD[first:][: len(some_R)])
            if self.context.tp_rank == 0:
                pieces.append(prompt_logprobs(logits_RV, some_R, params, self._operations, self.copies.upload, mode))
        return [torch.cat(column) for column in zip(*pieces, strict=True)]

    def build_inputs(
        self, chunks: Sequence[Chunk], num_tokens: tuple[int, ...], padded_to: int | None = None
    ) -> StepInputs:
        """Return the inputs of a step with these chunks, on the device. `start` describes the arguments."""
        mesh, block_size = self.context.mesh, self.model.context.block_size
        columns = tuple(zip(*chunks, strict=True)) or ((),) * len(Chunk._fields)
        by_name = dict(zip(Chunk._fields, columns, strict=True))
        tokens_of_chunk: Sequence[list[int]] = by_name["token_ids"]
        slots, starts = np.array(by_name["slot"], np.int64), np.array(by_name["start"], np.int64)
        num_sampled = np.fromiter((chunk.num_sampled for chunk in chunks), np.int64, len(chunks))
        lengths = np.fromiter(map(len, tokens_of_chunk), np.int64, len(chunks))
        ends = starts + lengths
        row_starts = np.concatenate([[0], np.cumsum(lengths)])
        total = int(row_starts[-1])
        size = total if padded_to is None else padded_to
        num_padding = size - total
        assert num_padding == 0 or len(chunks) == total < size, "only decode steps are padded"
        positions = np.arange(total) + np.repeat(starts - row_starts[:-1], lengths)

        slots_T, blocks_T, offsets_T = np.repeat(slots, lengths), positions // block_size, positions % block_size
        max_blocks = -(-int(ends.max(initial=0)) // block_size)
        num_drafts = map(len, by_name["drafts"])
        spans = tuple(map(ChunkSpan, row_starts.tolist(), lengths.tolist(), ends.tolist(), num_drafts))
        inputs = HostInputs(
            token_ids=_padded(list(itertools.chain.from_iterable(tokens_of_chunk)), np.int64, num_padding),
            positions=_padded(positions, np.int64, num_padding),
            row_starts=np.concatenate([row_starts, np.arange(total + 1, size + 1)]).astype(np.int32),
            context_lens=_padded(ends, np.int32, num_padding),
            logits_rows=np.flatnonzero(np.arange(total) >= np.repeat(row_starts[1:] - num_sampled, lengths)),
            padding=_padded(np.zeros(total, np.bool_), np.bool_, num_padding, True),
            slots=np.repeat(slots, num_sampled)
            if padded_to is None
            else _padded(slots, np.int64, num_padding, self.table.num_slots),
            chunk_slots=slots,
            state_rows=self._state_rows(chunks, num_padding),
            cache_slots=[
                _padded(table[slots_T, blocks_T].astype(np.int64) * block_size + offsets_T, np.int64, num_padding, -1)
                for table in self.table.tables
            ],
        )
        tensors, (table, *other_tables) = self.copies.upload_step(inputs, max_blocks)
        on_device: dict[str, Any] = tensors
        del on_device["chunk_slots"]
        padding, state_rows_4S = on_device.pop("padding"), on_device.pop("state_rows")
        counts = num_tokens if padded_to is None else (size,) * mesh.dp
        return StepInputs(
            **on_device,
            **table._asdict(),
            spans=spans + tuple(ChunkSpan(row, 1, 0) for row in range(total, size)),
            tp_sizes=share_sizes(size, mesh.tp),
            tokens_per_rank=tuple(share for count in counts for share in share_sizes(count, mesh.tp)),
            padding=None if padded_to is None else padding,
            own_rows=share_of(size, self.context.tp_rank, mesh.tp),
            states=StateRows(*state_rows_4S) if self.context.rules.rows else None,
            other_tables=tuple(other_tables),
        )

    def _state_rows(self, chunks: Sequence[Chunk], num_padding: int) -> Array:
        """Return the state rows [4, chunks] of all chunks, and of padding, which has no states."""
        states = [chunk.states for chunk in chunks] + [NO_STATES] * num_padding if self.context.rules.rows else []
        return np.array(states, np.int64).reshape(-1, len(NO_STATES)).T.copy()


def _padded(numbers: Any, dtype: Any, num_padding: int, value: int = 0) -> Array:
    array = np.asarray(numbers, dtype)
    return np.concatenate([array, np.full(num_padding, value, dtype)]) if num_padding else array
