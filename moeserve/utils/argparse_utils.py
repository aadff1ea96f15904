"""Names that vLLM has in `vllm.utils.argparse_utils`."""

from __future__ import annotations

import argparse
import sys
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser of flags whose words may be joined by hyphens or underscores."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed options and the remaining arguments; see `argparse`."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_with_hyphens(each) for each in given], namespace)


def _with_hyphens(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument
