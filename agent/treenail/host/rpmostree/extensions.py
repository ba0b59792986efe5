"""Packages out of an image, offered to rpm-ostree as a repository for one transaction.

podman unpacks the image in a transient unit, because the agent's sandbox forbids what podman needs.
The directory has a fixed path and is made first: an agent that finds one without a transaction, for
example after a crash, removes all of it.
"""

import shutil

from treenail.errors import CancelledError
from treenail.host.container.podman import Podman
from treenail.host.filesystem.files import HostFiles, translate_errors
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.host.ostree.jobs import JobRunner
from treenail.host.ostree.watch import WatchCallback
from treenail.host.systemd.transient import TransientJob, TransientUnits

UNPACK_UNIT = "treenail-extensions.service"
REPOSITORY_FILE = "/etc/yum.repos.d/treenail-extensions.repo"
PACKAGES_DIRECTORY = "/var/lib/treenail/extensions"
"""Not in /run, which is memory, nor in /var/tmp, of which the agent has one of its own."""

_CONTAINER = "treenail-extensions"
_IN_IMAGE = "/usr/share/rpm-ostree/extensions/."
# The image goes at once: it would be on disk twice. One that others use too stays.
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
# The signatures of its packages are not looked at: the digest that the image is pulled by names
# every byte of them, and podman takes no image that the machine's policy.json refuses.
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
    """One image at a time. Raises `HostError`; to be used by one thread."""

    def __init__(
        self,
        root: Root,
        files: HostFiles,
        podman: Podman,
        units: TransientUnits,
        jobs: JobRunner,
        *,
        timeout_s: float,
    ) -> None:
        """Paths below ``root`` have to be those that systemd and rpm-ostree see too."""
        self._root = root
        self._files = files
        self._podman = podman
        self._units = units
        self._jobs = jobs
        self._timeout_s = timeout_s

    @property
    def is_offered(self) -> bool:
        """There is something that `withdraw_packages` would take away."""
        return self._files.has_entry(PACKAGES_DIRECTORY) or self._files.has_entry(REPOSITORY_FILE)

    def offer_packages(self, image: str, *, watch: WatchCallback) -> None:
        """Return once rpm-ostree finds the packages of the image, by digest, in its repositories.

        What was offered before is gone. Raises `CancelledError` when the watcher has enough, and
        leaves it to the caller to `withdraw_packages` what is there by then.
        """
        place, podman = self._root.resolve_path(PACKAGES_DIRECTORY), self._podman
        words = (podman.program, _CONTAINER, str(place), image, *podman.build_pull_command(image))
        argv = ("/bin/sh", "-ec", _SCRIPT % _IN_IMAGE, *words)
        job = TransientJob(UNPACK_UNIT, f"treenail: unpack {image}", argv, self._timeout_s)

        def each() -> None:
            if watch(TransactionProgress(f"unpacking {image}", None)) is not WatchVerdict.CONTINUE:
                raise CancelledError(f"{image} was not unpacked: it was cancelled")

        self.withdraw_packages()
        self._files.make_directory(PACKAGES_DIRECTORY, mode=0o700)
        self._jobs.check_outcome(
            self._units.run_job(job, each), f"cannot unpack {image} with podman"
        )
        content = _CONTENT.format(image=image, place=place)
        self._files.write_file(REPOSITORY_FILE, content.encode())

    def withdraw_packages(self) -> None:
        """Remove the repository and its packages. Idempotent."""
        self._files.remove_file(REPOSITORY_FILE)
        self._units.stop_unit(UNPACK_UNIT, lambda: None)
        place = self._root.resolve_path(PACKAGES_DIRECTORY)
        if place.is_dir():
            with translate_errors("remove", place):
                shutil.rmtree(place)
