"""UserError: the exception for mistakes that the user can fix."""


class UserError(ValueError):
    """An input or setting is wrong, and the user can fix it.

    The message is one line. It says what was wrong, where, what was expected and how to fix it. The command
    line prints this message alone and exits with status 2. Any other exception is a bug in titan_tree and
    shows a traceback.
    """
