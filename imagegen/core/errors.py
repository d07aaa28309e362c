"""The one exception that a user's mistake raises."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one sentence that names the thing, what was expected and what to do. Command-line
    entry points print it without a traceback and exit with status 1.
    """
