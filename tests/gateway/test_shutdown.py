"""The budget of an ordered stop adds up, and its parts leave room for each other."""

from gateway import shutdown
from tests.system.installation import STOP_SECONDS


def test_the_parts_of_an_ordered_stop_fit_into_what_is_promised():
    parts = (
        shutdown.RUNNING_SECONDS,
        shutdown.SETTLING_SECONDS,
        shutdown.LEAVING_SECONDS,
        shutdown.ENGINE_SECONDS,
        shutdown.SLACK_SECONDS,
    )

    assert sum(parts) == shutdown.TOTAL_SECONDS == STOP_SECONDS
    assert min(parts) >= 1, "an interpreter's end alone takes 0.7 s of processor time"


def test_connections_outlive_running_requests_and_not_their_settlement():
    told_by = shutdown.CONNECTIONS_SECONDS - shutdown.RUNNING_SECONDS

    assert 1 <= told_by <= shutdown.SETTLING_SECONDS
