"""A wall clock that is set while requests run: no false alarm, and the same bytes.

A library that all processes load answers questions for the wall clock with the time of a file. Monotonic clocks, which
nobody can set, stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_models import Reference

pytestmark = pytest.mark.ranks

LIBRARY = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
  const char *name = getenv("MOESERVE_TEST_CLOCK");
  int fd = name ? open(name, O_RDONLY) : -1;
  void *memory = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
  if (memory != MAP_FAILED) offset_s = memory;
  if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (result) *result = exact.tv_sec;
  return exact.tv_sec;
}
"""

PROGRAM = """
import json, logging, sys, time
from pathlib import Path
from moeserve import LLM, SamplingParams

folder, clock, prompts = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])


def set_clock(offset_s):
    before = time.time()
    with clock.open("r+b") as file:
        file.write(offset_s.to_bytes(8, "little", signed=True))
    return time.time() - before


settings = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", num_threads=1)
with LLM(folder, tensor_parallel_size=2, data_parallel_size=2, **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    pids = [replica.handle.pid for replica in llm.core.replicas]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    jumps = [set_clock(offset_s) for offset_s in (3600, -3600)]
    for stream in streams:
        next(stream)
    jumps.append(set_clock(7200))
    tokens = [[*stream][-1].outputs[0].token_ids for stream in streams]
    assert [replica.handle.pid for replica in llm.core.replicas] == pids
print(json.dumps([[round(jump / 3600) for jump in jumps], tokens]))
"""


@pytest.mark.slow
def test_a_wall_clock_that_is_set_is_no_failure(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    source, library, clock = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "clock"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    clock.write_bytes(bytes(8))
    reference = reference_named("mixtral")
    prompts = reference.prompts(9, 20, 3, 14)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, reference.folder, str(clock), str(prompts)],
        env=os.environ | {"LD_PRELOAD": str(library), "MOESERVE_TEST_CLOCK": str(clock)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    jumps, tokens = json.loads(run.stdout)
    assert jumps == [1, -2, 3]
    assert tokens == reference.continuations(prompts, 120)
    assert run.stderr == ""
