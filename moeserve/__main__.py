"""`python -m moeserve` is the command line."""

import sys

from moeserve.cli import main

sys.exit(main())
