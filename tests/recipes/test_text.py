import gzip
import io
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.recipes.commands import metrics, start

import penstock as ps
from penstock.errors import CannotStartError
from penstock.recipes import language_model, text
from penstock.recipes.language_model import Decoder, LanguageModel, Sizes

pytestmark = pytest.mark.usefixtures("programs_are_compiled_fast")

SMALL = Sizes(width=32, depth=2, heads=4, kv_heads=2, hidden=48)


@pytest.fixture
def story(tmp_path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(200)))
    return path


def _trained(folder: Path) -> list[float]:
    return [line["bits_per_byte"] for line in metrics(folder) if "bits_per_byte" in line]


def _validated(folder: Path) -> list[float]:
    return [line["val_bits_per_byte"] for line in metrics(folder) if "val_bits_per_byte" in line]


def _bits(metrics: dict) -> float:
    return float(metrics["bits_per_byte"].total / metrics["bits_per_byte"].count)


# The data


@pytest.mark.parametrize(("size", "context"), [(1000, 7), (999, 1), (40_000, 128), (260, 128)])
def test_no_training_window_overlaps_the_held_out_text(size, context):
    # Each value is its position, so that the records say which bytes they hold.
    part = text.Text(np.arange(size, dtype=np.int32), context)
    held_out = set(part.held_out.tolist())
    windows = part.training_windows()
    trained = set(windows.read(np.arange(len(windows)))["tokens"].ravel().tolist())
    assert not trained & held_out
    assert len(part.training) + len(part.held_out) == size
    assert max(trained) < min(held_out)


@pytest.mark.parametrize(("size", "context"), [(1000, 7), (999, 1), (40_000, 128), (260, 128)])
def test_each_held_out_byte_is_a_target_once(size, context):
    part = text.Text(np.arange(size, dtype=np.int32), context)
    windows = part.held_out_windows()
    read = windows.read(np.arange(len(windows)))["tokens"]
    assert read[:, 1:].ravel().tolist() == part.held_out.tolist()
    assert (read[:, 1:] == read[:, :-1] + 1).all()


def test_a_tenth_is_held_out():
    assert len(text.Text(np.zeros(100_000, np.uint8), 128).held_out) == pytest.approx(10_000, abs=64)


def test_a_file_is_mapped_byte_for_byte(story):
    part = text.open_text(story, 16)
    assert isinstance(part.tokens, np.memmap)
    assert part.tokens.tobytes() == story.read_bytes()


def test_topics_are_the_text_if_no_file_is_named():
    part = text.open_text(None, 16)
    assert part.tokens.tobytes() == text.topics()
    assert len(part.tokens) > 300_000
    assert len(part.tokens) / 256 > 1000
    assert 'The "if" statement' in text.topics().decode()


def test_no_paragraph_of_the_topics_comes_twice():
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.topics().decode().split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)


def test_gzip_is_that_of_the_command(tmp_path):
    held_out = text.open_text(None, 128).held_out
    bits = text.gzip_bits_per_byte(held_out)
    compressed = subprocess.run(["gzip", "-9", "-n"], input=held_out.tobytes(), capture_output=True, check=True).stdout
    assert bits == pytest.approx(8 * len(compressed) / len(held_out), rel=0.01)
    assert gzip.decompress(compressed) == held_out.tobytes()


# The model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(SMALL, steps=60)


@pytest.fixture(scope="module")
def state(model):
    return jax.jit(model.start)(jax.random.key(0))


@pytest.fixture(scope="module")
def evaluate(model):
    return jax.jit(model.evaluate)


def test_equally_likely_bytes_have_8_bits(evaluate, state):
    zeros = state._replace(parameters=jax.tree.map(jnp.zeros_like, state.parameters))
    assert _bits(evaluate(zeros, {"tokens": np.zeros((3, 9), np.uint8)})) == pytest.approx(8)


def test_the_loss_is_the_mean_of_minus_the_log_of_the_probability_of_targets(model, evaluate, state):
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (3, 9), np.uint8)}
    metrics = evaluate(state, batch)
    whole = model._decoder(jax.random.key(0))  # the parameters of `state`
    logits = jax.jit(lambda tokens: jax.nn.log_softmax(whole(tokens)))(batch["tokens"][:, :-1].astype(np.int32))
    chosen = np.take_along_axis(np.asarray(logits), batch["tokens"][:, 1:, None].astype(int), axis=2)
    assert metrics["bits_per_byte"].count == 24
    assert _bits(metrics) == pytest.approx(-chosen.mean() / math.log(2), rel=1e-5)


