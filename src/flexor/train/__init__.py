"""Training: the loop, and what it is made of.

`from flexor import train` is the function that trains, whether this folder has been imported before or not: so the
folder can be called.
"""

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from flexor.train.loop import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Train
