"""Programs compiled in other processes have the same figures, and leave nothing behind."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import types

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.shard.hlo.train_step import MESH, PARAMETERS, directly, elsewhere, here, train

from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError
from penstock.shard import compile_worker, compiler
from penstock.shard.compiler import export_program, measure_exported
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.topologies import find_topology
from penstock.shard.mesh.shapes import order_devices


def exported(mesh=None, **options):
    jitted, *arguments = train(mesh or elsewhere(), **options)
    return export_program(jitted, *arguments, mesh=MESH)


def doubled(sizes=MESH, dtype="float32", **options):
    """Return an exported program that compiles fast: 64·64 elements over all devices."""
    sharding = NamedSharding(elsewhere(sizes), P("data", "model"))
    x = jax.ShapeDtypeStruct((64, 64), dtype, sharding=sharding)
    return export_program(jax.jit(lambda x: x * 2), x, mesh=sizes, **options)


def same(a, b):
    return dataclasses.replace(a, seconds_to_compile=0) == dataclasses.replace(b, seconds_to_compile=0)


def test_figures_are_the_same_from_another_process():
    """Check a program that was exported for devices of this process, and one for devices that are not here, without donation."""
    kept, given = measure_exported([exported(here()), exported(donate=())])
    assert same(kept, directly())
    assert kept.seconds_to_compile > 0
    assert kept.aliased > given.aliased == 0
    assert same(dataclasses.replace(given, aliased=kept.aliased, temporaries=kept.temporaries), kept)


def test_a_program_that_fails_does_not_affect_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    good = doubled()
    header, serialised = good.split(b"\n", 1)
    broken = header + b"\n" + serialised[: len(serialised) // 2]
    narrow = header.replace(b'"data": 2', b'"data": 1') + b"\n" + serialised
    tpu = doubled(platform="tpu")
    found = measure_exported([broken, good, narrow, tpu, good])
    assert [type(each) for each in found] == [CompileError, Measured, CompileError, CompileError, Measured]
    assert "does not match the mesh" in str(found[2])
    assert 'export it with platform="cpu"' in str(found[3])
    assert same(found[1], found[4])
    assert list(tmp_path.iterdir()) == []


def test_no_programs_are_no_results():
    assert measure_exported([]) == []


def test_meshes_of_several_sizes_and_dtypes_in_one_process_that_imports_nothing_from_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('this is not a JAX')")
    monkeypatch.chdir(tmp_path)
    sizes = [{"data": 1, "model": 2}, {"data": 4, "model": 8}]
    with jax.enable_x64(True):
        programs = [doubled(each, dtype) for each in sizes for dtype in ("bfloat16", "float64")]
    assert [found.arguments for found in measure_exported(programs)] == [64 * 64 * size // n for n in (2, 32) for size in (2, 8)]


def test_programs_are_compiled_in_as_many_processes_as_this_one_has_cores(monkeypatch):
    started, start = [], compiler._start
    monkeypatch.setattr(compiler, "_cores", lambda: 2)
    monkeypatch.setattr(compiler, "_start", lambda folder, share, *rest: started.append(share) or start(folder, share, *rest))
    sizes = [{"data": 1, "model": 2}, {"data": 2, "model": 2}, {"data": 2, "model": 4}]
    found = measure_exported([doubled(each) for each in sizes])
    assert started == [[0, 2], [1]]
    assert [each.arguments for each in found] == [64 * 64 * 4 // n for n in (2, 4, 8)]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-signal.SIGKILL, "signal 9.*out of memory: free some, and plan again"),
        (-signal.SIGTERM, "from outside.*signal 15.*: plan again"),
        (-signal.SIGSEGV, "signal 11.*if it crashes again, use another version of jaxlib"),
        (1, "status 1"),
    ],
)
def test_the_end_of_a_process_says_what_to_do(status, said):
    assert re.search(said, compiler._describe_end(status))


def test_a_crash_of_the_compiler_affects_one_program_only(monkeypatch):
    start = compiler._start

    def dies_first(folder, positions, topology):
        monkeypatch.setattr(compiler, "_start", start)
        script = "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
        with compiler._log_of(folder, positions).open("wb") as log:
            return subprocess.Popen([sys.executable, "-c", script], stderr=log, start_new_session=True)

    monkeypatch.setattr(compiler, "_start", dies_first)
    dead, alive = measure_exported([doubled()] * 2)
    assert isinstance(dead, CompilerFailedError)
    first, last = str(dead).splitlines()
    assert re.search("crashed.*signal 6.*plan again", first)
    assert last == "last words"
    assert alive.arguments == 64 * 64 * 4 // 8


def test_a_compiler_that_takes_too_long_is_ended():
    found = measure_exported([doubled()] * 2, timeout=0.01)
    assert all(isinstance(each, CompilerFailedError) and "gave no answer in" in str(each) for each in found)


@pytest.mark.parametrize(
    "error", [CompileError("no"), CompilerFailedError("killed"), CompilerMemoryError("full", 17), CompilerMemoryError("full")]
)
def test_errors_cross_processes(error, tmp_path):
    compiler.write_result(tmp_path, 0, error)
    found = compiler.read_result(tmp_path / "0.json")
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_a_process_that_cannot_start_is_an_error_of_its_programs(monkeypatch, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('this is not a JAX')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = measure_exported([doubled()] * 2)
    assert all(isinstance(each, CompileError) and "this is not a JAX" in str(each) for each in found)


@contextlib.contextmanager
def measuring(tmp_path):
    """Start a process that compiles many programs in a worker; yield it and the id of the worker."""
    (tmp_path / "program").write_bytes(doubled())
    folder = tmp_path / "temporary"
    folder.mkdir()
    script = f"""
    import signal, subprocess
    from pathlib import Path
    from penstock.shard import compiler

    class Told(subprocess.Popen):
        def wait(self, *arguments):
            print(self.pid, flush=True)
            return super().wait(*arguments)

    subprocess.Popen = Told
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compiler.measure_exported([Path({str(tmp_path / "program")!r}).read_bytes()] * 100)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    with measuring(tmp_path) as (process, worker):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_compiling_process_exits_with_its_parent(tmp_path):
    with measuring(tmp_path) as (process, worker):
        ended = os.pidfd_open(worker)
        process.kill()
        readable, _, _ = select.select([ended], [], [], 60)
    os.close(ended)
    assert readable


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x4", "tpu"), ("h100:8", "gpu-compiler")])
def test_a_topology_without_its_compiler_says_what_to_install(monkeypatch, topology, extra):
    found = find_topology(topology)
    monkeypatch.setattr(compile_worker, "describe_missing_compiler", lambda _: f'pip install "penstock[{extra}]"')
    with pytest.raises(CompileError, match=rf'topology "{topology}": pip install "penstock\[{extra}\]"'):
        compile_worker.topology_mesh(MESH, found)


@pytest.fixture
def requested(monkeypatch):
    """Replace the compilers by topologies of no devices; return the list of requested topologies."""
    asked = []

    def get_topology_desc(**options):
        asked.append(options)
        raise RuntimeError("it is not asked for more")

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(compile_worker, "describe_missing_compiler", lambda topology: "")
    return asked


def test_a_topology_of_another_size_is_refused_with_both_sizes(requested):
    with pytest.raises(CompileError, match=r"v5e:2x4 has 8 devices, and the mesh data 4 × model 4 needs 16"):
        compile_worker.topology_mesh({"data": 4, "model": 4}, find_topology("v5e:2x4"))
    assert not requested


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("TPU v4:2x2x1", {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"}),
        ("V5e:2x2", {"topology_name": "v5e:2x2"}),
        ("2xv5e:1x2", {"topology_name": "v5e:1x2", "num_slices": 2}),
    ],
)
def test_a_chip_of_v4_is_one_device_and_slices_are_counted(requested, name, asked):
    with pytest.raises(CompileError, match="it is not asked for more"):
        compile_worker.topology_mesh({"data": 4}, find_topology(name))
    assert requested == [{"platform": "tpu", **asked}]


@pytest.mark.parametrize(("name", "shape"), [("h100:8", "1x1x8"), ("h100:2x4", "2x1x4")])
def test_hosts_of_gpus_have_their_figures(requested, name, shape):
    with pytest.raises(CompileError, match="it is not asked for more"):
        compile_worker.topology_mesh({"data": 8}, find_topology(name))
    (asked,) = requested
    assert (asked["platform"], asked["topology"]) == ("cuda", shape)
    assert "core_count: 132" in asked["target_config"]
    assert f"device_memory_size: {80 * 10**9} " in asked["target_config"]


_GATHERED_LAYERS = """
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from penstock.shard.hlo.flops import count_flops

LAYERS, WIDTH, LENGTH = 2, 1024, 512
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
mesh = topologies.make_mesh(topology, (8,), ("data",))
on = lambda *layout: NamedSharding(mesh, P(*layout))

def layer(x, w):
    w = {name: lax.with_sharding_constraint(each.astype(jnp.bfloat16), on()) for name, each in w.items()}
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], 8, -1) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None

def compiled(unroll):
    def step(w, x):
        def loss(w):
            return jnp.mean(lax.scan(layer, x, w, unroll=unroll)[0].astype(jnp.float32) ** 2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))
    shapes = {**{name: (WIDTH, WIDTH) for name in "qkv"}, "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    w = {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32, sharding=on(None, "data"))
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((32, LENGTH, WIDTH), jnp.bfloat16, sharding=on("data"))
    out = {name: each.sharding for name, each in w.items()}
    return jax.jit(step, donate_argnums=0, out_shardings=out).lower(w, x).compile()

unrolled, looped = compiled(LAYERS), compiled(1)
text = unrolled.as_text()
print(text.count("AsyncCollectiveStart"))
print(count_flops(text), unrolled.cost_analysis()["flops"], count_flops(looped.as_text()))

heads = jax.ShapeDtypeStruct((4, 512, 8, 128), jnp.float32, sharding=on())
scores = jax.jit(lambda q, k: jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), out_shardings=on())
scores = scores.lower(heads, heads).compile()
print(scores.as_text().count(" reduce-window("), count_flops(scores.as_text()), scores.cost_analysis()["flops"])
"""


