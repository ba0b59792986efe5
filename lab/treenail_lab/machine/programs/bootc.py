"""An emulated bootc on the deployments of a lab machine."""

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treenail_lab import images
from treenail_lab.images import Image
from treenail_lab.machine.container import pull
from treenail_lab.machine.ostree.steps import OperationError
from treenail_lab.machine.ostree.sysroot import SysrootDeployment, make_deployment
from treenail_lab.machine.programs.context import ProgramContext, ProgramError

_REFSPECS = {
    ("registry", False): "ostree-unverified-registry:",
    ("registry", True): "ostree-image-signed:docker://",
    ("containers-storage", False): "ostree-unverified-image:containers-storage:",
    ("containers-storage", True): "ostree-image-signed:containers-storage:",
}
_SWITCHING = "Switching: Switching (ostree): "
_PREPARING = f"{_SWITCHING}{pull.PREPARING}"
_STORAGE = "overlay@/var/lib/containers/storage+/run/containers/storage"
_EVENTS, _MIN_LAYER_EVENTS = 200, 5
"""Progress events of a pull, and of each layer: more than a pipe holds, as in a busy pull."""
_STAGING = (("merging", 0), ("deploying", 1), ("bound_images", 1), ("cleanup", 2), ("", 3))
"""Each step of staging, with the number of steps that bootc counts as done by then."""
_STAGING_STEPS = 3
_SHORT_DIGEST = 21
_UNPACKED = 2
"""How many times as large as its download a layer is in podman's storage."""


