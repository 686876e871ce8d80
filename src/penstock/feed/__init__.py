"""Host batch → device, without stalls."""

from penstock.feed.feed import Feed as Feed
from penstock.feed.feed import feed as feed
from penstock.feed.stats import Stats as Stats
