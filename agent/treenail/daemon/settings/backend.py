"""The setting ``backend``, for commands that need no other setting and load no policy of them."""

from enum import StrEnum


class BackendSetting(StrEnum):
    """The back end that manages the operating system."""

    AUTO = "auto"
    """The installed one; rpm-ostree when both are."""
    RPM_OSTREE = "rpm-ostree"
    BOOTC = "bootc"
