"""A run over a mixture of packed documents is killed, and continues in fewer processes, with the same records."""

import json
import random

import pytest
from tests.feed.process_group import run

SCRIPT = """
import json, os, pathlib, signal
folder, last = pathlib.Path(FOLDER), LAST

def documents(seed, first):
    random = np.random.default_rng(seed)
    return [np.full(n, first + i, np.int32) for i, n in enumerate(random.integers(10, 200, 300))]

packs = [
    ps.pack(documents(1, 1), 128, index=folder / "first.index"),
    ps.pack(documents(2, 10_000), 128, method="concat", seed=3),
    ps.pack(documents(3, 20_000), 128, seed=1),
]
mixture = ps.mix(packs, {0: [0.5, 0.3, 0.2], 40: [0.2, 0.2, 0.6]})
options = dict(batch_size=16, shuffle=True, seed=9)
mesh = mesh_of((2, 4), ("node", "gpu"))
to = {"tokens": NamedSharding(mesh, SPEC), "segment_ids": NamedSharding(mesh, P()), "positions": NamedSharding(mesh, P("node"))}
whole = ps.Loader(mixture, **options, process=(0, 1))
saved = folder / "state.json"
with ps.feed(ps.Loader(mixture, **options, workers=WORKERS), to=to) as feed:
    if saved.exists():
        feed.restore(json.loads(saved.read_text()))
    for batch in feed:
        step = feed.state()["step"] - 1
        wrong = sum(wrong_elements(batch[name], whole[step][name]) for name in to)
        with open(folder / f"{count}-{index}.log", "a") as log:
            print(step, wrong, file=log)
        if index == 0 and step % 3 == 0:  # a state that is a little behind, as a checkpoint is
            saved.with_suffix(".tmp").write_text(json.dumps(feed.state()))
            os.replace(saved.with_suffix(".tmp"), saved)
        if step >= last:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_mixture_of_packs_goes_on_in_fewer_processes(tmp_path):
    ends = sorted(random.Random().sample(range(8, 90), 4))
    first = 0
    specs, workers_of = ('P("gpu")', 'P("node")', "P()", "P(None)"), (None, 2, None, 1)
    for count, last, spec, workers in zip((8, 4, 2, 1), ends, specs, workers_of, strict=True):
        script = SCRIPT.replace("FOLDER", repr(str(tmp_path))).replace("LAST", str(last))
        run(script.replace("SPEC", spec).replace("WORKERS", str(workers)), count, killed=True)
        for index in range(count):
            lines = [tuple(map(int, line.split())) for line in (tmp_path / f"{count}-{index}.log").read_text().splitlines()]
            assert [step for step, _ in lines] == list(range(first, last + 1)), (ends, count, index)
            assert sum(wrong for _, wrong in lines) == 0, (ends, count, index)
        first = json.loads((tmp_path / "state.json").read_text())["step"]
        assert first > last - 3