class EmulatedBootc:
    """One run of the program."""

    def __init__(self, host: ProgramContext) -> None:
        self._host = host

    def run(self, arguments: list[str]) -> int:
        """Execute the command; raise `ProgramError`, or exit with 2 for wrong arguments."""
        parser = argparse.ArgumentParser(prog="bootc")
        verbs = parser.add_subparsers(dest="verb", required=True)
        status = verbs.add_parser("status")
        status.add_argument("--json", action="store_true")
        status.add_argument("--format-version", type=int, default=1)
        switch = verbs.add_parser("switch")
        switch.add_argument(
            "--transport", choices=("registry", "containers-storage"), default="registry"
        )
        switch.add_argument("--progress-fd", type=_parse_progress_fd)
        switch.add_argument("--quiet", action="store_true")
        switch.add_argument("--enforce-container-sigpolicy", action="store_true", dest="signed")
        switch.add_argument("image")
        verbs.add_parser("rollback")
        chosen = parser.parse_args(arguments)
        with self._host.lock_sysroot():
            match chosen.verb:
                case "status" if chosen.format_version not in (0, 1):
                    raise ProgramError(
                        f"Status: Unsupported format version: {chosen.format_version}"
                    )
                case "status":
                    print(
                        json.dumps(self._build_status(), sort_keys=True, separators=(",", ":")),
                        end="",
                    )
                case "switch":
                    progress = _ProgressWriter(chosen.progress_fd)
                    self._switch_image(
                        chosen.image, chosen.transport, progress, signed=chosen.signed
                    )
                case _:
                    self._queue_rollback()
        return 0

    def _build_status(self) -> dict[str, Any]:
        sysroot = self._host.sysroot
        staged, booted, written = (
            sysroot.read_staged(),
            sysroot.find_booted(),
            sysroot.read_written(),
        )
        others = [deployment for deployment in written if deployment != booted]
        queued = bool(written) and written[0] != booted
        status: dict[str, Any] = {
            "staged": _build_entry(staged, locked=sysroot.is_staged_locked()) if staged else None,
            "booted": _build_entry(booted) if booted else None,
            "rollback": _build_entry(others[0]) if others else None,
            "rollbackQueued": queued,
            "type": "bootcHost" if booted and not _has_local_changes(booted) else None,
            "readOnly": False,
            "usrOverlay": None,
        }
        if others[1:]:
            status["otherDeployments"] = [_build_entry(deployment) for deployment in others[1:]]
        spec = staged or booted
        is_known = spec is not None and not _has_local_changes(spec)
        return {
            "apiVersion": "org.containers.bootc/v1",
            "kind": "BootcHost",
            "metadata": {"name": "host"},
            "spec": {
                "image": _build_reference(spec) if spec and is_known else None,
                "bootOrder": "rollback" if queued and is_known else "default",
            },
            "status": status,
        }

    def _switch_image(
        self, name: str, transport: str, progress: "_ProgressWriter", *, signed: bool
    ) -> None:
        sysroot = self._host.sysroot
        base = sysroot.find_base()
        booted = sysroot.find_booted()
        if base is None or booted is None:
            raise ProgramError("This command requires running in an actual host system")
        refspec = _REFSPECS[transport, signed] + name
        if refspec == base.refspec and not _has_local_changes(base):
            print("Image specification is unchanged.")
            return
        if signed and pull.is_insecure_by_default(self._host.root):
            raise ProgramError(
                f"{_PREPARING}containers-policy.json specifies a default of "
                "`insecureAcceptAnything`; refusing usage"
            )
        image = self._fetch_image(name, transport, progress)
        failure = self._host.settings().staging_error or image.faults.get("stage", "")
        if failure:
            raise ProgramError(f"{_SWITCHING}Staging: {failure}")
        for step, done in _STAGING:
            progress.write_step_progress("staging", step, done, _STAGING_STEPS, image)
            self._host.wait_for_staging(1 / len(_STAGING))
        if instead := self._host.settings().staged_instead:
            image = images.load_catalogue(self._host.catalogue).find_image(instead) or image
            refspec = _REFSPECS[transport, signed] + instead
        deployment = make_deployment(image, refspec, booted.kernel_arguments)
        serial = sysroot.compute_next_serial(deployment.checksum)
        sysroot.stage_deployment(replace(deployment, serial=serial), locked=False)
        print("Deploying...done (0 seconds)", file=sys.stderr)
        shown = name if transport == "registry" and not signed else refspec
        print(
            f"Queued for next boot: {shown}\n  Version: {image.version}\n  Digest: {image.digest}"
        )
        self._request_reboot(image.digest)

    def _fetch_image(self, name: str, transport: str, progress: "_ProgressWriter") -> Image:
        catalogue = images.load_catalogue(self._host.catalogue)
        if transport == "containers-storage":
            known = self._host.find_image(name)
            if name not in self._host.read_storage() or known is None:
                raise ProgramError(
                    f"{_PREPARING}failed to invoke method OpenImage: "
                    f'reference "[{_STORAGE}]{name}" '
                    "does not resolve to an image ID"
                )
            image = known
            if why := pull.find_refusal(self._host.root, "containers-storage", image):
                raise ProgramError(f"{_PREPARING}failed to invoke method OpenImage: {why}")
        else:
            try:
                image = pull.open_image(name, catalogue, self._host.root)
                self._host.download_image(image, name)
            except OperationError as error:
                words = str(error).removeprefix(pull.PREPARING)
                raise ProgramError(f"{_PREPARING}{words}") from error
        unpacked = _UNPACKED if transport == "containers-storage" else 1
        # Every event lists the layers so far, so the number of events falls as theirs grows.
        events = max(_EVENTS // len(image.layers), _MIN_LAYER_EVENTS)
        for number, layer in enumerate(image.layers):
            for event in range(1, events + 1):
                self._host.wait(layer.size_bytes / self._host.settings().pull_bytes_per_s / events)
                fetched = layer.size_bytes * event // events
                progress.write_layer_progress(image, number, fetched, unpacked)
            self._host.sysroot.import_layer(layer.digest)
        for done in (0, 1):
            progress.write_step_progress("importing", "importing", done, 1, image)
        return image

    def _queue_rollback(self) -> None:
        """Swap the first two deployments; a second rollback reverts the first."""
        sysroot = self._host.sysroot
        first, *others = sysroot.read_written()
        if not others:
            raise ProgramError("Rollback: Rollback (ostree): No rollback available")
        self._host.wait_for_staging()
        sysroot.drop_staged()
        reverting = first != sysroot.find_booted()
        if reverting:
            print("notice: Reverting queued rollback state")
        sysroot.write_deployments((others[0], first, *others[1:]))
        print(f"Next boot: {'current' if reverting else 'rollback'} deployment")
        self._request_reboot(others[0].digest if first == sysroot.find_booted() else first.digest)

    def _request_reboot(self, digest: str) -> None:
        """Write the file that kured looks for; only a reboot removes it."""
        path = self._host.root / "run/reboot-required"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"bootc: Reboot required for image: {digest}", encoding="utf-8")


