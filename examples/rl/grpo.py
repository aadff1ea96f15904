"""Train a small mixture of experts with TRL's GRPO, while moeserve generates its outputs in the same process.

pip install 'trl==1.16.*'
PYTHONPATH=examples/rl/as_vllm python examples/rl/grpo.py --curve rewards.json

The reward of an output is the share of its tokens that are among 6 of the 64 words.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from moeserve import LLM

NUM_WORDS, NUM_GOOD = 64, 6
DIFFERENCE = "sampling/sampling_logp_difference/max"


def save_model(folder: Path, seed: int) -> None:
    """Save a random model of 5 million parameters in float32, with a tokenizer of words w0 to w63."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=NUM_WORDS + 2,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=NUM_WORDS,
        pad_token_id=NUM_WORDS + 1,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)  # experts of a trained model differ clearly
    model.save_pretrained(folder)
    words = {f"w{word}": word for word in range(NUM_WORDS)} | {"<end>": NUM_WORDS, "<pad>": NUM_WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<pad>")
    fast.save_pretrained(folder)


def reward(completion_ids: list[list[int]], **others: object) -> list[float]:
    """Return the share of good words of each output."""
    return [sum(token < NUM_GOOD for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]


def prompts() -> Dataset:
    """Return all prompts of two of the first words."""
    return Dataset.from_dict({"prompt": [f"w{first} w{second}" for first in range(8) for second in range(8)]})


def config_of(folder: str, seed: int, num_steps: int, **more: object) -> GRPOConfig:
    """Return TRL's configuration, without what depends on where outputs are generated."""
    return GRPOConfig(
        output_dir=f"{folder}/trainer",
        max_steps=num_steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=24,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **more,
    )


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--curve", type=Path, help="file for the mean reward of each step")
    parser.add_argument("--checksums", action="store_true", help="compare with a new engine after each update")
    return parser


def report(checks: "Checks", options: argparse.Namespace) -> None:
    """Print the results of a run, and write its curve."""
    random, last = NUM_GOOD / (NUM_WORDS + 2), sum(checks.rewards[-10:]) / len(checks.rewards[-10:])
    print(f"mean reward of the last 10 steps: {last:.3f}, {last / random:.1f} times that of random words")
    print(f"{DIFFERENCE}: at most {max(checks.differences):.1e} in {len(checks.differences)} steps")
    if options.checksums:
        print(f"{checks.num_checksums} updates gave the weights of a new engine")
    if options.curve is not None:
        options.curve.write_text(json.dumps(checks.rewards))


class Checks(TrainerCallback):
    """Notes the reward of each step, and compares the engine with the trainer."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.differences: list[float] = []
        self.num_checksums = 0

    def on_log(self, args: object, state: object, control: object, logs: dict, **others: object) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])
            if DIFFERENCE in logs:
                self.differences.append(logs[DIFFERENCE])

    def compare_checksums(self, trainer: GRPOTrainer, found: dict[str, str]) -> None:
        """Require that the engine has the weights that a new engine loads from the trainer's checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            trainer.model.save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
            with LLM(folder, rl=True, max_model_len=128, kv_cache_memory="8MiB", show_progress=False) as fresh:
                assert fresh.weight_checksums() == found
        self.num_checksums += 1


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)  # of the trainer: the curve depends on this number, by rounding
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.seed)
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=config_of(
                folder, options.seed, options.steps, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=128
            ),
            train_dataset=prompts(),
            callbacks=[checks],
        )
        trainer.remove_callback(PrinterCallback)
        engine = trainer.vllm_generation.llm
        if options.checksums:
            engine.on_new_weights = lambda: checks.compare_checksums(trainer, engine.weight_checksums())
        trainer.train()
        engine.shutdown()
    report(checks, options)


if __name__ == "__main__":
    main()