class Chip(types.SimpleNamespace):
    """A chip at a place of a topology, as libtpu describes it."""

    __hash__ = object.__hash__


def test_a_mesh_axis_may_be_a_part_of_a_physical_axis(monkeypatch):
    kind = {"platform": "tpu", "device_kind": "TPU v5 lite", "core_on_chip": 0, "process_index": 0}
    chips = [Chip(id=4 * y + x, coords=(x, y, 0), **kind) for y in range(4) for x in range(4)]
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: types.SimpleNamespace(devices=chips))
    monkeypatch.setattr(compile_worker, "describe_missing_compiler", lambda topology: "")
    mesh = compile_worker.topology_mesh({"data": 8, "model": 2}, find_topology("v5e:4x4"))
    assert dict(mesh.shape) == {"data": 8, "model": 2}
    assert {chip.id for chip in mesh.devices.flat} == set(range(16))
    for near, far in mesh.devices:  # the two chips of the inner axis have a link
        assert sum(abs(a - b) for a, b in zip(near.coords, far.coords, strict=True)) == 1


@pytest.mark.parametrize("shape", [{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 8}, {"a": 2, "b": 2, "c": 2}])
def test_the_first_devices_of_a_mesh_are_those_of_the_first_slice(shape):
    kind = {"platform": "tpu", "device_kind": "TPU v5 lite", "core_on_chip": 0, "process_index": 0}
    places = [(slice_, x, y) for x in range(2) for slice_ in range(2) for y in range(2)]
    chips = [Chip(id=number, slice_index=slice_, coords=(x, y, 0), **kind) for number, (slice_, x, y) in enumerate(places)]
    mesh = order_devices(shape, chips)
    assert mesh.shape == tuple(shape.values())
    assert [chip.slice_index for chip in mesh.flat] == [0] * 4 + [1] * 4
    assert len({chip.id for chip in mesh.flat}) == 8
    with pytest.raises(ValueError, match="mesh a 3 × b 2 does not divide into 2 slices of 3 devices"):
        order_devices({"a": 3, "b": 2}, chips[:6])


# libtpu is not a dependency of the tests: where it is installed, every process that starts JAX looks for a TPU and prints
# that there is none. `pip install --target DIR libtpu` and `PYTHONPATH=DIR` run these.
if importlib.util.find_spec("libtpu"):

    def tpu_program(mesh=MESH):
        jitted, *arguments = train(elsewhere())
        return export_program(jitted, *arguments, mesh=mesh, platform="tpu")

    def test_tpus_that_are_not_here():
        found = measure_exported([tpu_program()] * 2, topology="v5e:2x4")
        assert same(*found)
        assert found[0].aliased > 0
        assert found[0].arguments >= PARAMETERS
        assert found[0].flops == pytest.approx(directly().flops, rel=0.05)
        assert {c.kind for c in found[0].collectives} == {"all-gather", "all-reduce", "reduce-scatter"}
        assert {c.count for c in found[0].collectives if c.bytes > 4} == {3.0}

    @pytest.mark.parametrize(("name", "devices"), [("v4:2x2x1", 4), ("v5p:2x2x1", 4), ("v5e:4x4", 16), ("v6e:4x4", 16)])
    def test_a_topology_has_a_device_for_each_chip(name, devices):
        (found,) = measure_exported([tpu_program()], topology=name)
        assert f"topology {name} has {devices} devices, and the mesh data 2 × model 4 needs 8" in str(found)

    def test_flops_of_tpu_programs_are_those_of_the_compiler_times_the_turns_of_loops():
        """Gather the weights of layers with attention at their use, over 8 chips, which the compiler does asynchronously."""
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        run = [sys.executable, "-c", _GATHERED_LAYERS]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=300)
        asynchronous, unrolled, of_compiler, looped, windows, counted, wanted = map(float, done.stdout.split()[-7:])
        assert asynchronous, "this compiler starts no collective in a fusion: take a larger step"
        assert unrolled == pytest.approx(of_compiler, rel=0.01)
        assert looped == pytest.approx(unrolled, rel=0.1)  # the unrolled one needs no gradient of its input
        assert windows, "this compiler writes no maximum as a window: take another softmax"
        assert counted == pytest.approx(wanted, rel=0.01)

    def test_slices_that_are_not_here():
        (found,) = measure_exported([tpu_program()], topology="2xv5e:2x2")
        assert found.flops == pytest.approx(directly().flops, rel=0.05)
        assert not found.unknown
        over_network = [each for each in found.collectives if each.inside < each.group]
        assert {each.axes for each in over_network} == {("data",)}
        assert {each.axes for each in found.collectives} == {("data",), ("model",)}

    def test_chips_of_v4():
        (found,) = measure_exported([tpu_program()], topology="v4:2x2x2")
        assert found.flops == pytest.approx(directly().flops, rel=0.05)


def test_a_topology_that_there_is_not():
    (found,) = measure_exported([doubled(platform="tpu")], topology="v99:2x4")
    assert isinstance(found, CompileError)
    assert "there is no topology 'v99:2x4'" in str(found)
