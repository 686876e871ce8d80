"""Compare the outputs of variants with a reference's before anything is timed, each variant in a fresh process."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.run_command import nvidia_gpu
from penstock_bench import activity
from penstock_bench.model import Agreement, Outputs, Variant
from penstock_bench.outcome import Failure, Parity
from penstock_bench.parity import compare_outputs
from penstock_bench.process import Finished, kill_all
from penstock_bench.progress import Progress


@dataclass
class _Compared:
    """The outputs of an agreement's reference, and each variant's differences from them, or the failures."""

    reference: Outputs | Failure
    variants: dict[str, list[Parity] | Failure] = field(default_factory=dict)


class Agreements:
    """The comparisons of outputs in a run. Workloads whose agreements have the same name are compared once.

    Args:
      folder: where processes write their outputs.
      run: runs a variant of a workload in a fresh process, which writes its outputs to a file.
      say: is called with the name of what is computed.
    """

    def __init__(self, folder: Path, run: Callable[[Progress, Variant, Path], Finished], say: Callable[[str], None]):
        self._folder, self._run, self._say = folder, run, say
        self._compared: dict[str, _Compared] = {}

    def check(self, progress: Progress, agreement: Agreement) -> None:
        """Compare each variant's outputs with the reference's, once for all workloads with the same agreement."""
        if agreement.name not in self._compared:
            self._compared[agreement.name] = _Compared(self._compute(progress, agreement, agreement.reference))
        compared = self._compared[agreement.name]
        if isinstance(compared.reference, Failure):
            reason = f"not timed: its reference, {agreement.reference.name}, failed"
            for name in list(progress.running):
                progress.fail(name, None, reason, compared.reference.output)
            return
        missing = [name for name in progress.running if name not in compared.variants]
        compared.variants |= dict(zip(missing, self._compare(progress, agreement, compared.reference, missing), strict=True))
        for name in list(progress.running):
            parity = compared.variants[name]
            if isinstance(parity, Failure):
                progress.fail(name, None, parity.reason, parity.output)
                continue
            progress.parity += parity
            if apart := [row for row in parity if not row.agreed]:
                differences = "; ".join(_apart(row, agreement.reference.name) for row in apart)
                progress.fail(name, None, f"not timed: it computes something else; {differences}")

    def _compare(
        self, progress: Progress, agreement: Agreement, reference: Outputs, names: Sequence[str]
    ) -> list[list[Parity] | Failure]:
        """Compare variants, as many at a time as there are cores: nothing is timed yet. On a GPU, one has the memory alone."""

        def compare(name: str) -> list[Parity] | Failure:
            variant = progress.workload.variant(name)
            # A variant that is its own reference needs no second process.
            found = reference if variant == agreement.reference else self._compute(progress, agreement, variant)
            return found if isinstance(found, Failure) else compare_outputs(name, found, reference, agreement)

        with ThreadPoolExecutor(1 if agreement.one_by_one or nvidia_gpu() else activity.cores()) as pool:
            futures = [pool.submit(compare, name) for name in names]
            try:
                return [future.result() for future in futures]
            except BaseException:  # Ctrl-C, which only this thread gets; a thread may be about to start its process
                for future in futures:
                    future.cancel()
                while wait(futures, timeout=0.1).not_done:
                    kill_all()
                raise

    def _compute(self, progress: Progress, agreement: Agreement, variant: Variant) -> Outputs | Failure:
        """Return the outputs that a variant computes in a fresh process, or its failure."""
        if variant.outputs is None:
            return {}
        self._say(f"parity, {agreement.name}: {variant.name}")
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder) / "outputs.npz"
            finished = self._run(progress, variant, path)
            reason = finished.reason
            if reason is None:
                try:
                    with np.load(path, allow_pickle=False) as file:
                        return dict(file)
                except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                    reason = f"its outputs cannot be read: {error}"
        return Failure(variant.name, None, f"computing what is compared: {reason}", finished.output)


def _apart(row: Parity, reference: str) -> str:
    """Word the difference between a variant and the reference."""
    apart = f"{row.difference:.2g} from the one of {reference}"
    if row.difference < row.least:
        return f"{row.worst} is only {apart}, which this precision cannot be (least {row.least:g})"
    return f"{row.worst} is {apart} (tolerance {row.tolerance:g})"
