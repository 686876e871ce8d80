"""`penstock doctor`: examine whether training in this environment is correct and fast, and say what to do if it is not."""

from __future__ import annotations

from penstock._doctor.report import Finding as Finding
from penstock._doctor.report import Report as Report


def doctor() -> Report:
    """Examine versions, devices, known faults of this jaxlib, memory, threads and optional tools.

    It takes a few seconds, and less than ten. JAX is started in processes of its own, never in this one, so no device is occupied
    and no setting of JAX is fixed.

    Returns:
      A `Report`: print it, or read its `findings`. `ok` is False if something gives wrong results or cannot work.

    Examples:
      >>> report = ps.doctor()
      >>> [finding.found for finding in report.findings if finding.name == "penstock"] == [ps.__version__]
      True
    """
    from penstock._doctor.examination import examine

    return Report(tuple(examine()))
