"""A pace ignores one long duration."""

from penstock._pipeline import Pace


def test_a_pace_ignores_one_long_duration():
    pace = Pace()
    for seconds in (1.0, 1.0, 9.0):
        pace.add(seconds)
    assert pace.seconds == 1.0
    pace.add(8.0)
    assert pace.seconds == 8.0
