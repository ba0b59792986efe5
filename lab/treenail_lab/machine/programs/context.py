"""The machine as its programs see it: sysroot, catalogue, settings and podman's storage."""

import json
import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from treenail_lab import images
from treenail_lab.images import Image
from treenail_lab.machine.container import pull
from treenail_lab.machine.ostree.sysroot import Sysroot, lock_exclusively
from treenail_lab.machine.settings import MachineSettings

_STEP_S = 0.2


class ProgramError(Exception):
    """The program prints this message and exits with another code than 0."""


class ProgramContext:
    """The machine below a root directory, for a program that runs on it."""

    def __init__(
        self,
        root: Path,
        catalogue: Path,
        settings: Callable[[], MachineSettings],
        wait: Callable[[float], None],
    ) -> None:
        self.root = root
        self.catalogue = catalogue
        self.settings = settings
        self.wait = wait
        self.sysroot = Sysroot(root)
        self._storage = root / "var/lib/containers/storage/images.json"
        self.containers_directory = root / "var/lib/containers/storage/containers"
        """One file for each container, with the name of its image."""

    def wait_for_staging(self, part: float = 1.0) -> None:
        """Take this part of the time of a staging, which the settings may change meanwhile."""
        waited_s = 0.0
        while (left_s := self.settings().staging_s * part - waited_s) > 0:
            step_s = min(left_s, _STEP_S)
            self.wait(step_s)
            waited_s += step_s

    @contextmanager
    def lock_sysroot(self) -> Iterator[None]:
        """Hold the sysroot lock; bootc and ostree wait for it, rpm-ostree does not."""
        path = self.root / "sysroot/ostree/lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            # bootc and ostree print nothing while they wait without a terminal.
            lock_exclusively(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def find_image(self, pull_spec: str) -> Image | None:
        """Return an image of the catalogue, or one that was pulled from a real registry."""
        catalogue = images.load_catalogue(self.catalogue)
        if catalogue.is_in_registry(pull_spec):
            return images.load_image(pull.find_record(self.root, pull_spec))
        return catalogue.find_image(pull_spec)

    def download_image(self, image: Image, pull_spec: str) -> None:
        """Download an image of a real registry; others have no content."""
        if image.content:
            pull.download_image(image, pull_spec, self.root, self.sysroot)

    def read_storage(self) -> frozenset[str]:
        """Return the pull specs in podman's storage."""
        if not self._storage.exists():
            return frozenset()
        return frozenset(json.loads(self._storage.read_text(encoding="utf-8")))

    def write_storage(self, pull_specs: Set[str]) -> None:
        """Replace the pull specs in podman's storage."""
        self._storage.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._storage.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(sorted(pull_specs)), encoding="utf-8")
        scratch.replace(self._storage)
