"""podman's image storage, from which bootc deploys a pre-pulled image."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treenail.clock import Clock
from treenail.codec import parse_json
from treenail.errors import CommandError, HostError
from treenail.host.container.registry import ImageInspection, SkopeoClient
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.systemd.unsandboxed import UnsandboxedRunner
from treenail.process import ProgramRunner

log = logging.getLogger(__name__)

_PODMAN = "/usr/bin/podman"
# The search order of bootc and rpm-ostree (ostree-rs-ext); they pull anonymously without one.
_AUTH_FILES = ("/run/ostree/auth.json", "/etc/ostree/auth.json", "/usr/lib/ostree/auth.json")
_TIMEOUT_S = 60.0
_COPY_DIRECTORY = "/run/treenail/image-content"
_COPY_SCRIPT = """
image=$("$0" image mount "$1") && [ -d "$image" ] || exit 1
trap '"$0" image unmount "$1" >/dev/null' EXIT
mkdir -m 0700 "$2/tree" || exit 1
while IFS= read -r path; do
    source=$image${path%/} copy=$2/tree${path%/}
    if [ -e "$copy" ] || [ -L "$copy" ] || [ -L "${copy%/*}" ] || [ ! -d "${copy%/*}" ]; then
        continue
    elif [ -L "$source" ] || [ -f "$source" ]; then
        cp -pP "$source" "$copy"
    elif [ -d "$source" ] && [ "$path" != "${path%/}" ]; then
        cp -a "$source" "$copy"
    elif [ -d "$source" ]; then
        mkdir "$copy" && chown --reference="$source" "$copy" && chmod --reference="$source" "$copy"
    fi || exit 1
done <"$2/paths"
"""


class Podman:
    """The images in podman's storage on this host. Raises only `HostError`."""

    def __init__(
        self, programs: ProgramRunner, unsandboxed: UnsandboxedRunner, root: Root, clock: Clock
    ) -> None:
        self._unsandboxed = unsandboxed
        self._root = root
        self._files = HostFiles(root)
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
            match parse_json(content):
                case [{"Labels": dict(labels)}]:
                    return {str(key): str(value) for key, value in labels.items()}
                case _:
                    return {}
        except ValueError as error:
            raise HostError(
                f"cannot read the labels of {image}: podman printed no JSON: {error}"
            ) from error

    @contextmanager
    def copy_from_image(self, image: str, paths: Sequence[str]) -> Iterator[Root]:
        """Copy these paths out of a pulled image, with owners and modes, until the context ends.

        A directory is copied with its content if its path ends with a slash. Of a path behind a
        symbolic link of the image only the link is copied.
        """
        directory = self._root.resolve_path(_COPY_DIRECTORY)
        shutil.rmtree(directory, ignore_errors=True)
        lines = "".join(f"{each}\n" for each in _order_paths(paths) if "\n" not in each)
        self._files.write_file(f"{_COPY_DIRECTORY}/paths", lines.encode(), mode=0o600)
        try:
            # It runs in the mount namespace of the host: the agent would not see the mount.
            self._unsandboxed.run_command(
                ["/bin/sh", "-c", _COPY_SCRIPT, self.program, image, str(directory)],
                timeout_s=_TIMEOUT_S,
            )
            yield Root(directory / "tree")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

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


def _order_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths after their parents, and directories with content before what is in them."""
    whole = [path for path in paths if path.endswith("/")]
    parents = {
        path[:end]
        for path in paths
        for end in range(1, len(path.rstrip("/")))
        if path[end] == "/" and f"{path[:end]}/" not in whole
    }
    ordered = (*sorted(parents, key=lambda each: each.count("/")), *whole, *paths)
    return tuple(dict.fromkeys(ordered))
