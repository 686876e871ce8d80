"""Run a script in several JAX processes that find each other."""

import socket
import subprocess
import sys
import textwrap

HEADER = """
import sys
import jax
count, index = int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // count)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", count, index)
import itertools
import numpy as np
import penstock as ps
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

def mesh_of(shape, names, order=None):
    devices = np.array(jax.devices())[np.arange(8) if order is None else order]
    return Mesh(devices.reshape(shape), names)

def wrong_elements(array, whole):
    '''Count the elements of this process's shards that differ from the global batch.'''
    assert array.shape == whole.shape, (array.shape, whole.shape)
    return sum(int((np.asarray(shard.data) != whole[shard.index]).sum()) for shard in array.addressable_shards)
"""


def run(script: str, count: int, seconds: float = 280, killed: bool = False) -> list[str]:
    """Run a script in `count` processes with 8 devices in total, and return what each printed.

    Args:
      killed: whether the processes end by SIGKILL.

    Raises:
      AssertionError: a process failed; the message has the end of what it wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = HEADER + textwrap.dedent(script)
    processes = [
        subprocess.Popen([sys.executable, "-c", source, port, str(count), str(p)], stdout=-1, stderr=-1, text=True)
        for p in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
        failed = [
            err[-3000:]
            for process, (_, err) in zip(processes, outputs, strict=True)
            if process.returncode != (-9 if killed else 0)
        ]
        assert not failed, "\n".join(failed)
        return [out for out, _ in outputs]
    finally:
        for process in processes:
            process.kill()
            process.wait()
