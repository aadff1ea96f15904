"""Other engines, measured beside moeserve on the same checkpoints, each in an environment and a process of its own.

    python -m moeserve.bench.peers.install llama.cpp vllm      makes their environments
    python -m moeserve.bench.peers.check llama.cpp-bf16        asks whether one computes what transformers computes

`environments.py` says what is installed for each, `peers.py` how one is started and asked, and `adapters/` holds the
scripts that answer. moeserve itself never imports anything of them.
"""
