"""`python -m flexor` is `flexor`."""

import sys

from flexor.cli import program

sys.exit(program())
