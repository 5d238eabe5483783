"""`flexor`, but in the first life of the run rank 1 kills itself when it has done some steps.

    torchrun --nproc-per-node=2 --max-restarts=1 tests/distributed/crashing.py STEPS train ...

For tests of what starts a run again.
"""

import os
import signal
import sys

import trouble

from flexor.cli import main

if __name__ == "__main__":
    steps, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        trouble.at_call(trouble.STEP, int(steps) + 1, trouble.send(signal.SIGKILL))
    sys.exit(main(arguments))
