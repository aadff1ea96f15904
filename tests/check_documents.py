"""Check that documents and docstrings name only what exists, and how docstrings begin. Run by `make check`.

Documents, docstrings and comments are compared with the tree: a path or a link must be a tracked file, an identifier
in backticks must occur in the code, and a flag must be one of the command line's. Commands, in backticks and in code
blocks, must name subcommands, benchmarks and `make` targets that exist. The check reads files; it imports nothing from
moeserve.
"""

from __future__ import annotations

import ast
import builtins
import io
import itertools
import keyword
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN_OPENINGS = re.compile(r"(What|Whether|Of|To be|For who(m|ever)?)\b")
PATH = re.compile(r"(?<![\w/~$}-])(?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h|md|toml|sh|yaml)\b(?![\w/(*])")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*(?:\(\))?")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
COMMAND_START = r"(?:^|\$ |&& |; |-- |-m |=\S+ |[\w.]/)"
COMMAND = re.compile(COMMAND_START + r"moeserve( bench)? +([a-z][a-z_-]*)(?![\w.])")
TARGET = re.compile(COMMAND_START + r"make ([a-z][a-z0-9-]*)")
VARIABLE = re.compile(r"\bMOESERVE_[A-Z_]+\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SECTIONS = ("Attributes", "Args", "Returns", "Yields", "Raises")  # of docstrings
HEAD = re.compile(rf" *(?:{'|'.join(SECTIONS)}):")
ENTRY = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):")  # arguments that a section describes together
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

# Names of other programs and packages that documents may use although no code here does.
EXTERNAL = {
    *("CUDA_VISIBLE_DEVICES", "PIP_EXTRA_INDEX_URL", "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT", "OMPProcessManager"),
    *("maxItems", "maxLength", "oneOf", "uniqueItems", "unevaluatedProperties"),  # keywords of JSON schemas
    *("RAY_worker_niceness", "n_batch", "n_ubatch", "script.py", "sitecustomize.py", "llama.cpp", "ik_llama.cpp"),
    *("settings.yaml", "save_original_format"),
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_DISABLE_PROGRESS_BARS"),  # variables of huggingface_hub
}
EXTERNAL_FLAGS = {
    *("--extra-index-url", "--local-dir", "--min-nodes", "--no-deps", "--no-index", "--only-binary", "--python-version")
}
EXTERNAL_FOLDERS = ("deep_ep/", "flashinfer/", "torch/", "FAST25-release/")

PLAIN_BASES = {"<Protocol", "<Struct", "<Generic", "<object"}  # without members that documents name


