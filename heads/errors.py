"""The exception that every command reports as one line, with exit code 2."""


class UserError(ValueError):
    """Error that the user can mend.

    The message is one line: what is wrong, then what to do about it.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
