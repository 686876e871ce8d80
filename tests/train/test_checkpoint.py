"""Only a complete and undamaged checkpoint is ever the latest, and the others do not get in its way."""

import contextlib
import errno
import json
import logging
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import penstock as ps
from penstock.train.checkpoint import Checkpoints, read, restore
from penstock.train.manifest import write_manifest
from penstock.train.schedule import Goal
from penstock.train.state import named_leaves


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints")
    yield made
    made.close()


def arrays(value=0.0):
    return {"w": jnp.full((8, 4), float(value)), "n": jnp.int32(value), "key": jax.random.key(int(value))}


def save(checkpoints, *steps, **settings):
    for step in steps:
        checkpoints.save(step, arrays(step), {"feed": {"step": step}}, **settings)
    checkpoints.wait()


def value(checkpoint):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays())
    return float(restore(checkpoint, like)["w"][0, 0])


def test_checkpoint_comes_back_bit_for_bit(checkpoints):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("d"))
    state = {
        "float": jax.device_put(jax.random.normal(jax.random.key(0), (16, 3)), sharded),
        "half": jnp.arange(7, dtype=jnp.bfloat16) / 3,
        "eight": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "eight, not in TensorStore": jax.device_put(jnp.arange(-8, 8).astype(jnp.float8_e4m3) / 3, sharded),
        "four": jnp.arange(-8, 8, dtype=jnp.int4),
        "four, not in TensorStore": jax.device_put(jnp.arange(16, dtype=jnp.uint4), sharded),
        "two, not in TensorStore": jnp.arange(4, dtype=jnp.uint2),
        "flags": jnp.array([True, False]),
        "small": jnp.arange(3, dtype=jnp.uint8),
        "scalar": jnp.float32(np.pi),
        "empty": jnp.zeros((0, 3)),
        "nan": jnp.array([jnp.nan, jnp.inf]),
        "key": jax.random.key(7),
        "keys": jax.device_put(jax.random.split(jax.random.key(8, impl="rbg"), 8), sharded),
        "old key": jax.random.PRNGKey(3),
    }
    checkpoints.save(1, state, {})
    checkpoints.wait()
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    back = restore(checkpoints.latest(), like)
    for name, leaf in state.items():
        assert back[name].dtype == leaf.dtype
        assert back[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        both = (leaf, back[name])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            both = tuple(map(jax.random.key_data, both))
        assert np.asarray(both[0]).tobytes() == np.asarray(both[1]).tobytes(), name


def test_state_of_empty_arrays_only_is_saved_too(checkpoints):
    state = {"none yet": jnp.zeros((0, 3))}
    checkpoints.save(1, state, {"feed": {"step": 1}})
    checkpoints.wait()
    found = checkpoints.latest()
    assert found.step == 1
    assert restore(found, state)["none yet"].shape == (0, 3)


def test_arrays_may_be_donated_right_after_save(checkpoints):
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = {"w": jnp.full((256, 256), 3.0)}
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = change(state)
    checkpoints.wait()
    like = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))}
    assert (restore(checkpoints.latest(), like)["w"] == 3).all()


def test_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2, 3, 10)
    assert checkpoints.steps() == [3, 10]
    checkpoints.close()


def test_best_one_is_kept_and_found(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, goal=Goal.parse("min loss", "best"))
    for step, metric in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, float("nan"))):
        checkpoints.save(step, arrays(step), {"metric": metric})
        checkpoints.wait()
    assert checkpoints.steps() == [2, 5]
    assert checkpoints.best().step == 2
    checkpoints.close()


def test_amended_record_counts_unless_it_is_damaged(tmp_path, caplog):
    with contextlib.closing(Checkpoints(tmp_path, goal=Goal.parse("min loss", "best"))) as checkpoints:
        save(checkpoints, 1, 2)
        checkpoints.amend(1, {"metric": 0.5, "more": [1]})
        assert checkpoints.best().record["more"] == [1]
        assert "more" not in checkpoints.latest().record
        later = tmp_path / "step-1/later.json"
        for content in (later.read_text().replace("0.5", "0.4"), "{", "[]", '"sha256"'):
            later.write_text(content)
            assert checkpoints.best() is None
            assert f"{later} is damaged" in caplog.text
            caplog.clear()


def test_amendment_that_cannot_be_written_is_an_error_and_changes_nothing(tmp_path, monkeypatch):
    def full(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        save(checkpoints, 1)
        monkeypatch.setattr("penstock.train.checkpoint.replace", full)
        with pytest.raises(ps.CheckpointError, match=r"results of step 1 could not be added to .*no space left .*is intact"):
            checkpoints.amend(1, {"more": 1})
        assert checkpoints.latest().record == {"feed": {"step": 1}}


def damage_truncate(path):
    target = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    target.write_bytes(target.read_bytes()[:-1])


def damage_flip(path):
    target = next(p for p in (path / "state").rglob("*") if p.is_file() and p.stat().st_size > 50)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)


def damage_remove(path):
    next(p for p in (path / "state").rglob("*") if p.is_file()).unlink()


def damage_unfinish(path):
    (path / "MANIFEST.json").unlink()


def damage_empty(path):
    shutil.rmtree(path)
    path.mkdir()


def damage_replace_manifest(path):
    damage_unfinish(path)
    (path / "MANIFEST.json").mkdir()


def damage_replace_folder(path):
    shutil.rmtree(path)
    path.write_text("no folder")


