"""The release script refuses what must not be released, before it builds or tags anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import moeserve

ROOT = Path(__file__).parents[2]
FILES = ("release/release.sh", "moeserve/__init__.py", "CHANGELOG.md")
IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
HEADING = f"## {moeserve.__version__} (2026-01-31)\n"


def git(folder: Path, *arguments: str) -> str:
    environment = os.environ | IDENTITY
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose version can be released. Its `make` fails, as where a check fails."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{HEADING}\nThe first version.\n")
    (tmp_path / "Makefile").write_text("check:\n\t@echo checking; false\ndist:\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def release(folder: Path) -> str:
    """Run the script, which must fail and tag nothing. Return its output."""
    tags = git(folder, "tag")
    script = folder / "release/release.sh"
    run = subprocess.run([str(script)], env=os.environ | IDENTITY, capture_output=True, text=True)
    assert run.returncode != 0
    assert git(folder, "tag") == tags
    return run.stdout + run.stderr


def test_nothing_is_tagged_if_a_check_fails(repository: Path) -> None:
    assert "checking" in release(repository)


def test_uncommitted_changes(repository: Path) -> None:
    (repository / "new.py").touch()
    output = release(repository)
    assert "not committed" in output
    assert "checking" not in output


def test_a_version_that_is_tagged(repository: Path) -> None:
    git(repository, "tag", f"v{moeserve.__version__}")
    output = release(repository)
    assert f"v{moeserve.__version__} is tagged" in output
    assert "checking" not in output


@pytest.mark.parametrize("heading", [f"## {moeserve.__version__} (unreleased)\n", "## 9.9.9 (2026-01-31)\n"])
def test_a_changelog_without_the_version(repository: Path, heading: str) -> None:
    changelog = repository / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(HEADING, heading))
    git(repository, "commit", "--all", "--quiet", "--message", "heading")
    output = release(repository)
    assert f"## {moeserve.__version__} (" in output
    assert "checking" not in output
