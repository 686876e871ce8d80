"""The last mile of JAX training: feed the devices, shard the model, train, and measure.

import penstock as ps

loader = ps.Loader({"image": images, "label": labels}, batch_size=128, shuffle=True)
with ps.feed(loader, to=sharding) as batches:
    for batch in batches: ...
plan = ps.plan(step, state, batch, devices=8, hardware="tpu-v5e")
"""

from typing import TYPE_CHECKING

from penstock import _first_import as _first_import  # first: it listens to signals while the others are imported
from penstock import _versions as _versions  # next: it refuses an old Python or JAX, with which the other imports would fail
from penstock.data import Loader as Loader
from penstock.data import Source as Source
from penstock.data import Steps as Steps
from penstock.data import as_source as as_source
from penstock.data import concat as concat
from penstock.data import decode_image as decode_image
from penstock.data import images as images
from penstock.data import mix as mix
from penstock.data import pack as pack
from penstock.data import pad_to as pad_to
from penstock.data import per_record as per_record
from penstock.data import windows as windows
from penstock.data.remote.files import local as local
from penstock.data.remote.files import remote as remote
from penstock.data.streams.jsonl import jsonl as jsonl
from penstock.data.streams.stream import stream as stream
from penstock.data.streams.webdataset import webdataset as webdataset
from penstock.environment.doctor import doctor as doctor
from penstock.errors import CheckpointError as CheckpointError
from penstock.errors import CompileError as CompileError
from penstock.errors import DistributedError as DistributedError
from penstock.errors import NonfiniteError as NonfiniteError
from penstock.errors import OtherRunError as OtherRunError
from penstock.errors import OtherStateError as OtherStateError
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PlanError as PlanError
from penstock.errors import StepError as StepError
from penstock.errors import UnsupportedVersionError as UnsupportedVersionError
from penstock.feed import Feed as Feed
from penstock.shard import Plan as Plan
from penstock.shard.largest_batch import largest_batch as largest_batch
from penstock.shard.planning import plan as plan
from penstock.train import EarlyStop as EarlyStop
from penstock.train import Evaluation as Evaluation
from penstock.train import Goodput as Goodput
from penstock.train import Mean as Mean
from penstock.train import Point as Point
from penstock.train import Stopped as Stopped
from penstock.train import log as log
from penstock.train.distributed import distributed as distributed
from penstock.train.fit import fit as fit

if TYPE_CHECKING:  # at run time, `feed` is the package, which can be called
    from penstock.feed import feed as feed
del TYPE_CHECKING

__version__ = "0.1.0"
