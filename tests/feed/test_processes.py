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


PENDING = textwrap.dedent("""
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
    import jax.numpy as jnp
    import numpy as np
    import penstock as ps
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from penstock.feed.starvation import pending_results
    from tests.feed import held_step

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    def step(state, batch):
        wait = jax.shard_map(
            lambda w, x: w + held_step.hold(w + x.ravel()[0]),
            mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False,
        )
        state = wait(state, batch["x"])
        return state, state.sum() + batch["x"].sum()

    state = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P()))
    with ps.feed(ps.Loader({"x": np.zeros((64, 4), np.float32)}, 8, epochs=1), to=NamedSharding(mesh, P("data"))) as feed:
        for number, batch in enumerate(feed):
            state, loss = step(state, batch)
            assert any(array is loss for array in pending_results(None)), number
            held_step.release()
            jax.block_until_ready(loss)
            assert not any(array is loss or array is state for array in pending_results(None)), number
    assert number == 7
    print("all right")
""")


@pytest.mark.slow
def test_two_processes_make_one_global_batch():
    run_twice(SCRIPT)


@pytest.mark.slow
def test_a_step_of_two_processes_is_seen_to_be_at_work_in_both():
    """The share of starving is made of such looks."""
    run_twice(PENDING)


def run_twice(script):
    """Run a script in two processes that know of each other, and check that both say that all is right."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", script, port, str(p)], stdout=-1, stderr=-1, text=True) for p in range(2)
    ]
    try:
        for out, err in [process.communicate(timeout=240) for process in processes]:
            assert "all right" in out, out + err
    finally:
        for process in processes:
            process.kill()
            process.wait()
