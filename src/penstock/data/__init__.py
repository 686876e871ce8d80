"""Records in storage go in, host batches (pytrees of NumPy arrays) come out. `Loader` is the entry point."""

from penstock.data.arrays import ArraySource as ArraySource
from penstock.data.collate import pad_to as pad_to
from penstock.data.collate import stack as stack
from penstock.data.loader import Loader as Loader
from penstock.data.records import RecordSource as RecordSource
from penstock.data.records import array_record as array_record
from penstock.data.source import Source as Source
from penstock.data.source import as_source as as_source
from penstock.data.transform import per_record as per_record
from penstock.data.worker_processes import WorkerDiedError as WorkerDiedError
