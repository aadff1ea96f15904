"""lm-eval, unmodified: with moeserve's model class and over HTTP, it finds what its own `hf` model finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM

lm_eval = pytest.importorskip("lm_eval", reason="install it with: pip install -e '.[lm-eval]'")

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 128  # tokens; the longest text has more, so it is scored in several windows
LOGIT_ERROR = 1e-4  # between float32 logits and those of transformers; log-probabilities differ by at most twice that
QUESTIONS = [
    ("Is three more than two?", ["yes", "no", "they are equal"], 0),
    ("Which of these is no animal?", ["a crab", "a crow", "a crowd"], 2),
    ("What follows Monday?", ["Tuesday", "Sunday"], 0),
    ("Long: " + "one and one are two, " * 9, ["true", "false"], 0),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one task of each kind of request."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [dict(question=question, choices=choices, answer=answer) for question, choices, answer in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")},
        "test_split": "train",
        "num_fewshot": 0,
        "doc_to_text": "{{question}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    text = {
        "output_type": "generate_until",
        "doc_to_text": "{{question[:60]}}",  # short: each model class cuts off longer ones at another place
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    whole = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    for name, task in {"choice": choice, "text": text, "whole": whole}.items():
        (folder / f"{name}.yaml").write_text(json.dumps(common | task | {"task": name}))
    return folder


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Data sets are cached beside the tests, and the hub is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield


def evaluated(tasks: Path, model_class: str, **arguments: Any) -> dict[str, Any]:
    """Return the results of one of lm-eval's own model classes."""
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model_class,
        model_args=arguments,
        tasks=["choice", "text", "whole"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tasks: Path, offline: None) -> dict[str, Any]:
    """The results with transformers, whose limit excludes the scored token, and the one that the engine generates."""
    return evaluated(tasks, "hf", pretrained=str(checkpoint), dtype="float32", max_length=MAX_MODEL_LEN - 2)


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare each answer, and the accuracies that follow from them."""
    for name, rows in expected["samples"].items():
        answers = {row["doc_id"]: row["resps"] for row in found["samples"][name]}
        assert len(answers) == len(rows) == len(QUESTIONS)
        for row in rows:
            tolerance = 2 * LOGIT_ERROR * len(QUESTIONS[row["doc_id"]][0])
            for (answer,), (right,) in zip(answers[row["doc_id"]], row["resps"], strict=True):
                if name == "choice":
                    assert float(answer[0]) == pytest.approx(right[0], abs=tolerance)
                    assert str(answer[1]) == str(right[1])  # if it is the greedy one
                elif name == "whole":
                    assert float(answer) == pytest.approx(right, abs=tolerance)
                else:
                    assert answer == right
    for name in ("acc,none", "acc_norm,none"):
        assert found["results"]["choice"][name] == expected["results"]["choice"][name]


def test_model_class(checkpoint: Path, tasks: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"pretrained": checkpoint, "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    command = [sys.executable, str(ROOT / "examples/lm_eval_moeserve.py"), "--model", "moeserve"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", str(tasks), "--tasks", "choice,text,whole", "--log_samples"]
    subprocess.run([*command, "--output_path", str(tmp_path)], check=True, timeout=120, capture_output=True)
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())
    found["samples"] = {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.rglob("samples_*.jsonl")
    }
    check_equal(found, expected)


def test_completions_over_http(checkpoint: Path, tasks: Path, expected: dict[str, Any]) -> None:
    llm = AsyncLLM(checkpoint, dtype="float32", max_model_len=MAX_MODEL_LEN, show_progress=False)
    with running(llm) as server:
        before, _ = server.token_totals()
        found = evaluated(
            tasks,
            "local-completions",
            pretrained=MODEL,
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(checkpoint),
            max_length=MAX_MODEL_LEN,
            num_concurrent=8,
        )
        after, _ = server.token_totals()
    llm.shutdown()
    check_equal(found, expected)
    # A token is a character. A prompt holds the token that is scored last, and the engine generates one more.
    lengths = [len(question + " " + choice) for question, choices, _ in QUESTIONS for choice in choices]
    lengths += [1 + len(question) for question, _, _ in QUESTIONS]  # after a token that stands for the beginning
    lengths += [MAX_MODEL_LEN - 1]  # the long text has a second window, as long as the first
    num_tokens = sum(min(length, MAX_MODEL_LEN - 1) for length in lengths)
    num_tokens += sum(len(question[:60]) for question, _, _ in QUESTIONS)
    assert after - before == num_tokens
