"""Access tokens of ``treenail-controller serve``: its options, and the access that they choose."""

import argparse
import os
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

from treenail.clock import Clock
from treenail.errors import UsageError

if TYPE_CHECKING:
    from treenail.controllers.ignition.access import Access
    from treenail.controllers.runtime.informers import Informers
    from treenail.controllers.runtime.metrics import ControllerMetrics
    from treenail.kube.client import Transport

DEFAULT_NAMESPACE = "treenail-ignition"
"""Namespace of the manifests."""
MODES = ("off", "ask", "require")
_DURATION = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_REQUEST_LIMIT_S = 5.0
"""Time limit of a request to the API server, for which a machine waits."""


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for access tokens."""
    parser.add_argument(
        "--tokens", choices=MODES, default=MODES[0],
        help="serve every request (off), refuse invalid tokens only (ask), or serve machines with "
        "a token only (require) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-window", type=parse_duration, default=600.0, metavar="DURATION",
        help="let the address that used a token use it again for this time (default: 10m)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=parse_duration, default=600.0, metavar="DURATION",
        help="accept tokens for this time while the API server is unreachable (default: 10m)",
    )  # fmt: skip


def parse_duration(text: str) -> float:
    """Parse a duration such as 30s, 10m, 24h or 7d; return seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a duration such as 10m or 24h, found {text!r}")
    return int(found[1]) * _UNITS_S[found[2]]


def find_namespace(arguments: argparse.Namespace) -> str:
    """Return the namespace of the server's objects."""
    return arguments.namespace or os.environ.get("POD_NAMESPACE") or DEFAULT_NAMESPACE


def check_token_arguments(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for tokens without a cluster, which keeps them."""
    if arguments.tokens != "off" and arguments.directory is not None:
        raise UsageError(
            "cannot use --tokens with --from: a cluster keeps the tokens",
            remedy="use --tokens off, or read a cluster",
        )


def open_access(
    stack: ExitStack,
    arguments: argparse.Namespace,
    transport: "Transport | None",
    informers: "Informers | None",
    metrics: "ControllerMetrics",
    clock: Clock,
) -> "Access":
    """Return the access that the arguments choose. Call it before the informers start."""
    from treenail.controllers.ignition.access import OpenAccess

    if arguments.tokens == "off" or transport is None or informers is None:
        return OpenAccess()
    from treenail.controllers.ignition.request_metrics import add_token_metrics
    from treenail.controllers.ignition.token_access import (
        SharedCredentials,
        TokenAccess,
        TokenMode,
        TokenSettings,
    )
    from treenail.controllers.ignition.token_store import TokenStore
    from treenail.kube.client import Client

    store = TokenStore(
        Client(transport, field_manager="treenail-serve", limit_s=_REQUEST_LIMIT_S),
        find_namespace(arguments),
        clock,
    )
    store.add_to_informers(informers)
    add_token_metrics(metrics, lambda: store.observed.book if store.observed else None, clock)
    access = TokenAccess(
        store,
        clock,
        TokenSettings(TokenMode(arguments.tokens), arguments.retry_window, arguments.grace),
        SharedCredentials(),
        is_watch_current=lambda: not informers.describe_staleness(("secrets",)),
    )
    return stack.enter_context(access)
