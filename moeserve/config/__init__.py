"""Settings of the engine, their validation and resolution."""

from moeserve.config.settings import ProfilerConfig

__all__ = ["ProfilerConfig"]
