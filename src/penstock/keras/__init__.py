"""Data for Keras 3 on JAX, read and placed on a thread ahead of the training step.

import penstock.keras as pk

with pk.threaded_epochs():                 # every fit, evaluate and predict in here, whatever its data
    model.fit(x, y, epochs=3)
model.fit(pk.data(loader), epochs=3)       # a Loader, or anything that ps.feed takes, as Keras data

With the environment variable KERAS_JAX_EPOCH_ITERATOR=threaded, importing this module turns threaded epochs on.
"""

from penstock.keras._data import data as data
from penstock.keras._replace_iterator import disable_threaded_epochs as disable_threaded_epochs
from penstock.keras._replace_iterator import enable_threaded_epochs as enable_threaded_epochs
from penstock.keras._replace_iterator import follow_environment
from penstock.keras._replace_iterator import threaded_epochs as threaded_epochs
from penstock.keras._session import ThreadedEpochs as ThreadedEpochs

follow_environment()
del follow_environment
