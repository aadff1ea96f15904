"""Users without a home folder or an account, folders that cannot be written, full disks, and little shared memory.

Each engine works, or ends with a named error. Needs root, to become another user and to mount file systems.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

# Another user reads the files of this environment, which may be in root's home folder, by one capability.
AS_NOBODY = (
    "setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
IN_NAMESPACE = "unshare --mount --propagation private"
RANKS = "--tensor-parallel-size 2 --executor mp"
FLAGS = "--temperature 0 --max-tokens 4 --num-threads 1 --dtype float32"


def generate(before: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `moeserve generate` after shell commands, with an environment that has no HOME unless it is given."""
    if os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")):
        pytest.skip("needs root, setpriv and unshare")
    own = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "MOESERVE_CACHE")
    }
    command = f'{before} "$0" -m moeserve generate "$@" {FLAGS}'
    namespaced = [*IN_NAMESPACE.split(), "sh", "-c", command, sys.executable, *arguments]
    run = subprocess.run(namespaced, capture_output=True, text=True, timeout=200, env=own | environment)
    if "unshare:" in run.stderr or "mount:" in run.stderr:
        pytest.skip(run.stderr)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_a_user_without_home_and_account(folder: Path) -> None:
    run = generate(f"exec {AS_NOBODY}", str(folder), "hi", "--raw", *RANKS.split())
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_without_a_writable_folder_and_with_little_shared_memory(folder: Path, tmp_path: Path) -> None:
    mounts = f"mount -t tmpfs -o ro none {tmp_path} && mount -t tmpfs -o size=64k none /dev/shm && exec"
    places = dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path))
    run = generate(mounts, str(folder), "hi", "--raw", *RANKS.split(), **places)
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cause"), [("ro", "Read-only file system"), ("size=1m", "No space left on device")]
)
def test_a_default_model_that_cannot_be_written(tmp_path: Path, options: str, cause: str) -> None:
    run = generate(f"mount -t tmpfs -o {options} none {tmp_path} && exec", "hi", HOME=str(tmp_path))
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert cause in run.stderr.splitlines()[-1]
    assert str(tmp_path) in run.stderr.splitlines()[-1]


PROGRAM = """
import random, sys
from moeserve import LLM, SamplingParams
from moeserve.kv.load_rates import LoadRates

LoadRates.pays = lambda _: True  # load although computing a tiny model may be faster
folder, model = sys.argv[1:]
chance, params = random.Random(0), SamplingParams(temperature=0, max_tokens=4)
prompts = [[chance.randrange(250) for _ in range(200)] for _ in range(300)]
settings = dict(dtype="float32", max_model_len=256, max_num_seqs=4, num_threads=1, kv_cache_memory="512KiB")


def tokens(llm, prompts):
    outputs = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
    return [each.outputs[0].token_ids for each in outputs], sum(each.num_cached_tokens > 0 for each in outputs)


with LLM(model, **settings) as llm:
    expected, _ = tokens(llm, prompts)
with LLM(model, kv_folder=folder, **settings) as llm:
    assert tokens(llm, prompts)[0] == expected
with LLM(model, kv_folder=folder, **settings) as llm:  # the last prompts replaced the first ones
    found, num_found = tokens(llm, prompts[-8:])
    assert found == expected[-8:]
    print("found", num_found)
"""


@pytest.mark.slow
def test_the_newest_prefixes_replace_the_oldest_ones_on_a_full_disk(folder: Path, tmp_path: Path) -> None:
    """The limit of the folder is larger than the disk."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    command = f'mount -t tmpfs -o size=1m,mode=700 none {tmp_path} && exec "$0" "$@"'
    run = subprocess.run(
        [*IN_NAMESPACE.split(), "sh", "-c", command, sys.executable, "-c", PROGRAM, str(tmp_path), str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "unshare:" in run.stderr or "mount:" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    assert "No space left on device" in run.stderr
    assert int(run.stdout.split()[1]) > 4


PACKED = """
import logging, sys
from moeserve import LLM, SamplingParams
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.worker.weight_sources import packed_entry

logging.basicConfig(level=logging.INFO)
packed_entry.MIN_CACHED_BYTES, packed_cache_writer.DELAY_SECONDS = 0, 0.0
with LLM(sys.argv[1], dtype="float32", max_model_len=256, kv_cache_memory="1MiB", num_threads=1) as llm:
    packed_cache_writer.wait_for_cache_writers()
    (output,) = llm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(len(output.outputs[0].token_ids))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ("size=64k", "are free in"),  # seen before anything is written
        ("nr_inodes=2", "No space left on device"),  # when the file is made
    ],
)
def test_a_full_disk_under_the_cache_of_packed_weights(folder: Path, tmp_path: Path, options: str, cause: str) -> None:
    """The start goes on with one line of log, and nothing is left in the cache."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    mount = f"mkdir -p {tmp_path}/cache && mount -t tmpfs -o {options},mode=700 none {tmp_path}/cache"
    command = f'{mount} && "$0" "$@" && find {tmp_path}/cache -type f'
    run = subprocess.run(
        [*IN_NAMESPACE.split(), "sh", "-c", command, sys.executable, "-c", PACKED, str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"MOESERVE_CACHE": f"{tmp_path}/cache"},
    )
    if "unshare:" in run.stderr or "mount:" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "4\n"
    lines = [line for line in run.stderr.splitlines() if "packed weights" in line]
    assert len(lines) == 1, run.stderr
    assert cause in lines[0]
