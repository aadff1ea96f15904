"""The status page shows what the engine reports, in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from running_server import MODEL, RunningServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    with server.http() as http:
        page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    addresses = re.findall(r"https?://[^\s\"']+", page.text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, which is not fetched
    assert not re.findall(r'(?:src|href)="|url\(|@import', page.text)


def test_the_state_is_that_of_the_engine(server: RunningServer) -> None:
    with server.http() as http:
        before = http.get("/status").json()
        answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 9}).json()
        server.llm.session.expert_load()  # ends a window
        after = http.get("/status").json()
    usage = answer["usage"]
    assert after["generated_tokens"] - before["generated_tokens"] == usage["completion_tokens"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["model"] == MODEL
    assert after["ready"]
    (replica,) = after["replicas"]
    assert replica["running"] == 0
    assert replica["rounds"] > before["replicas"][0]["rounds"]
    load = after["expert_load"]
    assert [len(row) for row in load["tokens_of_expert"]] == [4] * 30
    for of_experts, of_ranks in zip(load["tokens_of_expert"], load["tokens_of_rank"], strict=True):
        assert sum(of_experts) == sum(of_ranks) > 0


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_the_page(server: RunningServer) -> None:
    assert BROWSER is not None
    with server.http() as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 9})
        server.llm.session.expert_load()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    drawn = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r'id="state" class="up">ready<', drawn)
    assert len(re.findall(r"<rect ", drawn)) == 30 * 4
    assert drawn.count("<tr>") == 2  # the head and one replica
