"""Canaries: every private part of JAX that penstock uses is here, and of the form that it reads.

Each was last seen in the newest release that is tested (`penstock._versions.JAX.tested`). On a release where one of these fails,
read what replaced the part, teach `penstock/_jax.py` (or the file that is named) both forms, and add the release to the table.
"""

from __future__ import annotations

import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from penstock import _jax
from penstock._versions import JAX
from penstock.errors import UnsupportedVersionError
from penstock.shard.trace.calls import find_call, open_jaxpr

SEEN = f"last seen in JAX {JAX.tested[-1]}, and this is JAX {jax.__version__}"
X = jax.ShapeDtypeStruct((8, 4), "float32")


def equation(function, name, *args):
    """The first equation of a primitive in a traced function."""
    closed = jax.make_jaxpr(function)(*(args or (X,)))
    found = [each for each in closed.jaxpr.eqns if each.primitive.name == name]
    assert found, f"no {name} in {[each.primitive.name for each in closed.jaxpr.eqns]}: {SEEN}"
    return found[0]


def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("part", _jax.PARTS, ids=".".join)
def test_a_private_part_is_here(part):
    assert _jax.part(*part) is not None, SEEN


def test_a_cluster_tells_the_place_of_a_process():
    names = {each.name for each in _jax.clusters()}
    assert {"slurm", "ompi", "gcetpu", "gketpu"} <= names, SEEN
    assert "mpi4py" not in names, SEEN
    assert any(each.__name__ == "K8sCluster" and each.name == "" for each in _jax.clusters()), SEEN
    for each in _jax.clusters():
        for method in ("is_env_present", "get_coordinator_address", "get_process_count", "get_process_id"):
            assert callable(getattr(each, method)), SEEN
    assert _jax.joined_processes() is None
    assert jax.devices()
    assert _jax.backends_started(), SEEN


def test_a_part_that_is_gone_is_named_with_the_versions_that_have_it():
    with pytest.raises(UnsupportedVersionError, match=rf"no_such_part.*{jax.__version__}.*{JAX.tested[-1]}.*pip install"):
        _jax.part("jax._src.core", "no_such_part")
    with pytest.raises(UnsupportedVersionError, match="no_such_module"):
        _jax.part("jax._src.no_such_module", "anything")


def test_settings_of_a_thread_tell_contexts_apart():
    before = _jax.thread_settings()
    assert before is not None, SEEN
    with jax.default_matmul_precision("highest"):
        assert _jax.thread_settings() != before, SEEN
    with jax.default_device(jax.devices()[1]):
        assert _jax.thread_settings() != before, SEEN
    assert _jax.thread_settings() == before
    seen = []
    jax.make_jaxpr(lambda x: seen.append(_jax.thread_settings()) or x)(X)
    assert seen == [None], f"a trace is not noticed: {SEEN}"


def test_without_settings_of_a_thread_there_is_a_warning_and_no_thread_helps(monkeypatch):
    monkeypatch.setattr(_jax, "TRACE_CONTEXT", ("jax._src.config", "no_such_part"))
    _jax._settings.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"feeds are slower.*no_such_part"):
            assert _jax.thread_settings() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _jax.thread_settings() is None  # one warning
    finally:
        _jax._settings.cache_clear()


def test_constants_are_printed_with_a_compiled_program(monkeypatch):
    table = np.arange(1000, dtype="float32") ** 2
    compiled = jax.jit(lambda i: jnp.asarray(table)[i]).lower(jnp.int32(3)).compile()
    assert "constant({...})" in compiled.as_text(), SEEN
    text = _jax.program_text(compiled)
    assert "constant({...})" not in text, SEEN
    assert "998001" in text, SEEN
    monkeypatch.setattr(_jax, "PRINT_OPTIONS", ("jax._src.lib", "hlo.NoSuchOptions"))
    with pytest.raises(UnsupportedVersionError, match="NoSuchOptions"):
        _jax.program_text(compiled)


def test_constants_become_arguments():
    table = np.arange(4, dtype="float32")
    inner = jax.make_jaxpr(lambda x: x + jnp.asarray(table))(X)
    converted = _jax.constants_as_arguments(inner.jaxpr)
    assert len(converted.invars) == len(inner.jaxpr.constvars) + 1, SEEN
    assert not converted.constvars, SEEN


