"""transformers: `generate` with its KV cache, in bf16, otherwise with its defaults.

The process should be started with the libraries preloaded that PyTorch recommends for CPUs: tcmalloc and Intel's
OpenMP.
"""

from __future__ import annotations

from .protocol import Generate, Loader, serve


def load(model: str, num_threads: int, max_requests: int, max_request_tokens: int) -> Loader:
    import torch
    import transformers

    torch.set_num_threads(num_threads)

    def make() -> Generate:
        engine = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        engine.generation_config.eos_token_id = None  # never stop early
        engine.generation_config.pad_token_id = 0  # never used, but required

        def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
            prompt_ids = torch.tensor(prompts)
            output_ids = engine.generate(
                prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=num_tokens, do_sample=False
            )
            tokens: list[list[int]] = output_ids[:, prompt_ids.shape[1] :].tolist()
            return tokens

        return generate

    return Loader(f"transformers {transformers.__version__}", {"threads": num_threads}, make)


if __name__ == "__main__":
    serve(load)