def damage_link(path):
    damage_replace_folder(path)
    path.unlink()
    path.symlink_to("nowhere")


FOLDERS = [damage_unfinish, damage_replace_manifest, damage_replace_folder, damage_link]


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove, damage_empty, *FOLDERS])
def test_damaged_newest_is_reported_and_passed_over(checkpoints, caplog, damage):
    save(checkpoints, 5, 10)
    damage(checkpoints.folder / "step-10")
    with caplog.at_level(logging.WARNING):
        found = checkpoints.latest()
    assert (found.step, value(found)) == (5, 5.0)
    assert "step-10 is passed over" in caplog.text
    assert "continuing from step 5" in caplog.text


@pytest.mark.parametrize("damage", FOLDERS)
def test_later_saves_still_happen_after_damage(checkpoints, damage):
    save(checkpoints, 5, 10)
    damage(checkpoints.folder / "step-10")
    save(checkpoints, 10)
    assert (checkpoints.latest().step, value(checkpoints.latest())) == (10, 10.0)
    save(checkpoints, 15)
    assert checkpoints.latest().step == 15


def damage_away(path):
    """Move the arrays to a storage that is not mounted."""
    shutil.rmtree(path / "state")
    (path / "state").symlink_to("nowhere")


def damage_link_manifest(path):
    damage_unfinish(path)
    (path / "MANIFEST.json").symlink_to("nowhere")


@pytest.mark.parametrize("damage", [damage_flip, damage_away, damage_link, damage_link_manifest, damage_replace_manifest])
def test_no_usable_checkpoint_is_an_error_that_lists_them_and_keeps_them(checkpoints, damage):
    save(checkpoints, 5, 10)
    for step in (5, 10):
        damage(checkpoints.folder / f"step-{step}")
    with pytest.raises(ps.CheckpointError, match=r"(?s)no checkpoint in .* can be used:\n  step-10: .+\n  step-5: ") as raised:
        checkpoints.latest()
    assert f"To begin anew, name another run folder, or remove {checkpoints.folder}" in str(raised.value)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-10", "step-5"]


def test_saves_that_were_broken_off_are_reported_and_are_no_error(checkpoints, caplog):
    save(checkpoints, 5, 10)
    damage_unfinish(checkpoints.folder / "step-5")
    damage_empty(checkpoints.folder / "step-10")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() is None
    assert caplog.text.count("is passed over") == 2


def test_unfinished_one_goes_when_a_later_one_is_complete(checkpoints):
    save(checkpoints, 5)
    damage_unfinish(checkpoints.folder / "step-5")
    save(checkpoints, 6)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-6"]


def test_other_files_in_the_folder_stay(checkpoints):
    save(checkpoints, 1)
    (checkpoints.folder / "notes.txt").write_text("mine")
    save(checkpoints, 2, 3, 4, 5)
    assert (checkpoints.folder / "notes.txt").read_text() == "mine"


def test_named_checkpoint_that_is_damaged_is_an_error(checkpoints):
    save(checkpoints, 5)
    damage_flip(checkpoints.folder / "step-5")
    with pytest.raises(ps.CheckpointError, match=r"step-5 cannot be used: .*changed since"):
        read(checkpoints.folder / "step-5")


def test_record_of_a_later_version_is_not_read(checkpoints):
    save(checkpoints, 5)
    path = checkpoints.folder / "step-5/record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    write_manifest(path.parent)
    with pytest.raises(ps.CheckpointError, match="its version is 2"):
        read(path.parent)


def test_failed_save_is_raised_once_and_the_next_one_works(checkpoints, monkeypatch):
    save(checkpoints, 5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._files, "write", _fail)
        checkpoints.save(10, arrays(10), {})
        with pytest.raises(ps.CheckpointError, match=r"step 10 could not be saved.*no space left.*step 5 is intact"):
            checkpoints.wait()
    assert checkpoints.steps() == [5]
    save(checkpoints, 15)
    assert checkpoints.latest().step == 15


def _fail(folder, arrays):
    folder.mkdir()
    raise RuntimeError("RESOURCE_EXHAUSTED: Failed to write to file 4: No space left on device [os_error_code='28']")


def test_refused_save_writes_nothing(checkpoints):
    def refuse():
        raise ps.NonfiniteError("bad", 3, None)

    with pytest.raises(ps.NonfiniteError, match="bad"):
        save(checkpoints, 3, late=refuse)
    assert not checkpoints.folder.exists()


def test_close_logs_why_a_save_was_refused_as_the_caller_may_have_an_error_of_its_own(checkpoints, caplog):
    def refuse():
        raise ps.NonfiniteError("bad", 3, None)

    checkpoints.save(3, {"w": jnp.ones(2)}, {}, late=refuse)
    checkpoints.close()
    assert "bad" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_full_disk_is_told_and_leaves_the_checkpoint_before(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        return  # only root may mount; penstock bench faults tells whether it could
    try:
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        save(checkpoints, 1)
        checkpoints.save(2, {"w": jax.random.normal(jax.random.key(0), (1024, 1024))}, {})
        with pytest.raises(ps.CheckpointError, match=r"no space left on the disk.*checkpoint of step 1 is intact"):
            checkpoints.wait()
        assert checkpoints.latest().step == 1
        checkpoints.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_two_leaves_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match="two leaves named 'a/b'"):
        named_leaves({"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