def test_rows_that_the_mask_leaves_out_do_not_count(evaluate, state):
    rows = np.random.default_rng(0).integers(0, 256, (5, 9), np.uint8)
    masked = evaluate(state, {"tokens": rows, "mask": np.array([True, True, True, False, False])})
    alone = evaluate(state, {"tokens": rows[:3]})
    assert masked["bits_per_byte"].count == alone["bits_per_byte"].count == 24
    assert _bits(masked) == pytest.approx(_bits(alone), rel=1e-5)


@pytest.mark.slow
def test_training_learns_a_text_and_samples_it():
    model = LanguageModel(SMALL, steps=300)
    state = jax.jit(model.start)(jax.random.key(0))
    line = b"the quick brown fox jumps over it. "
    windows = ps.windows({"tokens": np.frombuffer(line * 40, np.uint8)}, 33, stride=3)
    loader, step = ps.Loader(windows, 16, shuffle=True), jax.jit(model.train)
    losses = []
    for number in range(300):
        state, metrics = step(state, loader[number])
        losses.append(_bits(metrics))
    assert state.step == 300
    assert losses[0] > 7
    assert losses[-1] < 0.3
    prompt = np.frombuffer(line[:20], np.uint8)
    sample = jax.jit(model.sample, static_argnums=(3, 4))(state, prompt, jax.random.key(0), 80, 32, 0.1)
    assert bytes(np.asarray(sample, np.uint8)) == (line * 3)[20:100]


def test_samples_at_low_temperature_are_the_likeliest_tokens_of_the_whole_sequence(model, state):
    prompt = jnp.array([7, 200, 3])
    sample = jax.jit(model.sample, static_argnums=(3, 4, 5))(state, prompt, jax.random.key(0), 6, 16, 1e-6)
    assert sample.shape == (6,)
    whole: Decoder = model._decoder(jax.random.key(0))  # the parameters of `state`
    logits = jax.jit(whole)(np.concatenate([prompt, sample])[None])
    likeliest = np.argmax(logits[0], axis=-1)
    np.testing.assert_array_equal(likeliest[2:-1], sample)


def test_a_seed_fixes_the_sample_and_another_changes_it(model, state):
    draw = jax.jit(model.sample, static_argnums=(3, 4))
    first, again, other = (draw(state, jnp.array([1]), jax.random.key(seed), 20, 8).tolist() for seed in (0, 0, 1))
    assert first == again != other


# The command


def test_a_tiny_training_leaves_metrics_and_a_sample(story, tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "Sizes", lambda: Sizes(width=16, depth=1, heads=2, kv_heads=1, hidden=16))
    result = text.train(story, steps=2, context=16, bf16=True, out=tmp_path / "run", quiet=True)
    assert len(_trained(tmp_path / "run")) == 1
    assert _validated(tmp_path / "run") == [result.bits_per_byte]
    assert 0 < result.bits_per_byte < 9
    assert result.held_out % 16 == 0
    assert result.prompt == text.open_text(story, 16).held_out[: len(result.prompt)].tobytes()
    assert (tmp_path / "run/sample.txt").read_bytes() == result.prompt + result.sample


def test_a_run_continues_with_its_own_settings_and_goes_on_with_more_steps(story, tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "Sizes", lambda: Sizes(width=16, depth=1, heads=2, kv_heads=1, hidden=16))
    monkeypatch.chdir(tmp_path)
    text.train(story.name, steps=2, context=16, seed=5, out="runs/story", quiet=True)  # a name of the user's own
    done = text.train(resume=True, quiet=True)
    assert (done.step, done.out) == (2, Path("runs/story"))
    assert done.verdict == "nothing left to train: the run is at step 2"
    longer = text.train(steps=3, resume=True, quiet=True)
    assert (longer.step, len(_validated(longer.out))) == (3, 2)
    with pytest.raises(CannotStartError, match="context was 16 and is 32"):
        text.train(context=32, out="runs/story", quiet=True)
    with pytest.raises(CannotStartError, match=r"--out runs/story: .*cannot be continued with this feed"):
        Path("other.txt").write_text("another text, " * 50)
        text.train("other.txt", out="runs/story", quiet=True)
    assert text.train(out="runs/story", quiet=True).step == 3  # a refused command leaves the run as it was


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> text.Result:
    return text.train(steps=24, context=32, seed=3, out=tmp_path_factory.mktemp("runs") / "a", quiet=True)


