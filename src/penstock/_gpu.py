"""Tell whether there is an NVIDIA GPU, without starting a framework. It imports only the standard library."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")  # has an entry for each


@functools.cache
def nvidia_gpu() -> bool:
    """Tell whether there is an NVIDIA GPU that programs may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if (smi := shutil.which("nvidia-smi")) is None:  # as in some containers
        return _DRIVER.is_dir() and any(_DRIVER.iterdir())
    try:
        listed = subprocess.run([smi, "-L"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout
