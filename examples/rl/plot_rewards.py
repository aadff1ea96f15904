"""Plot the rewards of several runs of grpo.py: `python examples/rl/plot_rewards.py PICTURE.svg REWARDS.json ...`."""

import json
import sys
from pathlib import Path

from moeserve.bench.plots import save_lines

picture, *files = map(Path, sys.argv[1:])
lines = {f"seed {seed}": json.loads(file.read_text()) for seed, file in enumerate(files)}
lines["random words"] = [6 / 66] * max(map(len, lines.values()))
save_lines(picture, lines, ("step", "mean reward"))
