"""Writes the checkpoints of this folder with gptqmodel and auto-round. The README has the command.

    python write.py NAME...

Each checkpoint gets digests.json beside it: the SHA-256 of each weight as the library dequantises it, in float16.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("AR_DISABLE_META_LOAD", "1")

import torch
import transformers
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # type: ignore[import-not-found, unused-ignore]
from gptqmodel.quantization import FORMAT, METHOD  # type: ignore[import-not-found, unused-ignore]
from torch import nn

GROUP_SIZE = int(os.environ.get("GROUP_SIZE", "32"))
VOCAB_SIZE = 32
AWQ = dict(quant_method=METHOD.AWQ, format=FORMAT.GEMM)
OF_GPTQMODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("Mixtral", dict(sym=True, desc_act=False)),
    "gptq-act-order": ("Qwen3Moe", dict(sym=False, desc_act=True, act_group_aware=False)),
    "gptq-v2": ("Qwen3Moe", dict(sym=False, desc_act=False, format=FORMAT.GPTQ_V2)),
    "awq": ("Mixtral", dict(sym=False, **AWQ)),
}
OF_AUTO_ROUND = {
    "auto-round": ("Mixtral", "auto_round", True),
    "auto-round-awq": ("Qwen3Moe", "auto_awq", False),
}


def main() -> None:
    into = Path(os.environ.get("INTO", Path(__file__).parent))
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            original, written = Path(work) / "original", Path(work) / "written"
            family, settings = OF_GPTQMODEL[name] if name in OF_GPTQMODEL else (OF_AUTO_ROUND[name][0], {})
            write_original(original, family, width=max(64, GROUP_SIZE) if "awq" in name else GROUP_SIZE)
            if name in OF_GPTQMODEL:
                quantise_with_gptqmodel(original, written, settings)
            else:
                written = quantise_with_auto_round(original, written, *OF_AUTO_ROUND[name][1:])
            keep(written, into / name)


def write_original(folder: Path, family: str, width: int) -> None:
    config = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=max(64, GROUP_SIZE),
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2 if width >= 64 else 1,
        head_dim=max(32, GROUP_SIZE // 2),
        max_position_embeddings=64,
        initializer_range=0.2,
        num_experts_per_tok=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    of_family = {
        "Mixtral": dict(num_local_experts=2),
        "Qwen3Moe": dict(num_experts=2, moe_intermediate_size=width, tie_word_embeddings=False, norm_topk_prob=True),
    }
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**config, **of_family[family])
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    model.half().save_pretrained(folder)
    words = {"model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCAB_SIZE)}, "unk_token": "w0"}}
    words |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="w1")
    tokenizer.save_pretrained(folder)


def texts() -> list[str]:
    tokens = torch.randint(2, VOCAB_SIZE, (32, 48), generator=torch.Generator().manual_seed(1))
    return [" ".join(f"w{token}" for token in row) for row in tokens.tolist()]


def quantise_with_gptqmodel(source: Path, target: Path, settings: dict[str, Any]) -> None:
    config = QuantizeConfig(bits=4, group_size=GROUP_SIZE, offload_to_disk=False, **settings)
    model = GPTQModel.load(str(source), config, device="cpu", dtype=torch.float16)
    model.quantize(texts(), batch_size=1)
    model.save(str(target))


def quantise_with_auto_round(source: Path, target: Path, form: str, is_symmetric: bool) -> Path:
    from auto_round import AutoRound  # type: ignore[import-not-found, unused-ignore]

    data = source / "texts.json"
    data.write_text(json.dumps([{"text": text} for text in texts()]))
    rounding = AutoRound(
        str(source),
        bits=4,
        group_size=GROUP_SIZE,
        sym=is_symmetric,
        iters=2,
        nsamples=8,
        seqlen=32,
        dataset=str(data),
        device_map="cpu",
    )
    rounding.quantize_and_save(str(target), format=form)
    return next(target.rglob("config.json")).parent


def keep(written: Path, target: Path) -> None:
    """Copy what the library wrote, and what its own layers return for each unit vector: the dequantised weights."""
    target.mkdir(exist_ok=True, parents=True)
    shutil.copy(written / "config.json", target)
    shutil.copy(next(written.glob("*.safetensors")), target / "model.safetensors")
    model = GPTQModel.load(str(written), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    digests = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "qweight"):
            num_inputs = getattr(module, "in_features", None) or module.infeatures
            weight_IO = module(torch.eye(num_inputs, dtype=torch.float16))
            weight_OI = weight_IO.T.contiguous().numpy()
            digests[f"{name}.weight"] = hashlib.sha256(weight_OI.tobytes()).hexdigest()
    assert digests, "the library quantised nothing"
    (target / "digests.json").write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
