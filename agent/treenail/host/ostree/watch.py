"""Callback for watching a transaction of any back end."""

from collections.abc import Callable

from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict

WatchCallback = Callable[[TransactionProgress], WatchVerdict]
