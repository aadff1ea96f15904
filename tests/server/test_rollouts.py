"""The routes for trainers: only with `rl` and an administrator's key; names and payloads of vLLM."""

from __future__ import annotations

import base64
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from running_server import MODEL, RunningServer, running
from safetensors.torch import load_file, save_file
from server_process import serving
from tiny_model import save_tiny_model
from torch import Tensor

from moeserve import AsyncLLM, CheckpointError, SettingsError
from moeserve.rl import WeightSender
from moeserve.server.run import serve
from moeserve.server.settings import ServerSettings

ADMIN = {"Authorization": "Bearer admin"}
ROUTES = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused")]
ROUTES += [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
WEIGHT_ROUTES = [
    *[("POST", f"/{name}") for name in ("start_weight_update", "finish_weight_update", "reload_weights")],
    ("POST", "/start_draft_weight_update"),
    *[("POST", f"/{name}") for name in ("init_weight_transfer_engine", "update_weights", "weight_checker")],
    *[("GET", f"/{name}") for name in ("weight_info", "get_world_size")],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=512, rl=True, show_progress=False)
    with running(llm, api_key=["user"], admin_key=["admin"]) as server:
        yield server
    llm.shutdown()


@pytest.mark.parametrize(("method", "path"), WEIGHT_ROUTES)
def test_weight_routes_need_the_setting_and_the_key(
    server: RunningServer, tiny_server: RunningServer, method: str, path: str
) -> None:
    with server.http() as http:
        assert http.request(method, path).status_code == 401
        assert http.request(method, path, headers={"Authorization": "Bearer user"}).status_code == 403
        assert http.get("/weight_info", headers=ADMIN).json() == {"weight_version": "default"}
    with tiny_server.http() as http:
        assert http.request(method, path).status_code == 404


OF_PAGES = [{"Origin": "http://localhost:3000"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]


def test_without_keys_programs_reach_the_routes_and_web_pages_do_not(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, rl=True, show_progress=False)
    routes = [*WEIGHT_ROUTES, *ROUTES, *SGLANG_ROUTES, ("POST", "/reset_prefix_cache"), ("POST", "/abort_requests")]
    with running(llm, rl_without_key=True, cors_origin=["*"]) as server, server.http() as http:
        for method, path in routes:
            for headers in OF_PAGES:
                answer = http.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "web_page_refused"), path
        assert http.get("/weight_info").json() == {"weight_version": "default"}
        assert http.get("/weight_info", headers={"Sec-Fetch-Site": "none"}).status_code == 200  # typed by a user
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert http.get("/health", headers=OF_PAGES[0]).status_code == 200
    llm.shutdown()


@pytest.mark.parametrize("name", ["api_key", "api_key_file", "admin_key"])
def test_keys_exclude_routes_without_keys(tmp_path: Path, name: str) -> None:
    (tmp_path / "keys").write_text("KEY")
    value: Any = str(tmp_path / "keys") if name == "api_key_file" else ["KEY"]
    with pytest.raises(SettingsError, match=rf"rl_without_key.*{name}.*leave {name} out"):
        serve(ServerSettings(port=0, rl_without_key=True, **{name: value}), {"model": "/nowhere", "rl": True})


def test_routes_without_keys_need_rl() -> None:
    with pytest.raises(SettingsError, match=r"rl_without_key.*set rl=True"):
        serve(ServerSettings(port=0, rl_without_key=True), {"model": "/nowhere"})


@pytest.mark.parametrize("is_open", [True, False])
def test_the_log_says_that_the_routes_are_open(caplog: pytest.LogCaptureFixture, is_open: bool) -> None:
    with pytest.raises(CheckpointError, match="/nowhere"):
        serve(ServerSettings(port=0, rl_without_key=is_open), {"model": "/nowhere", "rl": True})
    found = [record.getMessage() for record in caplog.records if "rl_without_key" in record.getMessage()]
    assert len(found) == is_open
    assert all("127.0.0.1:" in text and "/update_weights" in text for text in found)


def new_tensors(server: RunningServer) -> dict[str, Tensor]:
    (shard,) = Path(server.llm.config.weights.model_path).glob("*.safetensors")
    return {name: -0.5 * tensor for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize("transport", ["shm", "disk", "tcp"])
def test_a_trainer_updates_the_weights_of_a_server(
    server: RunningServer, transport: Literal["shm", "disk", "tcp"]
) -> None:
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    tensors = new_tensors(server)
    with server.http(headers=ADMIN) as http:

        def checksums() -> Any:
            return http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]

        old, answer = checksums(), http.post("/v1/completions", json=body).json()["choices"][0]
        assert answer["weight_versions"] == [["default", 0, 5]]
        WeightSender(server.url, transport, api_key="admin", chunk_bytes=5000).send(tensors, "next")
        assert http.get("/weight_info").json() == {"weight_version": "next"}
        other = http.post("/v1/completions", json=body).json()["choices"][0]
        assert other["weight_versions"] == [["next", 0, 5]]
        assert other["token_ids"] != answer["token_ids"]
        compared = http.post("/weight_checker", json={"action": "compare", "baseline": old}).json()
        assert not compared["match"]
        assert len(compared["mismatches"]) > 5
        assert http.post("/reload_weights").status_code == 200
        assert checksums() == old
        assert http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == answer["token_ids"]
        assert http.get("/get_world_size").json() == {"world_size": 1}


@pytest.mark.parametrize("num_points", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_trainer_leaves_old_new_or_stale_weights(tmp_path: Path, num_points: int) -> None:
    folder = save_tiny_model(tmp_path)
    settings: dict[str, Any] = dict(dtype="float32", max_model_len=512, weight_update_timeout=1)
    llm = AsyncLLM(folder, rl=True, show_progress=False, **settings)
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    states: list[str] = []
    with running(llm, admin_key=["admin"]) as server, server.http(headers=ADMIN) as http:

        def state() -> tuple[Any, ...]:
            answer = http.post("/v1/completions", json=body)  # waits until the update has ended
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.text
                return ("stale",)
            (choice,) = answer.json()["choices"]
            checksums = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
            return choice["weight_versions"][0][0], choice["token_ids"], checksums

        old = state()
        command = [sys.executable, str(Path(__file__).parent / "killed_trainer.py"), server.url]
        command += [str(folder / "model.safetensors"), str(num_points)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "whole\n"
            new = state()
            for _ in range(num_points):
                assert http.post("/reload_weights").status_code == 200
                assert state() == old
                print(file=trainer.stdin, flush=True)
                assert trainer.stdout.readline() == "killed\n"
                found = state()
                assert found in (old, new, ("stale",))
                states.append(found[0])
            print(file=trainer.stdin, flush=True)
    llm.shutdown()
    assert trainer.returncode == 0
    assert new[:2] != old[:2]
    assert states[0] == "default"
    assert states[-1] == "stale"


def test_a_folder_is_a_whole_update(server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    save_file(new_tensors(server), folder / "model.safetensors")
    with server.http(headers=ADMIN) as http:
        assert http.post("/update_weights", json={"weight_dir": str(folder)}).status_code == 200
        assert http.get("/weight_info").json() == {"weight_version": "step_7"}
        assert http.post("/reload_weights").status_code == 200


def test_a_wrong_folder_leaves_the_old_weights_in_service(server: RunningServer, tmp_path: Path) -> None:
    """Each call that is a whole update ends it if it fails, so that the next request need not wait for its timeout."""
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    save_file({"unknown.weight": Tensor([1.0])}, tmp_path / "model.safetensors")
    with server.http(headers=ADMIN) as http:
        expected = http.post("/v1/completions", json=body).json()["choices"]
        for folder in ("/nowhere", str(tmp_path)):
            for path, field in (("/update_weights", "weight_dir"), ("/update_weights_from_disk", "model_path")):
                assert http.post(path, json={field: folder}).status_code == 409, path
                assert http.post("/v1/completions", json=body).json()["choices"] == expected
        assert http.post("/update_weights", json={"weight_dir": ""}).status_code == 400
        assert http.post("/v1/completions", json=body).json()["choices"] == expected


def test_wrong_updates_have_their_own_statuses(server: RunningServer, tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, int, str]] = [
        ("/update_weights", {"update_info": {"path": "/nowhere"}}, 409, "start_weight_update"),
        ("/finish_weight_update", {}, 409, "start_weight_update"),
        ("/update_weights", {"update_info": {"path": "a"}, "ipc_handles_pickled": "gASV"}, 400, "ipc_handles_pickled"),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, 400, "update_info"),
        ("/update_weights", {}, 400, "weight_dir"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}, 400, "transport"),
        ("/init_weight_transfer_engine", {"init_info": []}, 400, "init_info"),
        ("/start_weight_update", {"shapes": {"a": ["b"]}}, 400, "shapes"),
        ("/start_weight_update", {"shapes": {"a": [2**31 + 1]}}, 400, "shapes"),
        ("/update_weights", {"weight_dir": ""}, 400, "weight_dir"),
        ("/update_weights", {"weight_dir": "a" * 4097}, 400, "weight_dir"),
        ("/finish_weight_update", {"weight_version": ""}, 400, "weight_version"),
        ("/finish_weight_update", {"weight_version": "a" * 257}, 400, "weight_version"),
        ("/update_weights_from_disk", {"model_path": ""}, 400, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a" * 4097}, 400, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a", "weight_version": ""}, 400, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "a", "load_format": "dummy"}, 400, "load_format"),
        ("/update_weight_version", {"new_version": ""}, 400, "new_version"),
        ("/update_weight_version", {"new_version": "a" * 257}, 400, "new_version"),
        ("/weight_checker", {"action": "reset"}, 400, "action"),
        ("/weight_checker", {"action": "compare"}, 400, "baseline"),
    ]
    with server.http(headers=ADMIN) as http:
        for path, body, status, words in wrong:
            answer = http.post(path, json=body)
            assert answer.status_code == status, (path, body, answer.text)
            assert words in answer.text
        name, tensor = next(iter(new_tensors(server).items()))
        save_file({name: tensor}, tmp_path / "model.safetensors")
        http.post("/start_weight_update")
        assert http.post("/update_weights", json={"update_info": {"path": str(tmp_path)}}).status_code == 200
        http.post("/start_weight_update")  # the former is cancelled, and this one has no tensors
        refused = http.post("/finish_weight_update")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "weight_update_refused")
        assert http.post("/reload_weights").status_code == 200
        assert http.get("/weight_info").json() == {"weight_version": "default"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_routes_need_the_setting_and_the_key(
    server: RunningServer, tiny_server: RunningServer, method: str, path: str
) -> None:
    with server.http() as http:
        assert http.request(method, path).status_code == 401
        refused = http.request(method, path, headers={"Authorization": "Bearer user"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "administrator_required")
        assert http.request(method, path, headers=ADMIN).status_code == 200
        http.post("/resume", headers=ADMIN)
    with tiny_server.http() as http:
        assert http.request(method, path).status_code == 404


def test_a_pause_aborts_and_later_requests_wait(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.http(headers=ADMIN) as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert http.post("/pause").json() == {"status": "paused"}
            assert '"finish_reason":"abort"' in "".join(lines)
        assert http.get("/is_paused").json() == {"is_paused": True}
        answers: list[Any] = []
        short = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 2}

        def ask() -> None:
            with server.http(headers=ADMIN) as other:
                answers.append(other.post("/v1/completions", json=short).json())

        thread = threading.Thread(target=ask)
        thread.start()
        assert http.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
        assert not answers
        assert http.post("/resume").json() == {"status": "resumed"}
        thread.join()
        assert answers[0]["choices"][0]["finish_reason"] == "length"
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("query", ["mode=stop", "mode=", "clear_cache=2", "mode=keep&mode=stop"])
def test_wrong_arguments_are_refused(server: RunningServer, query: str) -> None:
    with server.http(headers=ADMIN) as http:
        assert http.post(f"/pause?{query}").status_code == 400
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.slow
def test_several_processes_pause_one_engine(default_cache: Any) -> None:
    flags = ["--max-model-len", "512", "--kv-cache-memory", "64MiB", "--api-server-count", "2", "--rl"]
    with serving(*flags, "--admin-key", "admin") as server:
        for _ in range(4):  # requests reach both processes
            assert server.post("/pause?mode=wait", "admin") == 200
            assert server.post("/resume", "admin") == 200


def test_choices_have_the_experts_of_their_tokens(server: RunningServer) -> None:
    """As the base64 form of a file of numpy, also in the last event of a stream."""
    body = {"model": MODEL, "prompt": [3, 1, 4, 1, 5], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    folder = server.llm.config.weights.model_path
    llm = AsyncLLM(folder, dtype="float32", max_model_len=64, enable_return_routed_experts=True, show_progress=False)
    with running(llm) as own, own.http() as http:
        found = []
        for late in ({}, {"routed_experts_prompt_start": 3}):
            (choice,) = http.post("/v1/completions", json=body | late).json()["choices"]
            found.append(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False))
        num_layers = llm.config.experts.routes.num_layers  # type: ignore[union-attr]
        assert found[0].shape == (8, num_layers, 2)
        assert np.array_equal(found[1], found[0][3:])
        chat = body | {"messages": [{"role": "user", "content": "a"}]}
        del chat["prompt"]
        assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["routed_experts"]
        lines = http.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert [bool(event.get("routed_experts")) for event in events] == [False] * (len(events) - 1) + [True]
    llm.shutdown()


def test_a_server_sleeps(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [3, 1, 4], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with server.http(headers=ADMIN) as http:
        expected = http.post("/v1/completions", json=body).json()["choices"]
        assert http.post("/sleep?level=2").json() == {"status": "asleep"}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/v1/completions", json=body).status_code == 503
        assert http.post("/resume").status_code == 400
        assert http.post("/reload_weights").status_code == 409
        assert http.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert http.post("/reload_weights").status_code == 200
        assert http.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
        assert http.post("/v1/completions", json=body).json()["choices"] == expected
        for wrong in ("/sleep?level=9", "/sleep?level=a", "/sleep?mode=keep", "/wake_up?tags=kv"):
            assert http.post(wrong).status_code in (400, 422), wrong
        assert http.get("/is_paused").json() == {"is_paused": False}


SGLANG_ROUTES = [
    *[("POST", f"/{name}") for name in ("generate", "pause_generation", "continue_generation", "flush_cache")],
    *[("POST", f"/{name}") for name in ("update_weights_from_disk", "abort_request")],
    *[("GET", f"/{name}") for name in ("get_weight_version", "health_generate", "flush_cache", "v1/loads")],
    ("POST", "/inference/v1/generate"),
]


@pytest.mark.parametrize(("method", "path"), [*SGLANG_ROUTES, ("POST", "/abort_requests"), ("POST", "/sleep")])
def test_sglang_routes_need_the_setting_and_the_key(
    server: RunningServer, tiny_server: RunningServer, method: str, path: str
) -> None:
    with server.http() as http:
        assert http.request(method, path).status_code == 401
        assert http.request(method, path, headers={"Authorization": "Bearer user"}).status_code == 403
    with tiny_server.http() as http:
        assert http.request(method, path).status_code == 404


def test_sglang_routes_generate_and_update(server: RunningServer, tmp_path: Path) -> None:
    """As slime calls them: tokens in and out, a pause, an update from a folder, and its version in later outputs."""
    prompt, params = [3, 1, 4, 1, 5], {"temperature": 0, "max_new_tokens": 6, "no_stop_trim": True, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    save_file(new_tensors(server), tmp_path / "model.safetensors")
    with server.http(headers=ADMIN) as http:
        http.post("/reload_weights")
        first = http.post("/generate", json=body).json()
        direct = http.post(
            "/v1/completions",
            json={
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
            }
            | {"return_token_ids": True},
        ).json()["choices"][0]
        assert first["output_ids"] == direct["token_ids"]
        assert first["text"] == direct["text"]
        meta = first["meta_info"]
        assert [item[:2] for item in meta["output_token_logprobs"]] == [
            [logprob, token]
            for logprob, token in zip(direct["logprobs"]["token_logprobs"], direct["token_ids"], strict=True)
        ]
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (5, 6, "default")
        for mode in ("in_place", "retract", "abort"):
            assert http.post("/pause_generation", json={"mode": mode}).json()["success"]
            assert http.get("/is_paused").json() == {"is_paused": True}
            assert http.post("/continue_generation").json()["success"]
        assert http.get("/flush_cache").status_code == 200
        assert http.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "7"}).json()[
            "success"
        ]
        assert http.get("/get_weight_version").json() == {"weight_version": "7"}
        second = http.post("/generate", json=body).json()
        assert second["meta_info"]["weight_version"] == "7"
        assert second["output_ids"] != first["output_ids"]
        assert http.post("/update_weight_version", json={"new_version": "8"}).json()["success"]
        assert http.post("/generate", json=body).json()["output_ids"] == second["output_ids"]
        assert http.get("/weight_info").json() == {"weight_version": "8"}
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
        assert http.post("/abort_requests", json={}).status_code == 200
        assert http.post("/abort_requests", json={"request_ids": ["a"]}).status_code == 400
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.get("/health_generate").status_code == 200
        assert http.get("/v1/loads").json() == {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        info = http.get("/server_info").json()
        assert info["vllm_config"]["model_config"] == {"dtype": "float32", "logprobs_mode": "raw_logprobs"}
        assert info["vllm_config"]["weight_transfer_config"] is not None
        assert {name: info[name] for name in ("tp_size", "pp_size", "dp_size")} == dict(tp_size=1, pp_size=1, dp_size=1)
        assert info["dtype"] == "float32"
        assert not info["enable_return_routed_experts"]
        for wrong in ({}, {"text": "a", "input_ids": [1]}, {"input_ids": []}, body | {"stream": True}):
            assert http.post("/generate", json=wrong).status_code in (400, 422)
        for name, value in (("n", 2), ("temperatur", 1), ("max_new_tokens", 0)):
            assert http.post("/generate", json=body | {"sampling_params": {name: value}}).status_code in (400, 422)
        assert http.post("/generate", json=body | {"return_routed_experts": True}).status_code == 400
        assert http.post("/abort_request", json={"rid": "a"}).status_code in (400, 422)
        http.post("/reload_weights")


def test_tokens_in_and_out(server: RunningServer) -> None:
    """As prime-rl's client sends and reads them."""
    prompt = [3, 1, 4, 1, 5]
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "cache_salt": "3", "return_token_ids": True}
    body = {"token_ids": prompt, "sampling_params": params | {"logprobs": 1, "prompt_logprobs": 1}}
    with server.http(headers=ADMIN) as http:
        answer = http.post("/inference/v1/generate", json=body).json()
        direct = http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            | {"logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True},
        ).json()
        (choice,), (expected,) = answer["choices"], direct["choices"]
        assert choice["token_ids"] == expected["token_ids"]
        assert [each["token"] for each in choice["logprobs"]["content"]] == expected["logprobs"]["tokens"]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == expected["logprobs"]["token_logprobs"]
        assert (choice["finish_reason"], choice["weight_versions"]) == ("length", [["default", 0, 6]])
        assert answer["prompt_logprobs"] == expected["prompt_logprobs"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 6)
        two = http.post("/inference/v1/generate", json=body | {"sampling_params": {"n": 2, "max_tokens": 3}}).json()
        assert [(each["index"], len(each["token_ids"])) for each in two["choices"]] == [(0, 3), (1, 3)]
        for wrong in (
            {},
            {"token_ids": []},
            body | {"stream": True},
            body | {"features": {"image": [1]}},
            body | {"model": "x"},
        ):
            assert http.post("/inference/v1/generate", json=wrong).status_code in (400, 404)
        wrong = body | {"sampling_params": {"temperatur": 1}}
        assert http.post("/inference/v1/generate", json=wrong).status_code == 400


def test_tokens_come_with_their_experts(server: RunningServer) -> None:
    settings: dict[str, Any] = dict(dtype="float32", max_model_len=64, enable_return_routed_experts=True, rl=True)
    llm = AsyncLLM(server.llm.config.weights.model_path, show_progress=False, **settings)
    body = {"token_ids": [3, 1, 4, 1, 5], "input_ids": [3, 1, 4, 1, 5], "return_routed_experts": True}
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with running(llm, rl_without_key=True) as own, own.http() as http:
        answers = []
        for late in ({}, {"routed_experts_prompt_start": 3}):
            (choice,) = http.post("/inference/v1/generate", json=body | {"sampling_params": params | late}).json()[
                "choices"
            ]
            packed = choice["routed_experts"]
            experts = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])
            answers.append((packed["start"], experts))
        meta = http.post("/generate", json=body | {"sampling_params": params}).json()["meta_info"]
        of_sglang = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        http.post("/pause")  # without a key, as slime calls
        ended: list[Any] = []
        paths = ("/generate", "/inference/v1/generate")

        def ask() -> None:
            with own.http() as other:
                for path in paths:
                    ended.append(other.post(path, json=body | {"sampling_params": params}).json())

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():  # both are aborted before their first tokens
            http.post("/abort_request", json={"abort_all": True})
        thread.join()
    llm.shutdown()
    (slimes, (choice,)) = ended[0]["meta_info"], ended[1]["choices"]
    assert (slimes["finish_reason"], choice["finish_reason"]) == ({"type": "abort"}, "abort")
    assert "routed_experts" not in slimes
    assert choice["routed_experts"] is None
    (first, whole), (second, later) = answers
    assert (first, second) == (0, 3)
    assert whole.shape[0] == 8
    assert np.array_equal(later, whole[3:])
    assert np.array_equal(of_sglang.reshape(whole.shape), whole)


