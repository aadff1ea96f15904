"""`python -m moeserve.executor.ray`: waits for the nodes of a Ray cluster, and checks that they can run an engine."""

from __future__ import annotations

import argparse
import sys

from moeserve.errors import MoeserveError
from moeserve.executor.ray.cluster import Cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moeserve.executor.ray", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--model")
    options = parser.parse_args()
    try:
        cluster = Cluster(may_start=False)
        cluster.wait_for_nodes(options.nodes, options.timeout)
        facts = {each.node_id: each for each in cluster.check(options.model)}
        for node in cluster.nodes():
            found = facts[node.node_id]
            versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
            print(
                f"{found.name}: {node.cores} CPUs ({found.kernels or 'no C++ kernels'}), {node.gpus} GPUs, "
                f"Python {found.python}, {versions}",
                file=sys.stderr,
                flush=True,
            )
    except MoeserveError as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
