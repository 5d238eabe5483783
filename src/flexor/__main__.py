"""`python -m flexor` is `flexor`."""

import sys

from flexor.cli.main import program

sys.exit(program())
