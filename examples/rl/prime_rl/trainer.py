r"""A trainer for prime-rl's orchestrator on a CPU: policy gradient on its micro batches, weights through folders.

In this folder, which is on PYTHONPATH, each in a terminal with MOESERVE_KEY=KEY, where MODEL has a chat template:

    moeserve serve MODEL --rl --admin-key KEY --api-key USER --served-model-name MODEL \
        --logprobs-mode processed_logprobs
    env-server @ environment.toml
    orchestrator @ orchestrator.toml
    OMP_NUM_THREADS=1 python trainer.py MODEL outputs --num-steps 20
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchReceiver
from prime_rl.transports.rollouts.types import MicroBatch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def log_probabilities(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the log-probability of each token given those before it in its sequence; 0 for first tokens."""
    ids, start, found = torch.tensor(batch.input_ids), 0, []
    for length in batch.seq_lens:
        sequence = ids[start : start + length][None]
        logits = model(input_ids=sequence).logits[0, :-1].float()
        logits = logits / torch.tensor(batch.temperatures[start + 1 : start + length])[:, None].clamp(min=1e-3)
        of_tokens = logits.log_softmax(-1).gather(1, sequence[0, 1:, None])[:, 0]
        found.append(torch.cat([torch.zeros(1), of_tokens]))
        start += length
    return torch.cat([*found, torch.zeros(len(ids) - start)])


def broadcast(model: PreTrainedModel, output_dir: Path, step: int) -> None:
    """Write the weights of a step, and then the file that tells the orchestrator that all of them are there."""
    folder = output_dir / "broadcasts" / f"step_{step}"
    model.save_pretrained(folder)
    (folder / "STABLE").touch()
    shutil.rmtree(output_dir / "broadcasts" / f"step_{step - 4}", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    receiver = FileSystemMicroBatchReceiver(arguments.output_dir, data_rank=0, current_step=1)
    broadcast(model, arguments.output_dir, 0)
    for step in range(1, arguments.num_steps + 1):
        receiver.wait()
        batches = receiver.receive()
        num_tokens = sum(sum(batch.loss_mask) for batch in batches)
        difference, started_s = 0.0, time.monotonic()
        for batch in batches:
            mask = torch.tensor(batch.loss_mask)
            own, sampled = log_probabilities(model, batch), torch.tensor(batch.inference_logprobs)
            difference = max(difference, (own - sampled)[mask].abs().max().item() if mask.any() else 0.0)
            ratio = (own - sampled).exp().clamp(max=2.0)
            loss = -(ratio * torch.tensor(batch.advantages))[mask].sum() / max(1, num_tokens)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        broadcast(model, arguments.output_dir, step)
        seconds = time.monotonic() - started_s
        print(f"step {step}: {num_tokens} tokens, largest difference {difference:.1e}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
