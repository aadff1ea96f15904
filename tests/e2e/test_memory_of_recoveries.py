"""The memory that a rank takes while it takes over the experts of others: no more than it has checked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_models import SHAPES, Shape, make_reference

FOLDERS = [Path(__file__).parent, Path(__file__).parent.parent, Path(__file__).parent.parent / "distributed"]
OPTIONS = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "int8": dict(quantization="int8"),
    "int4": dict(quantization="int4"),
}
SLACK = 12 * 2**20  # for Python, and for what torch allocates once

# The limit holds for private memory that can be written, whether or not it is used, so also for a mapped file.
PROGRAM = """
import gc, json, resource, sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from test_weight_sources import CheckpointExperts, KeptWeights, PackedExperts, Ranks, after, load_from, packed_entry
from moeserve.errors import CheckpointError
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.checkpoint.packed_cache import PackedWeightCache
from moeserve.worker.weight_sources import kept_weights

folder, options, source, cache_folder, share, slack = sys.argv[1:]
packed_cache_writer.DELAY_SECONDS = packed_entry.MIN_CACHED_BYTES = 0
torch.set_num_threads(1)
options = json.loads(options)
before, cache = Ranks(Path(folder), 4, options), PackedWeightCache(Path(cache_folder), 2**40)
for lost in (1, 2, 3):
    if source == "packed":
        before.loaded(lost, cache)
sources = [PackedExperts(cache), CheckpointExperts()] if source == "packed" else [CheckpointExperts()]
with torch.inference_mode():
    kept, target = before.loaded(0), after(before, Path(folder), [0], options).target(0)
    weights = KeptWeights(kept, sources)
    planned = weights.bytes_needed(target)
    kept_weights.free_bytes = lambda config: 2**40  # it knows of the limit below
    gc.collect()
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    files = Path(cache_folder if source == "packed" else folder).glob("*.safetensors")
    mapped = max(path.stat().st_size for path in files)
    limit = int(status["VmData"].split()[0]) * 1024 + int(float(share) * planned) + mapped + int(slack)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        load_from([weights], target)
    except (RuntimeError, MemoryError, OSError, SafetensorError, CheckpointError) as error:
        print("too little of", planned, error)
    else:
        print("enough of", planned)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model whose weights are nearly all those of experts: 100 MB in float32."""
    folder = tmp_path_factory.mktemp("wide")
    wide = dict(hidden_size=256, intermediate_size=1024, num_local_experts=8, num_hidden_layers=4)
    make_reference(folder, Shape("Mixtral", SHAPES["mixtral"].settings | wide, seed=5)).close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind"),
    [("packed", "float32"), ("packed", "bfloat16"), *(("checkpoint", kind) for kind in OPTIONS)],
)
def test_taking_over_experts_needs_no_more_memory_than_was_checked(
    folder: Path, tmp_path: Path, source: str, kind: str
) -> None:
    """The last of four ranks takes over the experts of three others."""
    if sys.platform != "linux":
        pytest.skip("the limit is one of Linux")

    arguments = [str(folder), json.dumps(OPTIONS[kind]), source]

    def load(share: float) -> str:
        """Load with a share of the memory that the rank has checked for."""
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments, str(tmp_path), str(share), str(SLACK)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert load(1.0).startswith("enough")
    assert load(0.3).startswith("too little")  # the experts alone take more
