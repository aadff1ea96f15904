"""Methods of `LLM` and `AsyncLLM` for programs that train the model whose outputs they use."""

from __future__ import annotations

import asyncio
import secrets

from moeserve.api.engine_thread import EngineThread
from moeserve.api.session import Session
from moeserve.controls import PAUSE_MODES, Command, ControlResult, Pause, PauseMode, Resume
from moeserve.errors import EngineError, RequestError, nearest, shown

SALT_BYTES = 32


def pause_command(mode: PauseMode, *, clear_cache: bool) -> Pause:
    """Return the command of `pause`.

    Raises:
        RequestError: there is no such mode.
    """
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode={shown(mode)} is unknown; {nearest(str(mode), PAUSE_MODES)}", parameter="mode")
    clears = clear_cache and mode != "keep"
    return Pause(mode=mode, salt=secrets.token_bytes(SALT_BYTES) if clears else b"")


class Rollouts:
    """The methods of `LLM`."""

    session: Session

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop after the steps in flight, and return when no rank computes. Requests that come later wait.

        Args:
            mode: what happens to the requests in flight. "abort": they end with the tokens they have. "wait": they
                finish first. "keep": they continue after `resume` with the keys and values they have. "retract": they
                continue too, but compute these again, which matters after an update of weights.
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

    def is_paused(self) -> bool:
        """Return True from the end of `pause` to the end of `resume`."""
        return self.session.engine.is_paused

    def _run_control(self, command: Command) -> ControlResult:
        ended = self.session.control(command)
        while not ended.done():
            self.session.advance([], waits_for_others=True)
        return ended.result()


class AsyncRollouts:
    """The methods of `AsyncLLM`, which are those of `Rollouts`."""

    session: Session
    _engine_thread: EngineThread

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """See `LLM.pause`."""
        await self._run_control(pause_command(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """See `LLM.resume`."""
        await self._run_control(Resume())

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return self.session.engine.is_paused

    pause_generation, resume_generation = pause, resume  # vLLM's names

    async def _run_control(self, command: Command) -> ControlResult:
        """Run a control. If the calling task is cancelled, the control continues."""
        if not self._engine_thread.is_running or self._engine_thread.errored:
            raise EngineError(str(self._engine_thread.dead_error))
        ended = await asyncio.to_thread(self.session.control, command)
        self._engine_thread.run()
        return await asyncio.shield(asyncio.wrap_future(ended))
