"""`penstock doctor`: is this environment one in which training is right and fast, and if not, what to do?"""

from __future__ import annotations

from penstock._doctor.report import Finding as Finding
from penstock._doctor.report import Report as Report


def doctor() -> Report:
    """Look at versions, devices, known faults of this jaxlib, memory, threads and optional tools.

    Takes a few seconds, and less than ten: JAX is started in processes of its own, never in this one, so that no device is taken
    and no setting is decided here.

    Returns:
      A `Report`: print it, or look at its `findings`. `ok` is False where something gives wrong results or cannot work.

    Example:
      >>> report = ps.doctor()
      >>> [finding.found for finding in report.findings if finding.name == "penstock"] == [ps.__version__]
      True
    """
    from penstock._doctor.examination import examine

    return Report(tuple(examine()))
