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
_LOCAL_CHANGES = (
    "Deployment contains local rpm-ostree modifications; cannot upgrade via bootc. You can run "
    "`rpm-ostree reset` to undo the modifications."
)
_EVENTS, _MIN_LAYER_EVENTS = 200, 5
"""Progress events of a pull, and of each layer: more than a pipe holds, as in a busy pull."""
_STAGING = ("merging", "deploying", "bound_images", "cleanup")


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
        status.add_argument("--format-version", choices=("0", "1"), default="1")
        switch = verbs.add_parser("switch")
        switch.add_argument(
            "--transport", choices=("registry", "containers-storage"), default="registry"
        )
        switch.add_argument("--progress-fd", type=int)
        switch.add_argument("--quiet", action="store_true")
        switch.add_argument("--enforce-container-sigpolicy", action="store_true", dest="signed")
        switch.add_argument("image")
        verbs.add_parser("rollback")
        chosen = parser.parse_args(arguments)
        with self._host.lock_sysroot():
            match chosen.verb:
                case "status":
                    print(json.dumps(self._build_status()))
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
        others = [each for each in written if each != booted]
        queued = bool(written) and written[0] != booted
        status = {
            "staged": _build_entry(staged, locked=sysroot.is_staged_locked()) if staged else None,
            "booted": _build_entry(booted) if booted else None,
            "rollback": _build_entry(others[0]) if others else None,
            "otherDeployments": [_build_entry(each) for each in others[1:]],
            "rollbackQueued": queued,
            "type": "bootcHost" if booted else None,
            "readOnly": False,
            "usrOverlay": None,
        }
        spec = staged or booted
        return {
            "apiVersion": "org.containers.bootc/v1",
            "kind": "BootcHost",
            "metadata": {"name": "host"},
            "spec": {
                "image": _build_reference(spec) if spec else None,
                "bootOrder": "rollback" if queued else "default",
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
        if booted.packages or booted.removals:
            raise ProgramError(_LOCAL_CHANGES)
        if signed and pull.is_insecure_by_default(self._host.root):
            raise ProgramError(
                "Switching: Pulling: containers-policy.json specifies a default of "
                "`insecureAcceptAnything`; refusing usage"
            )
        refspec = _REFSPECS[transport, signed] + name
        if refspec == base.refspec:
            print("Image specification is unchanged.")
            return
        image = self._fetch_image(name, transport, progress)
        failure = self._host.settings().staging_error or image.faults.get("stage", "")
        if failure:
            raise ProgramError(f"Switching: Staging: {failure}")
        for number, step in enumerate(_STAGING, start=1):
            self._host.wait(self._host.settings().staging_s / len(_STAGING))
            progress.write_step_progress("staging", step, number, len(_STAGING))
        if instead := self._host.settings().staged_instead:
            image = images.load_catalogue(self._host.catalogue).find_image(instead) or image
            refspec = _REFSPECS[transport, signed] + instead
        deployment = make_deployment(image, refspec, booted.kernel_arguments)
        serial = sysroot.compute_next_serial(deployment.checksum)
        sysroot.stage_deployment(replace(deployment, serial=serial), locked=False)
        print(f"Queued for next boot: {name}\n  Version: {image.version}\n  Digest: {image.digest}")

    def _fetch_image(self, name: str, transport: str, progress: "_ProgressWriter") -> Image:
        catalogue = images.load_catalogue(self._host.catalogue)
        if transport == "containers-storage":
            found = catalogue.find_image(name)
            if name not in self._host.read_storage() or found is None:
                raise ProgramError(
                    "Switching: Pulling: Creating importer: failed to invoke method OpenImage: "
                    f'reference "[overlay@/var/lib/containers/storage]{name}" does not resolve to '
                    "an image ID: identifier is not an image"
                )
            image = found
            if why := pull.find_refusal(self._host.root, "containers-storage", image):
                raise ProgramError(f"Switching: Pulling: {why}")
        else:
            try:
                image = pull.open_image(name, catalogue, self._host.root)
            except OperationError as error:
                raise ProgramError(f"Switching: Pulling: {error}") from error
        done = 0
        # Every event lists all layers, so their number falls as the number of layers grows.
        events = max(_EVENTS // len(image.layers), _MIN_LAYER_EVENTS)
        for layer in image.layers:
            for event in range(1, events + 1):
                self._host.wait(layer.size_bytes / self._host.settings().pull_bytes_per_s / events)
                progress.write_layer_progress(
                    layer.digest, done + layer.size_bytes * event // events, image
                )
            done += layer.size_bytes
            self._host.sysroot.import_layer(layer.digest)
        return image

    def _queue_rollback(self) -> None:
        """Swap the first two deployments; a second rollback reverts the first."""
        sysroot = self._host.sysroot
        first, *others = sysroot.read_written()
        if not others:
            raise ProgramError("No rollback available")
        self._host.wait(self._host.settings().staging_s)
        sysroot.drop_staged()
        reverting = first != sysroot.find_booted()
        if reverting:
            print("notice: Reverting queued rollback state")
        sysroot.write_deployments((others[0], first, *others[1:]))
        print(f"Next boot: {'current' if reverting else 'rollback'} deployment")


class _ProgressWriter:
    """Writes progress to a descriptor, which must be a pipe; blocks while it is full."""

    def __init__(self, descriptor: int | None) -> None:
        self._write: Callable[[bytes], object] | None = None
        if descriptor is None:
            return
        if descriptor <= 2 or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise ProgramError(f"Parsing --progress-fd: {descriptor} is not a pipe")
        os.set_blocking(descriptor, True)
        self._write = lambda line: os.write(descriptor, line)
        self._write_event({"type": "Start", "version": "0.1.0"})

    def write_layer_progress(self, digest: str, done: int, image: Image) -> None:
        layers = [
            {"subtask": "ostree_chunk", "description": f"ostree chunk: {each.digest}",
             "id": each.digest, "bytesCached": 0, "bytes": 0, "bytesTotal": each.size_bytes}
            for each in image.layers
        ]  # fmt: skip
        self._write_event({
            "type": "ProgressBytes", "task": "pulling", "id": digest,
            "description": f"Pulling Image: {image.pull_spec}",
            "bytesCached": 0, "bytes": done, "bytesTotal": image.size_bytes,
            "stepsCached": 0, "steps": 0, "stepsTotal": len(layers), "subtasks": layers,
        })  # fmt: skip

    def write_step_progress(self, task: str, step: str, number: int, total: int) -> None:
        self._write_event({
            "type": "ProgressSteps", "task": task, "description": "Deploying Image",
            "id": step, "stepsCached": 0, "steps": number, "stepsTotal": total,
            "subtasks": [{"subtask": step, "description": step, "id": step, "completed": True}],
        })  # fmt: skip

    def _write_event(self, event: dict[str, Any]) -> None:
        if self._write is None:
            return
        try:
            self._write(json.dumps(event).encode() + b"\n")
        except BrokenPipeError as error:
            print(f"Failed to write to jsonl: {error}", file=sys.stderr)
            self._write = None


def _build_entry(deployment: SysrootDeployment, *, locked: bool = False) -> dict[str, Any]:
    return {
        "image": {
            "image": _build_reference(deployment)["image"],
            "version": deployment.version,
            "timestamp": None,
            "imageDigest": deployment.digest,
            "architecture": "amd64",
        },
        "cachedUpdate": None,
        "incompatible": bool(deployment.packages or deployment.removals),
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
            found = {"image": deployment.refspec.removeprefix(scheme), "transport": transport}
            return {"image": {**found, "signature": "containerPolicy"} if signed else found}
    return {"image": {"image": pull.parse_pull_spec(deployment.refspec), "transport": "registry"}}
