"""`python -m flexor` is `flexor`."""

import sys

from flexor.cli import main

sys.exit(main())
