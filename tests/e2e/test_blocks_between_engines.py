"""Prompts that one engine computes and another continues: the same tokens, whatever happens to the blocks between."""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_peers import (
    BLOCK,
    NUM_BLOCKS,
    PARAMS,
    PROMPT,
    Relay,
    compute_prompt,
    ends,
    engine,
    num_failed_blocks,
    request,
    require_all_free,
    serve,
)
from rank_processes import living_ranks
from reference_models import Reference

from moeserve import SettingsError
from moeserve.protocol import PeerBlocks


def nixl_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of engines that read blocks by NIXL. Skips the test without it."""
    pytest.importorskip("nixl._api", reason="install it with: pip install -e '.[nixl]'")
    (folder / "key").write_text(secrets.token_hex(16))
    return {"kv_transfer_backend": "nixl", "kv_transfer_key_file": str(folder / "key")}


@pytest.mark.slow_but("mixtral-three-layers-tcp", "deepseek-v3-four-heads-nixl")
@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
@pytest.mark.parametrize("name", ["mixtral-three-layers", "mixtral-three-layers, fp8", "deepseek-v3-four-heads"])
@pytest.mark.parametrize("layouts", [("1", "1"), ("1", "tp 2"), ("tp 2", "1"), ("pp 2", "tp 2"), ("1", "pp 2")])
def test_another_engine_continues(
    name: str, backend: str, layouts: tuple[str, str], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    name, _, kv_cache_dtype = name.partition(", ")
    model, settings = reference_named(name).folder, nixl_settings(tmp_path) if backend == "nixl" else {}
    settings |= {"kv_cache_dtype": kv_cache_dtype or "auto"}
    with engine(model, layouts[0], **settings) as prefill, engine(model, layouts[1], **settings) as decode:
        (expected,) = serve(prefill)
        assert expected.kv_blocks is None
        source = compute_prompt(prefill)
        assert source.num_blocks == NUM_BLOCKS
        assert len(source.addresses) == prefill.core.config.parallel.ranks_per_replica
        before = decode.core.replica_stats[0].steps.num_tokens
        (found,) = serve(decode, kv_source=source)
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, NUM_BLOCKS * BLOCK)
        (stats,) = decode.core.replica_stats
        assert stats.steps.num_tokens - before == len(PROMPT) + len(found.token_ids) - 1 - NUM_BLOCKS * BLOCK
        assert (stats.num_loaded_tokens, stats.num_failed_blocks) == (NUM_BLOCKS * BLOCK, 0)
        require_all_free(prefill)
        require_all_free(decode)
        assert prefill.core.replica_stats[0].num_failed_blocks == 0  # which counts those that nobody has read


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "layouts", "num_blocks"),
    [
        ("qwen3-next", ("1", "tp 2"), 4),  # a state after 64 tokens
        ("kimi-linear", ("tp 2", "1"), 4),
        ("granite-hybrid", ("tp 2", "1"), 4),
        ("lfm2-moe", ("1", "tp 2"), 4),
        ("gpt-oss", ("1", "pp 2"), NUM_BLOCKS),
        ("deepseek-v4", ("tp 2", "1"), NUM_BLOCKS),
        ("minimax-m3", ("1", "tp 2"), NUM_BLOCKS),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_states_and_windows_go_along(
    name: str, layouts: tuple[str, str], num_blocks: int, reference_named: Callable[[str], Reference]
) -> None:
    model, settings = reference_named(name).folder, {"block_size": BLOCK}
    with engine(model, layouts[0], **settings) as prefill, engine(model, layouts[1], **settings) as decode:
        (expected,) = serve(prefill)
        source = compute_prompt(prefill)
        assert source.num_blocks == num_blocks
        found = serve(decode, kv_source=source, num_samples=2)
        assert [each.token_ids for each in found] == [expected.token_ids] * 2
        assert [each.num_cached_tokens for each in found] == [num_blocks * BLOCK] * 2
        (stats,) = decode.core.replica_stats
        assert (stats.num_loaded_tokens, stats.num_failed_blocks) == (num_blocks * BLOCK, 0)
        assert stats.num_loaded_states == int(num_blocks < NUM_BLOCKS)
        require_all_free(prefill)
        require_all_free(decode)
        assert prefill.core.replica_stats[0].num_failed_blocks == 0


def test_blocks_that_are_cached_are_not_read_again(reference_named: Callable[[str], Reference]) -> None:
    model = reference_named("mixtral").folder
    with engine(model) as prefill, engine(model) as decode:
        (expected,) = serve(decode, prompt_token_ids=PROMPT[: 2 * BLOCK + 1])  # of which two blocks stay cached
        first, second = compute_prompt(prefill), compute_prompt(prefill)
        (expected,) = serve(prefill)
        found = serve(decode, kv_source=first, num_samples=3)
        assert [each.token_ids for each in found] == [expected.token_ids] * 3
        assert decode.core.replica_stats[0].num_loaded_tokens == 3 * BLOCK
        serve(decode, kv_source=second)
        assert decode.core.replica_stats[0].num_loaded_tokens == 3 * BLOCK
        require_all_free(prefill)
        require_all_free(decode)
        assert prefill.core.replica_stats[0].num_failed_blocks == 0


def test_blocks_that_nobody_reads_are_set_free(reference_named: Callable[[str], Reference]) -> None:
    model = reference_named("mixtral").folder
    with engine(model, kv_transfer_timeout=1) as prefill, engine(model) as decode:
        source = compute_prompt(prefill)
        require_all_free(prefill)
        (expected,) = serve(prefill)
        (found,) = serve(decode, kv_source=source)  # at once: the sender remembers that they are gone
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
        assert decode.core.replica_stats[0].num_failed_blocks == NUM_BLOCKS
        unknown = PeerBlocks(handle="unknown", addresses=source.addresses, num_blocks=NUM_BLOCKS)
        (found,) = serve(prefill, kv_source=unknown, cache_salt="other")
        assert found.token_ids == expected.token_ids
        require_all_free(decode)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_connection_that_is_cut(reference_named: Callable[[str], Reference]) -> None:
    model = reference_named("mixtral").folder
    with engine(model, kv_transfer_timeout=2) as prefill, engine(model, kv_transfer_timeout=2) as decode:
        (expected,) = serve(prefill)
        serve(decode, kv_source=compute_prompt(prefill), cache_salt="whole")
        files = open_files()
        for num_bytes in (0, 16, 40, 100, 300, 1000, 10_000, 15_000):
            failed_before = num_failed_blocks(decode)
            with Relay(compute_prompt(prefill), num_bytes, cuts=True) as relay:
                (found,) = serve(decode, kv_source=relay.source, cache_salt=str(num_bytes))
            assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
            assert num_failed_blocks(decode) - failed_before == NUM_BLOCKS
        require_all_free(decode)
        require_all_free(prefill)
        deadline = time.monotonic() + 200
        while open_files() > files:  # a sender may notice the end of a connection a little later
            assert time.monotonic() < deadline, f"{open_files()} files are open; {files} were before"
            time.sleep(0.05)
    deadline = time.monotonic() + 200
    while left := [thread for thread in threading.enumerate() if thread.name.startswith("kv ")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_prompt_with_other_tokens(reference_named: Callable[[str], Reference]) -> None:
    """Blocks count for the tokens that they were computed for, and for no others."""
    model, other = reference_named("mixtral").folder, PROMPT[::-1]
    with engine(model) as prefill, engine(model) as decode:
        (expected,) = serve(prefill, prompt_token_ids=other)
        source = compute_prompt(prefill)
        (found,) = serve(decode, prompt_token_ids=other, kv_source=source)
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
        (found,) = serve(decode, prompt_token_ids=other)
        assert found.token_ids == expected.token_ids
        (found,) = serve(decode, kv_source=source)
        assert found.num_cached_tokens == NUM_BLOCKS * BLOCK
        require_all_free(prefill)


def test_blocks_are_for_one_engine(reference_named: Callable[[str], Reference]) -> None:
    model = reference_named("mixtral").folder
    with engine(model) as prefill, engine(model) as first, engine(model) as second:
        (expected,) = serve(prefill)
        source = compute_prompt(prefill)
        for decode, num_cached in ((first, NUM_BLOCKS * BLOCK), (second, 0)):
            (found,) = serve(decode, kv_source=source)
            assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, num_cached)


def test_a_copy_of_the_model(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    """On two machines, the files have other times."""
    model = reference_named("mixtral").folder
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    with engine(model) as prefill, engine(tmp_path / "copy") as decode:
        (found,) = serve(decode, kv_source=compute_prompt(prefill))
        assert found.num_cached_tokens == NUM_BLOCKS * BLOCK


def test_requests_that_do_not_read_their_blocks(reference_named: Callable[[str], Reference]) -> None:
    """Blocks are set free at once if a request ends before it is admitted, or needs all rows of its prompt."""
    model = reference_named("mixtral").folder
    with engine(model) as prefill, engine(model) as decode:
        params = msgspec.structs.replace(PARAMS, prompt_logprobs=1)
        serve(decode, kv_source=compute_prompt(prefill), params=params)
        require_all_free(prefill)
        decode.core.add(request(request_id="aborted", kv_source=compute_prompt(prefill)))
        decode.core.abort("aborted")
        ends(decode)
        require_all_free(prefill)
        assert prefill.core.replica_stats[0].num_failed_blocks == 0


@pytest.mark.parametrize(
    ("backend", "num_bytes"), [("tcp", 70), ("tcp", 500), ("tcp", 15_000), ("nixl", 70), ("nixl", 500)]
)
def test_an_abort_ends_the_transfer(
    backend: str, num_bytes: int, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """While the sender describes its cache, while it answers, and while it sends blocks. NIXL is beside the relay."""
    settings = dict(kv_transfer_timeout=600) | (nixl_settings(tmp_path) if backend == "nixl" else {})
    model = reference_named("mixtral").folder
    with (
        engine(model, **settings) as prefill,
        engine(model, **settings) as decode,
        Relay(compute_prompt(prefill), num_bytes) as relay,
    ):
        decode.core.add(request(request_id="aborted", kv_source=relay.source))
        threading.Thread(target=lambda: (relay.wait_until_stalled(), decode.core.wake())).start()
        assert decode.core.step() == []  # it waits for the transfer
        assert decode.core.num_free_blocks == [decode.core.num_blocks - NUM_BLOCKS]
        decode.core.abort("aborted")
        (update,) = ends(decode)
        assert update.finish_reason == "abort"
        require_all_free(decode)
        require_all_free(prefill)
        assert (num_failed_blocks(prefill), num_failed_blocks(decode)) == (0, 0)


@pytest.mark.ranks
@pytest.mark.parametrize("sender_dies", [False, True])
def test_blocks_are_held_while_nixl_writes_into_them(
    sender_dies: bool,
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender is stopped while its memory is read, so the request can be aborted in the middle of that."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # over shared memory, the sender would have no part in it
    settings, model = nixl_settings(tmp_path), reference_named("mixtral").folder
    from moeserve.kv.rank.nixl import NixlMemory

    with engine(model, executor="mp", **settings) as prefill, engine(model, **settings) as decode:
        (rank,) = living_ranks()
        read = NixlMemory.read

        def read_slowly(*arguments: Any) -> None:
            rank.suspend()
            decode.core.wake()
            read(*arguments)

        monkeypatch.setattr(NixlMemory, "read", read_slowly)
        decode.core.add(request(request_id="aborted", kv_source=compute_prompt(prefill)))
        assert decode.core.step() == []  # it waits for the transfer
        decode.core.abort("aborted")
        (update,) = ends(decode)
        assert update.finish_reason == "abort"
        time.sleep(0.5)  # a cancelled transfer over TCP would have ended
        assert decode.core.num_free_blocks == [decode.core.num_blocks - NUM_BLOCKS]
        if sender_dies:
            rank.kill()
        rank.resume()
        require_all_free(decode)
        if not sender_dies:
            require_all_free(prefill)


@pytest.mark.ranks
def test_a_rank_of_the_receiver_dies(reference_named: Callable[[str], Reference]) -> None:
    """The engine restarts. Its request was about to receive blocks, which nobody needs any more, and is computed."""
    model = reference_named("mixtral").folder
    with (
        engine(model, kv_transfer_timeout=600) as prefill,
        engine(model, "tp 2", on_failure="restart") as decode,
        Relay(compute_prompt(prefill), 1000, num_limited=2) as relay,
    ):
        (expected,) = serve(prefill)
        decode.core.add(request(kv_source=relay.source))
        threading.Thread(target=lambda: (relay.wait_until_stalled(), living_ranks()[0].kill())).start()
        (found,) = ends(decode)
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
        require_all_free(prefill)
        assert num_failed_blocks(prefill) == 0
        (found,) = serve(decode, kv_source=compute_prompt(prefill), cache_salt="other")
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, NUM_BLOCKS * BLOCK)
        require_all_free(prefill)
        require_all_free(decode)


@pytest.mark.ranks
def test_a_rank_of_the_sender_dies(reference_named: Callable[[str], Reference]) -> None:
    """It computes a prompt, and keeps another one that is being received."""
    model = reference_named("mixtral").folder
    settings = dict(executor="mp", on_failure="restart")
    with engine(model, "1", **settings) as prefill, engine(model, kv_transfer_timeout=600) as decode:
        (expected,) = serve(decode, cache_salt="other")
        with Relay(compute_prompt(prefill), 1000) as relay:
            decode.core.add(request(kv_source=relay.source))
            threading.Thread(target=lambda: (relay.wait_until_stalled(), decode.core.wake())).start()
            assert decode.core.step() == []
            sender = living_ranks()[0]
            sender.suspend()  # or it might have computed the prompt before it is killed
            prefill.core.add(request(kv_handle="computed again"))
            sender.kill()
        (found,) = ends(decode)
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
        (kept,) = ends(prefill)
        assert kept.token_ids == expected.token_ids
        (found,) = serve(decode, kv_source=kept.kv_blocks, cache_salt="third")
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, NUM_BLOCKS * BLOCK)
        require_all_free(prefill)
        require_all_free(decode)


@pytest.mark.ranks
@pytest.mark.parametrize("layouts", [("dp 2", "dp 2"), ("1", "tp 2 dp 2"), ("tp 2 dp 2", "1")])
def test_several_replicas(layouts: tuple[str, str], reference_named: Callable[[str], Reference]) -> None:
    model, num_prompts = reference_named("mixtral-three-layers").folder, 6
    params = msgspec.structs.replace(PARAMS, max_tokens=1)
    with engine(model, layouts[0]) as prefill, engine(model, layouts[1]) as decode:
        (expected,) = serve(decode)
        for number in range(num_prompts):
            prefill.core.add(request(params=params, kv_handle=str(number), cache_salt=str(number)))
        sources = [update.kv_blocks for update in ends(prefill)]
        for number, source in enumerate(sources):
            decode.core.add(request(kv_source=source, cache_salt=str(number)))
        found = ends(decode)
        assert [each.token_ids for each in found] == [expected.token_ids] * num_prompts
        assert [each.num_cached_tokens for each in found] == [NUM_BLOCKS * BLOCK] * num_prompts
        assert len({source.addresses[0] for source in sources if source}) == len(prefill.core.replica_stats)
        assert all(stats.num_loaded_tokens for stats in decode.core.replica_stats)
        for llm in (prefill, decode):
            require_all_free(llm)
            assert num_failed_blocks(llm) == 0
        # Outputs of one prompt on two replicas: one of these receives the blocks.
        found = serve(decode, num_samples=4, kv_source=compute_prompt(prefill), cache_salt="outputs")
        assert [each.token_ids for each in found] == [expected.token_ids] * 4
        for llm in (prefill, decode):
            require_all_free(llm)
        assert num_failed_blocks(prefill) == 0


def test_at_most_half_of_the_cache_is_kept(reference_named: Callable[[str], Reference]) -> None:
    model = reference_named("mixtral").folder
    with engine(model, kv_transfer_timeout=600) as prefill:
        most = prefill.core.num_blocks // 2 // NUM_BLOCKS
        params = msgspec.structs.replace(PARAMS, max_tokens=1)
        kept = [serve(prefill, params=params, kv_handle=str(number))[0].kv_blocks for number in range(most + 1)]
        assert [blocks is None for blocks in kept] == [False] * most + [True]
        serve(prefill)


@pytest.mark.parametrize(
    "other",
    [{"block_size": 32}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}, {"kv_transfer_key_file": "wrong key"}],
)
def test_engines_that_do_not_match(
    other: dict[str, Any],
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = reference_named("mixtral").folder
    if "kv_transfer_key_file" in other:
        other = {"kv_transfer_key_file": str(tmp_path / "key")}
        (tmp_path / "key").write_text(secrets.token_hex(16))
    with engine(model, kv_transfer_timeout=600) as prefill, engine(model, **other) as decode:
        (expected,) = serve(decode)
        (found,) = serve(decode, kv_source=compute_prompt(prefill), cache_salt="other")
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, 0)
        require_all_free(decode)
    assert "kv_transfer_key_file" in other or f"{next(iter(other))} " in caplog.text


def test_a_key_that_both_know(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    model = reference_named("mixtral").folder
    (tmp_path / "key").write_text(secrets.token_hex(16))
    settings = dict(kv_transfer_key_file=str(tmp_path / "key"))
    with engine(model, **settings) as prefill, engine(model, **settings) as decode:
        (found,) = serve(decode, kv_source=compute_prompt(prefill))
        assert found.num_cached_tokens == NUM_BLOCKS * BLOCK


def test_strangers(reference_named: Callable[[str], Reference]) -> None:
    """Whatever connects and sends junk is disconnected, and harms nobody."""
    model, chance = reference_named("mixtral").folder, random.Random(0)
    with engine(model) as prefill, engine(model) as decode:
        (expected,) = serve(prefill)
        source = compute_prompt(prefill)
        host, _, port = source.addresses[0].partition(":")
        for num_bytes in (0, 1, 31, 32, 64, 100, 5000):
            with socket.create_connection((host, int(port))) as stranger:
                received = b""
                with contextlib.suppress(OSError):  # it is disconnected while it sends
                    stranger.sendall(chance.randbytes(num_bytes))
                    stranger.shutdown(socket.SHUT_WR)
                    while data := stranger.recv(4096):
                        received += data
                assert len(received) <= 32  # a random challenge
        (found,) = serve(decode, kv_source=source)
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, NUM_BLOCKS * BLOCK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_transfer_address": "127.0.0.1:x"}, "not a port"),
        ({"kv_transfer_address": "0.0.0.0"}, "no address to which others can connect"),
        ({"kv_transfer_address": "192.0.2.1"}, "needs a key"),
        ({"kv_transfer_address": "127.0.0.1:65536"}, "not a port"),
        ({"kv_transfer_address": "127.0.0.1", "kv_transfer_backend": "nixl"}, "needs a key"),
        ({"kv_transfer_address": "nowhere0"}, "kv_transfer_address='nowhere0'.*no such interface"),
        ({"kv_transfer_address": "192.0.2.1", "kv_transfer_key_file": "key"}, "cannot listen"),
        ({"kv_transfer_address": "127.0.0.1", "kv_transfer_key_file": "missing"}, "cannot be read"),
        ({"kv_transfer_address": "127.0.0.1", "kv_transfer_key_file": "short"}, "has 5 characters"),
        ({"kv_transfer_address": None, "kv_transfer_key_file": "key"}, "kv_transfer_address"),
        ({"kv_transfer_address": "127.0.0.1", "enable_prefix_caching": False}, "prefix cache"),
    ],
)
def test_settings_that_cannot_work(
    settings: dict[str, Any], message: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(secrets.token_hex(16))
    (tmp_path / "short").write_text("short")
    if "kv_transfer_key_file" in settings:
        settings = {**settings, "kv_transfer_key_file": str(tmp_path / settings["kv_transfer_key_file"])}
    with pytest.raises(SettingsError, match=message), engine(reference_named("mixtral").folder, **settings):
        pass
