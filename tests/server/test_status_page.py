"""The status page shows what the engine reports, in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from running_server import MODEL, RunningServer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def drawn_page(server: RunningServer) -> str:
    """Return the page's elements after three seconds in a browser."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    return subprocess.run([*command, server.url], capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    with server.http() as http:
        page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    addresses = re.findall(r"https?://[^\s\"']+", page.text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, which is not fetched
    assert not re.findall(r"src=|url\(|@import", page.text)


def test_links_lead_to_this_server(server: RunningServer) -> None:
    with server.http() as http:
        links = re.findall(r'href="([^"]*)"', http.get("/").text)
        assert {"metrics", "openapi.json"} <= {*links}
        for link in links:
            assert http.get(f"/{link}").status_code == 200, link


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
    with server.http() as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 9})
        server.llm.session.expert_load()
    drawn = drawn_page(server)
    assert re.search(r'id="state" class="up">ready<', drawn)
    assert len(re.findall(r"<rect ", drawn)) == 30 * 4
    assert drawn.count("<tr>") == 2  # the head and one replica
    for title in ("Generated, tokens/s", "Outputs, number", "Time to the first token, s", "Time between tokens, ms"):
        assert title in drawn
    assert drawn.count(">minutes ago<") == 4
    assert {">layer<", ">expert<"} <= {*re.findall(r">\w+<", drawn)}


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_first_picture_has_the_rates_of_the_engine(server: RunningServer) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 9})
    drawn = drawn_page(server)
    rate = re.search(r"<b>([\d.]+)</b><span>tokens/s generated<", drawn)
    assert rate is not None
    assert float(rate[1]) > 0
