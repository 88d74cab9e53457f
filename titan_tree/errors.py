"""UserError, the exception for wrong input."""


class UserError(ValueError):
    """An error that the user can fix. Its message is one line: what is wrong, where, and how to fix it.

    Commands print only the message and exit with status 2. Any other exception is a bug in titan_tree and
    shows a traceback.
    """
