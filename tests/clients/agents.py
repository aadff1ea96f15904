"""Agents: each runs two commands, one after the other, and ends with the second one's output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Server, run

COMMANDS = ("echo $((6*7))first", "echo $((6*7))second")  # whose outputs are not in the prompt
LAST = "42second"


def prompt(tool: str, argument: str, **others: object) -> str:
    """Return a prompt upon which the scripted model calls a tool with each command."""
    calls = [f"[call {tool} {json.dumps({argument: command, **others})}]" for command in COMMANDS]
    return f"Please run {calls[0]}, and then {calls[1]}."


@pytest.mark.clients("npm:@anthropic-ai/claude-code")
def test_claude_code(home: Path, scripted: Server) -> None:
    command = ["claude", "--print", "--output-format", "json", "--allowedTools", "Bash"]
    printed = run(
        home, *command, stdin=prompt("Bash", "command", description="Print"),
        ANTHROPIC_BASE_URL=scripted.url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=scripted.model,
        ANTHROPIC_SMALL_FAST_MODEL=scripted.model, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    answer = json.loads(printed)
    assert answer["result"] == f"The tool returned: {LAST}"
    assert answer["num_turns"] == 3


@pytest.mark.clients("npm:@openai/codex")
def test_codex(home: Path, scripted: Server) -> None:
    settings = [
        'model_provider="moeserve"',
        f'model="{scripted.model}"',
        'model_providers.moeserve.name="moeserve"',
        'model_providers.moeserve.wire_api="responses"',
        f'model_providers.moeserve.base_url="{scripted.openai_url}"',
        "check_for_update_on_startup=false",
        "analytics.enabled=false",
    ]
    flags = [part for each in settings for part in ("--config", each)]
    command = ["codex", "exec", *flags, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    run(home, *command, "--output-last-message", str(home / "last"), "-", stdin=prompt("exec_command", "cmd"))
    answer = (home / "last").read_text().strip()
    assert answer.startswith("The tool returned:")
    assert answer.endswith(LAST)


@pytest.mark.clients("npm:opencode-ai")
def test_opencode(home: Path, scripted: Server) -> None:
    model = f"moeserve/{scripted.model}"
    options = {"baseURL": scripted.openai_url, "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {scripted.model: {}}}
    settings = {"model": model, "small_model": model, "autoupdate": False, "share": "disabled"}
    printed = run(
        home, "opencode", "run", stdin=prompt("bash", "command", description="Print"),
        OPENCODE_CONFIG_CONTENT=json.dumps(settings | {"provider": {"moeserve": provider}}),
        OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1",
    )  # fmt: skip
    assert printed.rstrip().endswith(f"The tool returned: {LAST}")


@pytest.mark.clients("npm:@qwen-code/qwen-code")
def test_qwen_code(home: Path, scripted: Server) -> None:
    (home / ".qwen").mkdir()
    settings = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    printed = run(
        home, "qwen", "--auth-type", "openai", "--yolo",
        stdin=prompt("run_shell_command", "command", is_background=False),
        OPENAI_BASE_URL=scripted.openai_url, OPENAI_API_KEY="none", OPENAI_MODEL=scripted.model,
    )  # fmt: skip
    assert printed.startswith("The tool returned:")
    assert f"Output: {LAST}\n" in printed


@pytest.mark.clients("npm:@continuedev/cli")
def test_continue(home: Path, scripted: Server) -> None:
    model = {"name": "scripted", "provider": "openai", "model": scripted.model, "apiBase": scripted.openai_url}
    model |= {"apiKey": "none", "roles": ["chat"], "capabilities": ["tool_use"]}
    settings = {"name": "test", "version": "0.0.1", "schema": "v1", "models": [model]}
    (home / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    printed = run(
        home, "cn", "--config", str(home / "config.yaml"), "--auto", "--print", prompt("Bash", "command"),
        CONTINUE_CLI_ENABLE_TELEMETRY="0", CONTINUE_METRICS_ENABLED="0",
    )  # fmt: skip
    assert printed.strip() == f"The tool returned: {LAST}"
