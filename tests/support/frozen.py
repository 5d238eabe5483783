"""Imported last by a process that others are forked from: what is there by then is never looked at again.

Else the garbage collector of each of them would touch, and by that copy, all of it.
"""

import gc

gc.collect()
gc.freeze()
