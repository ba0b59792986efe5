"""Images of the container runtime, CRI-O or containerd, through crictl and ctr."""

import json
from collections.abc import Collection, Iterable
from typing import Any

from treenail import errors
from treenail.encoding import json_text
from treenail.host.machine import Machine
from treenail.host.system import disk_space, health_probes
from treenail.process import ProgramRunner

CRIO_PINS = "/etc/crio/crio.conf.d/50-pinned-images"
"""Name and contents are those of the MCO, so that it finds them after a handback."""
_CRIO = "crio.service"
_STORAGE = {_CRIO: "/var/lib/containers", "containerd.service": "/var/lib/containerd"}
_PINNED_LABEL = "io.cri-containerd.pinned"
_CALL_S = 60.0
_LIST_LIMIT = 16 * 1024 * 1024
_RESERVED_SHARE = 0.15
"""The kubelet deletes unused images, and evicts pods, when a smaller share of the disk is free."""


class ImageRuntime:
    """The container runtime of this machine. Raises `HostError`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        sockets = health_probes.RUNTIME_SOCKETS
        found = [unit for unit in sockets if machine.files.has_entry(sockets[unit])]
        if not found:
            raise errors.HostError(
                f"cannot pin images: expected one of {', '.join(sockets.values())}, found none",
                remedy="start the container runtime, for example: systemctl start crio",
            )
        self._unit = found[0]
        self._socket = str(machine.root.resolve_path(sockets[self._unit]))

    def list_images(self) -> frozenset[str]:
        """Return the images by all their digests."""
        try:
            output = self._machine.programs.run_command(
                self._build_command("images", "--output=json"),
                timeout_s=_CALL_S,
                output_limit=_LIST_LIMIT,
            )
            listed: Any = json_text.parse_json(output)
            return frozenset().union(*(image["repoDigests"] or () for image in listed["images"]))
        except (ValueError, LookupError, TypeError) as error:
            raise errors.CommandError("cannot list the images: crictl printed no list") from error

    def read_usable_bytes(self) -> int:
        """Return how much larger the images may become; negative for a disk that is too full."""
        path = _STORAGE[self._unit]
        space = disk_space.read_filesystem_space(self._machine.root, path)
        if space is None:
            raise errors.FileError(f"cannot read the free space of {path}: it does not exist")
        return space.free_bytes - int(space.size_bytes * _RESERVED_SHARE)

    def pull_image(self, image: str, login: str, *, timeout_s: float) -> None:
        """Pull the image; ``login`` is ``user:password`` in base64, empty for none.

        The runtime itself reads no pull secret of the kubelet.
        """
        # Not --auth: every user can read arguments.
        environ = {**self._machine.environ, "CRICTL_AUTH": login}
        programs = ProgramRunner(self._machine.clock, environ)
        programs.run_command(self._build_command("pull", image), timeout_s=timeout_s)

    def pin_images(self, images: Collection[str], unpinned: Iterable[str]) -> None:
        """Pin ``images``, and no longer ``unpinned``."""
        machine = self._machine
        if self._unit != _CRIO:
            values = {**dict.fromkeys(unpinned, ""), **dict.fromkeys(images, "pinned")}
            for image, value in values.items():
                ctr = ("ctr", "--address", self._socket, "--namespace", "k8s.io")
                label = ("images", "label", image, f"{_PINNED_LABEL}={value}")
                machine.programs.run_command((*ctr, *label), timeout_s=_CALL_S)
            return
        if images:
            # The strings are JSON and TOML alike.
            names = ", ".join(map(json.dumps, images))
            content = f"[crio]\n  [crio.image]\n    pinned_images = [{names}]\n"
            machine.labelled_files.write_file(CRIO_PINS, content.encode())
        else:
            machine.labelled_files.remove_file(CRIO_PINS)
        # Also for the same contents: an earlier process may have ended before its reload.
        machine.systemd.reload_unit(_CRIO)

    def _build_command(self, *words: str) -> tuple[str, ...]:
        address = f"unix://{self._socket}"
        # By default crictl waits 2 s for an answer.
        options = ("--runtime-endpoint", address, "--image-endpoint", address, "--timeout=60s")
        return ("crictl", *options, *words)
