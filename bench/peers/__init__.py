"""Other engines, measured beside moeserve on the same checkpoints, each in its own environment and process.

    python -m moeserve.bench.peers.install llama.cpp vllm      makes their environments

`environments.py` lists what is installed for each, `peers.py` starts an engine and sends it requests, and `adapters/`
holds the scripts that run inside its environment. moeserve itself never imports any of them.
"""
