"""What a user can mend: it is shown as it is written, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the configuration, the data or a file; the message says what, where and what to do."""

    exit_code = 2


class DivergenceError(UserError):
    """Numbers got out of hand and were kept from the weights."""

    exit_code = 3
