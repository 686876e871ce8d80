"""The name `Sampling`, which `keras._unthreaded` still imports; `starvation.Meter` needs none any more."""


class Sampling:
    """Nothing: a `Meter` ignores it."""

    def __init__(self, at_once: float = 0.0, share: float = 0.0):
        """Take a budget, which changes nothing."""
