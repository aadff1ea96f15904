"""Move experts between two ranks by their load, then start again with the result: `python examples/rebalance.py`."""

import tempfile
from pathlib import Path

from moeserve import LLM, SamplingParams
from moeserve.telemetry.expert_load import LoadWindow, ranks_max_over_mean

topics = ["rain", "bread", "music", "gold", "trains", "the moon", "tea", "numbers", "ice", "the law", "bees", "glass"]
prompts = [f"Here is what I know about {topic}:" for topic in topics]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

# A placement fits one number of ranks and slots, so both engines use the same layout. The default model has 4 experts
# in each layer, so 2 redundant ones give each rank 3 slots.
layout = dict(data_parallel_size=2, num_redundant_experts=2)


def show(when: str, window: LoadWindow) -> None:
    print(f"{when}: placement epoch {window.placement_epoch}, fullest rank over mean {ranks_max_over_mean(window):.2f}")


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "placement.json"

    # Short windows and a long horizon move experts within seconds. The defaults, 256 and 10000 steps, suit engines that
    # serve for hours.
    with LLM(rebalance="auto", expert_load_window=16, rebalance_horizon=10**9, **layout) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        show("before", llm.expert_load())
        for _ in range(2):  # a window, then a planning step for each layer, then the moves
            llm.generate(prompts, params, use_tqdm=False)
        llm.expert_load()  # discards the counts from before and during the moves
        llm.generate(prompts, params, use_tqdm=False)
        show("after", llm.expert_load())
        llm.save_placement(path)

    with LLM(rebalance=str(path), **layout) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        show("started again", llm.expert_load())
