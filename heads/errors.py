"""The one exception that a command turns into a clear line and exit code 2."""


class UserError(ValueError):
    """Something the user can mend. The message is one line: what is wrong, then what to do about it."""
