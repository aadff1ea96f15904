"""A rank that the kernel kills because the processes of its cgroup use more memory than it allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from planted import Planted
from reference_models import Reference

pytestmark = pytest.mark.ranks

GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
PROGRAM = """
import json, sys
from pathlib import Path
from moeserve import LLM, SamplingParams

folder, group, planted, prompts = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
settings = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", num_threads=1)
with LLM(folder, data_parallel_size=2, **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    streams = [llm.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    limit = int((group / "memory.usage_in_bytes").read_text()) + 2**26
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (planted / "go").touch()
    print(json.dumps([[*stream][-1].outputs[0].token_ids for stream in streams]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    group = GROUPS / f"moeserve-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"memory cgroups of version 1 cannot be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.slow
def test_a_rank_killed_for_lack_of_memory_is_named_as_such_and_replaced(
    reference_named: Callable[[str], Reference], plant: Callable[..., Planted], group: Path
) -> None:
    reference = reference_named("mixtral")
    prompts = reference.prompts(9, 20, 3, 14)
    planted = plant(rank=1, point="step", action="exhaust_memory")
    in_group = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" -c "$@"']
    arguments = [reference.folder, str(group), str(planted.folder), str(prompts)]
    run = subprocess.run(
        [*in_group, sys.executable, PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},  # with what plants the fault
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"rank 1\b.*: the kernel killed it for lack of memory \(limit [\d.]+ MiB\)", run.stderr)
    assert run.stdout.strip() == str(reference.continuations(prompts, 80))
