"""Processes on this host: starting them, messages to and from them, watching them, and reports of their failures."""
