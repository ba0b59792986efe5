"""Packages out of an image, offered to rpm-ostree as a repository for one transaction.

podman unpacks the image in a transient unit, because the agent's sandbox forbids what podman needs.
The directory has a fixed path and is made first: an agent that finds one without a transaction, for
example after a crash, removes all of it.
"""

import shutil

from treenail.errors import CancelledError
from treenail.host.container.podman import Podman
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.ostree import deployments
from treenail.host.ostree.jobs import JobRunner
from treenail.host.systemd import transient

UNPACK_UNIT = "treenail-extensions.service"
REPOSITORY_FILE = "/etc/yum.repos.d/treenail-extensions.repo"
PACKAGES_DIRECTORY = "/var/lib/treenail/extensions"
"""Not in /run, which is memory, nor in /var/tmp, which is private to the agent's unit."""

_CONTAINER = "treenail-extensions"
# With "/." podman cp copies the content of the directory, not the directory (podman-cp(1)).
_IN_IMAGE = "/usr/share/rpm-ostree/extensions/."
# Remove the image at once, else it is on disk twice. podman keeps one that a container uses.
# podman cp reads a container that was created and never started: nothing of the image runs. A shell
# that a signal ends need not run its EXIT trap, so SIGTERM, which stops a unit, has a trap.
_SCRIPT = """\
podman=$0 container=$1 place=$2 image=$3
shift 3
clean() {
    "$podman" rm --force --ignore "$container"
    "$podman" image rm --ignore "$image" || :
}
trap clean EXIT
trap 'exit 1' TERM
"$podman" rm --force --ignore "$container"
"$@"
"$podman" create --net=none --name "$container" "$image" /bin/true
"$podman" cp "$container:%s" "$place"
"""
# No check of package signatures: the digest of the image covers every byte of them, and podman
# enforces the machine's policy.json.
# Metadata of an earlier image must not be used, and a missing directory is an error (dnf.conf(5)).
_CONTENT = """\
[treenail-extensions]
name=Packages of {image}
baseurl=file://{place}
enabled=1
gpgcheck=0
metadata_expire=0
skip_if_unavailable=0
"""


class ExtensionsRepository:
    """The packages of one image at a time, for one thread. Raises `HostError`."""

    def __init__(
        self,
        root: root_directory.Root,
        files: atomic_files.HostFiles,
        podman: Podman,
        units: transient.TransientUnits,
        jobs: JobRunner,
        *,
        timeout_s: float,
    ) -> None:
        """Paths below ``root`` must be those that systemd and rpm-ostree see too."""
        self._root = root
        self._files = files
        self._podman = podman
        self._units = units
        self._jobs = jobs
        self._timeout_s = timeout_s

    @property
    def is_offered(self) -> bool:
        """Return whether there is anything for `withdraw_packages` to remove."""
        return self._files.has_entry(PACKAGES_DIRECTORY) or self._files.has_entry(REPOSITORY_FILE)

    def offer_packages(self, image: str, *, watch: deployments.TransactionWatch) -> None:
        """Add the packages of the image to the repositories of rpm-ostree.

        They replace those of an earlier image. Raises `CancelledError` when the watcher cancels or
        detaches; the caller calls `withdraw_packages` after errors too.
        """
        directory, podman = self._root.resolve_path(PACKAGES_DIRECTORY), self._podman
        words = (
            podman.program, _CONTAINER, str(directory), image, *podman.build_pull_command(image)
        )  # fmt: skip
        argv = ("/bin/sh", "-ec", _SCRIPT % _IN_IMAGE, *words)
        job = transient.TransientJob(
            UNPACK_UNIT, f"treenail: unpack {image}", argv, self._timeout_s
        )

        def check_verdict() -> None:
            if (
                watch(deployments.TransactionProgress(f"unpacking {image}", None))
                is not deployments.TransactionVerdict.CONTINUE
            ):
                raise CancelledError(f"cancelled unpacking {image}")

        self.withdraw_packages()
        self._files.make_directory(PACKAGES_DIRECTORY, mode=0o700)
        self._jobs.check_outcome(
            self._units.run_job(job, check_verdict), f"cannot unpack {image} with podman"
        )
        content = _CONTENT.format(image=image, place=directory)
        self._files.write_file(REPOSITORY_FILE, content.encode())

    def withdraw_packages(self) -> None:
        """Remove the repository and its packages. Idempotent."""
        self._files.remove_file(REPOSITORY_FILE)
        self._units.stop_unit(UNPACK_UNIT, lambda: None)
        directory = self._root.resolve_path(PACKAGES_DIRECTORY)
        if directory.is_dir():
            with atomic_files.translate_errors("remove", directory):
                shutil.rmtree(directory)
