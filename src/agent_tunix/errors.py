"""What a user can mend: it is shown as it is written, without a traceback."""

from __future__ import annotations

import errno


class UserError(Exception):
    """A mistake in the configuration, the data or a file; the message says what, where and what to do."""

    exit_code = 2


class DivergenceError(UserError):
    """Numbers got out of hand and were kept from the weights."""

    exit_code = 3


def file_mistake(fault: OSError) -> UserError | None:
    """What to say of a fault of files that a user can mend; nothing of any other."""
    full = "Free some space; training.resume=<folder> goes on from the last checkpoint."
    refused = "Choose a folder that can be written to, as in hydra.run.dir=<folder> or hydra.sweep.dir=<folder>."
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), full)
    remedies |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), refused)
    if fault.errno not in remedies:
        return None
    return UserError(f"{fault.filename or 'A file'}: {fault.strerror}. {remedies[fault.errno]}")
