"""How far a transaction is, by what it says."""

import pytest

from treenail.host.ostree.deployments import TransactionProgress
from treenail.host.rpmostree.client import RpmOstreeProgress
from treenail.host.systemd.system_bus import BusSignal


def said(member: str, *values: object) -> BusSignal:
    return BusSignal(member, values)


IMPORT = [
    (said("Message", "Pulling manifest"), TransactionProgress("Pulling manifest", None)),
    (said("TaskBegin", "[1/4] Fetching a"), TransactionProgress("[1/4] Fetching a", 0)),
    (said("TaskEnd", "done"), TransactionProgress("[1/4] Fetching a", 25)),
    (said("TaskBegin", "[2/4] Fetching b"), TransactionProgress("[2/4] Fetching b", 25)),
    (said("PercentProgress", "Fetching b", 50), TransactionProgress("Fetching b", 37)),
    (said("TaskEnd", "done"), TransactionProgress("Fetching b", 50)),
    (said("TaskBegin", "[4/4] Fetching d"), TransactionProgress("[4/4] Fetching d", 75)),
    (said("TaskEnd", "done"), TransactionProgress("[4/4] Fetching d", 99)),
    (
        said("PercentProgress", "Staging deployment", 10),
        TransactionProgress("Staging deployment", 99),
    ),
    (said("ProgressEnd"), TransactionProgress("Staging deployment", 99)),
    (said("Message", "Queued"), TransactionProgress("Queued", 99)),
]
UNCOUNTED = [
    (said("TaskBegin", "Checking out tree"), TransactionProgress("Checking out tree", None)),
    (said("TaskEnd", "done"), TransactionProgress("Checking out tree", None)),
    (said("PercentProgress", "Staging", 10), TransactionProgress("Staging", 10)),
    (said("PercentProgress", "Staging", 100), TransactionProgress("Staging", 99)),
    (said("PercentProgress", "Writing", 0), TransactionProgress("Writing", 99)),
    (said("DownloadProgress", (0, 0), (0, 0)), TransactionProgress("Writing", 99)),
]
ODD = [
    (said("TaskBegin", "[0/0] Fetching"), TransactionProgress("[0/0] Fetching", None)),
    (said("TaskEnd", "done"), TransactionProgress("[0/0] Fetching", None)),
    (said("Message", "GET https://me:pw@a.b/"), TransactionProgress("GET https://a.b/", None)),
    (said("Message", "x" * 300), TransactionProgress("x" * 199 + "…", None)),
    (said("News", 1), TransactionProgress("x" * 199 + "…", None)),
]


@pytest.mark.parametrize("story", [IMPORT, UNCOUNTED, ODD], ids=["import", "uncounted", "odd"])
def test_progress_follows_signals_and_never_falls(
    story: list[tuple[BusSignal, TransactionProgress]],
) -> None:
    gauge = RpmOstreeProgress()
    seen = []
    for signal, _ in story:
        gauge.read_signal(signal)
        seen.append(gauge.progress)
    assert seen == [progress for _, progress in story]
