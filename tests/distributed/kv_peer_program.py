"""One of two engines on different hosts, one of which computes prompts for the other."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TypeVar

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from kv_peers import compute_prompt, engine, require_all_free, serve

from moeserve.protocol import PeerBlocks

SECONDS_TO_WAIT = 120
T = TypeVar("T")


class Served(msgspec.Struct):
    """The outputs of the engine that has received the prompts."""

    token_ids: list[list[int]]
    num_cached_tokens: list[int]


def write(path: Path, value: object) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(value))
    os.replace(partial, path)


def read(path: Path, kind: type[T]) -> T:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is missing"
        time.sleep(0.05)
    return msgspec.json.decode(path.read_bytes(), type=kind)


def main() -> None:
    role, model, layout, address, num_prompts, folder_name = sys.argv[1:]
    folder = Path(folder_name)
    settings = dict(kv_transfer_address=address, kv_transfer_key_file=str(folder / "key"), kv_cache_memory="4MiB")
    with engine(Path(model), layout, **settings) as llm:
        if role == "prefill":
            write(folder / "sources", [compute_prompt(llm) for _ in range(int(num_prompts))])
            read(folder / "served", Served)
        else:
            sources = read(folder / "sources", list[PeerBlocks])
            found = [serve(llm, kv_source=source, cache_salt=source.handle)[0] for source in sources]
            write(
                folder / "served",
                Served([each.token_ids for each in found], [each.num_cached_tokens for each in found]),
            )
        require_all_free(llm)
        assert not any(stats.num_failed_blocks for stats in llm.core.replica_stats)


if __name__ == "__main__":
    main()
