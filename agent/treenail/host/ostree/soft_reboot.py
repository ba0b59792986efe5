"""Soft reboots into another deployment: ostree mounts it as systemd's next root.

ostree rejects a deployment whose kernel, initramfs or kernel arguments differ from the running
ones. Its answer therefore shows whether a soft reboot is possible. See
ostree-admin-prepare-soft-reboot(1), of ostree 2025.3 and later, and systemd-soft-reboot.service(8).
"""

import logging

from treenail.errors import TransactionError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import OSTREE_PROGRAM
from treenail.host.ostree.jobs import JobRunner

log = logging.getLogger(__name__)

SOFT_REBOOT_UNIT = "treenail-soft-reboot.service"
_NEXT_ROOT = "/run/ostree/nextroot-booted"


class OstreeSoftReboot:
    """Prepares soft reboots, for one thread. Raises only `HostError`.

    The commands run in transient units because they mount in the host's mount namespace.
    """

    def __init__(self, jobs: JobRunner, root: Root) -> None:
        self._jobs = jobs
        self._root = root

    def unlock_staged(self) -> None:
        """Unlock the staged deployment, so that the next shutdown finalizes it; do not reboot."""
        self._run_ostree_admin("unlock the staged deployment", "lock-finalization", "--unlock")

    def prepare_soft_reboot(self) -> bool:
        """Prepare a soft reboot into the staged deployment; return False when ostree rejects it."""
        try:
            self._run_ostree_admin("prepare a soft reboot", "prepare-soft-reboot", "0")
        except TransactionError as error:
            log.info("falling back to a full reboot: %s", error)
            return False
        return True

    def clear_soft_reboot(self) -> None:
        """Clear a prepared soft reboot, if there is one."""
        if self._root.resolve_path(_NEXT_ROOT).exists():
            self._run_ostree_admin("clear the soft reboot", "prepare-soft-reboot", "--reset")

    def _run_ostree_admin(self, description: str, *arguments: str) -> None:
        argv = (str(self._root.resolve_path(OSTREE_PROGRAM)), "admin", *arguments)
        self._jobs.run_job(SOFT_REBOOT_UNIT, "ostree", description, argv)
