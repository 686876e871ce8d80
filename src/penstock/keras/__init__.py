"""Data for Keras 3 on JAX, read and placed on a thread ahead of the training step.

import penstock.keras as pk

with pk.threaded_epochs():                 # every fit, evaluate and predict in here, whatever its data
    model.fit(x, y, epochs=3)
model.fit(pk.data(loader), epochs=3)       # a Loader, or anything that ps.feed takes, as Keras data
with pk.AutoShardDistribution().scope():   # every model in here is sharded over all devices, by a plan of its training step
    model = build(); model.compile("adamw", "mse"); model.fit(x, y)
model.fit(pk.data(loader), callbacks=[pk.Checkpoint("runs/a", loader)])    # continues in the middle of an epoch after a crash

With the environment variable KERAS_JAX_EPOCH_ITERATOR=threaded, importing this module turns threaded epochs on.
"""

from typing import TYPE_CHECKING

from penstock.keras.replace_iterator import data as data
from penstock.keras.replace_iterator import disable_threaded_epochs as disable_threaded_epochs
from penstock.keras.replace_iterator import enable_threaded_epochs as enable_threaded_epochs
from penstock.keras.replace_iterator import follow_environment
from penstock.keras.replace_iterator import threaded_epochs as threaded_epochs
from penstock.keras.session import ThreadedEpochs as ThreadedEpochs

if TYPE_CHECKING:
    from penstock.keras.autoshard import AutoShardDistribution as AutoShardDistribution
    from penstock.keras.checkpoint import Checkpoint as Checkpoint

follow_environment()
del follow_environment, TYPE_CHECKING


def __getattr__(name: str) -> type:
    """Return a class whose base class is Keras's, so that Keras is imported with it and not before."""
    from penstock.keras.versions import require_jax

    if name == "AutoShardDistribution":
        require_jax("automatic shardings", "use the distributions of Keras")
        from penstock.keras.autoshard import AutoShardDistribution

        return AutoShardDistribution
    if name == "Checkpoint":
        require_jax("checkpoints", "use keras.callbacks.BackupAndRestore")
        from penstock.keras.checkpoint import Checkpoint

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
