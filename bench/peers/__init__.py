"""Other engines, measured on the same checkpoints as moeserve, each in its own environment and process.

    python -m moeserve.bench.peers.install llama.cpp vllm      makes their environments

`environments.py` lists the packages of each, `peers.py` starts an engine and sends it requests, and `adapters/` has the
scripts that run inside its environment. moeserve itself never imports any of them.
"""
