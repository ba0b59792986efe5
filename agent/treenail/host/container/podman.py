"""podman's image storage, from which bootc deploys a pre-pulled image.

The progress of ``podman pull`` is parsed from its output without a terminal. podman prints
``Copying blob sha256:…`` when it begins a layer, and pulls several layers at once. Since 2026 it
also prints ``Progress: 1.5GiB / 2.0GiB`` twice a second, for the layers that have begun
(containers/image, copy/progress_bars.go and copy/progress_nontty.go). Sizes of layers come from the
manifest.
"""

import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from treenail import clocks, errors, observations, process
from treenail.encoding import json_text
from treenail.host.container import registry
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.ostree.deployments import TransactionProgress
from treenail.host.systemd.transient import UnsandboxedRunner

log = logging.getLogger(__name__)

_PODMAN = "/usr/bin/podman"
# The search order of bootc and rpm-ostree (ostree-rs-ext); they pull anonymously without one.
_AUTH_FILES = ("/run/ostree/auth.json", "/etc/ostree/auth.json", "/usr/lib/ostree/auth.json")
_TIMEOUT_S = 60.0
_COPY_DIRECTORY = "/run/treenail/image-content"
# A mounted image has a counter: it stays mounted until each mount has its unmount
# (podman-image-unmount(1)).
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
        self,
        programs: process.ProgramRunner,
        unsandboxed: UnsandboxedRunner,
        root: root_directory.Root,
        clock: clocks.Clock,
    ) -> None:
        self._unsandboxed = unsandboxed
        self._root = root
        self._files = atomic_files.HostFiles(root)
        self._registry = registry.SkopeoClient(programs, clock, timeout_s=_TIMEOUT_S)

    @property
    def program(self) -> str:
        """Return the path of podman."""
        return str(self._root.resolve_path(_PODMAN))

    def build_pull_command(self, image: str) -> tuple[str, ...]:
        """Build the command that pulls the image with the pull secret of bootc and rpm-ostree."""
        # Without the option podman reads its own files and those of Docker
        # (containers-auth.json(5)).
        auth = self._find_auth_file()
        options = ("--authfile", auth) if auth else ()
        return (self.program, "pull", *options, image)

    def read_layer_sizes(self, image: str) -> dict[str, int]:
        """Return the bytes of each layer by digest, from the registry; empty if unknown."""
        match self._registry.inspect_image(image, auth_file=self._find_auth_file()):
            case observations.ImageInspection(layers=layers):
                return {layer.digest: layer.size_bytes for layer in layers}
            case _:
                return {}

    def read_labels(self, image: str) -> dict[str, str]:
        """Return the labels of a pulled image."""
        command = [self.program, "image", "inspect", "--format", "json", image]
        content = self._unsandboxed.run_command(command, timeout_s=_TIMEOUT_S)
        try:
            match json_text.parse_json(content):
                case [{"Labels": dict(labels)}]:
                    return {str(key): str(value) for key, value in labels.items()}
                case _:
                    return {}
        except ValueError as error:
            raise errors.HostError(
                f"cannot read the labels of {image}: podman printed no JSON: {error}"
            ) from error

    @contextmanager
    def copy_from_image(self, image: str, paths: Sequence[str]) -> Iterator[root_directory.Root]:
        """Copy these paths out of a pulled image, with owners and modes, until the context ends.

        A directory is copied with its content if its path ends with a slash. Of a path behind a
        symbolic link of the image only the link is copied.
        """
        directory = self._root.resolve_path(_COPY_DIRECTORY)
        shutil.rmtree(directory, ignore_errors=True)
        lines = "".join(f"{path}\n" for path in _order_paths(paths) if "\n" not in path)
        self._files.write_file(f"{_COPY_DIRECTORY}/paths", lines.encode(), mode=0o600)
        try:
            # It runs in the mount namespace of the host: the agent would not see the mount.
            self._unsandboxed.run_command(
                ["/bin/sh", "-c", _COPY_SCRIPT, self.program, image, str(directory)],
                timeout_s=_TIMEOUT_S,
            )
            yield root_directory.Root(directory / "tree")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def remove_image(self, image: str) -> None:
        """Remove a pulled image, unless a container uses it."""
        # --ignore: an image that is gone already is no error (podman-rmi(1)).
        command = [self.program, "image", "rm", "--ignore", image]
        try:
            self._unsandboxed.run_command(command, timeout_s=_TIMEOUT_S)
        except errors.CommandError as error:
            log.warning("cannot remove %s from podman's storage: %s", image, error)

    def _find_auth_file(self) -> str:
        auth_files = (path for path in map(self._root.resolve_path, _AUTH_FILES) if path.exists())
        return str(next(auth_files, ""))


def _order_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths after their parents, and directories with content before what is in them."""
    whole = [path for path in paths if path.endswith("/")]
    parents = {
        path[:end]
        for path in paths
        for end in range(1, len(path.rstrip("/")))
        if path[end] == "/" and f"{path[:end]}/" not in whole
    }
    ordered = (*sorted(parents, key=lambda parent: parent.count("/")), *whole, *paths)
    return tuple(dict.fromkeys(ordered))


# The default of image_parallel_copies in containers.conf(5): so many layers may be unfinished.
_PARALLEL_LAYERS = 6
# podman writes the image after the last layer: only success is 100 %.
_MAX_UNFINISHED_PERCENT = 99
_BEGUN = re.compile(r"^Copying blob (sha256:[0-9a-f]{64})", re.MULTILINE)
_READ = re.compile(r"^Progress: (\d+(?:\.\d+)?)([KMGT]?i?[Bb]) / ", re.MULTILINE)
_FETCHED = re.compile(r"^(?:Copying config|Writing manifest)", re.MULTILINE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class PodmanProgress:
    """Progress of one pull. ``layers`` maps digests to sizes in bytes; empty if unknown."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        self._layers = layers
        self._total = sum(layers.values())
        self.last_progress = TransactionProgress("pulling the image", None)

    def parse_output(self, output: str) -> TransactionProgress:
        """Parse the whole output so far, and return the progress."""
        begun = list(dict.fromkeys(_BEGUN.findall(output)))
        known = [digest for digest in begun if digest in self._layers]
        percent = None
        if self._total:
            done = max(self._sum_sizes(known[:-_PARALLEL_LAYERS]), _parse_bytes_read(output))
            done = self._total if _FETCHED.search(output) else done
            percent = max(
                self.last_progress.percent or 0,
                min(done * 100 // self._total, _MAX_UNFINISHED_PERCENT),
            )
        text = self.last_progress.text
        if begun:
            of = f" of {len(self._layers)}" if self._layers else ""
            text = f"pulling layer {len(begun)}{of}"
        self.last_progress = TransactionProgress(text, percent)
        return self.last_progress

    def _sum_sizes(self, digests: Iterable[str]) -> int:
        return sum(self._layers[digest] for digest in digests)


def _parse_bytes_read(output: str) -> int:
    amounts = _READ.findall(output)
    if not amounts:
        return 0
    number, unit = amounts[-1]
    return int(float(number) * _UNITS.get(unit.lower(), 0))
