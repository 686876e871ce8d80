"""`ps.distributed`: processes join, or each of them says which did not come."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from tests.train.ranks import launch

import penstock as ps
from penstock.errors import DistributedError
from penstock.train import distributed

CLUSTER = re.compile("SLURM_|OMPI_|KUBERNETES_|JOB_COMPLETION|TPU_|PENSTOCK_|JAX_COORDINATOR")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    for name in list(os.environ):
        if CLUSTER.match(name):
            monkeypatch.delenv(name)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(script, count, environments=None):
    """Run a script as processes that get the port and their index, and return what each printed."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), port, str(index)],
            stdout=-1,
            stderr=-1,
            text=True,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", **(environments[index] if environments else {})},
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
        assert [process.returncode for process in processes] == [0] * count, outputs
        return [out for out, _ in outputs]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def meet_all(count, calls, timeout=100.0):
    """Let processes meet, each on a thread: from index and count to the error or None."""
    address = f"127.0.0.1:{free_port()}"

    def one(call):
        try:
            distributed.meet(address, call[1], call[0], timeout, bind=address)
        except DistributedError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as pool:
        return address, list(pool.map(one, calls))


SUM = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    def sum_over_all():
        mesh = jax.make_mesh((jax.device_count(),), ("x",))
        rows = np.full(jax.local_device_count(), jax.process_index() + 1.0, np.float32)
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), rows)
        add = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
        return float(add(x)[0])
