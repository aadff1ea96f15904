"""Other engines, measured on the same checkpoints as moeserve, each in its own environment and process.

`environments.py` lists the packages of each, `install.py` makes the environments, `peers.py` starts an engine and sends
it requests, and `adapters/` has the scripts that run inside its environment. moeserve itself imports none of them.
"""
