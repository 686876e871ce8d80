"""The error of processes that cannot join each other."""


class DistributedError(RuntimeError):
    """An error: the processes of this run could not join.

    The message says which process this is, of how many, where it looked for the others, which of them did not come as far as
    that is known, and what to do.
    """
