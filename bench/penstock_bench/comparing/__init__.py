"""Compare a user's own functions or commands, with the machinery of the suites."""
