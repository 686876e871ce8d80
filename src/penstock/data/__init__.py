"""Read records from storage as host batches, which are pytrees of NumPy arrays. `Loader` is the entry point."""

from penstock.data.arrays import ArraySource as ArraySource
from penstock.data.collate import pad_to as pad_to
from penstock.data.collate import stack as stack
from penstock.data.concatenation import concat as concat
from penstock.data.image.decoding import decode_image as decode_image
from penstock.data.image.folder import ImageFolder as ImageFolder
from penstock.data.image.folder import images as images
from penstock.data.loader import Loader as Loader
from penstock.data.order.mixture import Mixture as Mixture
from penstock.data.order.mixture import mix as mix
from penstock.data.packs.documents import Documents as Documents
from penstock.data.packs.packing import pack as pack
from penstock.data.records import RecordSource as RecordSource
from penstock.data.records import array_record as array_record
from penstock.data.sliding_windows import windows as windows
from penstock.data.source import Source as Source
from penstock.data.source import as_source as as_source
from penstock.data.steps import Steps as Steps
from penstock.data.transform import per_record as per_record
