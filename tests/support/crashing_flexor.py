"""`flexor`, but in each of the run's first lives rank 1 kills itself when it has done so many steps of that life.

    torchrun --nproc-per-node=2 --max-restarts=2 -m support.crashing_flexor STEPS,STEPS train ...

For tests of what starts a run again.
"""

import os
import signal
import sys

from flexor.cli.main import main
from support import trouble

if __name__ == "__main__":
    steps, *arguments = sys.argv[1:]
    lives, life = [int(number) for number in steps.split(",")], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1" and life < len(lives):
        trouble.before_step(lives[life], trouble.send(signal.SIGKILL))()
    sys.exit(main(arguments))
