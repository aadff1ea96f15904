"""The settings of several hosts, as `HostOptions`."""

from __future__ import annotations

from moeserve.config.settings import ParallelSettings
from moeserve.errors import SettingsError, shown
from moeserve.executor.hosts.connection import HostOptions
from moeserve.processes.proof import key_in_file


def host_options(parallel: ParallelSettings) -> HostOptions | None:
    """Return the hosts of an engine; None if this is the only host, or Ray has the other hosts.

    Raises:
        SettingsError: a setting is missing, or contradicts another setting.
    """
    number, num_hosts = parallel.node_rank, parallel.nnodes
    if number >= num_hosts:
        raise SettingsError(
            f"node_rank={number} needs a larger nnodes than {num_hosts}: hosts are numbered from 0 to nnodes - 1"
        )
    if num_hosts == 1:
        return None
    if parallel.master_addr is None:
        raise SettingsError(
            f"nnodes={num_hosts} needs master_addr, the same on all hosts: an address of the host with node_rank=0"
        )
    if parallel.cluster_key_file is None:
        raise SettingsError(
            f"nnodes={num_hosts} needs cluster_key_file, on each host a file with the same key, for example of "
            "`openssl rand -hex 32`"
        )
    host, separator, port = parallel.master_addr.partition(":")
    if not host or (separator and not port.isdecimal()) or (separator and not 1 <= int(port) < 2**16):
        raise SettingsError(
            f"master_addr={shown(parallel.master_addr)} is not HOST or HOST:PORT, such as 10.0.0.1:29501"
        )
    return HostOptions(
        num_hosts=num_hosts,
        number=number,
        host=host,
        port=int(port) if separator else parallel.master_port,
        key=key_in_file("cluster_key_file", parallel.cluster_key_file),
    )
