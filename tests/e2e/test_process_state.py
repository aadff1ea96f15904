"""The state of the user's program while an `LLM` is open, and after: it is as before."""

from __future__ import annotations

import json
import subprocess
import sys

from reference_models import Reference

PROGRAM = """
import json, logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch
from moeserve import LLM, SamplingParams

def state():
    return dict(
        start_method=multiprocessing.get_start_method(allow_none=True),
        sharing=torch.multiprocessing.get_sharing_strategy(),
        dtype=str(torch.get_default_dtype()),
        grad=torch.is_grad_enabled(),
        threads=torch.get_num_threads(),
        precision=torch.get_float32_matmul_precision(),
        denormals=float(torch.tensor(1e-40) * 1) != 0,
        environment=dict(os.environ),
        signals=[str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        hooks=[str(sys.excepthook), str(threading.excepthook)],
        logging=[logging.root.level, str(logging.root.handlers)],
        filters=len(warnings.filters),
        folder=os.getcwd(),
        random=[torch.initial_seed(), hash(random.getstate()), int(numpy.random.get_state()[1][0])],
        cores=sorted(os.sched_getaffinity(0)),
        limits=[sys.getswitchinterval(), sys.getrecursionlimit()],
    )

torch.set_num_threads(1)
states = [state()]
with LLM(sys.argv[1]) as llm:
    states.append(state())
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2))
    states.append(state())
states.append(state())
print(json.dumps(states))
"""


def test_a_program_keeps_its_state(plain: Reference) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(plain.folder)], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    before, *later = json.loads(run.stdout)
    for each in later:
        assert each == before
