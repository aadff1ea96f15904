"""Limits of cgroups of both versions: files laid out in a folder, and, where this process may, real groups."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference_models import Reference

from moeserve.cgroups import cpu_quota, memory_kills, memory_left, memory_limit

V1_CPU = "29 23 0:30 / {mounts}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "30 23 0:31 / {mounts}/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "31 23 0:32 / {mounts}/unified rw,relatime - cgroup2 cgroup2 rw"
OTHERS = "22 27 0:21 / /proc rw,relatime - proc proc rw"


def lay_out(
    root: Path, files: dict[str, str], groups: list[str], mounts: list[str], at: str = "/sys/fs/cgroup"
) -> None:
    """Write the files of a system: /proc of the process, and those of cgroups, by their paths below `at`."""
    found = {
        "proc/self/cgroup": "\n".join(groups),
        "proc/self/mountinfo": "\n".join([OTHERS, *(mount.format(mounts=at) for mount in mounts)]),
        **{f"{at.lstrip('/')}/{name}": text for name, text in files.items()},
    }
    for name, text in found.items():
        path = root / name.replace("\\040", " ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def v1_quota(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


def v1_memory(
    folder: str, limit: int, usage: int, cached: int = 0, least: int = 2**63 - 4096, active: int = 0, mapped: int = 0
) -> dict[str, str]:
    statistics = (
        f"cache 5\ninactive_file 1\nactive_file 2\nmapped_file 3\ntotal_inactive_file {cached}\n"
        f"total_active_file {active}\ntotal_mapped_file {mapped}\nhierarchical_memory_limit {least}"
    )
    return {
        f"{folder}/memory.limit_in_bytes": str(limit),
        f"{folder}/memory.usage_in_bytes": str(usage),
        f"{folder}/memory.stat": statistics,
    }


def v2_memory(
    folder: str, limit: str, usage: int, cached: int = 0, high: str = "max", active: int = 0, mapped: int = 0
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": str(usage),
        f"{folder}/memory.stat": f"anon 7\ninactive_file {cached}\nactive_file {active}\nfile_mapped {mapped}",
    }


DEEP = "/kubepods/pod1/inner"
HYBRID = [V1_CPU, V1_MEMORY, V2]
# Where the process is, what is mounted, the files, and the quota in cores.
QUOTAS: dict[str, tuple[list[str], list[str], dict[str, str], float | None]] = {
    "version 1": (["4:cpu,cpuacct:/a"], [V1_CPU], v1_quota("cpu,cpuacct/a", 765000), 7.65),
    "version 2": (["0::/a"], [V2], {"unified/a/cpu.max": "150000 100000"}, 1.5),
    "none in version 1": (["4:cpu,cpuacct:/a"], [V1_CPU], v1_quota("cpu,cpuacct/a", -1), None),
    "none in version 2": (["0::/a"], [V2], {"unified/a/cpu.max": "max 100000"}, None),
    "a parent's, version 1": (
        [f"4:cpu,cpuacct:{DEEP}"],
        [V1_CPU],
        v1_quota(f"cpu,cpuacct{DEEP}", 300000) | v1_quota("cpu,cpuacct/kubepods/pod1", 100000, 50000),
        2.0,
    ),
    "the root's": ([f"4:cpu,cpuacct:{DEEP}"], [V1_CPU], v1_quota("cpu,cpuacct", 300000), 3.0),
    "a parent's, version 2": (
        [f"0::{DEEP}"],
        [V2],
        {f"unified{DEEP}/cpu.max": "max 100000", "unified/kubepods/cpu.max": "400000 100000"},
        4.0,
    ),
    "both versions mounted": (
        ["4:cpu,cpuacct:/a", "9:name=systemd:/b", "0::/a"],
        HYBRID,
        v1_quota("cpu,cpuacct/a", 200000) | {"unified/a/memory.max": "max"},
        2.0,
    ),
    "another group's": (["4:cpu,cpuacct:/a"], [V1_CPU], v1_quota("cpu,cpuacct/b", 100000), None),
    # A container that sees its own group at the top of the mount, while /proc names it as the host does.
    "the mount begins at the group": (
        ["4:cpu,cpuacct:/docker/c1"],
        [V1_CPU.replace(" / ", " /docker/c1 ")],
        v1_quota("cpu,cpuacct", 250000),
        2.5,
    ),
    "below the top of the mount": (
        ["4:cpu,cpuacct:/docker/c1/inner"],
        [V1_CPU.replace(" / ", " /docker/c1 ")],
        v1_quota("cpu,cpuacct/inner", 150000) | v1_quota("cpu,cpuacct", 250000),
        1.5,
    ),
    "in a namespace": (["0::/"], [V2.replace(" / ", " /../.. ")], {"unified/cpu.max": "200000 100000"}, 2.0),
    "the named group is not visible": (
        ["4:cpu,cpuacct:/docker/c1"],
        [V1_CPU],
        v1_quota("cpu,cpuacct", 200000),
        2.0,
    ),
    "unreadable numbers": (["0::/a"], [V2], {"unified/a/cpu.max": "soon", "unified/cpu.max": "100000 0"}, None),
    "no cgroup is mounted": (["4:cpu,cpuacct:/a"], [], v1_quota("cpu,cpuacct/a", 100000), None),
}


@pytest.mark.parametrize("at", ["/sys/fs/cgroup", "/elsewhere/with\\040space"])
@pytest.mark.parametrize("case", QUOTAS)
def test_the_least_quota_of_all_groups_above_a_process(case: str, at: str, tmp_path: Path) -> None:
    groups, mounts, files, quota = QUOTAS[case]
    lay_out(tmp_path, files, groups, mounts, at)
    assert cpu_quota(tmp_path) == quota


MEMORIES: dict[str, tuple[list[str], list[str], dict[str, str], int | None]] = {
    "version 1": (["3:memory:/a"], [V1_MEMORY], v1_memory("memory/a", 1000, 700, cached=50), 350),
    "version 2": (["0::/a"], [V2], v2_memory("unified/a", "1000", 700, cached=50), 350),
    "files read twice, version 1": (
        ["3:memory:/a"],
        [V1_MEMORY],
        v1_memory("memory/a", 1000, 700, cached=50, active=300, mapped=80),
        570,
    ),
    "files read twice, version 2": (
        ["0::/a"],
        [V2],
        v2_memory("unified/a", "1000", 700, cached=50, active=300, mapped=80),
        570,
    ),
    "shared memory is mapped, but no file": (
        ["0::/a"],
        [V2],
        v2_memory("unified/a", "1000", 700, cached=50, active=30, mapped=200),
        350,
    ),
    "version 2, high": (["0::/a"], [V2], v2_memory("unified/a", "1000", 700, high="800"), 100),
    "none": (["0::/a"], [V2], v2_memory("unified/a", "max", 700), None),
    "a parent's, version 1": (
        ["3:memory:/a/b"],
        [V1_MEMORY],
        v1_memory("memory/a/b", 1000, 10) | v1_memory("memory/a", 900, 800),
        100,
    ),
    "an invisible parent's": (["3:memory:/a"], [V1_MEMORY], v1_memory("memory/a", 1000, 10, least=500), 490),
    "a parent's, version 2": (
        ["0::/a/b"],
        [V2],
        v2_memory("unified/a/b", "max", 0) | v2_memory("unified/a", "5000", 4000),
        1000,
    ),
    "both versions mounted": (["3:memory:/a", "0::/a"], HYBRID, v1_memory("memory/a", 1000, 400), 600),
    "more used than allowed": (["3:memory:/a"], [V1_MEMORY], v1_memory("memory/a", 1000, 2000), 0),
}


@pytest.mark.parametrize("case", MEMORIES)
def test_the_least_memory_left_in_all_groups_above_a_process(case: str, tmp_path: Path) -> None:
    groups, mounts, files, left = MEMORIES[case]
    lay_out(tmp_path, files, groups, mounts)
    assert memory_left(tmp_path) == left


LIMITS: dict[str, int | None] = {
    "version 1": 1000,
    "version 2, high": 1000,
    "none": None,
    "a parent's, version 1": 900,
    "an invisible parent's": 500,
    "a parent's, version 2": 5000,
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_least_memory_limit_of_all_groups_above_a_process(case: str, tmp_path: Path) -> None:
    groups, mounts, files, _ = MEMORIES[case]
    lay_out(tmp_path, files, groups, mounts)
    assert memory_limit(tmp_path) == LIMITS[case]


def test_the_number_that_version_1_names_without_a_limit_is_none(tmp_path: Path) -> None:
    lay_out(tmp_path, v1_memory("memory/a", 2**63 - 4096, 700), ["3:memory:/a"], [V1_MEMORY])
    assert memory_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("group", "mount", "files", "expected"),
    [
        ("3:memory:/a", V1_MEMORY, {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3"}, 3),
        ("0::/a", V2, {"unified/a/memory.events": "low 0\nhigh 4\nmax 9\noom 3\noom_kill 2"}, 2),
        ("0::/a/b", V2, {"unified/a/memory.events": "oom_kill 2", "unified/a/b/memory.events": "oom_kill 0"}, 0),
        ("3:memory:/a", V1_MEMORY, {"memory/a/memory.oom_control": "under_oom 0"}, 0),  # an old kernel
    ],
)
def test_processes_that_were_killed_in_a_group(
    group: str, mount: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    lay_out(tmp_path, files, [group], [mount])
    assert memory_kills(tmp_path) == expected


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert memory_left(tmp_path) is None
    assert memory_limit(tmp_path) is None
    assert memory_kills(tmp_path) == 0


MEASURE = """
from moeserve import cgroups
from moeserve.machine import free_memory, usable_cores
print(cgroups.cpu_quota(), usable_cores(), free_memory())
"""


@pytest.fixture(params=["version 1", "version 2"])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path, bool]]:
    """New cgroups for cores and for memory with a group inside each, and whether they are of version 1."""
    is_v1 = request.param == "version 1"
    parents: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split()[:3]
        for controller in ("cpu", "memory"):
            point = Path(mount.split()[4])
            if is_v1 and kind == "cgroup" and controller in options.split(","):
                parents[controller] = point
            controllers = point / "cgroup.controllers"
            if not is_v1 and kind == "cgroup2" and controller in controllers.read_text().split():
                parents[controller] = point
    if len(parents) < 2:
        pytest.skip(f"cgroups of {request.param} with cpu and memory are not mounted here")
    name = f"moeserve-test-{uuid.uuid4().hex}"
    made: list[Path] = []
    try:
        for parent in dict.fromkeys(parents.values()):
            for folder in (parent / name, parent / name / "inner"):
                folder.mkdir()
                made.append(folder)
            if not is_v1:
                (parent / name / "cgroup.subtree_control").write_text("+cpu +memory")
        yield parents["cpu"] / name, parents["memory"] / name, is_v1
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    finally:
        for folder in reversed(made):
            folder.rmdir()


def run_in(group: tuple[Path, Path, bool], num_bytes: int, program: str, *arguments: str) -> str:
    """Run a program with one core and a half and some memory, and return what it prints.

    The limits are those of a parent, and the process is in a group inside it.
    """
    cpu, memory, is_v1 = group
    if is_v1:
        (cpu / "cpu.cfs_quota_us").write_text("150000")
        (memory / "memory.limit_in_bytes").write_text(str(num_bytes))
    else:
        (cpu / "cpu.max").write_text("150000 100000")
        (memory / "memory.max").write_text(str(num_bytes))
    join = "; ".join(f"echo $$ > {folder}/inner/cgroup.procs" for folder in {memory, cpu})
    command = ["sh", "-c", f'{join}; exec "$0" -c "$@"', sys.executable, program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_a_real_group_limits_cores_and_memory(group: tuple[Path, Path, bool]) -> None:
    quota, num_cores, free = run_in(group, 300 * 2**20, MEASURE).split()
    assert (float(quota), int(num_cores)) == (1.5, 1)
    assert 0 < int(free) < 300 * 2**20


SHRINKS = """
import sys
from moeserve import LLM, SamplingParams
from moeserve.cgroups import memory_left
with LLM(
    sys.argv[1], expert_memory="90%", expert_store=sys.argv[2], packed_cache=0, kv_cache_memory="1MiB",
    enable_prefix_caching=False, show_progress=False,
) as llm:
    def tokens():
        (output,) = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        return output.outputs[0].token_ids
    expected = tokens()
    assert llm.expert_load().disk.num_released == 0
    filled = b"x" * (memory_left() - 24 * 2**20)
    while not (released := llm.expert_load().disk.num_released):
        assert tokens() == expected
    assert tokens() == expected
    print(released)
"""


def test_experts_give_memory_back_when_a_group_is_nearly_full(
    group: tuple[Path, Path, bool], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """With the same tokens."""
    folder = str(reference_named("qwen3-moe-wide").folder)
    assert int(run_in(group, 2**30, SHRINKS, folder, str(tmp_path / "store"))) > 0


REFUSED = """
import sys
from moeserve import LLM, SettingsError
try:
    LLM(sys.argv[1], kv_cache_memory="1GiB", max_num_seqs=100_000, dtype="float32", show_progress=False)
except SettingsError as error:
    print(error)
"""


def test_a_cache_is_refused_that_is_larger_than_the_memory_of_a_group(
    group: tuple[Path, Path, bool], plain: Reference
) -> None:
    message = run_in(group, 2**30, REFUSED, str(plain.folder))
    assert "kv_cache_memory=1073741824" in message
    assert "MiB are free" in message
