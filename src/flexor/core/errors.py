"""Errors with a message for the user."""

import errno

from flexor.core.secrets import redacted
from flexor.core.text import visible

# problems of the disk, not of Flexor: full, over quota, read-only, no permission
UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP}  # paths that no file can have
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class FlexorError(Exception):
    """A problem the user can fix: the message says what is wrong, where, and how to fix it.

    The command line prints only the message, without a traceback, and exits with `exit_code`.
    A bug in Flexor is an `assert`, never a FlexorError.
    """

    exit_code = 1
    already_logged = False  # True if another process of the run has already printed it

    def __str__(self) -> str:
        """The message, without passwords, and with control characters shown: names in it may be from outside."""
        return visible(redacted(super().__str__()))


class ConfigError(FlexorError):
    """A setting is unknown, has the wrong type or contradicts another setting."""

    exit_code = 2


class DatasetError(FlexorError):
    """A dataset is missing or broken, or does not match its metadata."""


class SourceError(DatasetError):
    """A dataset's files can't be reached. Their content may be fine."""


class CheckpointError(FlexorError):
    """A checkpoint is missing, damaged or does not belong to this run."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one without text, how Python writes it."""
    return (str(error).strip() or repr(error)).splitlines()[0]
