"""No file of the package may run code that came as data, or read the environment outside `config/environment.py`."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder in the repository: its path in the package.
FOLDERS = {"moeserve": "moeserve", "bench": "moeserve/bench", "triton_kernels": "moeserve/triton_kernels"}

READS_ENVIRONMENT = (
    "moeserve/config/environment.py",
    "moeserve/processes/fork_server.py",  # sets the environment of a forked process
    # These pass the environment on to other engines, with changes.
    "moeserve/bench/day.py",
    "moeserve/bench/servers.py",
    "moeserve/bench/peers/install.py",
    "moeserve/bench/peers/peers.py",
    "moeserve/bench/peers/adapters/serve_vllm.py",
    "moeserve/bench/peers/adapters/serve_ik_llama_cpp.py",  # which library it uses
)
# A name, and the files and folders that may use it. One that begins with a dot is an attribute of anything.
ALLOWED: dict[str, tuple[str, ...]] = {
    # modules that run what they read (multiprocessing pickles all that passes through it)
    **dict.fromkeys(("cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"), ()),
    **dict.fromkeys((f"builtins.{name}" for name in ("eval", "exec", "compile", "__import__")), ()),
    **dict.fromkeys(("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "yaml.load"), ()),
    **dict.fromkeys(("os.system", "os.popen"), ()),
    # collectives that pickle
    **dict.fromkeys((".all_gather_object", ".gather_object", ".scatter_object_list", ".broadcast_object_list"), ()),
    **dict.fromkeys((".send_object_list", ".recv_object_list"), ()),
    **dict.fromkeys(("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"), READS_ENVIRONMENT),
    "moeserve._cpu": (
        "moeserve/ops/",
        "moeserve/distributed/",
        "moeserve/executor/kernels.py",
        "moeserve/processes/progress_records.py",
    ),
    "ray": ("moeserve/executor/ray/", "moeserve/engine/ray_launcher.py"),
    "triton": ("moeserve/triton_kernels/", "moeserve/bench/gpu/"),
}
HARMLESS = ("multiprocessing.shared_memory",)
# Keyword and the one value it may have.
KEYWORDS = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}


def violations(source: str, name: str) -> list[str]:
    """Return every violation in a source file as `name:line: description`. The name is its path in the package."""
    tree = ast.parse(source, name)
    found = {(line, f"uses {used}") for line, used in _uses(tree) if _breaks_a_rule(used, name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            only = KEYWORDS[node.arg]
            if not (isinstance(node.value, ast.Constant) and node.value.value is only):
                found.add((node.value.lineno, f"passes {node.arg}= with another value than {only}"))
    return [f"{name}:{line}: {description}" for line, description in sorted(found)]


def _breaks_a_rule(used: str, name: str) -> bool:
    """Return True if a full name, one of the names that it begins with, or its attribute may not be used."""
    parts = used.split(".")
    names = (f".{parts[-1]}", *(".".join(parts[:length]) for length in range(1, len(parts) + 1)))
    return not used.startswith(HARMLESS) and any(
        not name.startswith(ALLOWED[each]) for each in names if each in ALLOWED
    )


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything imported or used, and of modules named in a call's arguments."""
    imported = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, _dotted(node, imported)
        elif isinstance(node, ast.Call):
            constants = [each for each in node.args if isinstance(each, ast.Constant)]
            yield from ((each.lineno, each.value) for each in constants if str(each.value).startswith("moeserve."))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local and the full name of what `import a.b`, `import a.b as c` and `from a import b` bind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                yield alias.asname or root, alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """Return the full name of a.b.c if `a` is imported or built in; ?.c for an attribute of anything else."""
    if isinstance(node, ast.Name):
        return imported.get(node.id) or (f"builtins.{node.id}" if hasattr(builtins, node.id) else "?")
    return f"{_dotted(node.value, imported)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def test_no_file_of_the_package_breaks_a_rule() -> None:
    files = {
        f"{in_package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, in_package in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert {*READS_ENVIRONMENT, "moeserve/triton_kernels/__init__.py"} <= set(files)
    found = [line for name, path in files.items() for line in violations(path.read_text(encoding="utf-8"), name)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import pickle", 1),
        ("import os\nfrom cloudpickle import dumps", 2),
        ("def f():\n    import multiprocessing.pool", 2),
        ("x = eval(y)", 1),
        ("import builtins\nbuiltins.exec('x')", 2),
        ("run = eval", 1),
        ("import torch as t\nx = t.load(path)", 2),
        ("from torch import load as read\nread(path)", 1),
        ("import torch\ntorch.jit.load(path)", 2),
        ("mesh().broadcast_object_list(a)", 1),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", 2),
        ("import subprocess\nsubprocess.run(x,\n  shell=yes)", 3),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", 1),
        ("import os\nos.environ['A']", 2),
        ("from os import getenv as read\nread('A')", 1),
        ("from moeserve import _cpu", 1),
        ("import importlib\nimportlib.import_module('moeserve._cpu')", 2),
        ("def f():\n    from ray.util import placement_group", 2),
        ("import triton.language as tl", 1),
    ],
)
def test_a_violation_is_found_with_its_line(source: str, line: int) -> None:
    found = violations(source, "moeserve/engine/engine.py")
    assert [text.split(":")[:2] for text in found][:1] == [["moeserve/engine/engine.py", str(line)]], found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.eval()", "moeserve/worker/worker.py"),
        ("import re\nre.compile('x')", "moeserve/config/environment.py"),
        ("import os\nos.environ.get('A')", "moeserve/config/environment.py"),
        ("from safetensors.torch import load", "moeserve/models/checkpoint/shards.py"),
        ("import subprocess\nsubprocess.run(x, shell=False)", "moeserve/cli/generate.py"),
        ("from multiprocessing.shared_memory import SharedMemory", "moeserve/distributed/shared_memory.py"),
        ("import importlib\nimportlib.import_module('moeserve._cpu')", "moeserve/ops/native.py"),
        ("import ray", "moeserve/executor/ray/actors.py"),
        ("import triton", "moeserve/triton_kernels/rms_norm.py"),
        ("import importlib.util\nimportlib.util.find_spec('triton')", "moeserve/ops/select.py"),
    ],
)
def test_similar_code_that_is_safe_passes(source: str, name: str) -> None:
    assert violations(source, name) == []
