"""Host batch → device, without stalls."""

from penstock._feed.device_feed import Feed as Feed
from penstock._feed.device_feed import feed as feed
from penstock._feed.stats import Stats as Stats
