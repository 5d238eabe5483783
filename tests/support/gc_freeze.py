"""Freezes all objects for the garbage collector. Imported last by the process that others are forked from.

Otherwise every forked process would look through a million objects for garbage, and copy their memory.
"""

import gc

gc.collect()
gc.freeze()
