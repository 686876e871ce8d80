"""Show on the terminal that something takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 2.0
"""Nothing is shown of what takes less than this."""


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Show a line with the elapsed time on standard error, if it is a terminal and the body takes more than two seconds.

    The line is gone afterwards.

    Args:
      what: what the body does, such as "compiling".
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    display = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True)
    display.add_task(escape(what), total=None)
    ended = threading.Event()

    def show_if_slow() -> None:
        if not ended.wait(_SECONDS):
            display.start()

    waiting = threading.Thread(target=show_if_slow, name="penstock-progress", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        waiting.join()
        display.stop()
