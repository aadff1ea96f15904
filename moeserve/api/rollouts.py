"""Methods of `LLM` and `AsyncLLM` for programs that train the model whose outputs they use."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from moeserve.api.engine_thread import EngineThread
from moeserve.api.session import Session
from moeserve.config.engine_config import EngineConfig
from moeserve.controls import (
    INITIAL_VERSION,
    MEMORY_TAGS,
    PAUSE_MODES,
    CancelUpdate,
    Command,
    EndRequests,
    EndSleep,
    FinishUpdate,
    LoadTensors,
    MemoryTag,
    Outcome,
    Pause,
    PauseMode,
    ReadChecksums,
    ReceiveTensors,
    Resume,
    Sleep,
    StartUpdate,
)
from moeserve.errors import EngineError, MoeserveError, RequestError, WeightUpdateError, nearest, shown

SALT_BYTES = 32
MAX_SIZE = 2**31  # of one dimension of a tensor
_TRAINER = re.compile(r"[^\s:]+:\d{1,5} [0-9a-f]{64}")  # address and key
TRANSPORTS = ("disk", "shm", "tcp")


def pause_command(mode: PauseMode, *, clear_cache: bool) -> Pause:
    """Return the command of `pause`.

    Raises:
        RequestError: there is no such mode.
    """
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode={shown(mode)} is unknown; {nearest(str(mode), PAUSE_MODES)}", parameter="mode")
    clears = clear_cache and mode != "keep"
    return Pause(mode=mode, salt=_new_salt() if clears else b"")


def sleep_commands(config: EngineConfig, level: int, mode: PauseMode) -> tuple[Pause, Sleep]:
    """Return the commands of `sleep`, in order.

    Raises:
        RequestError: there is no such level, requests would lose the keys and values that they continue with, or the
            engine cannot sleep.
    """
    if not config.weights.rl:
        raise RequestError("this engine cannot sleep; start it with rl=True (--rl)")
    if config.store.kv_folder or config.store.kv_host_memory:
        raise RequestError("sleep frees blocks that kv_host_memory and kv_folder copy; leave these settings out")
    if level not in (1, 2) or isinstance(level, bool):
        raise RequestError(f"level={shown(level)} must be 1 or 2", parameter="level")
    if mode == "keep":
        raise RequestError(
            "mode='keep' needs the KV cache, whose memory is freed; use 'retract', 'wait' or 'abort'", parameter="mode"
        )
    return pause_command(mode, clear_cache=True), Sleep(2 if level == 2 else 1)


def wake_command(tags: Sequence[MemoryTag] | None) -> EndSleep:
    """Return the command of `wake_up`.

    Raises:
        RequestError: there is no such tag.
    """
    for tag in tags or ():
        if tag not in MEMORY_TAGS:
            raise RequestError(f"tag {shown(tag)} is unknown; {nearest(str(tag), MEMORY_TAGS)}", parameter="tags")
    return EndSleep(list(MEMORY_TAGS if tags is None else tags))


def check_transport(request: Any) -> None:
    """Raise RequestError unless a request of `init_weight_transfer_engine` names a transport."""
    info = _field(request, "init_info")
    transport = info.get("transport")
    unknown = sorted(info.keys() - {"transport"})
    if transport not in TRANSPORTS or unknown:
        raise RequestError(
            f"init_info={shown(info)}: transport must be one of {', '.join(TRANSPORTS)}, and there are no other fields",
            parameter="init_info",
        )


def start_command(shapes: Mapping[str, Sequence[int]] | None, *, only_drafts: bool = False) -> StartUpdate:
    """Return the command of `start_weight_update`, or of `start_draft_weight_update`.

    Raises:
        RequestError: a size is larger than `MAX_SIZE`.
    """
    given = {name: [int(size) for size in shape] for name, shape in (shapes or {}).items()}
    for name, shape in given.items():
        if any(size > MAX_SIZE for size in shape):
            raise RequestError(f"shapes[{shown(name)}]: sizes must be at most {MAX_SIZE}", parameter="shapes")
    return StartUpdate(shapes=given, only_drafts=only_drafts)


def load_command(request: Any) -> LoadTensors | ReceiveTensors:
    """Return the command of `update_weights`.

    Raises:
        RequestError: the request names neither a path nor a trainer, or has other fields.
    """
    info = _field(request, "update_info")
    are_texts = all(isinstance(value, str) and value for value in info.values())
    if are_texts and info.keys() == {"path"}:
        return LoadTensors(info["path"])
    if are_texts and info.keys() == {"address", "key"} and _TRAINER.fullmatch(f"{info['address']} {info['key']}"):
        return ReceiveTensors(address=info["address"], key=info["key"])
    raise RequestError(
        f"update_info={shown(info)}: it must have either a path, of a folder with safetensors files or of a file in "
        "shared memory that moeserve.rl has written, or an address (host and port) and a key (64 hexadecimal digits) "
        "of a trainer",
        parameter="update_info",
    )


def finish_command(version: str | None, *, is_checkpoint: bool = False) -> FinishUpdate:
    """Return the command of `finish_weight_update`; if no version is given, the engine chooses one."""
    return FinishUpdate(version=version or "", salt=_new_salt(), is_checkpoint=is_checkpoint)


def whole_update(path: str | None, version: str | None, *, is_checkpoint: bool = False) -> tuple[Command, ...]:
    """Return the commands of `update_weights_from_folder`, or of `reload_weights`, in order.

    Raises:
        RequestError: the path is empty or no text.
    """
    load = () if path is None else (load_command({"update_info": {"path": path}}),)
    return start_command(None), *load, finish_command(version, is_checkpoint=is_checkpoint)


def reload_commands(config: EngineConfig) -> tuple[Command, ...]:
    """Return the commands of `reload_weights`, in order."""
    return whole_update(config.weights.model_path, INITIAL_VERSION, is_checkpoint=True)


def require_success(outcome: Outcome | None) -> Outcome:
    """Return the outcome of a command that has succeeded.

    Raises:
        WeightUpdateError: the ranks have reported an error.
    """
    assert outcome is not None
    if outcome.error:
        raise WeightUpdateError(outcome.error)
    return outcome


def _new_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)


def _field(request: Any, name: str) -> Mapping[str, Any]:
    """Return a field of a request of vLLM, which is an object or a dict."""
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, Mapping):
        raise RequestError(f"{shown(request)} must have {name}, an object", parameter=name)
    return info


class Rollouts:
    """The methods of `LLM` that pause and sleep, and that update the weights."""

    session: Session

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop after the steps in flight, and return when no rank computes. Requests that come later wait.

        Args:
            mode: what happens to the requests in flight. "abort": they end with the tokens they have. "wait": they
                finish first. "keep": they continue after `resume` with the keys and values they have. "retract": they
                continue too, but compute keys and values again, which matters after an update of weights.
            clear_cache: later requests find no prefix that was cached before. No effect with "keep".

        Raises:
            RequestError: there is no such mode.
            EngineError: the engine was shut down, or has failed.
        """
        self._run_control(pause_command(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """Run steps again after `pause`. Without a pause, nothing happens.

        Raises:
            EngineError: the engine was shut down, or has failed.
        """
        self._run_control(Resume())

    def end_requests(self) -> None:
        """End the requests in flight with the tokens they have. A pause stays as it is.

        Raises:
            EngineError: the engine was shut down, or has failed.
        """
        self._run_control(EndRequests())

    def is_paused(self) -> bool:
        """Return True from the end of `pause` to the end of `resume`."""
        return self.session.engine.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and return memory to the system until `wake_up`. Requests that come later wait.

        Args:
            level: 1: the KV cache and buffers; 2: also the weights, which are stale until a whole update or
                `reload_weights`.
            mode: as for `pause`, without "keep".

        Raises:
            RequestError: there is no such level or mode, the engine was not started with `rl`, or it has a store behind
                its KV cache.
            EngineError: the engine was shut down, or has failed.
        """
        for command in sleep_commands(self.session.engine.config, level, mode):
            self._run_control(command)

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Use memory again after `sleep`, and resume once all memory is in use. Without a sleep, nothing happens.

        Args:
            tags: "weights", "kv_cache" or both; None: both. After level 2, update the weights once "weights" is awake.

        Raises:
            RequestError: there is no such tag.
            EngineError: the engine was shut down, or has failed.
        """
        command = wake_command(tags)
        if self.is_sleeping():
            self._run_control(command)
            if not self.is_sleeping():
                self._run_control(Resume())

    def is_sleeping(self) -> bool:
        """Return True from the end of `sleep` until all memory is awake."""
        return bool(self.session.engine.weights.asleep)

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Check that updates can use a transport.

        Args:
            request: {"init_info": {"transport": "disk", "shm" or "tcp"}}.

        Raises:
            RequestError: there is no such transport.
        """
        check_transport(request)

    def start_weight_update(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Begin an update of the weights. No step runs until `finish_weight_update`; requests wait.

        An update that had begun before is cancelled.

        Args:
            shapes: shapes of all tensors, by name; needed if the trainer stacks experts in another way than the
                checkpoint.

        Raises:
            RequestError: a size is larger than 2**31.
            WeightUpdateError: weights cannot be updated now, or names or shapes do not fit the model.
            EngineError: the engine was shut down, or has failed.
        """
        self._run_weights(start_command(shapes))

    def start_draft_weight_update(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Begin an update of only the modules for multi-token prediction, which a trainer may send separately.

        Other tensors that come are ignored, so that all tensors of a model may be sent once more.

        Args:
            shapes: as for `start_weight_update`.

        Raises:
            WeightUpdateError: there are no such modules; or as for `start_weight_update`.
            RequestError, EngineError: as for `start_weight_update`.
        """
        self._run_weights(start_command(shapes, only_drafts=True))

    def update_weights(self, request: Any) -> None:
        """Copy some tensors into the weights. An update has any number of such calls.

        Args:
            request: {"update_info": {"path": PATH}}, where PATH is a folder with safetensors files, or a file in shared
                memory that `moeserve.rl.WeightSender` has written; or {"update_info": {"address": "HOST:PORT", "key":
                KEY}}, where a trainer sends the tensors over TCP.

        Raises:
            RequestError: the request has another form.
            WeightUpdateError: names, shapes or dtypes do not fit, and nothing was copied; or the copy has failed. Then
                the weights are stale: no request is served until a whole update.
            EngineError: the engine was shut down, or has failed.
        """
        self._run_weights(load_command(request))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update. Outputs name the version of the weights in `weight_versions`.

        Args:
            weight_version: name of the new version; None: a new name, or the present one after
                `start_draft_weight_update`.

        Raises:
            WeightUpdateError: some weights are only partly filled, or an update of modules for drafts has none of their
                tensors. The update stays open for the missing tensors, which the message names.
            EngineError: the engine was shut down, or has failed.
        """
        self._run_weights(finish_command(weight_version))

    def update_weights_from_folder(self, path: str | None, weight_version: str | None = None) -> None:
        """Begin an update, copy the tensors of a folder, and end the update. An error cancels it.

        Args:
            path: a folder with safetensors files; None: only give the weights another version.
            weight_version: name of the new version; None: a new name.

        Raises:
            RequestError: the path is empty or no text.
            WeightUpdateError: as for the three calls. If a tensor had been copied, the weights are stale now; else the
                engine serves the old weights.
            EngineError: the engine was shut down, or has failed.
        """
        self._run_update(whole_update(path, weight_version))

    def reload_weights(self) -> None:
        """Load the checkpoint's weights again. This works even if an update has left stale weights.

        Raises:
            WeightUpdateError, EngineError: as for `update_weights`.
        """
        self._run_update(reload_commands(self.session.engine.config))

    def get_weight_version(self) -> str:
        """Return the version of the weights after the last update; "default" before the first update."""
        return self.session.engine.weights.version

    def weight_checksums(self) -> dict[str, str]:
        """Return a SHA-256 checksum of each weight as the kernels read it, by rank and name.

        Raises:
            WeightUpdateError, EngineError: as for `start_weight_update`.
        """
        return self._run_weights(ReadChecksums()).checksums

    def _run_update(self, commands: Sequence[Command]) -> None:
        """Run the commands of an update. An error, or Ctrl-C, cancels the update."""
        try:
            for command in commands:
                self._run_weights(command)
        except (WeightUpdateError, KeyboardInterrupt):
            with contextlib.suppress(MoeserveError):  # the first error says more
                self._run_control(CancelUpdate())
            raise

    def _run_weights(self, command: Command) -> Outcome:
        return require_success(self._run_control(command))

    def _run_control(self, command: Command) -> Outcome | None:
        ended = self.session.control(command)
        self.session.run_until(ended)
        return ended.result().outcome


class AsyncRollouts:
    """The same methods as `Rollouts`, for `AsyncLLM`."""

    session: Session
    _engine_thread: EngineThread

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """See `LLM.pause`."""
        await self._run_control(pause_command(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """See `LLM.resume`."""
        await self._run_control(Resume())

    async def end_requests(self) -> None:
        """See `LLM.end_requests`."""
        await self._run_control(EndRequests())

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return self.session.engine.is_paused

    pause_generation, resume_generation = pause, resume  # vLLM's names

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See `LLM.sleep`."""
        for command in sleep_commands(self.session.engine.config, level, mode):
            await self._run_control(command)

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """See `LLM.wake_up`."""
        command = wake_command(tags)
        if await self.is_sleeping():
            await self._run_control(command)
            if not await self.is_sleeping():
                await self._run_control(Resume())

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return bool(self.session.engine.weights.asleep)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See `LLM.init_weight_transfer_engine`."""
        check_transport(request)

    async def start_weight_update(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """See `LLM.start_weight_update`."""
        await self._run_weights(start_command(shapes))

    async def start_draft_weight_update(self, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """See `LLM.start_draft_weight_update`."""
        await self._run_weights(start_command(shapes, only_drafts=True))

    async def update_weights(self, request: Any) -> None:
        """See `LLM.update_weights`."""
        await self._run_weights(load_command(request))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `LLM.finish_weight_update`."""
        await self._run_weights(finish_command(weight_version))

    async def update_weights_from_folder(self, path: str | None, weight_version: str | None = None) -> None:
        """See `LLM.update_weights_from_folder`. If the calling task is cancelled, the update continues."""
        await asyncio.shield(self._run_update(whole_update(path, weight_version)))

    async def reload_weights(self) -> None:
        """See `LLM.reload_weights`. If the calling task is cancelled, the update continues."""
        await asyncio.shield(self._run_update(reload_commands(self.session.engine.config)))

    async def get_weight_version(self) -> str:
        """See `LLM.get_weight_version`."""
        return self.session.engine.weights.version

    async def weight_checksums(self) -> dict[str, str]:
        """See `LLM.weight_checksums`."""
        return (await self._run_weights(ReadChecksums())).checksums

    async def _run_update(self, commands: Sequence[Command]) -> None:
        """Run the commands of an update. An error, or the end of the event loop, cancels the update."""
        try:
            for command in commands:
                await self._run_weights(command)
        except (WeightUpdateError, asyncio.CancelledError):
            with contextlib.suppress(MoeserveError):  # the first error says more
                await self._run_control(CancelUpdate())
            raise

    async def _run_weights(self, command: Command) -> Outcome:
        return require_success(await self._run_control(command))

    async def _run_control(self, command: Command) -> Outcome | None:
        """Run a control. If the calling task is cancelled, the control continues."""
        if not self._engine_thread.is_running or self._engine_thread.errored:
            raise EngineError(str(self._engine_thread.dead_error))
        ended = await asyncio.to_thread(self.session.control, command)
        self._engine_thread.run()
        return (await asyncio.shield(asyncio.wrap_future(ended))).outcome
