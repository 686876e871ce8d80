"""Train without loss: the loop, verified checkpoints, and several processes. See `penstock.train.fit`."""

from penstock._stopping import Stopped as Stopped
from penstock.train import log as log
from penstock.train.goodput import Goodput as Goodput
from penstock.train.metrics import Mean as Mean
from penstock.train.metrics import Point as Point
from penstock.train.schedule import EarlyStop as EarlyStop
from penstock.train.schedule import Evaluation as Evaluation
