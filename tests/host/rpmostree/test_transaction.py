"""How far a transaction is, by what it says."""

import pytest

from treenail.host.ostree.deployments import Progress
from treenail.host.rpmostree.transaction import Gauge
from treenail.host.systemd.bus import Signal


def said(member: str, *values: object) -> Signal:
    return Signal(member, values)


IMPORT = [
    (said("Message", "Pulling manifest"), Progress("Pulling manifest", None)),
    (said("TaskBegin", "[1/4] Fetching a"), Progress("[1/4] Fetching a", 0)),
    (said("TaskEnd", "done"), Progress("[1/4] Fetching a", 25)),
    (said("TaskBegin", "[2/4] Fetching b"), Progress("[2/4] Fetching b", 25)),
    (said("PercentProgress", "Fetching b", 50), Progress("Fetching b", 37)),
    (said("TaskEnd", "done"), Progress("Fetching b", 50)),
    (said("TaskBegin", "[4/4] Fetching d"), Progress("[4/4] Fetching d", 75)),
    (said("TaskEnd", "done"), Progress("[4/4] Fetching d", 99)),
    (said("PercentProgress", "Staging deployment", 10), Progress("Staging deployment", 99)),
    (said("ProgressEnd"), Progress("Staging deployment", 99)),
    (said("Message", "Queued"), Progress("Queued", 99)),
]
UNCOUNTED = [
    (said("TaskBegin", "Checking out tree"), Progress("Checking out tree", None)),
    (said("TaskEnd", "done"), Progress("Checking out tree", None)),
    (said("PercentProgress", "Staging", 10), Progress("Staging", 10)),
    (said("PercentProgress", "Staging", 100), Progress("Staging", 99)),
    (said("PercentProgress", "Writing", 0), Progress("Writing", 99)),
    (said("DownloadProgress", (0, 0), (0, 0)), Progress("Writing", 99)),
]
ODD = [
    (said("TaskBegin", "[0/0] Fetching"), Progress("[0/0] Fetching", None)),
    (said("TaskEnd", "done"), Progress("[0/0] Fetching", None)),
    (said("Message", "GET https://me:pw@a.b/"), Progress("GET https://a.b/", None)),
    (said("Message", "x" * 300), Progress("x" * 199 + "…", None)),
    (said("News", 1), Progress("x" * 199 + "…", None)),
]


@pytest.mark.parametrize("story", [IMPORT, UNCOUNTED, ODD], ids=["import", "uncounted", "odd"])
def test_progress_follows_what_is_said_and_never_falls(
    story: list[tuple[Signal, Progress]],
) -> None:
    gauge = Gauge()
    seen = []
    for signal, _ in story:
        gauge.read(signal)
        seen.append(gauge.progress)
    assert seen == [progress for _, progress in story]
