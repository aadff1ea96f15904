"""Names that vLLM has in `vllm.utils`."""

from moeserve.utils.argparse_utils import FlexibleArgumentParser
from moeserve.utils.network_utils import get_open_port

__all__ = ["FlexibleArgumentParser", "get_open_port"]
