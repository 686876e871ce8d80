"""The recipe `penstock train text`: train a small language model on the bytes of a text.

The tokens are the bytes of a file, or of the topics of Python's `help()`, which every Python has. The file is mapped into memory,
and windows of it are the records for training and validation.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock as ps
from penstock.data.sliding_windows import WindowSource
from penstock.errors import CannotStartError
from penstock.recipes.run_folder import (
    add_integer,
    add_run_arguments,
    check_at_least_one,
    check_devices,
    check_divides_over_devices,
    check_installed,
    check_seed,
    choose_folder,
    data_mesh,
    find_run,
    find_settings,
    fit_in,
    read_lines,
    stoppable,
    validation_batch_size,
)

if TYPE_CHECKING:
    from penstock.recipes.language_model import LanguageModel, State


DESCRIPTION = """\
Train a small language model on the bytes of a text, on all devices that JAX finds: a decoder-only transformer with 0.8
million parameters. The text is a file, or by default the topics of Python's help(), 400 KB that are on every machine.
The last tenth is held out. After a minute on two CPU cores, the model predicts it with about 2.1 bits per byte; gzip -9
of the same bytes, without the rest of the text, needs 2.4. Then the model writes a text of its own. The same flags on
the same machine give the same numbers.

The run folder gets checkpoints; metrics.jsonl, a line of JSON for every log point (step, bits_per_byte,
steps_per_second, input_wait) and every validation (step, val_bits_per_byte); goodput.json; and sample.txt, the text that
the model wrote. Ctrl-C and SIGTERM save the run; the same command continues it. With more --steps, a finished run goes
on: its learning rate, which was 0 at the end, then follows the schedule of the longer run."""
EPILOG = """\
example:
  penstock train text --data book.txt --steps 2000 --out runs/book
  penstock train text --resume --steps 4000"""
_NEEDS = ("flax", "optax", "orbax")
_LOG_EVERY, _VALIDATE_EVERY = 10, 200  # steps
_PROMPT, _SAMPLE = 64, 400  # bytes


@dataclass(frozen=True)
class Result:
    """The result of a training."""

    step: int  # number of steps of the run
    bits_per_byte: float  # mean cross-entropy of the held-out bytes, each predicted from at most `context` bytes before it
    gzip_bits_per_byte: float  # size of the same bytes, compressed alone by `gzip -9`, divided by their number
    held_out: int  # number of held-out bytes
    prompt: bytes  # the held-out bytes that the sample continues
    sample: bytes  # the bytes that the model wrote
    seconds: float  # wall-clock time of `train`, including compilation
    goodput: ps.Goodput
    verdict: str  # the verdict of the feed in one sentence, or that there was nothing left to train
    out: Path  # the run folder


@dataclass(frozen=True)
class Settings:
    """The options that a run keeps."""

    data: str | None = None  # the path of the text; None for the topics of help()
    steps: int = 600
    batch_size: int = 8
    context: int = 128
    seed: int = 0
    bf16: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `penstock train text` to its parser."""
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to learn (default: the topics of Python's help())")
    add_integer(parser, "--steps", Settings.steps, "training steps")
    add_integer(parser, "--batch-size", Settings.batch_size, "windows of a step, a multiple of the number of devices")
    add_integer(parser, "--context", Settings.context, "bytes that the model reads at once")
    add_integer(parser, "--seed", Settings.seed, "of parameters, order and sample, 0 to 2^32 - 1")
    parser.add_argument(
        "--bf16", action="store_true", default=None, help="compute matrix products in bfloat16, for GPUs and TPUs"
    )
    add_run_arguments(parser, "text")


def run(args: argparse.Namespace) -> int:
    """Train with the given arguments, print the result, and return the exit status: 0, or 2 if the arguments cannot be used."""
    try:
        result = train(
            args.data,
            args.steps,
            args.batch_size,
            args.context,
            args.seed,
            args.bf16,
            args.out,
            args.quiet,
            resume=args.resume,
            verbose=args.verbose,
        )
    except CannotStartError as error:
        print(f"penstock train text: error: {error}", file=sys.stderr)
        return 2
    print(f"continuing {_printable(result.prompt)!r}:\n{_printable(result.sample)}\n")
    print(
        f"held-out text, {result.held_out:,} bytes: {result.bits_per_byte:.3f} bits per byte at step {result.step:,}; "
        f"gzip -9 of the same bytes alone: {result.gzip_bits_per_byte:.3f}; {result.seconds:.1f} s in all"
    )
    print(f"goodput: {result.goodput}")
    print(result.verdict)
    print(f"files: {result.out / 'metrics.jsonl'}, {result.out / 'sample.txt'}")
    return 0


def train(
    data: str | Path | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    context: int | None = None,
    seed: int | None = None,
    bf16: bool | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    *,
    resume: bool = False,
    verbose: bool = False,
) -> Result:
    """Train the language model, or continue, and write the metrics and a sample to the run folder.

    The arguments are the options of `penstock train text`; None takes the one of the run that continues, or else the default.
    The held-out text does not depend on the seed.

    Raises:
      CannotStartError: an argument cannot be used, or a library is not installed.
      ps.Stopped: SIGINT or SIGTERM came. The run is saved.
    """
    begun = time.perf_counter()
    check_installed(_NEEDS)
    check_devices()
    run = find_run("text", out, resume)
    path = None if data is None else str(Path(data).absolute())
    given = {"data": path, "steps": steps, "batch_size": batch_size, "context": context, "seed": seed, "bf16": bf16}
    settings = Settings(**find_settings(run, given))
    check_at_least_one(steps=settings.steps, batch_size=settings.batch_size, context=settings.context)
    check_seed(settings.seed)
    name = settings.data if data is None else data  # as the user wrote it
    text = _open(name, settings.context)
    _check_length(text, name, settings.batch_size)
    check_divides_over_devices(settings.batch_size)
    folder = choose_folder("text", run or out)
    with stoppable(folder, verbose):
        sample, end = _train(text, settings, folder, quiet)
    prompt = _prompt(text)
    (folder / "sample.txt").write_bytes(prompt + sample)
    bits = next(line["val_bits_per_byte"] for line in reversed(read_lines(folder)) if "val_bits_per_byte" in line)
    gzipped = gzip_bits_per_byte(text.held_out)
    seconds = time.perf_counter() - begun
    assert end.goodput is not None
    return Result(end.step, bits, gzipped, len(text.held_out), prompt, sample, seconds, end.goodput, end.text, folder)


def _train(text: Text, settings: Settings, folder: Path, quiet: bool) -> tuple[bytes, ps.Point]:
    """Return the sample and the last point of the run."""
    from penstock.recipes.language_model import LanguageModel, Sizes

    mesh = data_mesh()
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    training = ps.Loader(text.training_windows(), settings.batch_size, shuffle=True, seed=settings.seed)
    validation = ps.Loader(text.held_out_windows(), validation_batch_size(32, mesh.size), epochs=1, remainder="pad")
    model = LanguageModel(Sizes(), settings.steps, jnp.bfloat16 if settings.bf16 else jnp.float32)
    # "rbg" is one XLA operation for each draw, which compiles in a third of the time of the default generator.
    key = jax.random.key(settings.seed, impl="rbg")
    with ps.feed(training, to=sharded) as batches:
        state, end = fit_in(
            folder,
            "text",
            settings,
            model.train,
            jax.jit(lambda: model.start(key)),
            batches,
            quiet=quiet,
            evaluate=ps.Evaluation(model.evaluate, validation, every=_VALIDATE_EVERY),
            log_every=_LOG_EVERY,
        )
    assert end is not None  # in one process
    return _sample(model, state, text, key, mesh), end


def _sample(model: LanguageModel, state: State, text: Text, key: jax.Array, mesh: Mesh) -> bytes:
    """Return bytes that continue the beginning of the held-out text."""
    prompt = jnp.asarray(bytearray(_prompt(text)), jnp.int32)
    draw = jax.jit(model.sample, static_argnums=(3, 4), out_shardings=NamedSharding(mesh, PartitionSpec()))
    return bytes(jax.device_get(draw(state, prompt, key, _SAMPLE, text.context)).astype("uint8"))


def _prompt(text: Text) -> bytes:
    return text.held_out[:_PROMPT].tobytes()


def _open(data: str | Path | None, context: int) -> Text:
    try:
        return open_text(data, context)
    except ImportError as error:
        raise CannotStartError("this Python has no topics of help(); name a text with --data") from error
    except OSError as error:
        raise CannotStartError(f"--data {data}: cannot be read ({error.strerror or error}); name a file of text") from error
    except ValueError as error:
        raise CannotStartError(f"--data {data}: is empty; name a file of text") from error


def _check_length(text: Text, data: str | Path | None, batch_size: int) -> None:
    needed = batch_size * text.context + 1
    if len(text.training) < needed:
        name = "the topics of help()" if data is None else f"--data {data}"
        raise CannotStartError(
            f"{name}: {len(text.tokens):,} bytes, of which {len(text.training):,} are for training, and a batch of {batch_size} "
            f"windows of {text.context} bytes needs {needed:,}; give a longer text, or a smaller --batch-size or --context"
        )


def _printable(text: bytes) -> str:
    """Return a text that any terminal can show: the text of the model may be no UTF-8, or have control characters."""
    shown = "".join(c if c.isprintable() or c == "\n" else "." for c in text.decode("utf-8", "replace"))
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "replace").decode(encoding)


