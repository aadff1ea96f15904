"""A trainer on another host than the server whose weights it sends."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from moeserve.addresses import address_towards
from moeserve.rl import WeightSender
from moeserve.rl.transports import offer_over_tcp

SECONDS_TO_WAIT = 120


def post(url: str, body: Any) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer admin"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready"):
                return
        except OSError:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.2)


def main() -> None:
    url, file, result = sys.argv[1:]
    wait_for(url)
    tensors = load_file(file)
    found: dict[str, Any] = {}
    assert post(f"{url}/start_weight_update", {})[0] == 200
    with offer_over_tcp(tensors, address_towards(url.split("/")[2].split(":")[0])) as info:
        found["wrong key"] = post(f"{url}/update_weights", {"update_info": {**info, "key": "ab" * 32}})
    WeightSender(url, "tcp", api_key="admin", chunk_bytes=50_000).send(tensors, "sent")
    found["checksums"] = json.loads(post(f"{url}/weight_checker", {"action": "checksum"})[1])["checksums"]
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
