"""The errors a person is meant to read."""

import errno

# the disk's fault, not ours: full, over quota, read-only, not permitted
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class FlexorError(Exception):
    """Something the user can put right: says what is wrong, where, and what to do about it.

    The command line prints the message alone, without a traceback, and exits with `exit_code`.
    A mistake of ours is an `assert`, never a FlexorError.
    """

    exit_code = 1
    said = False  # by another process of the run


class ConfigError(FlexorError):
    """A setting is unknown, of the wrong type or impossible together with another one."""

    exit_code = 2


class DatasetError(FlexorError):
    """A dataset is missing, broken or not what its metadata says."""


class SourceError(DatasetError):
    """A dataset's files can't be reached: nothing is wrong with what they hold."""


class CheckpointError(FlexorError):
    """A checkpoint is missing, damaged or does not belong to this run."""
