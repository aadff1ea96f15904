"""Log-probabilities of sampled tokens against those of transformers, as a trainer would compute them.

An engine samples at temperature 1; transformers reads the same tokens in each dtype. In rows with the same experts, the
engine scores the tokens again, and each token gets the experts that it has in transformers.

- *mean*, *p99*, *max*: of the absolute difference of log-probabilities, in nats. TRL reports mean and max as
  sampling/sampling_logp_difference.
- *K1*, *K3*: estimates of the divergence of sampler and trainer, from the trainer's log-probability less the sampler's:
  minus its mean, and the mean of exp(d) - 1 - d.
- *ratio*: the least and the largest exp(d), TRL's sampling/importance_sampling_ratio.
- *other top*: the share of tokens after which another token is the most likely one.
- *other experts*: the share of tokens and layers with another set of experts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moeserve import LLM, SamplingParams
from moeserve.api.verification import load_in_transformers
from moeserve.bench.checkpoints import find_checkpoint
from moeserve.bench.harness import Row, at_least, make_parser
from moeserve.bench.report import show_and_save
from moeserve.outputs import SequenceScore

Routes = npt.NDArray[np.integer[Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("rollout_mismatch", __doc__, rounds=None, threads=False)
    parser.add_argument("model", help="name or folder of a checkpoint with experts")
    parser.add_argument("--dtype", default="bfloat16", help="of the engine")
    parser.add_argument(
        "--reference-dtypes", nargs="+", metavar="DTYPE", default=["float32", "bfloat16"], help="of transformers"
    )
    parser.add_argument("--sequences", type=at_least(1), default=8)
    parser.add_argument("--prompt-tokens", type=at_least(1), default=32)
    parser.add_argument("--new-tokens", type=at_least(2), default=64)
    options = parser.parse_args(arguments)
    folder = str(find_checkpoint(options.model))
    length = options.prompt_tokens
    with LLM(folder, dtype=options.dtype, enable_return_routed_experts=True, show_progress=False) as llm:
        dice, num_ids = random.Random(0), llm.config.texts.vocab_size
        prompts = [{"prompt_token_ids": dice.choices(range(num_ids), k=length)} for _ in range(options.sequences)]
        params = SamplingParams(temperature=1, max_tokens=options.new_tokens, ignore_eos=True, seed=0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        sampled = llm.score(sequences, length, top_logprobs=1, use_tqdm=False)
        layers = list(llm.config.experts.routes.layers) if llm.config.experts.routes else []
        for dtype in options.reference_dtypes:
            found = read_by_transformers(folder, dtype, sequences)
            facts = {"benchmark": "rollout_mismatch", "model": options.model, "engine": options.dtype, "trainer": dtype}
            rows = [facts | {"experts": "own"} | compare(sampled, found, length, layers)]
            forced = [_in_all_layers(*each, layers) for each in zip(sampled, found, strict=True)]
            if layers and all(routes is not None for routes in forced):
                again = llm.score(sequences, length, top_logprobs=1, routed_experts=forced, use_tqdm=False)
                rows.append(facts | {"experts": "those of transformers"} | compare(again, found, length, layers))
            show_and_save(options.json, rows)


def read_by_transformers(
    folder: str, dtype: str, sequences: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Routes | None]]:
    """Return for each sequence the log-probabilities [tokens - 1, vocabulary] and the experts [tokens - 1, layers, K].

    The experts are None if the model's routers do not return them.
    """
    model = load_in_transformers(Path(folder), dtype)
    found = []
    for sequence in sequences:
        with torch.inference_mode(), recorded_experts(model) as experts:
            logits_TV = model(torch.tensor([sequence[:-1]]), use_cache=False).logits[0].float()
        routes = torch.stack(experts, dim=1).numpy() if experts else None
        found.append((logits_TV.log_softmax(-1), routes))
    return found


@contextmanager
def recorded_experts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the experts [T, K] that each router chooses, in the order of the layers."""
    experts: list[Tensor] = []

    def record(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) >= 3 and not output[2].is_floating_point():
            experts.append(output[2])

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield experts
    finally:
        for hook in hooks:
            hook.remove()


def compare(
    scores: Sequence[SequenceScore],
    found: Sequence[tuple[Tensor, Routes | None]],
    length: int,
    layers: Sequence[int],
) -> Row:
    """Return the differences of the tokens after `length` prompt tokens."""
    differences, num_other_top, num_other, num_choices = [], 0, 0, 0
    for score, (logprobs_TV, routes) in zip(scores, found, strict=True):
        own_TV = logprobs_TV[length - 1 :]
        differences.append(
            own_TV.gather(1, torch.tensor(score.token_ids)[:, None])[:, 0] - torch.tensor(score.logprobs)
        )
        best = [max(position, key=lambda token: position[token].logprob) for position in score.top_logprobs]
        num_other_top += int((own_TV.argmax(-1) != torch.tensor(best)).sum())
        if routes is not None and score.routed_experts is not None:
            own = np.sort(score.routed_experts[:, layers], axis=-1)
            num_other += int((own != np.sort(routes, axis=-1)).any(-1).sum())
            num_choices += own.shape[0] * own.shape[1]
    d = torch.cat(differences).double()
    return {
        "mean": float(d.abs().mean()),
        "p99": float(d.abs().quantile(0.99)),
        "max": float(d.abs().max()),
        "K1": float(-d.mean()),
        "K3": float((d.exp() - 1 - d).mean()),
        "ratio": f"{float(d.exp().min()):.3f} to {float(d.exp().max()):.3f}",
        "other top": num_other_top / len(d),
        "other experts": num_other / num_choices if num_choices else None,
    }


def _in_all_layers(score: SequenceScore, found: tuple[Tensor, Routes | None], layers: Sequence[int]) -> Routes | None:
    """Return the experts of transformers, [tokens - 1, layers with experts, K], with all other layers as zeros."""
    routes, own = found[1], score.routed_experts
    if routes is None or own is None:
        return None
    whole = np.zeros_like(own)
    whole[:, layers] = routes
    return whole
