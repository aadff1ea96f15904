"""Ranks on several hosts without Ray. The first host has the engine, and each other host an agent that starts ranks."""