# The text.
_HELD_OUT = 0.1  # share of the text


@dataclass(frozen=True)
class Text:
    """A text in two parts: the first is for training, and the last tenth is held out for validation.

    No training window overlaps the held-out text. `ps.windows` makes only windows that lie within the array it is given, and for
    training that is `training`, which ends where `held_out` begins.

    Attributes:
      tokens: uint8 [N], all bytes, mapped from the file.
      context: number of bytes that a model reads at once.
    """

    tokens: np.ndarray
    context: int

    @property
    def held_out_bytes(self) -> int:
        """Return M: the multiple of `context` that is nearest to a tenth of the text, but at least one."""
        return max(1, round(_HELD_OUT * len(self.tokens) / self.context)) * self.context

    @property
    def training(self) -> np.ndarray:
        """Return the first N - M bytes, which the model learns from."""
        return self.tokens[: max(0, len(self.tokens) - self.held_out_bytes)]

    @property
    def held_out(self) -> np.ndarray:
        """Return the last M bytes, on which the model is judged."""
        return self.tokens[len(self.training) :]

    def training_windows(self) -> WindowSource:
        """Return records `{"tokens": uint8 [context + 1]}`: inputs and targets of each window of the training text."""
        return ps.windows({"tokens": self.training}, self.context + 1, stride=self.context)

    def held_out_windows(self) -> WindowSource:
        """Return records as for training, in which each held-out byte is a target exactly once.

        The first window begins with the last byte of the training text, which is an input and no target.
        """
        return ps.windows({"tokens": self.tokens[len(self.training) - 1 :]}, self.context + 1, stride=self.context)


