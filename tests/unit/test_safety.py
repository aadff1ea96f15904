"""No file of the package may run code that came as data, or read the environment outside `config/environment.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder in the repository: its path in the package.
FOLDERS = {"moeserve": "moeserve", "bench": "moeserve/bench", "triton_kernels": "moeserve/triton_kernels"}

# Modules that run what they read (multiprocessing pickles all that passes through it).
BANNED_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
ALLOWED_MODULES = {"multiprocessing.shared_memory"}

BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
# The last two parts of a dotted name. torch.save and the *_object collectives write and read pickles.
BANNED_ATTRIBUTES = {
    *("torch.load", "torch.save", "jit.load", "hub.load", "yaml.load", "os.system", "os.popen"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# Keyword and the one value it may have.
BANNED_KEYWORDS = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
READS_ENVIRONMENT = {
    "moeserve/config/environment.py",
    "moeserve/processes/fork_server.py",  # gives a forked process the environment of whoever asked for it
    # They pass it on to other engines, with changes.
    "moeserve/bench/peers/install.py",
    "moeserve/bench/peers/peers.py",
    "moeserve/bench/peers/adapters/serve_vllm.py",
}

# Module: files that may name it, in an import or as a string.
ONLY_IMPORTERS = {
    "moeserve._cpu": ("moeserve/ops/", "moeserve/distributed/"),
    "ray": ("moeserve/executor/ray/",),
    "triton": ("moeserve/triton_kernels/",),
}


def violations(source: str, name: str) -> list[str]:
    """Return every violation in a source file as `name:line: description`. The name is its path in the package."""
    tree = ast.parse(source, name)
    modules = _names_of_modules(tree)
    found = [*_dangerous(tree, modules), *_environment(tree, modules, name), *_imports(tree, name)]
    return [f"{name}:{line}: {what}" for line, what in sorted(set(found))]


def _names_of_modules(tree: ast.AST) -> dict[str, str]:
    """Return the full names of what `import a.b as c` and `from a import b as c` bind, by local name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, modules: dict[str, str]) -> str | None:
    """Return the full name of a.b.c, with imported names resolved; ?.c for an attribute of an expression."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, modules) or '?'}.{node.attr}"
    return None


def _used_names(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (dotted := _dotted(node, modules)):
            yield node.lineno, dotted


def _dangerous(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    for line, module in _imported(tree):
        if module.split(".")[0] in BANNED_MODULES and not any(_within(module, allowed) for allowed in ALLOWED_MODULES):
            yield line, f"imports {module}"
    for line, dotted in _used_names(tree, modules):
        last_two = ".".join(dotted.split(".")[-2:])
        if last_two in BANNED_ATTRIBUTES or dotted.split(".")[-1] in BANNED_ATTRIBUTES:
            yield line, f"uses {last_two}"
        if dotted.removeprefix("builtins.") in BANNED_BUILTINS:
            yield line, f"uses {dotted}"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in BANNED_KEYWORDS:
            only = BANNED_KEYWORDS[node.arg]
            if not (isinstance(node.value, ast.Constant) and node.value.value is only):
                yield node.value.lineno, f"passes {node.arg}= with another value than {only}"


def _environment(tree: ast.AST, modules: dict[str, str], name: str) -> Iterator[tuple[int, str]]:
    if name not in READS_ENVIRONMENT:
        for line, dotted in _used_names(tree, modules):
            if dotted in ENVIRONMENT:
                yield line, f"uses {dotted}, but only config/environment.py may read the environment"


def _imports(tree: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for node in node.args
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for module, importers in ONLY_IMPORTERS.items():
        if not name.startswith(importers):
            for line, used in _imported(tree):
                if _within(used, module):
                    yield line, f"imports {module}, which only {' and '.join(importers)} may"
            if "." in module:
                for line, string in strings:
                    if _within(string, module):
                        yield line, f"names {module}, which only {' and '.join(importers)} may"


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_no_file_of_the_package_breaks_a_rule() -> None:
    files = {
        f"{in_package}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, in_package in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert {
        "moeserve/config/environment.py",
        "moeserve/processes/fork_server.py",  # gives a forked process the environment of whoever asked for it
        "moeserve/bench/__init__.py",
        "moeserve/triton_kernels/__init__.py",
    } <= set(files)
    found = [line for name, path in files.items() for line in violations(path.read_text(encoding="utf-8"), name)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import pickle", 1),
        ("import os\nfrom cloudpickle import dumps", 2),
        ("import dill as safe", 1),
        ("def f():\n    import multiprocessing.pool", 2),
        ("x = eval(y)", 1),
        ("exec('x = 1')", 1),
        ("import builtins\nbuiltins.exec('x')", 2),
        ("run = eval", 1),
        ("import torch\nx = torch.load(path)", 2),
        ("import torch as t\nx = t.load(path)", 2),
        ("from torch import load as read\nread(path)", 2),
        ("import torch\ntorch.jit.load(path)", 2),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", 2),
        ("mesh().broadcast_object_list(a)", 1),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", 2),
        ("import subprocess\nsubprocess.run(x,\n  shell=True)", 3),
        ("import subprocess\nsubprocess.run(x, shell=yes)", 2),
        ("import os\nos.system('ls')", 2),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", 1),
        ("import os\nos.environ['A']", 2),
        ("from os import getenv as read\nread('A')", 2),
        ("from moeserve import _cpu", 1),
        ("import importlib\nimportlib.import_module('moeserve._cpu')", 2),
        ("def f():\n    from ray.util import placement_group", 2),
        ("import triton.language as tl", 1),
    ],
)
def test_a_violation_is_found_with_its_line(source: str, line: int) -> None:
    found = violations(source, "moeserve/engine/core.py")
    assert [text.split(":")[:2] for text in found][:1] == [["moeserve/engine/core.py", str(line)]], found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.eval()", "moeserve/worker/worker.py"),
        ("import re\nre.compile('x')", "moeserve/config/environment.py"),
        ("import os\nos.environ.get('A')", "moeserve/config/environment.py"),
        ("import json\njson.load(file)", "moeserve/models/checkpoint.py"),
        ("from safetensors.torch import load", "moeserve/models/checkpoint.py"),
        ("import subprocess\nsubprocess.run(x, shell=False)", "moeserve/cli/generate.py"),
        ("from multiprocessing.shared_memory import SharedMemory", "moeserve/distributed/shared_memory.py"),
        ("import importlib\nimportlib.import_module('moeserve._cpu')", "moeserve/ops/cpu/native.py"),
        ("import ray", "moeserve/executor/ray/actors.py"),
        ("import triton", "moeserve/triton_kernels/rms_norm.py"),
        ("import importlib.util\nimportlib.util.find_spec('triton')", "moeserve/ops/select.py"),
        ("executor = 'ray'", "moeserve/config/environment.py"),
    ],
)
def test_similar_code_that_is_safe_passes(source: str, name: str) -> None:
    assert violations(source, name) == []
