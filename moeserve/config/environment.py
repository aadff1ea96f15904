"""Environment variables: those that moeserve reads, and those of the processes that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from moeserve.config.settings import EngineConfig
from moeserve.errors import SettingsError


def ray_address() -> str:
    """The Ray cluster that this process was told to use, as Ray reads it; "" if there is none."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_temporary_folder() -> str:
    """Where Ray keeps what it knows of this host's cluster, if the user has said so; "": where temporary files go."""
    return os.environ.get("RAY_TMPDIR", "")


def is_inside_ray() -> bool:
    """Whether this process belongs to a Ray cluster, or was told of one."""
    ray = sys.modules.get("ray")
    return bool(ray_address()) or (ray is not None and bool(ray.is_initialized()))


def cache_folder() -> Path:
    """Where made models are kept: $MOESERVE_CACHE, else moeserve/ in the user's cache folder."""
    chosen = os.environ.get("MOESERVE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeserve"


def set_for_libraries(wanted: Mapping[str, str]) -> None:
    """Variables by which libraries in this process are told; what the user has set stays."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def nvshmem_queue_depth(default: int) -> int:
    """NVSHMEM_QP_DEPTH, which DeepEP's low-latency kernels go by.

    Raises:
        SettingsError: it is no number.
    """
    told = os.environ.get("NVSHMEM_QP_DEPTH", str(default))
    if not told.isdecimal():
        raise SettingsError(
            f"NVSHMEM_QP_DEPTH={told!r} is not a number; unset it, or give it a number such as {default}"
        )
    return int(told)


def environment_without(name: str) -> dict[str, str]:
    """This process's environment but for one variable, for a child."""
    return {each: value for each, value in os.environ.items() if each != name}


def ray_token() -> str:
    """The secret that nodes of a Ray cluster share, found where Ray looks for it; "": there is none."""
    told = os.environ.get("RAY_AUTH_TOKEN", "")
    if is_token_refused() or told:
        return "" if is_token_refused() else told
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = f"the Ray token cannot be read: {error}; set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled"
        raise SettingsError(why) from None


def is_token_refused() -> bool:
    """Whether the user said that Ray is to ask for no token."""
    return os.environ.get("RAY_AUTH_MODE", "token") != "token"


def environment_of_cluster(address: str, token: str) -> dict[str, str]:
    """The environment for Ray's own processes, and for programs that are to use the cluster."""
    environment = dict(os.environ)
    # A node that has died is noticed within seconds. Ray's defaults take half a minute, and a minute on the other side.
    for name, value in {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    }.items():
        environment.setdefault(name, value)
    environment["RAY_ADDRESS"] = address
    # Said in any case: of Ray's own programs some look for a token where nothing is said, and others do not.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    return environment


def environment_of_rank(config: EngineConfig, num_cores: int) -> dict[str, str]:
    """The environment for a process that runs one rank."""
    environment = dict(os.environ)
    if config.num_ranks * config.num_threads > num_cores:
        # Threads that wait awake would take the cores from those that work.
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment
