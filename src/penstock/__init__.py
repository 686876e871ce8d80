"""The last mile of JAX training: feed the devices, shard the model, train, and measure.

import penstock as ps

loader = ps.Loader({"image": images, "label": labels}, batch_size=128, shuffle=True)
with ps.feed(loader, to=sharding) as batches:
    for batch in batches: ...
plan = ps.plan(step, state, batch, devices=8, hardware="tpu-v5e")
"""

from penstock import _early as _early  # first: it listens to signals while the others are imported
from penstock import _versions as _versions  # next: it refuses an old Python or JAX, with which the other imports would fail
from penstock._feed import Feed as Feed
from penstock._feed import feed as feed
from penstock._versions import UnsupportedVersionError as UnsupportedVersionError
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
from penstock.shard import Plan as Plan
from penstock.shard import PlanError as PlanError
from penstock.shard import plan as plan
from penstock.train import CheckpointError as CheckpointError
from penstock.train import DistributedError as DistributedError
from penstock.train import EarlyStop as EarlyStop
from penstock.train import Evaluation as Evaluation
from penstock.train import Goodput as Goodput
from penstock.train import Mean as Mean
from penstock.train import NonfiniteError as NonfiniteError
from penstock.train import OtherRunError as OtherRunError
from penstock.train import OtherStateError as OtherStateError
from penstock.train import Point as Point
from penstock.train import StepError as StepError
from penstock.train import Stopped as Stopped
from penstock.train import distributed as distributed
from penstock.train import fit as fit
from penstock.train import log as log

__version__ = "0.1.0"
