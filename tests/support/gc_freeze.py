"""Imported last by the process that others are forked from: what it has imported lives for ever.

Otherwise every forked process would look through a million objects for garbage, and copy the memory they lie in.
"""

import gc

gc.collect()
gc.freeze()
