"""Helpers for tests of the prefetch pipeline."""

from penstock._pipeline import Exhausted


def drain(pipeline):
    """Return all items of a pipeline, and close it."""
    items = []
    try:
        while True:
            items.append(pipeline.get())
    except Exhausted:
        return items
    finally:
        pipeline.close()
