"""Several JAX processes feed one global array, each with its own rows."""

import socket
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent("""
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
    import numpy as np
    import penstock as ps
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    data = {"x": np.arange(64, dtype=np.int32)}
    options = dict(batch_size=8, shuffle=True, seed=1, epochs=2)
    whole = ps.Loader(data, **options, process=(0, 1))
    for transform in (None, lambda batch: {"x": batch["x"] * 2}):
        loader = ps.Loader(data, **options)
        assert loader.process == (jax.process_index(), 2)
        with ps.feed(loader, to=sharding, transform=transform) as feed:
            for step, batch in enumerate(feed):
                assert batch["x"].shape == (8,), batch["x"].shape
                assert batch["x"].sharding.is_equivalent_to(sharding, 1)
                got = multihost_utils.process_allgather(batch["x"], tiled=True)
                assert got.tolist() == (whole[step]["x"] * (2 if transform else 1)).tolist()
        assert step == 15
    try:
        ps.Loader(data, 7)
    except ValueError as error:
        assert "2 processes" in str(error)
    try:
        ps.feed(ps.Loader(data, 6), to=sharding)
    except ValueError as error:
        assert "multiple of 4" in str(error)
    try:
        next(ps.feed([np.zeros(3)], to=sharding))
    except ValueError as error:
        assert "dimension 0 has size 3" in str(error), error
    print("all right")
""")


@pytest.mark.slow
def test_two_processes_make_one_global_batch():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, port, str(p)], stdout=-1, stderr=-1, text=True) for p in range(2)
    ]
    try:
        for out, err in [process.communicate(timeout=240) for process in processes]:
            assert "all right" in out, err
    finally:
        for process in processes:
            process.kill()
            process.wait()