def tracked_files() -> list[str]:
    """Return every file that git tracks or would track, relative to the repository's root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name and (ROOT / name).is_file()]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def faults_of_sections(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and a description of each fault in the sections of a module's docstrings.

    A section stands at the margin of its docstring, once, in the order of `SECTIONS`. Its entries are indented by four
    spaces. The arguments that it describes are parameters of the function.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = None if isinstance(node, ast.ClassDef) else node.args
            faults = _faults_of_docstring(ast.get_docstring(node) or "", arguments)
            yield from ((node.body[0].lineno, fault) for fault in faults)


def _faults_of_docstring(text: str, arguments: ast.arguments | None) -> Iterator[str]:
    lines = text.split("\n")
    heads = [number for number, line in enumerate(lines) if HEAD.fullmatch(line)]
    titles = [lines[number].rstrip(":") for number in heads]
    if titles != [title for title in SECTIONS if title in titles]:
        yield f"sections {', '.join(titles)}: each once, at the margin, in the order {', '.join(SECTIONS)}"
        return
    for number in heads:
        entries = list(itertools.takewhile(str.strip, lines[number + 1 :]))
        if not entries or not re.match(r" {4}\S", entries[0]):
            yield f"section {lines[number]} must have entries, indented by four spaces"
        elif lines[number] == "Args:" and arguments is not None:
            yield from _faults_of_arguments(entries, arguments)


def _faults_of_arguments(entries: list[str], arguments: ast.arguments) -> Iterator[str]:
    """Yield the described arguments that are no parameters, or are described twice."""
    parameters = {part.arg for part in ast.walk(arguments) if isinstance(part, ast.arg)}
    names = [name for entry in entries if (match := ENTRY.match(entry)) for name in re.findall(r"\w+", match[1])]
    for name in dict.fromkeys(names):
        if name not in parameters:
            yield f"the described argument {name} is no parameter"
        if names.count(name) > 1:
            yield f"the argument {name} is described twice"


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def words_of_code(tree: ast.Module) -> Iterator[str]:
    """Yield every identifier of a module's code: names, attributes, parameters, imports, and words in strings.

    Docstrings are left out: a name that only documentation mentions does not exist.
    """
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield from re.findall(r"[A-Za-z_]\w*", node.value)
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")


def parameters_of_code(tree: ast.Module) -> Iterator[str]:
    """Yield the names of parameters and of annotated fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def members_of_classes(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yield each class with the names of its members. A base is among them, as "<name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            members = {"<" + ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases} - PLAIN_BASES
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    members.add(part.name)
                elif isinstance(part, ast.Attribute | ast.Name) and isinstance(part.ctx, ast.Store):
                    members.add(part.attr if isinstance(part, ast.Attribute) else part.id)
            yield node.name, members


class Tree:
    """The names that documents may use.

    Attributes:
        files: tracked paths, and every suffix of each (`layers/moe/layer.py` for `moeserve/layers/moe/layer.py`).
        words: identifiers of the code.
        parameters: names of parameters and of annotated fields, which include all settings.
        members: what each class of the code has, those of its bases included.
        flags: options of the command line and of the scripts, with their dashes.
        commands: subcommands of `moeserve`.
        benchmarks: subcommands of `moeserve bench`.
        targets: targets of the Makefile.
    """

    def __init__(self, files: list[str], *, with_tests: bool) -> None:
        """Read the files. Without tests, their code counts only as far as it defines functions and classes."""
        self.files: set[str] = set()
        self.parameters: set[str] = set()
        self.members: dict[str, set[str]] = {}
        self.words: set[str] = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names, *EXTERNAL}
        for name in files:
            parts = name.split("/")
            self.files.update("/".join(parts[start:]) for start in range(len(parts)))
            self.files.add(".".join(parts[-1].split(".")[-2:]))
            self.words.update(part for piece in parts for part in piece.split("."))
            path = ROOT / name
            if path.suffix == ".safetensors":
                continue
            if parts[0] == "tests" and not with_tests:
                self.words.update(re.findall(r"^ *(?:def|class) (\w+)", _read(name), re.MULTILINE))
                continue
            if path.suffix == ".py":
                module = ast.parse(_read(name))
                self.words.update(words_of_code(module))
                self.parameters.update(parameters_of_code(module))
                for class_name, members in members_of_classes(module):
                    self.members.setdefault(class_name, set()).update(members)
            elif path.suffix in (".cpp", ".h", ".toml", ".sh", ".yaml", ".txt") or name in ("Makefile", "LICENSE"):
                self.words.update(re.findall(r"[A-Za-z_]\w*", _read(name)))
        scripts = [name for name in files if name.endswith((".py", ".sh"))]
        sources = [_read(name) for name in scripts if with_tests or not name.startswith("tests/")]
        self.flags = {flag for source in sources for flag in FLAG.findall(source)} | EXTERNAL_FLAGS
        settings = [name.replace("_", "-") for name in _names_of_settings(files)]
        self.flags |= {prefix + name for name in settings for prefix in ("--", "--no-")}  # "--no-" turns a setting off
        self.words |= {f"MOESERVE_{name.upper()}" for name in (*_names_of_settings(files), "config")}
        self.commands = {
            Path(name).stem
            for name in files
            if re.fullmatch(r"moeserve/cli/(?!parser|sources|completion)[a-z]+[.]py", name)
        }
        self.benchmarks = set(re.findall(r'^    "(\w+)": "[\w.]+",$', _read("bench/commands.py"), re.MULTILINE))
        self.targets = set(re.findall(r"^([a-z0-9-]+):", _read("Makefile"), re.MULTILINE))

    def missing(self, text: str) -> Iterator[str]:
        """Yield what a document or docstring names that does not exist."""
        text = re.sub(r"https?://\S+", "", text)
        for path in PATH.findall(text):
            own = path.lstrip("./")
            if own not in self.files and path not in EXTERNAL and not path.startswith(("path/to", *EXTERNAL_FOLDERS)):
                yield f"the file {path}"
        for flag in FLAG.findall(text):
            if flag not in self.flags:
                yield f"the flag {flag}"
        for variable in VARIABLE.findall(text):
            if variable not in self.words:
                yield f"the variable {variable}"
        for quoted in QUOTED.findall(text):
            yield from self.missing_commands(quoted)
            if match := re.match(r"([A-Za-z_]\w*)=", quoted):
                if match[1] not in self.parameters | EXTERNAL and not match[1].isupper():
                    yield f"the setting {match[1]}"
            elif IDENTIFIER.fullmatch(quoted):
                name = quoted.removesuffix("()")
                words = (name if name in self.words else name.removesuffix("_total")).split(".")  # added by Prometheus
                unknown = [word for word in words if word not in self.words]
                if (unknown or not self.is_member(words)) and not PATH.fullmatch(quoted):
                    yield f"`{quoted}`"

    def is_member(self, words: list[str]) -> bool:
        """True unless the first word is a class of the code that lacks the second word."""
        return len(words) < 2 or words[0] not in self.members or self._has(words[0], words[1])

    def _has(self, class_name: str, member: str) -> bool:
        """Return True if the class or a base has the member, or has a base from elsewhere."""
        members = self.members.get(class_name)
        return (
            members is None
            or member in members
            or any(self._has(base[1:], member) for base in members if base[0] == "<")
        )

    def missing_commands(self, line: str) -> Iterator[str]:
        """Yield the subcommands and targets of a command line that do not exist."""
        for bench, name in COMMAND.findall(line):
            if name not in (self.benchmarks if bench else self.commands):
                yield f"the command moeserve{bench} {name}"
        for target in TARGET.findall(line):
            if target not in self.targets:
                yield f"the make target {target}"

    def missing_in_document(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield what a Markdown file names that does not exist, each with its line."""
        in_code_block = False
        for number, line in enumerate(_read(name).split("\n"), start=1):
            if line.lstrip().startswith("```"):
                in_code_block = not in_code_block
            yield from ((number, fault) for fault in self.missing(line))
            if in_code_block:
                yield from ((number, fault) for fault in self.missing_commands(line.strip()))
            else:
                for link, heading in LINK.findall(line):
                    target = (ROOT / name).parent / link if link else ROOT / name
                    if not target.exists():
                        yield number, f"the link {link}"
                    elif heading and heading not in anchors(target.read_text(encoding="utf-8")):
                        yield number, f"the heading {link}#{heading}"


def anchors(document: str) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    text = re.sub(r"^```.*?^```", "", document, flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in headings}


def _names_of_settings(files: list[str]) -> Iterator[str]:
    """Yield the fields of the classes that `add_flags` makes flags of."""
    modules = [ast.parse(_read(name)) for name in files if name.startswith("moeserve/") and name.endswith(".py")]
    nodes = [node for module in modules for node in ast.walk(module)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "add_flags"]
    names = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and (node.name in names or node.name.endswith("Settings")):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield ast.unparse(field.target)


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def faults() -> Iterator[str]:
    """Yield one line for each fault, as `file:line: what is wrong`."""
    files = tracked_files()
    tree, tree_without_tests = Tree(files, with_tests=True), Tree(files, with_tests=False)
    for name in files:
        if name.endswith(".md"):
            for number, fault in tree_without_tests.missing_in_document(name):
                yield f"{name}:{number}: {fault} does not exist"
        elif name.endswith(".py"):
            source = _read(name)
            module = ast.parse(source)
            yield from (f"{name}:{number}: {fault}" for number, fault in faults_of_sections(module))
            for number, text in docstrings(module):
                if opening := FORBIDDEN_OPENINGS.match(text):
                    yield f"{name}:{number}: a docstring opens with {opening[0]!r}; begin with a verb or a noun"
                yield from (f"{name}:{number}: {fault} does not exist" for fault in tree.missing(text))
            for number, text in comments(source):
                yield from (f"{name}:{number}: {fault} does not exist" for fault in tree.missing(text))


if __name__ == "__main__":
    found = list(faults())
    print("\n".join(found))
    sys.exit(bool(found))
