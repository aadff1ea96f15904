"""Train a small mixture of experts with TRL's GRPO, while a moeserve server generates its outputs.

pip install 'trl==1.16.*'
python examples/rl/grpo_server.py --curve rewards.json

TRL calls `Rollouts` for the outputs of each step. It sends the new weights first. The reward is that of grpo.py.
"""

import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from grpo import Checks, config_of, parser_of, prompts, report, reward, save_model
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from moeserve.rl import WeightSender


class Server:
    """A server and its administrator's key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())


class Rollouts:
    """TRL's `rollout_func`: outputs of the weights that the trainer has now."""

    def __init__(self, server: Server, transport: str, checks: Checks, *, compares_checksums: bool) -> None:
        self._server, self._checks, self._compares_checksums = server, checks, compares_checksums
        self._sender = WeightSender(server.url, transport, api_key=server.key)
        self._version = ""

    def __call__(self, texts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return one output for each prompt."""
        self._send_weights(trainer)
        prompt_ids = trainer.processing_class(texts)["input_ids"]
        body = {"model": "trained", "prompt": prompt_ids, "max_tokens": trainer.args.max_completion_length}
        body |= {"temperature": trainer.args.temperature, "logprobs": 0, "return_token_ids": True}
        choices = self._server.post("/v1/completions", body)["choices"]
        assert all(choice["weight_versions"][0][0] == self._version for choice in choices)
        completion_ids = [choice["token_ids"] for choice in choices]
        logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
        self._compare(trainer, prompt_ids, completion_ids, logprobs)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def _send_weights(self, trainer: GRPOTrainer) -> None:
        version = f"step-{trainer.state.global_step}"
        if version == self._version:
            return
        self._sender.send(trainer.model.state_dict(), version)
        self._version = version
        if self._compares_checksums:
            found = self._server.post("/weight_checker", {"action": "checksum"})["checksums"]
            self._checks.compare_checksums(trainer, found)

    @torch.no_grad()
    def _compare(
        self,
        trainer: GRPOTrainer,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        logprobs: list[list[float]],
    ) -> None:
        """Note the largest difference from the log-probabilities of the trainer's own forward pass."""
        sequences = [torch.tensor([*prompt, *more]) for prompt, more in zip(prompt_ids, completion_ids, strict=True)]
        padded_BT = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # attention is causal
        own_BTV = (trainer.model(padded_BT).logits / trainer.args.temperature).log_softmax(-1)
        largest = 0.0
        for own_TV, prompt, completion, sampled in zip(own_BTV, prompt_ids, completion_ids, logprobs, strict=True):
            own_T = own_TV[len(prompt) - 1 :][range(len(completion)), completion]
            largest = max(largest, (own_T - torch.tensor(sampled)).abs().max().item())
        self._checks.differences.append(largest)


@contextmanager
def serving(folder: str, seed: int) -> Iterator[Server]:
    """Start a server of a model, and wait until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = secrets.token_hex(16)
    flags = ["--rl", "--admin-key", key, "--logprobs-mode", "processed_logprobs", "--max-model-len", "128"]
    flags += ["--port", str(port), "--served-model-name", "trained", "--seed", str(seed)]
    server = Server(f"http://127.0.0.1:{port}", key)
    with subprocess.Popen([sys.executable, "-m", "moeserve", "serve", folder, *flags]) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{server.url}/ready").close()
                    break
                except urllib.error.URLError:
                    assert process.poll() is None, "the server has ended"
                    time.sleep(0.2)
            yield server
        finally:
            process.terminate()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--transport", choices=["shm", "disk", "tcp"], default="shm")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of the trainer: the curve depends on this number, by rounding
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.seed)
        with serving(folder, options.seed) as server:
            trainer = GRPOTrainer(
                model=folder,
                reward_funcs=reward,
                args=config_of(folder, options.seed, options.steps),
                train_dataset=prompts(),
                rollout_func=Rollouts(server, options.transport, checks, compares_checksums=options.checksums),
                callbacks=[checks],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    report(checks, options)


if __name__ == "__main__":
    main()