"""


def test_alone_it_does_nothing_and_says_what_keeps_it_from_joining_others():
    script = """
        import sys
        import jax
        import penstock as ps
        from penstock._jax import backends_started

        def join():
            try:
                ps.distributed(f"127.0.0.1:{sys.argv[1]}", 3, 2, timeout=0.3)
            except ps.DistributedError as error:
                print(error, sys.argv[1], "END")

        first, second = ps.distributed(), ps.distributed()
        assert first == second and (first.index, first.count, first.coordinator) == (0, 1, None)
        assert ps.distributed(count=1).how == "count=1 was given"
        join()
        assert not backends_started()
        assert str(first) == "one process with 4 devices (no cluster was found)", str(first)
        assert backends_started() and ps.distributed().count == 1
        join()
    """
    (out,) = run(script, 1)
    missing, used = out.split("END")[:2]
    for word in ("process 2 of 3", f"127.0.0.1:{missing.split()[-1]}", "0.3 s", "no program listens there"):
        assert word in missing
    assert "a device was used before ps.distributed()" in used
    assert "top of the script" in used


@pytest.mark.slow
def test_processes_join_by_arguments_and_add_over_all_devices():
    script = textwrap.dedent(SUM) + textwrap.dedent("""
        import sys
        import penstock as ps
        given = (f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
        me = ps.distributed(*given, timeout=100)
        assert ps.distributed() is me and ps.distributed(*given) is me
        try:
            ps.distributed(count=3)
        except ValueError as error:
            assert "count=3" in str(error) and "count=2" in str(error)
        assert sum_over_all() == 12.0
        print(me)
    """)
    first, second = run(script, 2)
    assert re.search(r"^process 0 of 2 with 4 devices \(arguments, coordinator 127.0.0.1:\d+\)$", first, re.MULTILINE)
    assert "process 1 of 2 with 4 devices" in second


@pytest.mark.slow
def test_processes_join_under_slurm_and_after_jax_itself():
    script = textwrap.dedent(SUM) + textwrap.dedent("""
        import os, sys
        import penstock as ps
        if os.environ["SLURM_PROCID"] == sys.argv[2] == "0" and "JAX_FIRST" in os.environ:
            jax.distributed.initialize()
        me = ps.distributed(timeout=100)
        assert (me.index, me.count) == (int(sys.argv[2]), 2)
        assert sum_over_all() == 12.0
        print(me.how)
    """)
    for extra in ({}, {"JAX_FIRST": "1"}):
        slurm = {
            "SLURM_JOB_ID": "1234",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "JAX_COORDINATOR_PORT": str(free_port()),
        }
        outputs = run(script, 2, [{**slurm, **extra, "SLURM_PROCID": str(p), "SLURM_LOCALID": str(p)} for p in range(2)])
        assert "SLURM" in outputs[1]
        assert ("jax.distributed.initialize was called before" if extra else "SLURM") in outputs[0]


def test_ranks_of_the_launcher_join_and_an_exception_in_one_ends_another_that_waits_for_it(tmp_path):
    """JAX would let both wait for five minutes, and then abort them."""
    script = (
        "import penstock as ps\nme = ps.distributed(timeout=100)\n"
        + textwrap.dedent(SUM)
        + textwrap.dedent("""
        print(me, sum_over_all())
        assert ps.distributed() is me
        try:
            ps.distributed(count=3)
        except ValueError as error:
            assert "count=3" in str(error) and "count=2" in str(error)
        else:
            raise AssertionError
        if me.index == 1:
            raise ValueError("boom")
        sum_over_all()
    """)
    )
    done = launch(tmp_path, script, "--devices-per-process", "4", "--grace", "1")
    for rank in range(2):
        pattern = rf"process {rank} of 2 with 4 devices \(penstock launch, coordinator 127.0.0.1:\d+\) 12.0"
        assert any(re.fullmatch(pattern, line) for line in done.lines(rank)), done.err
    assert done.code == 1, done.err
    assert "[1] ValueError: boom" in done.err
    assert "rank 1 exited with 1" in done.err


def test_a_name_that_nobody_knows_is_said_to_be_so():
    with pytest.raises(DistributedError, match="the name is not known here"):
        distributed.meet("no-such-host.invalid:1234", 2, 1, 0.3)


def test_all_that_came_are_told_who_did_not():
    address, errors = meet_all(6, [(0, 6), (2, 6)], timeout=1.0)
    for error in errors:
        assert f"4 of 6 processes did not come to the coordinator, process 0 on {socket.gethostname()} at {address}" in error
        assert "process 1, 3–5 (process 2 came)" in error


def test_all_go_on_when_the_last_has_come():
    address = f"127.0.0.1:{free_port()}"
    done = threading.Event()

    def host():
        distributed.meet(address, 3, 0, 100, bind=address)
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):  # as the service of JAX
            done.wait()

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(distributed.meet, address, 3, index, 100) for index in (1, 2)]  # before process 0 listens
        first = pool.submit(host)
        for each in others:
            each.result(100)
        done.set()
        first.result(100)


def test_processes_that_disagree_are_told():
    _, errors = meet_all(3, [(0, 3), (1, 4)])
    assert all("process 1 " in error and "4 processes" in error and "one of 3" in error for error in errors)
    _, errors = meet_all(3, [(0, 3), (2, 3), (2, 3)])
    assert all("two processes have the index 2 of 3" in error for error in errors), errors


def test_a_process_that_came_and_ended_is_missing():
    address = f"127.0.0.1:{free_port()}"
    hello = b'penstock 1 {"index": 1, "count": 3, "host": "node7", "pid": 42}\n'
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(distributed.meet, address, 3, 0, 2.0, address)
        for data in (hello, b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b""):
            while True:
                try:
                    with distributed._connect(address, 5) as connection:
                        connection.sendall(data)
                    break
                except ConnectionRefusedError:
                    continue
        with pytest.raises(DistributedError) as failed:
            first.result(100)
    assert "process 1–2" in str(failed.value)
    assert "process 1 (process id 42 on node7) came and ended" in str(failed.value)
    assert "a process called jax.distributed.initialize()" in str(failed.value)


def test_a_port_in_use_is_an_error_of_process_0():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DistributedError, match=rf"cannot listen at port {port}.*in use"):
            distributed.meet(f"127.0.0.1:{port}", 2, 0, 1.0, bind=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "count=0: needs an integer >= 1"),
        ({"count": 2, "index": 2}, "index=2: needs an integer from 0 to 2 - 1"),
        ({"index": -1}, "index=-1"),
        ({"coordinator": "node1"}, "coordinator='node1': needs the host and a free port"),
        ({"coordinator": "node1:port"}, "'node1:1234'"),
        ({"coordinator": "node1:1234"}, "needs count= and index= too"),
        ({"count": 2}, "needs coordinator= and index= too"),
        ({"timeout": 0}, "timeout=0: needs seconds > 0"),
        ({"timeout": None}, "timeout=None"),
    ],
)
def test_bad_arguments_are_errors(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ps.distributed(**arguments)


SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[001-004],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def find(monkeypatch, environment, *arguments):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return distributed.find_place(*(arguments or (None, None, None)), 1.0)


def test_slurm_is_found(monkeypatch):
    place = find(monkeypatch, SLURM)
    assert (place.coordinator, place.count, place.index) == ("node001:62674", 4, 3)
    assert (place.how, place.in_cluster) == ("SLURM", True)


def test_one_task_of_slurm_is_alone(monkeypatch):
    place = find(monkeypatch, {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert (place.coordinator, place.count, place.how) == (None, 1, "SLURM")


def test_arguments_are_completed_by_the_cluster(monkeypatch):
    place = find(monkeypatch, SLURM, "node7:99", None, None)
    assert (place.coordinator, place.count, place.index, place.how) == ("node7:99", 4, 3, "arguments and SLURM")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node8:98")
    assert find(monkeypatch, SLURM).coordinator == "node8:98"


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_several_tasks_of_slurm_without_srun_are_alone_with_a_warning(monkeypatch, missing):
    environment = {name: value for name, value in SLURM.items() if name != missing}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match="trains alone.*4 tasks.*SLURM_JOB_ID.*srun") as caught:
        processes = ps.distributed()
    assert processes.count == 1
    assert caught[0].filename == __file__
    assert f"{missing} missing" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ps.distributed(count=1).count == 1


def test_one_task_of_slurm_without_srun_is_alone_without_a_warning(monkeypatch):
    place = find(monkeypatch, {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "1"})
    assert place.count == 1
    assert "SLURM_JOB_ID, SLURM_NTASKS set" in place.how


def test_open_mpi_is_found(monkeypatch):
    environment = {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_VERSION": "4.1.4",
    }
    place = find(monkeypatch, environment)
    assert (place.coordinator.partition(":")[0], place.count, place.index, place.how) == ("10.96.0.1", 8, 5, "Open MPI")


def test_a_tpu_pod_is_found(monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    metadata = {"MEGASCALE_COORDINATOR_ADDRESS": "", "MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": ""}
    place = find(
        monkeypatch, {"TPU_WORKER_HOSTNAMES": "localhost,other", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1"} | metadata
    )
    assert (place.coordinator, place.count, place.index, place.how) == ("localhost:8482", 2, 1, "TPU pod")


def test_a_pod_without_an_index_is_alone_and_one_with_an_index_needs_the_package(monkeypatch):
    place = find(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert place.count == 1
    assert "JOB_COMPLETION_INDEX" in place.how
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(DistributedError, match=r'pip install "jax\[k8s\]"'):
        find(monkeypatch, {"JOB_COMPLETION_INDEX": "1"})


def test_a_cluster_that_cannot_be_read_is_an_error_with_a_way_out(monkeypatch):
    with pytest.raises(DistributedError, match=r"runs under SLURM.*count=1"):
        find(monkeypatch, {**SLURM, "SLURM_NTASKS": "four"})


def test_worker_processes_join_nothing(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert find(monkeypatch, SLURM).count == 1
    assert find(monkeypatch, SLURM, "node1:1", 4, 2).count == 4


def test_a_command_that_a_rank_starts_does_not_take_its_place(monkeypatch):
    environment = {"PENSTOCK_COORDINATOR": "127.0.0.1:1", "PENSTOCK_PROCESS_COUNT": "2", "PENSTOCK_PROCESS_INDEX": "1"}
    assert find(monkeypatch, {**environment, "PENSTOCK_LAUNCHER": "1"}).count == 1
    place = find(monkeypatch, {**environment, "PENSTOCK_LAUNCHER": str(os.getppid())})
    assert (place.coordinator, place.count, place.index, place.bind) == ("127.0.0.1:1", 2, 1, "127.0.0.1:1")


def test_the_local_devices_are_those_of_jax():
    assert ps.distributed().local_devices == jax.local_device_count()
