"""The collectives of a reshard: their order, their bytes, and their price."""

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penstock.shard.mesh.resharding import MeshLinks, union
from penstock.shard.mesh.shapes import concrete_mesh


def links_of(*sizes, latency=0.0, last_is_major=False):
    names = ("a", "b", "c")[: len(sizes)]
    return MeshLinks(names, sizes, 100.0, latency, last_is_major=last_is_major)


def layouts(links, rank):
    """Draw a layout: each mesh axis shards one dimension or none."""
    return st.lists(st.integers(-1, rank - 1), min_size=len(links.sizes), max_size=len(links.sizes)).map(
        lambda dims: tuple(sum(1 << axis for axis, dim in enumerate(dims) if dim == each) for each in range(rank))
    )


@st.composite
def reshards(draw):
    """Draw mesh links, a source and a target layout, and axes over which the array is still to be summed."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    links = links_of(*sizes, last_is_major=draw(st.booleans()))
    rank = draw(st.integers(1, 4))
    source, target = draw(layouts(links, rank)), draw(layouts(links, rank))
    partial = draw(st.integers(0, 2 ** len(links.sizes) - 1)) & ~union(source)
    return links, source, target, partial


GLOBAL_BYTES = 3600.0 * 1000


@given(reshards())
def test_the_same_layout_needs_no_collective(reshard):
    links, source, _, _ = reshard
    assert links.reshard_steps(source, source, 0, GLOBAL_BYTES) == ()


@given(reshards())
def test_the_last_waypoint_is_the_target(reshard):
    links, source, target, partial = reshard
    assert links.waypoints(source, target, partial)[-1] == target


@given(reshards())
def test_no_waypoint_gives_an_axis_to_two_dimensions(reshard):
    links, source, target, partial = reshard
    for stop in links.waypoints(source, target, partial):
        assert sum(mask.bit_count() for mask in stop) == union(stop).bit_count()
        assert len(stop) == len(source)


@given(reshards())
def test_collectives_run_over_axes_of_several_devices_and_send_what_a_ring_sends(reshard):
    links, source, target, partial = reshard
    for step in links.reshard_steps(source, target, partial, GLOBAL_BYTES):
        n = links.shards(step.axes)
        assert n > 1
        turns = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}.get(step.kind, (n - 1) / n)
        assert step.bytes_on_wire == pytest.approx(turns * step.bytes)


@given(reshards())
def test_each_collective_starts_from_the_bytes_that_the_one_before_it_left(reshard):
    links, source, target, partial = reshard
    local = GLOBAL_BYTES / links.shards(union(source))
    held = union(source)
    for step in links.reshard_steps(source, target, partial, GLOBAL_BYTES):
        n = links.shards(step.axes)
        if step.kind in ("reduce-scatter", "all-reduce"):
            assert step.bytes == pytest.approx(local)
            local /= n if step.kind == "reduce-scatter" else 1
        elif step.kind in ("all-to-all", "collective-permute"):
            local = GLOBAL_BYTES / links.shards(held | (union(target) & ~held))
            assert step.bytes == pytest.approx(local)
        else:
            assert step.bytes == pytest.approx(GLOBAL_BYTES / links.shards(union(target)))


@given(reshards())
def test_each_partial_axis_is_summed_once(reshard):
    links, source, target, partial = reshard
    summed = 0
    for step in links.reshard_steps(source, target, partial, GLOBAL_BYTES):
        if step.kind in ("reduce-scatter", "all-reduce"):
            assert not summed & step.axes
            summed |= step.axes
    several = sum(1 << axis for axis, size in enumerate(links.sizes) if size > 1)
    assert summed & several == partial & several


@given(reshards())
def test_slicing_a_replicated_dimension_sends_nothing(reshard):
    links, source, target, _ = reshard
    assume(all(one in (0, other) for one, other in zip(source, target, strict=True)))
    assert links.reshard_steps(source, target, 0, GLOBAL_BYTES) == ()


@given(reshards())
def test_shards_are_the_product_of_the_axis_sizes(reshard):
    links, source, *_ = reshard
    bits = [bit for bit in range(len(links.sizes)) if union(source) >> bit & 1]
    assert links.shards(union(source)) == math.prod(links.sizes[bit] for bit in bits)
    assert links.bits(links.axes(union(source))) == union(source)


@given(st.integers(0, 7), st.integers(0, 7), st.booleans(), st.sampled_from([(2, 2, 2), (2, 4, 1), (1, 4, 2), (1, 8, 1)]))
def test_an_array_is_permuted_unless_blocks_are_parts_of_blocks(before, after, last_is_major, sizes):
    links = links_of(*sizes, last_is_major=last_is_major)
    mesh = concrete_mesh(dict(zip(links.names, sizes, strict=True)))

    def rows(mask):
        axes = links.axes(mask)
        sharding = NamedSharding(mesh, P(axes[::-1] if last_is_major else axes))
        return [set(range(*index[0].indices(64))) for index in sharding.devices_indices_map((64,)).values()]

    pairs = list(zip(rows(before), rows(after), strict=True))
    nested = all(one <= other for one, other in pairs) or all(one >= other for one, other in pairs)
    kinds = [step.kind for step in links.reshard_steps((before,), (after,), 0, 800)]
    assert ("collective-permute" in kinds) == (not nested)


@pytest.mark.parametrize(
    ("source", "target", "partial", "kind", "bytes_on_wire"),
    [
        ((0b01, 0), (0, 0), 0, "all-gather", 800 * 1 / 2),
        ((0b11, 0), (0, 0), 0, "all-gather", 800 * 7 / 8),
        ((0b01, 0b10), (0b01, 0), 0, "all-gather", 400 * 3 / 4),
        ((0, 0), (0b10, 0), 0b10, "reduce-scatter", 800 * 3 / 4),
        ((0b01, 0), (0b01, 0), 0b10, "all-reduce", 2 * 400 * 3 / 4),
        ((0b10, 0), (0, 0b10), 0, "all-to-all", 200 * 3 / 4),
    ],
)
def test_each_collective_by_hand(source, target, partial, kind, bytes_on_wire):
    (step,) = links_of(2, 4).reshard_steps(source, target, partial, 800)
    assert (step.kind, step.bytes_on_wire, step.after) == (kind, bytes_on_wire, target)


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        ((0, 0, 0b11), (0b10, 0b01, 0), [("all-to-all", 0b10, 75), ("all-to-all", 0b01, 50)]),
        ((0b10, 0b01, 0), (0, 0, 0b11), [("all-to-all", 0b01, 50), ("all-to-all", 0b10, 75)]),
        ((0, 0, 0b11), (0b11, 0, 0), [("all-to-all", 0b11, 87.5)]),
        ((0, 0, 0b11), (0b01, 0, 0), [("collective-permute", 0b11, 100), ("all-to-all", 0b01, 50), ("all-gather", 0b10, 300)]),
        ((0, 0, 0b11), (0b10, 0, 0), [("all-to-all", 0b10, 75), ("all-gather", 0b01, 100)]),
        ((0b01, 0, 0), (0b10, 0, 0), [("collective-permute", 0b11, 100), ("all-gather", 0b01, 100)]),
    ],
)
def test_what_compilers_send_to_exchange_axes_between_dimensions(source, target, collectives):
    """Programs of the TPU and the GPU compiler send so many bytes for an array of 800."""
    steps = links_of(2, 4).reshard_steps(source, target, 0, 800)
    assert [(step.kind, step.axes, step.bytes_on_wire) for step in steps] == collectives


@pytest.mark.parametrize(("target", "kind"), [((0b11, 0), "reduce-scatter"), ((0b01, 0b10), "all-reduce")])
def test_a_sum_is_scattered_into_one_dimension_only(target, kind):
    (step,) = links_of(2, 4).reshard_steps((0, 0), target, 0b11, 800)
    assert (step.kind, step.axes, step.bytes) == (kind, 0b11, 800)


def test_an_axis_of_one_device_does_not_count_as_a_dimension_of_a_scattered_sum():
    (step,) = links_of(1, 4).reshard_steps((0, 0), (0b01, 0b10), 0b11, 800)
    assert (step.kind, step.axes) == ("reduce-scatter", 0b10)


# Two hosts of four devices each, on meshes whose axes are within the hosts, across them, or both.
HOSTS = {"bandwidth": 100.0, "latency": 1.0, "domain": 4, "network_bandwidth": 10.0, "network_latency": 2.0}


@pytest.mark.parametrize(
    ("sizes", "axes", "speeds"),
    [
        ((2, 4), 0b10, (100, 100, 100, 1)),  # within a host
        ((2, 4), 0b01, (10, 10, 10, 2)),  # from host to host, over one network card
        ((2, 4), 0b11, (40, 17.5, 10, 2)),  # all devices: four rings, or 4/7 of the bytes on the card of each device
        ((8,), 0b1, (40, 17.5, 10, 2)),
        ((4, 2), 0b01, (20, 15, 10, 2)),  # two devices of each host: two rings, or 2/3 of the bytes
        ((2, 2, 2), 0b101, (20, 15, 10, 2)),
    ],
)
def test_collectives_have_the_speed_of_the_links_that_they_cross(sizes, axes, speeds):
    links = MeshLinks(("a", "b", "c")[: len(sizes)], sizes, **HOSTS)
    kinds = ("all-gather", "all-to-all", "collective-permute")
    assert [links.speed(kind, axes)[0] for kind in kinds] == pytest.approx(speeds[:3])
    assert {links.speed(kind, axes)[1] for kind in kinds} == {speeds[3]}


def test_a_ring_over_many_devices_of_a_host_is_no_faster_than_their_links():
    links = MeshLinks(("a",), (64,), 100.0, 1.0, domain=32, network_bandwidth=10.0)
    assert links.speed("all-reduce", 1)[0] == 100


def test_a_sum_is_scattered_within_the_slices_of_tpus_and_reduced_across_them():
    links = MeshLinks(("a", "b"), (2, 4), **HOSTS, scatters_over_network=False)
    over_slices = links.reshard_steps((0,), (0b11,), 0b11, 800)
    assert [(step.kind, step.axes, step.bytes) for step in over_slices] == [
        ("reduce-scatter", 0b10, 800),
        ("all-reduce", 0b01, 200),
    ]
    assert [step.kind for step in links.reshard_steps((0,), (0b01,), 0b01, 800)] == ["all-reduce"]


@given(reshards(), st.integers(1, 30))
def test_no_collective_is_faster_over_a_network(reshard, domain):
    links, source, target, partial = reshard
    apart = dataclasses.replace(links, domain=domain, network_bandwidth=10.0, network_latency=3.0)
    for step in links.reshard_steps(source, target, partial, 1 << 10):
        assert apart.seconds(step) >= links.seconds(step)


def test_a_reduce_scatter_takes_the_time_of_an_all_reduce_where_there_is_none():
    links = MeshLinks(("a",), (4,), 100.0, 1.0, reduce_scatters=False)
    (scatter,) = links.reshard_steps((0,), (1,), 1, 800)
    (reduce,) = links.reshard_steps((0,), (0,), 1, 800)
    assert (scatter.kind, reduce.kind) == ("reduce-scatter", "all-reduce")
    assert links.seconds(scatter) == links.seconds(reduce)
    assert scatter.bytes_on_wire == reduce.bytes_on_wire / 2
