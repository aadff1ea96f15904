"""Mapped weights that the first steps read from a slow disk: no rank is taken for hung, and the bytes are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_models import SHAPES, Shape, make_reference

pytestmark = pytest.mark.ranks

GROUPS = Path("/sys/fs/cgroup/blkio")  # of version 1
BYTES_PER_S = 20 * 10**6
PROGRAM = """
import json, sys, time
from pathlib import Path
from moeserve import LLM, SamplingParams

folder, num_entries = sys.argv[1], int(sys.argv[2])
began = time.monotonic()
with LLM(folder, data_parallel_size=2, dtype="float32", max_model_len=64, kv_cache_memory="8MiB", num_threads=1) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([[number, 5, 6] for number in range(16)], params, use_tqdm=False)
    seconds = time.monotonic() - began
    while len([*Path(sys.argv[3]).glob("packed/*.safetensors")]) < num_entries:
        time.sleep(0.1)
print(json.dumps([seconds, [each.outputs[0].token_ids for each in outputs]]))
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A cgroup that reads slowly from the disk of the test's folder."""
    device, group = tmp_path.stat().st_dev, GROUPS / f"moeserve-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {BYTES_PER_S}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
    except OSError as error:
        pytest.skip(f"reads cannot be slowed down here by a cgroup of version 1: {error}")
    yield group
    group.rmdir()


def run(command: list[str], cache: Path) -> tuple[float, list[list[int]]]:
    """Return the seconds until the first outputs of an engine have ended, and their tokens."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"MOESERVE_CACHE": str(cache)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    seconds, tokens = json.loads(done.stdout)
    return seconds, tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_layers", [2, pytest.param(6, marks=pytest.mark.soak)])
def test_weights_that_come_slowly_from_a_disk_are_no_failure(tmp_path: Path, group: Path, num_layers: int) -> None:
    wide = dict(hidden_size=512, intermediate_size=2048, num_local_experts=8, num_hidden_layers=num_layers)
    folder, cache = tmp_path / "model", tmp_path / "cache"
    make_reference(folder, Shape("Mixtral", SHAPES["mixtral"].settings | wide, seed=5)).close()
    command = [sys.executable, "-c", PROGRAM, str(folder), "2", str(cache)]
    _, expected = run(command, cache)
    num_bytes = 0
    for entry in cache.glob("packed/*.safetensors"):
        with entry.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        num_bytes += entry.stat().st_size
    assert num_bytes > 8 * BYTES_PER_S  # more than a rank may take without progress
    in_group = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"']
    seconds, found = run([*in_group, *command], cache)
    assert found == expected
    assert seconds > 0.9 * num_bytes / BYTES_PER_S
