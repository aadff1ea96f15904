"""Connects functions that run on ranks (see `ranks.py`) with each other."""

from __future__ import annotations

from typing import Any

from ranks import Place

from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.groups import Groups
from moeserve.distributed.mesh import Mesh


def join(place: Place, tp: int = 1, *, scope: str = "", timeout_s: float = 20.0, **options: Any) -> Groups:
    """Return the groups of this rank. A rank may join several times with different scopes.

    Args:
        options: of `connect`.
    """
    mesh = Mesh(tp=tp, dp=place.num_ranks // tp)
    return connect(mesh, place.rank, Rendezvous(place.store, timeout_s, scope), **options)
