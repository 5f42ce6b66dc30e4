"""The one exception that a command turns into a clear line and exit code 2."""


class UserError(ValueError):
    """Something the user can mend. The message is one line: what is wrong, then what to do about
    it."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
