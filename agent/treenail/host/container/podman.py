"""podman's storage, where an image waits until it is booted."""

import json
import logging

from treenail.errors import CommandError, HostError
from treenail.host.container.registry import Inspected, Registry
from treenail.host.filesystem.root import Root
from treenail.host.system.process import Programs
from treenail.host.systemd.unsandboxed import Outside

log = logging.getLogger(__name__)

_PODMAN = "/usr/bin/podman"
# As bootc and rpm-ostree read them: the first that is there, and without one anonymously.
_AUTH_FILES = ("/run/ostree/auth.json", "/etc/ostree/auth.json", "/usr/lib/ostree/auth.json")
_LIMIT_S = 60.0


class Podman:
    """The images on this host. Raises `HostError` alone."""

    def __init__(self, programs: Programs, outside: Outside, root: Root) -> None:
        self._programs = programs
        self._outside = outside
        self._root = root

    @property
    def program(self) -> str:
        """Where it is."""
        return str(self._root.path(_PODMAN))

    def pull(self, image: str) -> tuple[str, ...]:
        """The command that pulls the image with the logins that bootc and rpm-ostree would use."""
        auth = self._auth()
        logins = ("--authfile", auth) if auth else ()
        return (self.program, "pull", *logins, image)

    def layers(self, image: str) -> dict[str, int]:
        """The bytes of each layer, by digest, as its registry says; empty if that can't be had."""
        match Registry(self._programs, limit_s=_LIMIT_S).inspect(image, auth_file=self._auth()):
            case Inspected(layers=layers):
                return {each.digest: each.size_bytes for each in layers}
            case _:
                return {}

    def labels(self, image: str) -> dict[str, str]:
        """The labels of a pulled image."""
        command = [self.program, "image", "inspect", "--format", "json", image]
        content = self._outside.run(command, limit_s=_LIMIT_S)
        try:
            match json.loads(content):
                case [{"Labels": dict(labels)}]:
                    return {str(key): str(value) for key, value in labels.items()}
                case _:
                    return {}
        except ValueError as error:
            raise HostError(f"podman answered no JSON about {image}: {error}") from error

    def forget(self, image: str) -> None:
        """Free the space of a pulled image; one that is used by a container stays."""
        command = [self.program, "image", "rm", "--ignore", image]
        try:
            self._outside.run(command, limit_s=_LIMIT_S)
        except CommandError as error:
            log.warning("%s stays in podman's storage: %s", image, error)

    def _auth(self) -> str:
        found = (path for path in map(self._root.path, _AUTH_FILES) if path.exists())
        return str(next(found, ""))