IGNORED = ("rid", "request_id", "priority", "log_metrics")
UNUSED: dict[str, Any] = {"stream": False, "rid": "a", "priority": 3, "kv_transfer_params": None}
UNUSED_BY_SGLANG: dict[str, Any] = {"top_logprobs_num": 0, "logprob_start_len": -1, "log_metrics": True}
UNUSED_BY_SGLANG |= {"image_data": None, "lora_path": None, "return_hidden_states": False, "token_ids_logprob": None}


@pytest.mark.parametrize(
    ("path", "prompt", "unused"),
    [
        ("/generate", "input_ids", UNUSED | UNUSED_BY_SGLANG),
        ("/inference/v1/generate", "token_ids", UNUSED | {"features": None, "request_id": "b"}),
    ],
)
def test_only_fields_without_an_effect_are_accepted(
    server: RunningServer, path: str, prompt: str, unused: dict[str, Any]
) -> None:
    body: dict[str, Any] = {prompt: [3, 1], "sampling_params": {"temperature": 0, "ignore_eos": True}}
    wrong: list[dict[str, Any]] = [{name: {"a": 1}} for name in unused if name not in IGNORED]
    wrong += [{prompt: [value]} for value in ("5", True, 2.0, -1, 2**31)]
    if path == "/generate":
        wrong += [{"logprob_start_len": 0}, {"input_embeds": [[0.5]]}, {"lora_path": "a"}, {"top_logprobs_num": 2}]
    with server.http(headers=ADMIN) as http:
        for fields in wrong:
            answer = http.post(path, json=body | fields)
            assert answer.status_code == 400, (fields, answer.text)
            assert next(iter(fields)) in answer.json()["error"]["message"]
        for name in ("cls", "self", "parameters", "temperatur"):
            answer = http.post(path, json=body | {"sampling_params": {name: 1}})
            assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True), answer.text
        short = {"max_new_tokens" if path == "/generate" else "max_tokens": 2}
        assert http.post(path, json=body | unused | {"sampling_params": short}).status_code == 200
        if path != "/generate":
            for salt in (5, "a" * 1025):
                answer = http.post(path, json=body | {"sampling_params": {"cache_salt": salt}})
                assert (answer.status_code, "cache_salt" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/generate"])
def test_generation_ends_when_the_trainer_leaves(server: RunningServer, path: str) -> None:
    data = json.dumps({"token_ids": [3, 1, 4], "input_ids": [3, 1, 4]}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer admin\r\n"
    head += "Content-Type: application/json\r\n"
    with server.http(headers=ADMIN) as http:

        def num_running() -> int:
            (load,) = http.get("/v1/loads").json()["loads"]
            return int(load["num_running_reqs"])

        http.post("/pause")  # so that no output ends
        try:
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
                connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                while num_running() == 0:
                    pass
            while num_running() == 1:
                pass
        finally:
            http.post("/resume")