def open_text(path: str | Path | None, context: int) -> Text:
    """Map a file into memory as a `Text`; None maps a temporary file with `topics`, which no folder shows.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is empty.
    """
    file: IO[bytes] = tempfile.TemporaryFile() if path is None else Path(path).open("rb")  # noqa: SIM115 - closed below
    with file:  # the mapping stays when it is closed
        if path is None:
            file.write(topics())
            file.flush()
        return Text(np.memmap(file, np.uint8, mode="r"), context)


def topics() -> bytes:
    """Return the text of all topics of Python's `help()`, in alphabetical order; it differs a little between releases of Python.

    Each paragraph comes once. The topics repeat whole sections of each other, so a model could otherwise have learnt by heart a
    part of the text that is held out. In Python 3.12, 7 % of the held-out bytes are in runs of 50 bytes that are in the training
    text too, and none in runs of 80; with all paragraphs, 18 % would be in runs of 50.
    """
    from pydoc_data.topics import topics

    once: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Compared word by word, because a section that another topic repeats may be indented.
            once.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(once.values()).encode()


def gzip_bits_per_byte(text: np.ndarray) -> float:
    """Return the size of a text uint8 [N] after `gzip -9`, in bits for each of its bytes, with the 18 bytes of gzip's frame."""
    return 8 * len(gzip.compress(text.tobytes(), 9, mtime=0)) / len(text)