def test_a_scan_tells_its_constants_carries_and_slices():
    def step(x):
        scale = x[0]
        return jax.lax.scan(lambda carry, row: (carry + row * scale, carry), x[1], x)

    params = equation(step, "scan").params
    assert _jax.scan_counts(params) == (1, 1), SEEN
    assert params["length"] == 8, SEEN
    assert len(params["jaxpr"].jaxpr.invars) == 3, SEEN
    with pytest.raises(UnsupportedVersionError, match="length"):
        _jax.scan_counts({"length": 8})


def test_a_while_tells_its_constants_and_programs():
    def step(x):
        scale = x[0, 0]
        return jax.lax.while_loop(lambda y: y.sum() < scale, lambda y: y * scale, x)

    params = equation(step, "while").params
    assert (params["cond_nconsts"], params["body_nconsts"]) == (1, 1), SEEN
    for name in ("cond_jaxpr", "body_jaxpr"):
        assert params[name].jaxpr.eqns, SEEN
        assert params[name].consts is not None, SEEN


def test_a_cond_has_branches():
    branches = equation(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cond").params["branches"]
    assert [each.jaxpr.eqns[0].primitive.name for each in branches] == ["cos", "sin"], SEEN


@jax.custom_jvp
def _custom_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def _custom_vjp(x):
    return jnp.sin(x)


_custom_jvp.defjvp(lambda primals, tangents: (_custom_jvp(*primals), tangents[0]))
_custom_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (jax.jit(jnp.sin), ["jit"]),
        (jax.checkpoint(jnp.sin), ["checkpoint", "remat2"]),
        (_custom_jvp, ["custom_jvp_call"]),
        (_custom_vjp, ["custom_vjp_call"]),
    ],
)
def test_a_call_holds_its_program_where_the_planner_looks_for_it(function, names):
    (called,) = jax.make_jaxpr(function)(X).jaxpr.eqns
    assert called.primitive.name in names, SEEN
    assert open_jaxpr(find_call(called).jaxpr).eqns, SEEN


def test_an_equation_can_be_bound_again():
    one = equation(jnp.sin, "sin")
    with one.ctx.manager:
        again = one.primitive.bind(jnp.ones((8, 4)), **one.primitive.get_bind_params(one.params))
    np.testing.assert_allclose(again, np.sin(np.ones((8, 4))), rtol=1e-6)
    assert one.outvars[0].aval.str_short() == "float32[8,4]", SEEN
    assert isinstance(equation(lambda x: x + 1.0, "add").invars[1], core.Literal), SEEN


def test_prescribed_layouts_are_where_the_planner_looks_for_them():
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    constraint = equation(lambda x: jax.lax.with_sharding_constraint(x, sharding), "sharding_constraint")
    assert constraint.params["sharding"].spec == PartitionSpec("x"), SEEN
    mapped = jax.shard_map(jnp.sin, mesh=mesh(), in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    params = equation(mapped, "shard_map").params
    assert dict(params["mesh"].shape) == {"x": 8}, SEEN
    assert tuple(params["in_specs"]) == tuple(params["out_specs"]) == (PartitionSpec("x"),), SEEN
    jitted = equation(jax.jit(jnp.sin, in_shardings=sharding), "jit", X).params
    assert jitted["in_shardings"][0] == sharding, SEEN
    assert len(jitted["out_shardings"]) == 1, SEEN


def test_an_exported_program_tells_its_shardings_and_what_it_keeps():
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    argument = jax.ShapeDtypeStruct((8, 4), "float32", sharding=sharding)
    exported = jax.export.export(jax.jit(lambda x, unused: x + 1), platforms=["cpu"])(argument, argument)
    assert exported.module_kept_var_idx == (0,), SEEN
    assert len(exported.in_shardings_jax(mesh())) == 2, SEEN
    assert len(exported.out_shardings_jax(mesh())) == 1, SEEN


def test_a_compiled_program_tells_its_memory():
    analysis = jax.jit(lambda x: x @ x.T).lower(X).compile().memory_analysis()
    for name in ("argument", "output", "temp", "alias"):
        assert getattr(analysis, f"{name}_size_in_bytes") >= 0, SEEN
    assert analysis.argument_size_in_bytes == 8 * 4 * 4, SEEN
