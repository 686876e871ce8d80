"""Train without loss: the loop, checkpoints that are verified, and several processes.

A step function, a state and a feed go in; the trained state comes out, and a run folder from which the run continues.
"""

from penstock._stopping import Stopped as Stopped
from penstock.train import log as log
from penstock.train.checkpoint import CheckpointError as CheckpointError
from penstock.train.detection import DistributedError as DistributedError
from penstock.train.fitting import fit as fit
from penstock.train.goodput import Goodput as Goodput
from penstock.train.intervals import NonfiniteError as NonfiniteError
from penstock.train.leaves import OtherStateError as OtherStateError
from penstock.train.metrics import Mean as Mean
from penstock.train.point import Point as Point
from penstock.train.processes import distributed as distributed
from penstock.train.program import StepError as StepError
from penstock.train.run_folder import OtherRunError as OtherRunError
from penstock.train.schedule import EarlyStop as EarlyStop
from penstock.train.schedule import Evaluation as Evaluation