@pytest.mark.slow
def test_training_leaves_a_line_for_each_log_point(short):
    lines = [line for line in metrics(short.out) if "bits_per_byte" in line]
    assert [line["step"] for line in lines] == [10, 20, 24]
    assert all(set(line) == {"step", "bits_per_byte", "steps_per_second", "input_wait"} for line in lines)
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
    assert _validated(short.out) == [short.bits_per_byte]
    assert short.bits_per_byte < 8


@pytest.mark.slow
def test_the_sample_is_kept_behind_its_prompt(short):
    held_out = text.open_text(None, 32).held_out
    assert short.prompt == held_out[:64].tobytes()
    assert (short.out / "sample.txt").read_bytes() == short.prompt + short.sample
    assert len(short.sample) == 400
    assert short.held_out == len(held_out)
    assert short.gzip_bits_per_byte == text.gzip_bits_per_byte(held_out)


@pytest.mark.slow
def test_a_seed_fixes_the_losses_and_another_changes_them(short, tmp_path):
    def losses(seed: int) -> list[float]:
        text.train(steps=24, context=32, seed=seed, out=tmp_path / str(seed), quiet=True)
        return _trained(tmp_path / str(seed))

    assert losses(3) == _trained(short.out)
    assert losses(4) != _trained(short.out)


@pytest.mark.slow
def test_stopped_run_continues_with_the_same_losses(short, tmp_path, monkeypatch):
    from penstock.train.loop import Loop

    step = Loop._step
    with monkeypatch.context() as patch, pytest.raises(ps.Stopped):
        patch.setattr(
            Loop, "_step", lambda loop, batch: (loop.step == 12 and signal.raise_signal(signal.SIGTERM), step(loop, batch))
        )
        text.train(steps=24, context=32, seed=3, out=tmp_path, quiet=True)
    result = text.train(steps=24, context=32, seed=3, out=tmp_path, quiet=True)
    assert _trained(tmp_path)[-1] == _trained(short.out)[-1]
    assert (result.bits_per_byte, result.sample) == (short.bits_per_byte, short.sample)


@pytest.mark.slow
def test_training_in_half_the_default_steps_reaches_2_65_bits_per_byte_on_one_device(tmp_path):
    process = start("text", "--quiet", "--steps", str(text.Settings.steps // 2), "--out", str(tmp_path))
    printed, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert _validated(tmp_path)[-1] <= 2.65  # 2.62 on Python 3.13, whose topics of help() are other ones; below 2.6 before
    assert "gzip -9 of the same bytes alone: 2." in printed
    assert printed.startswith("continuing ")
    assert str(tmp_path / "sample.txt") in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"--steps 0: needs an integer >= 1"),
        ({"batch_size": -8}, r"--batch-size -8: needs an integer >= 1"),
        ({"seed": -1}, r"--seed -1: needs an integer from 0 to 4294967295"),
        ({"batch_size": 12}, r"--batch-size 12: does not divide over 8 devices; use a multiple, such as 8"),
        ({"context": 10**6}, r"of which 0 are .* or a smaller --batch-size or --context"),
        ({"data": "no such file"}, r"--data no such file: .*No such file.*name a file"),
        ({"data": tempfile.gettempdir()}, r"--data .*Is a directory.*name a file"),
    ],
)
def test_unusable_arguments_are_named_with_a_way_out(arguments, message, tmp_path):
    assert jax.device_count() == 8
    with pytest.raises(CannotStartError, match=message):
        text.train(**arguments, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_empty_and_short_files_are_told(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"")
    with pytest.raises(CannotStartError, match="is empty; name a file of text"):
        text.train(path, out=tmp_path / "never")
    # A tenth of 145 bytes is held out: one window of 16. A batch of 8 windows of 16 targets has 129 bytes.
    path.write_bytes(bytes(144))
    with pytest.raises(CannotStartError, match=r"144 bytes, of which 128 .* needs 129; give a longer text"):
        text.train(path, context=16, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_the_shortest_text_is_trained(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(145))
    assert text.train(path, steps=2, context=16, out=tmp_path / "run", quiet=True).held_out == 16


def test_what_the_model_wrote_can_be_shown_on_any_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    shown = text._printable("é\n\x1b[31m".encode() + b"\xff")
    assert shown == "?\n.[31m?"
