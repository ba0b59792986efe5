"""podman's image storage, from which bootc deploys a pre-pulled image."""

import json
import logging

from treenail.clock import Clock
from treenail.errors import CommandError, HostError
from treenail.host.container.registry import ImageInspection, SkopeoClient
from treenail.host.filesystem.root import Root
from treenail.host.system.process import ProgramRunner
from treenail.host.systemd.unsandboxed import UnsandboxedRunner

log = logging.getLogger(__name__)

_PODMAN = "/usr/bin/podman"
# The search order of bootc and rpm-ostree (ostree-rs-ext); they pull anonymously without one.
_AUTH_FILES = ("/run/ostree/auth.json", "/etc/ostree/auth.json", "/usr/lib/ostree/auth.json")
_TIMEOUT_S = 60.0


class Podman:
    """The images in podman's storage on this host. Raises only `HostError`."""

    def __init__(
        self, programs: ProgramRunner, unsandboxed: UnsandboxedRunner, root: Root, clock: Clock
    ) -> None:
        self._unsandboxed = unsandboxed
        self._root = root
        self._registry = SkopeoClient(programs, clock, timeout_s=_TIMEOUT_S)

    @property
    def program(self) -> str:
        """Return the path of podman."""
        return str(self._root.resolve_path(_PODMAN))

    def build_pull_command(self, image: str) -> tuple[str, ...]:
        """Build the command that pulls the image with the pull secret of bootc and rpm-ostree."""
        auth = self._find_auth_file()
        options = ("--authfile", auth) if auth else ()
        return (self.program, "pull", *options, image)

    def read_layer_sizes(self, image: str) -> dict[str, int]:
        """Return the bytes of each layer by digest, from the registry; empty if unknown."""
        match self._registry.inspect_image(image, auth_file=self._find_auth_file()):
            case ImageInspection(layers=layers):
                return {each.digest: each.size_bytes for each in layers}
            case _:
                return {}

    def read_labels(self, image: str) -> dict[str, str]:
        """Return the labels of a pulled image."""
        command = [self.program, "image", "inspect", "--format", "json", image]
        content = self._unsandboxed.run_command(command, timeout_s=_TIMEOUT_S)
        try:
            match json.loads(content):
                case [{"Labels": dict(labels)}]:
                    return {str(key): str(value) for key, value in labels.items()}
                case _:
                    return {}
        except ValueError as error:
            raise HostError(
                f"cannot read the labels of {image}: podman printed no JSON: {error}"
            ) from error

    def remove_image(self, image: str) -> None:
        """Remove a pulled image, unless a container uses it."""
        command = [self.program, "image", "rm", "--ignore", image]
        try:
            self._unsandboxed.run_command(command, timeout_s=_TIMEOUT_S)
        except CommandError as error:
            log.warning("cannot remove %s from podman's storage: %s", image, error)

    def _find_auth_file(self) -> str:
        found = (path for path in map(self._root.resolve_path, _AUTH_FILES) if path.exists())
        return str(next(found, ""))
