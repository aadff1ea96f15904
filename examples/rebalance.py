"""Two ranks whose experts move as loads say, and a start with what came of it: `python examples/rebalance.py`."""

import tempfile
from pathlib import Path

from moeserve import LLM, SamplingParams
from moeserve.telemetry.expert_load import LoadWindow, ranks_max_over_mean

topics = ["rain", "bread", "music", "gold", "trains", "the moon", "tea", "numbers", "ice", "the law", "bees", "glass"]
prompts = [f"Here is what I know about {topic}:" for topic in topics]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

# A placement is of so many ranks and slots: both starts need the same. The default model has 4 experts in each layer,
# which with 2 redundant ones makes 3 slots on each rank.
layout = dict(data_parallel_size=2, num_redundant_experts=2)


def show(when: str, window: LoadWindow) -> None:
    print(f"{when}: placement epoch {window.placement_epoch}, fullest rank over mean {ranks_max_over_mean(window):.2f}")


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "placement.json"

    # Short windows and a long horizon, so that experts move within seconds. The defaults, 256 and 10000 steps, are for
    # engines that serve for hours.
    with LLM(rebalance="auto", expert_load_window=16, rebalance_horizon=10**9, **layout) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        show("before", llm.expert_load())
        for _ in range(2):  # a window, then a step of planning for each layer that pays, then the moves
            llm.generate(prompts, params, use_tqdm=False)
        llm.expert_load()  # what was counted while experts moved; the next call tells of what came after
        llm.generate(prompts, params, use_tqdm=False)
        show("after", llm.expert_load())
        llm.save_placement(path)

    with LLM(rebalance=str(path), **layout) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        show("started again", llm.expert_load())
