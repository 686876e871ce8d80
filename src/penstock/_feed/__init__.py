"""An iterable of host batches goes in, an iterator of device batches comes out. `feed` is the entry point."""

from penstock._feed.device_feed import Feed as Feed
from penstock._feed.device_feed import feed as feed
from penstock._feed.stats import Stats as Stats
