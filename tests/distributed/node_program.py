"""What a test has `moeserve launch` run on the first host: an engine that is told over a pipe what to do."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ray.util import get_placement_group, placement_group_table, remove_placement_group

from moeserve import LLM, MoeserveError, SamplingParams


def living_groups() -> list[str]:
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def main() -> None:
    """Orders come as lines of JSON, answers go to a file, one line each."""
    orders, answers = sys.argv[1:]
    llm: LLM | None = None
    with open(answers, "w", buffering=1) as said, open(orders) as lines:
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            started = time.monotonic()
            answer: dict[str, Any] = {}
            try:
                match order.pop("do"):
                    case "start":
                        llm = LLM(executor="ray", **order)
                    case "generate":
                        assert llm is not None
                        params = SamplingParams(temperature=0, max_tokens=order["max_tokens"], ignore_eos=True)
                        outputs = llm.generate(order["prompts"], params, use_tqdm=False)
                        answer["tokens"] = [output.outputs[0].token_ids for output in outputs]
                    case "stop":
                        assert llm is not None
                        llm.shutdown()
                    case "groups":
                        answer["groups"] = len(living_groups())
                    case "remove groups":
                        names = living_groups()
                        answer["groups"] = len(names)
                        for name in names:
                            remove_placement_group(get_placement_group(name))
            except MoeserveError as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            said.write(json.dumps(answer | {"seconds": time.monotonic() - started}) + "\n")


if __name__ == "__main__":
    main()
