"""The exception that every command reports as one line, with exit code 2."""


class UserError(ValueError):
    """Error that the user can correct; its one line says what is wrong and what to do."""


# Parts of the messages of torch and of the system when memory runs out.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
)


def out_of_memory(error: BaseException) -> bool:
    """Return True for an error that says that memory has run out."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in message for phrase in OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
