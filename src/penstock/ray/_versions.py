"""The check of the installed Ray, which every function of this package makes first."""

from __future__ import annotations

from penstock._versions import RAY, installed
from penstock.errors import UnsupportedVersionError


def require_ray() -> None:
    """Raise an error if Ray is not installed, or its version does not work.

    Raises:
      UnsupportedVersionError: an ImportError, with the version found and the command that installs one that works.
    """
    found = installed("ray")
    if found is None:
        raise UnsupportedVersionError(f"penstock.ray needs {RAY.works}, which is not installed: {RAY.install}")
    if found not in RAY:
        raise RAY.refuse(found)