class _ProgressWriter:
    """Writes progress to a descriptor, which must be a pipe; blocks while it is full."""

    def __init__(self, descriptor: int | None) -> None:
        self._write: Callable[[bytes], object] | None = None
        if descriptor is None:
            return
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise ProgramError(f"{_SWITCHING}not a pipe")
        os.set_blocking(descriptor, True)
        self._write = lambda line: os.write(descriptor, line)
        self._write_event({"type": "Start", "version": "0.1.0"})

    def write_layer_progress(self, image: Image, number: int, fetched: int, unpacked: int) -> None:
        """Report the bytes of a layer, and the layers before it.

        The total is that of the download, also where the bytes are those of ``unpacked`` layers.
        """
        layers = [
            {"subtask": "ostree chunk", "description": f"ostree chunk: {short}", "id": short,
             "bytesCached": 0, "bytes": size, "bytesTotal": layer.size_bytes * unpacked}
            for index, layer in enumerate(image.layers[: number + 1])
            for short in [layer.digest.removeprefix("sha256:")[:_SHORT_DIGEST]]
            for size in [(fetched if index == number else layer.size_bytes) * unpacked]
        ]  # fmt: skip
        is_done = fetched == image.layers[number].size_bytes
        self._write_event({
            "type": "ProgressBytes", "task": "pulling", "id": image.digest,
            "description": f"Pulling Image: {image.digest}",
            "bytesCached": 0, "bytes": sum(layer["bytes"] for layer in layers),
            "bytesTotal": image.size_bytes, "stepsCached": 0, "steps": number + is_done,
            "stepsTotal": len(image.layers), "subtasks": layers,
        })  # fmt: skip

    def write_step_progress(
        self, task: str, step: str, done: int, total: int, image: Image
    ) -> None:
        """Report a step that begins; an empty one reports the end of the task."""
        steps = [{"subtask": step, "description": step, "id": step, "completed": done == total}]
        description = "Importing Image" if task == "importing" else "Deploying Image"
        self._write_event({
            "type": "ProgressSteps", "task": task, "description": description,
            "id": image.digest, "stepsCached": 0, "steps": done, "stepsTotal": total,
            "subtasks": steps if step else [],
        })  # fmt: skip

    def _write_event(self, event: dict[str, Any]) -> None:
        if self._write is None:
            return
        try:
            self._write(json.dumps(event).encode() + b"\n")
        except BrokenPipeError as error:
            print(f"Failed to write to jsonl: {error}", file=sys.stderr)
            self._write = None


def _parse_progress_fd(text: str) -> int:
    if int(text) <= sys.stderr.fileno():
        raise argparse.ArgumentTypeError(f"Cannot use fd {text} for progress JSON")
    return int(text)


def _build_entry(deployment: SysrootDeployment, *, locked: bool = False) -> dict[str, Any]:
    is_changed = _has_local_changes(deployment)
    image = {
        "image": _build_reference(deployment),
        "version": deployment.version,
        "timestamp": None,
        "imageDigest": deployment.digest,
        "architecture": "amd64",
    }
    return {
        # bootc does not name the image of a deployment that rpm-ostree changed.
        "image": None if is_changed else image,
        "cachedUpdate": None,
        "incompatible": is_changed,
        "pinned": deployment.pinned,
        "softRebootCapable": False,
        "downloadOnly": locked,
        "store": "ostreeContainer",
        "ostree": {
            "stateroot": deployment.osname,
            "checksum": deployment.checksum,
            "deploySerial": deployment.serial,
        },
        "composefs": None,
    }


def _build_reference(deployment: SysrootDeployment) -> dict[str, Any]:
    for (transport, signed), scheme in _REFSPECS.items():
        if deployment.refspec.startswith(scheme):
            reference = {"image": deployment.refspec.removeprefix(scheme), "transport": transport}
            return {**reference, "signature": "containerPolicy"} if signed else reference
    return {"image": pull.parse_pull_spec(deployment.refspec), "transport": "registry"}


def _has_local_changes(deployment: SysrootDeployment) -> bool:
    return bool(deployment.packages or deployment.removals)
