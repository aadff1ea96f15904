"""Connects functions that run on ranks (see `ranks.py`) with each other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from ranks import Place
from torch.distributed import Store

from moeserve.distributed.connect import Rendezvous, connect
from moeserve.distributed.groups import Groups
from moeserve.distributed.mesh import Mesh
from moeserve.distributed.store import connect_store


def join(place: Place, tp: int = 1, *, scope: str = "", timeout_s: float = 20.0, **options: Any) -> Groups:
    """Return the groups of this rank. A rank may join several times with different scopes.

    Args:
        options: of `connect`.
    """
    mesh = Mesh(tp=tp, dp=place.num_ranks // tp)
    return connect(mesh, place.rank, Rendezvous(place.store, timeout_s, scope), **options)


def store_of(place: Place) -> Store:
    """Return the store of a run, in which a rank can wait until another one has set a key."""
    return connect_store(place.rank, place.store, 20.0)


def patient_reports() -> AbstractContextManager[Any]:
    """Let a rank that has failed wait longer for the reports of others: a busy machine runs some of them late."""
    return mock.patch("moeserve.distributed.store.WAIT_FOR_REPORTS_S", 2.0)
