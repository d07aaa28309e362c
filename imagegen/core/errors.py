"""The one exception that a user's mistake raises, and what others say in short."""


class UserError(Exception):
    """A mistake that the user can correct.

    The message is one sentence that names the thing, what was expected and what to do. Command-line
    entry points print it without a traceback and exit with status 1.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
