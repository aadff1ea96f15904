"""Environment variables: those that moeserve reads, and those that it sets for processes it starts."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.errors import SettingsError, nearest
from moeserve.private_folder import make_private_folder

if TYPE_CHECKING:
    from moeserve.config.engine_config import EngineConfig

logger = logging.getLogger(__name__)

PREFIX = "MOESERVE_"
# Variables with this prefix that are not settings of the engine. They choose folders, kernels and the file of settings.
OTHER_VARIABLES = frozenset(["cache", "isa", "kernels", "require_kernels", "config"])
# In pods beside a service named moeserve, Kubernetes sets variables such as MOESERVE_PORT_8000_TCP_ADDR.
PREFIXES_OF_KUBERNETES = ("service_", "port_")


def ray_address() -> str:
    """Return the address of a Ray cluster from RAY_ADDRESS; "" if it is not set."""
    return os.environ.get("RAY_ADDRESS", "")


def ray_temporary_folder() -> str:
    """Return the folder where Ray keeps the state of this host's cluster; "" for its default."""
    return os.environ.get("RAY_TMPDIR", "")


def openmp_threads() -> int | None:
    """Return the threads of OpenMP that OMP_NUM_THREADS sets, as Ray does for its actors; None if it sets none."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(value) if value.isdecimal() and int(value) else None


def names_traced_service() -> bool:
    """Return True if OTEL_SERVICE_NAME names the service in traces."""
    return "OTEL_SERVICE_NAME" in os.environ


def is_inside_ray() -> bool:
    """Return True if this process is connected to a Ray cluster, or RAY_ADDRESS names one."""
    ray = sys.modules.get("ray")
    return bool(ray_address()) or (ray is not None and bool(ray.is_initialized()))


def cache_folder() -> Path:
    """Return the folder of generated models and packed weights.

    The folder is $MOESERVE_CACHE if set, otherwise moeserve/ in the user's cache folder. For a user without a home
    folder, it is in the folder of temporary files.

    Raises:
        SettingsError: the user has no home folder, and the folder of temporary files cannot be used.
    """
    chosen = os.environ.get("MOESERVE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeserve"
    except RuntimeError:  # HOME is not set, and the system does not know the user, as in many containers
        try:
            folder = Path(tempfile.gettempdir()) / f"moeserve-{os.getuid()}"
        except OSError as error:
            raise SettingsError(f"there is no home folder, and {error}; set MOESERVE_CACHE to a folder") from None
        make_private_folder("MOESERVE_CACHE", folder)
        return folder


def setting_variables(settings: Iterable[str]) -> dict[str, str]:
    """Return the variables MOESERVE_<NAME>, keyed by the name in lower case. Warn of names that seem misspelt.

    Args:
        settings: names of the settings that are looked for.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    known = {name: f"{PREFIX}{name.upper()}" for name in (*settings, *OTHER_VARIABLES)}
    for name in found:
        option = name.removeprefix(PREFIX).lower()
        is_of_kubernetes = option.startswith(PREFIXES_OF_KUBERNETES)
        if (
            option not in known
            and not is_of_kubernetes
            and (hint := nearest(option, known, shown_as=known, otherwise=""))
        ):
            logger.warning("%s is no setting of this command: %s", name, hint)
    return {name.removeprefix(PREFIX).lower(): value for name, value in found.items()}


def set_for_libraries(variables: Mapping[str, str]) -> None:
    """Set variables that libraries in this process read, unless the user has set them."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def nvshmem_queue_depth(default: int) -> int:
    """Return the value of NVSHMEM_QP_DEPTH, which limits DeepEP's low-latency kernels.

    Raises:
        SettingsError: the value is not a number.
    """
    depth = os.environ.get("NVSHMEM_QP_DEPTH", str(default))
    if not depth.isdecimal():
        raise SettingsError(f"NVSHMEM_QP_DEPTH={depth!r} is not a number; unset it, or use one such as {default}")
    return int(depth)


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with other values of some variables."""
    return {**os.environ, **variables}


def environment_without(name: str) -> dict[str, str]:
    """Return this process's environment without one variable."""
    return {each: value for each, value in os.environ.items() if each != name}


def ray_token() -> str:
    """Return Ray's authentication token, from the places where Ray looks for it; "" if there is none.

    Raises:
        SettingsError: the token's file cannot be read.
    """
    if is_token_refused():
        return ""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if token:
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        why = f"the Ray token cannot be read: {error}; set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled"
        raise SettingsError(why) from None


def is_token_refused() -> bool:
    """Return True if the user switched off token authentication in Ray."""
    return os.environ.get("RAY_AUTH_MODE", "token") != "token"


def environment_of_cluster(address: str, token: str) -> dict[str, str]:
    """Return the environment of Ray's own processes, and of programs that use the cluster."""
    environment = dict(os.environ)
    # Detect a dead node within seconds. With Ray's defaults this takes 30 to 60 seconds.
    for name, value in {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    }.items():
        environment.setdefault(name, value)
    environment["RAY_ADDRESS"] = address
    # Always set these variables, because the defaults of Ray's own programs differ.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    return environment


# Variables that bind OpenMP's threads to cores. OpenMP reads them when it is loaded.
BINDINGS_OF_THREADS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def environment_of_rank(config: EngineConfig, num_cores: int) -> dict[str, str]:
    """Return the environment of a process that runs one rank."""
    environment = dict(os.environ)
    if config.parallel.num_ranks > 1 and config.compute.device == "cpu":
        for name in BINDINGS_OF_THREADS:  # they would bind the threads of all ranks to the same cores
            environment.pop(name, None)
    if config.parallel.num_sharing_ranks * config.compute.num_threads > num_cores:
        # Threads that wait actively would take cores from threads that compute.
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment
