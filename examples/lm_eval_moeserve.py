"""Evaluate a model with lm-eval: `python examples/lm_eval_moeserve.py --model moeserve --tasks TASK`.

The arguments are those of the command `lm_eval`. `--model_args` are settings of `LLM`, with the checkpoint as in
`pretrained=FOLDER,tensor_parallel_size=2`; without `pretrained`, the default model is evaluated.
"""

from __future__ import annotations

from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise SystemExit(f"lm-eval is missing ({error}): pip install '.[lm-eval]' in a clone of moeserve") from None

from moeserve import LLM, SamplingParams

# Texts of a context and its continuation, or None, and the tokens of both.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("moeserve")
class MoeserveLM(TemplateLM):
    """A model of moeserve. The engine receives all requests of a call at once, and batches them itself."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            pretrained: checkpoint folder; none: the default model.
            max_gen_toks: most tokens of an output for tasks that name no number.
            batch_size, max_batch_size: ignored; `max_num_seqs` is the engine's limit.
            device: that of `LLM`; lm-eval's default, cuda:0, stands for the default of `LLM`.
            settings: of `LLM`.
        """
        super().__init__()
        if device not in (None, "cuda:0"):
            settings["device"] = device
        self.llm = LLM(pretrained, **settings)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_gen_toks = max_gen_toks
        # Most tokens before one that is scored: the prompt holds that one too, and the engine generates another.
        self.max_length = self.llm.config.schedule.max_model_len - 2

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its beginning."""
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False  # a chat template has added them
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **given)

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the greedy one."""
        for _texts, _context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} tokens, not 1 to {self.max_length}")
        prompts = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        answers = []
        for (_, _, continuation), output in zip(
            requests, self.llm.generate(prompts, params, use_tqdm=not disable_tqdm), strict=True
        ):
            assert output.prompt_logprobs is not None
            positions = output.prompt_logprobs[-len(continuation) :]
            scores = [position[token_id] for position, token_id in zip(positions, continuation, strict=True)]
            answers.append((sum(score.logprob for score in scores), all(score.rank == 1 for score in scores)))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[Pair] = []
        ends = []  # of each text among all windows
        for request in requests:
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        return [sum(scores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        end = self.tokenizer.decode(self.eot_token_id)
        prompts, params, stops = [], [], []
        for context, options in (request.args for request in requests):
            given = {"temperature": 0.0} | normalize_gen_kwargs(options, self.max_gen_toks)
            del given["do_sample"]  # false: the temperature is 0
            stop = [text for text in handle_stop_sequences(given.pop("until"), end) if text]
            max_tokens = given.pop("max_gen_toks")
            room = self.llm.config.schedule.max_model_len - max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={max_tokens} leaves no room for a prompt; lower it or raise max_model_len"
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(SamplingParams(max_tokens=max_tokens, stop=stop, **{"skip_special_tokens": False} | given))
            stops.append(stop)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]


if __name__ == "__main__":
    cli_evaluate()
