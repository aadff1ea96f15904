"""The program that runs on the first of several hosts in tests: an engine that obeys commands from a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moeserve import LLM, MoeserveError, SamplingParams

with contextlib.suppress(ImportError):  # some tests need no Ray
    import ray
    from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def living_groups() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def object_bytes() -> int:
    """Return the bytes in Ray's shared memory on all nodes."""
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0))


def generate(llm: LLM, command: dict[str, Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True)
    outputs = llm.generate(command["prompts"], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def generate_in_group(bundles: list[dict[str, float]], command: dict[str, Any]) -> dict[str, Any]:
    """Generate in a task inside a placement group, as where another program has placed the engine."""
    group = placement_group(bundles, strategy="STRICT_SPREAD", name="adopted")
    ray.get(group.ready())

    def task() -> dict[str, Any]:
        llm = LLM(**command["settings"])
        try:
            return {
                "tokens": generate(llm, command),
                "groups": living_groups(),
                "executor": llm.config.parallel.executor,
            }
        finally:
            llm.shutdown()

    placed = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    found: dict[str, Any] = ray.get(ray.remote(num_cpus=0)(task).options(scheduling_strategy=placed).remote())
    remove_placement_group(group)
    return found


def main() -> None:
    """Read commands as lines of JSON, and write an answer to each as a line of a file."""
    commands, answers = sys.argv[1:]
    llm: LLM | None = None
    with open(answers, "w", buffering=1) as output, open(commands) as lines:
        for line in lines:
            command: dict[str, Any] = json.loads(line)
            started = time.monotonic()
            answer: dict[str, Any] = {}
            try:
                match command.pop("do"):
                    case "start":
                        llm = LLM(**command)
                        answer["num_blocks"] = llm.core.num_blocks
                    case "generate":
                        assert llm is not None
                        answer["tokens"] = generate(llm, command)
                    case "placement":
                        assert llm is not None
                        answer["layers"] = llm.expert_load().logical_of_slot
                    case "generate in group":
                        answer |= generate_in_group(command.pop("bundles"), command)
                    case "scale":
                        assert llm is not None
                        with ThreadPoolExecutor(1) as thread:
                            tokens = thread.submit(generate, llm, command)
                            llm.scale(command["size"])
                            answer["tokens"] = tokens.result()
                    case "stop":
                        assert llm is not None
                        llm.shutdown()
                    case "left":
                        answer |= {"groups": living_groups(), "object_bytes": object_bytes()}
                    case "remove groups":
                        names = living_groups()
                        answer["groups"] = len(names)
                        for name in names:
                            remove_placement_group(get_placement_group(name))
            except MoeserveError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            output.write(json.dumps(answer | {"seconds": time.monotonic() - started}) + "\n")


if __name__ == "__main__":
    main()
