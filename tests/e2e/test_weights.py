"""Loading: how much memory it takes, shards, dtypes, dummy weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from conftest import Reference
from transformers import MixtralConfig, MixtralForCausalLM

from moeserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from moeserve.config import Settings, resolve
from moeserve.models import registry
from moeserve.models.weights import load_weights, shards_by_tensor

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

facts = registry.read_facts(sys.argv[1])
config = resolve(Settings.from_options({}), facts, has_cuda=False, num_cores=1)
torch.ones(4).bfloat16() @ torch.ones(4, 4).bfloat16()  # what torch needs once
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = registry.build(config)
shards = shards_by_tensor(Path(sys.argv[1]))
with torch.inference_mode():
    load_weights(shards, model.destinations(shards), show_progress=False)
weights = sum(weight.nbytes for weight in model.parameters())
print((resident("VmHWM") - before) / weights, weights)
"""


def test_peak_memory_while_loading_is_little_more_than_the_weights(tmp_path: Path) -> None:
    """At most 1.2 times the weights, mapped pages of the shards included. The shards are larger than what is mapped
    at a time, so that a loader that kept them would show."""
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        MixtralForCausalLM(config).save_pretrained(tmp_path)  # 1.3 GB in one file
    finally:
        torch.set_default_dtype(torch.float32)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    )
    ratio, num_bytes = map(float, run.stdout.split())
    assert num_bytes > 1e9
    assert 1.0 <= ratio <= 1.2


def test_sharded_checkpoint_loads_alike(plain: Reference, tmp_path: Path) -> None:
    plain.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    prompts = plain.prompts(9, 20)
    with LLM(tmp_path, dtype="float32") as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert tokens == [plain.greedy(prompt, 16) for prompt in prompts]


def test_auto_dtype_is_the_checkpoints(plain: Reference, tmp_path: Path) -> None:
    with LLM(plain.folder) as llm:
        assert llm.config.dtype == "float32"
    for file in plain.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path) as llm:
        assert llm.config.dtype == "bfloat16"
        assert {weight.dtype for weight in llm.core.executor.worker.runner.model.parameters()} == {torch.bfloat16}


def test_bf16_is_as_close_to_float32_as_transformers_bf16_is(plain: Reference) -> None:
    """Mean difference of log-probabilities to float32, no more than twice transformers' own."""
    prompt = plain.prompts(200, seed=7)[0]
    exact = plain.logits(prompt).log_softmax(-1)
    rounded = MixtralForCausalLM.from_pretrained(plain.folder, dtype=torch.bfloat16)
    rounded.config._experts_implementation = "eager"
    with torch.no_grad():
        theirs = rounded(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    with LLM(plain.folder, dtype="bfloat16") as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        given = llm.generate([prompt], params)[0].prompt_logprobs
    targets = torch.tensor(prompt[1:])
    at_targets = exact[:-1].gather(1, targets[:, None])[:, 0]
    their_gap = (theirs[:-1].gather(1, targets[:, None])[:, 0] - at_targets).abs().mean()
    ours = torch.tensor([row[token].logprob for row, token in zip(given[1:], prompt[1:], strict=True)])
    assert (ours - at_targets).abs().mean() <= 2 * their_gap


def test_dummy_weights_need_a_config_only_and_follow_the_seed(plain: Reference, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain.folder / "config.json").read_text())
    prompts = plain.prompts(9, 20)

    def tokens(seed: int) -> list[list[int]]:
        with LLM(tmp_path, load_format="dummy", seed=seed) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
