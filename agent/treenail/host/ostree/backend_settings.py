"""The OS back ends as settings and commands know them, without loading one of them.

The choice of the back end, the time limits of its transactions, and remedies for errors that
rpm-ostree, bootc and podman report for an image. It imports nothing of treenail: every command of
the node loads it.
"""

from dataclasses import dataclass
from enum import StrEnum


class BackendSetting(StrEnum):
    """The back end that manages the operating system."""

    AUTO = "auto"
    """The installed one; rpm-ostree when both are."""
    RPM_OSTREE = "rpm-ostree"
    BOOTC = "bootc"


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """Time limits of a transaction.

    ``stall_s`` is long because rpm-ostree reports no progress within a layer, however large.
    """

    transaction_s: float = 3 * 3600.0
    stall_s: float = 1800.0
    cancel_s: float = 120.0


_REMEDIES = (
    ("unauthorized", "check the pull secret for the image's registry"),
    ("authentication required", "check the pull secret for the image's registry"),
    ("denied", "check that the pull secret may read the image"),
    ("manifest unknown", "check that the registry has the image by this digest"),
    ("corrupted blob", "push the image again: a layer differs from its digest"),
    ("no such host", "check the name of the registry and this node's DNS"),
    ("no space left", "free space in /sysroot and /boot"),
    ("insufficient free space", "free space in /sysroot"),
    ("truncated history", "build the image with a tool that records the history of its layers"),
    ("inhibitor", "see who holds it with: systemd-inhibit --list"),
)


def find_remedy(text: str, default: str) -> str:
    """Return the remedy for the first known phrase in the text, else ``default``."""
    lowered = text.lower()
    return next((remedy for phrase, remedy in _REMEDIES if phrase in lowered), default)
