"""The one exception that says: the input is at fault, and here is what to do about it."""


class UserError(ValueError):
    """An error that the user can mend. Its message is one line: what, where, what was expected, what to do.

    The command-line doors print the message alone and exit with status 2; everything else shows a
    traceback, because it is our bug.
    """
