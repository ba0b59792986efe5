"""Emulated bootc, podman, ostree, journalctl, update-ca-trust, crictl and ctr of a machine.

They emulate the interface of the process: arguments, output, exit codes, signals and locks. They
use the same `Sysroot` as the emulated rpm-ostreed.

    python -m treenail_lab.machine.programs.commands ROOT CATALOGUE SETTINGS PROGRAM ARGUMENT...
"""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from treenail_lab import images
from treenail_lab.lifetime.fork_server import build_client_script
from treenail_lab.machine import settings
from treenail_lab.machine.container import pull
from treenail_lab.machine.ostree.steps import OperationError
from treenail_lab.machine.ostree.sysroot import SysrootDeployment, make_deployment
from treenail_lab.machine.programs.bootc import EmulatedBootc
from treenail_lab.machine.programs.context import ProgramContext, ProgramError
from treenail_lab.machine.programs.cri import run_crictl, run_ctr
from treenail_lab.machine.systemd.unit_log import find_unit_log

_PODMAN_FAILED = 125
_PARALLEL_BLOBS = 6
_TRUST_SOURCES = ("usr/share/pki/ca-trust-source/anchors", "etc/pki/ca-trust/source/anchors")


def install_programs(
    root: Path, catalogue: Path, settings_file: Path, *, on_path: Path | None = None
) -> None:
    """Install the programs where the agent expects them: below the root, or in ``on_path``."""
    for program in _PROGRAMS:
        # The agent searches those of the container runtime in its PATH.
        directory = on_path if program in _ON_PATH else None
        place = (directory or root / "usr/bin") / program
        place.parent.mkdir(parents=True, exist_ok=True)
        script = build_client_script(__name__, root, catalogue, settings_file, program)
        place.write_text(script, encoding="utf-8")
        place.chmod(0o755)


def _run_bootc(host: ProgramContext, arguments: list[str]) -> int:
    try:
        return EmulatedBootc(host).run(arguments)
    except ProgramError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run_podman(host: ProgramContext, arguments: list[str]) -> int:
    match arguments:
        case ["pull", *logins, image]:
            if logins and not Path(logins[1]).exists():
                print(
                    f"Error: credential file is not accessible: faccessat {logins[1]}: no such "
                    "file or directory",
                    file=sys.stderr,
                )
                return _PODMAN_FAILED
            return _run_podman_pull(host, image)
        case ["image", "inspect", "--format", "json", image] if image in host.read_storage():
            stored = host.find_image(image)
            labels = (
                {}
                if stored is None
                else json.loads(stored.render_configuration())["config"]["Labels"]
            )
            print(json.dumps([{"RepoDigests": [image], "Labels": labels}]))
            return 0
        case ["image", "mount", image] if image in host.read_storage():
            print(_mount_image(host, image))
            return 0
        case ["image", "unmount", image]:
            shutil.rmtree(_find_mount(host, image), ignore_errors=True)
            return 0
        case ["image", "rm", "--ignore", image]:
            host.write_storage({*host.read_storage()} - {image})
            return 0
        case ["create", "--net=none", "--name", name, image, "/bin/true"] if (
            image in host.read_storage()
        ):
            host.containers_directory.mkdir(parents=True, exist_ok=True)
            (host.containers_directory / name).write_text(image, encoding="utf-8")
            return 0
        case ["cp", source, target]:
            return _run_podman_cp(host, source, Path(target))
        case ["rm", *_, name]:
            (host.containers_directory / name).unlink(missing_ok=True)
            return 0
        case _:
            print(f"Error: {shlex.join(arguments)}: no such image or command", file=sys.stderr)
            return _PODMAN_FAILED


def _mount_image(host: ProgramContext, image: str) -> Path:
    """Write the tree of the image; unlike a deployment it has /etc and no /usr/etc."""
    stored = host.find_image(image)
    place = _find_mount(host, image)
    shutil.rmtree(place, ignore_errors=True)
    if stored is not None:
        tree = host.sysroot.trees.write_tree(make_deployment(stored, image, ()), place)
        (tree / "usr/etc").rename(tree / "etc")
    return place


def _find_mount(host: ProgramContext, image: str) -> Path:
    return host.root / "var/lib/containers/storage/mounts" / image.rpartition(":")[2]


def _run_podman_pull(host: ProgramContext, image: str) -> int:
    print(f"Trying to pull {image}...", file=sys.stderr)
    try:
        remote = pull.open_image(image, images.load_catalogue(host.catalogue), host.root)
    except OperationError as error:
        words = str(error).rpartition("OpenImage: ")[2]
        print(f"Error: initializing source docker://{image}: {words}", file=sys.stderr)
        return _PODMAN_FAILED
    if why := pull.find_refusal(host.root, "docker", remote):
        print(f"Error: copying system image from manifest list: Source image rejected: {why}",
              file=sys.stderr)  # fmt: skip
        return _PODMAN_FAILED
    print("Getting image source signatures", file=sys.stderr)
    if image not in host.read_storage():
        for number, layer in enumerate(remote.layers):
            # podman reports each blob when its download begins; several run in parallel.
            last = number + _PARALLEL_BLOBS
            for begun in remote.layers[last - 1 if number else 0 : last]:
                print(f"Copying blob {begun.digest}", file=sys.stderr, flush=True)
            host.wait(layer.size_bytes / host.settings().pull_bytes_per_s)
            failure = host.settings().pull_error or remote.faults.get("pull", "")
            if failure:
                print(f"Error: copying system image from manifest: {failure}", file=sys.stderr)
                return _PODMAN_FAILED
        try:
            host.download_image(remote, image)
        except OperationError as error:
            print(f"Error: copying system image from manifest: {error}", file=sys.stderr)
            return _PODMAN_FAILED
        print("Copying config\nWriting manifest to image destination", file=sys.stderr)
        host.write_storage({*host.read_storage(), image})
    print(remote.digest)
    return 0


def _run_podman_cp(host: ProgramContext, source: str, target: Path) -> int:
    name, _, path = source.partition(":")
    image = (host.containers_directory / name).read_text(encoding="utf-8")
    stored = host.find_image(image)
    if stored is None or not stored.packages or path != "/usr/share/rpm-ostree/extensions/.":
        print(f'Error: "{path}" could not be found on container {name}', file=sys.stderr)
        return _PODMAN_FAILED
    for package in stored.packages:
        (target / f"{package}.rpm").touch()
    return 0


def _run_ostree(host: ProgramContext, arguments: list[str]) -> int:
    match arguments:
        case ["show", "--print-metadata-key=ostree.container.image-config", checksum]:
            commits = {
                deployment.checksum: deployment for deployment in host.sysroot.list_deployments()
            }
            if checksum not in commits:
                print(f"error: No such metadata object {checksum}.commit", file=sys.stderr)
                return 1
            print(repr(commits[checksum].configuration))
            return 0
        case ["admin", "undeploy", number]:
            return _run_undeploy(host, int(number))
        case ["admin", "lock-finalization", "--unlock"]:
            with host.lock_sysroot():
                host.sysroot.unlock_staged()
            return 0
        case ["admin", "pin", *option, index] if option in ([], ["--unpin"]):
            return _run_pin(host, int(index), pinned=not option)
        case ["admin", "prepare-soft-reboot", "0" | "--reset" as what]:
            return _run_prepare_soft_reboot(host, reset=what == "--reset")
        case _:
            print(f"error: Unknown command '{shlex.join(arguments)}'", file=sys.stderr)
            return 1


def _run_undeploy(host: ProgramContext, number: int) -> int:
    with host.lock_sysroot():
        everything = host.sysroot.list_deployments()
        if number >= len(everything):
            print(f"error: Out of range deployment index {number}", file=sys.stderr)
            return 1
        chosen = everything[number]
        if chosen == host.sysroot.find_booted():
            print(f"error: Cannot undeploy currently booted deployment {number}", file=sys.stderr)
            return 1
        if chosen == host.sysroot.read_staged():
            host.sysroot.drop_staged()
        else:
            host.sysroot.write_deployments(
                tuple(
                    deployment for deployment in host.sysroot.read_written() if deployment != chosen
                )
            )
    return 0


def _run_pin(host: ProgramContext, index: int, *, pinned: bool) -> int:
    with host.lock_sysroot():
        deployments = host.sysroot.list_deployments()
        if index >= len(deployments) or deployments[index] == host.sysroot.read_staged():
            print(f"error: Out of range deployment index {index}, or staged", file=sys.stderr)
            return 1
        host.sysroot.set_pinned(deployments[index], pinned=pinned)
    return 0


def _run_prepare_soft_reboot(host: ProgramContext, *, reset: bool) -> int:
    with host.lock_sysroot():
        first, booted = host.sysroot.find_base(), host.sysroot.find_booted()
        if reset:
            host.sysroot.prepare_soft_reboot(None)
        elif first is None or booted is None or first == booted:
            print("error: Cannot prepare for soft-reboot currently booted", file=sys.stderr)
            return 1
        elif _find_kernel_state(host, first) != _find_kernel_state(host, booted):
            print("error: Deployment has a different kernel state", file=sys.stderr)
            return 1
        else:
            host.sysroot.prepare_soft_reboot(first)
    return 0


def _find_kernel_state(
    host: ProgramContext, deployment: SysrootDeployment
) -> tuple[str, tuple[str, ...]]:
    image = images.load_catalogue(host.catalogue).find_by_digest(deployment.digest)
    return image.kernel if image else "", deployment.kernel_arguments


def _run_journalctl(host: ProgramContext, arguments: list[str]) -> int:
    *_, last = arguments
    if last == "--sync":
        return 0
    log = find_unit_log(host.root, last.removeprefix("_SYSTEMD_INVOCATION_ID="))
    sys.stdout.write(log.read_text(encoding="utf-8") if log.exists() else "")
    return 0


def _run_update_ca_trust(host: ProgramContext, arguments: list[str]) -> int:
    """Write the bundle that programs read; the real program also leaves out what is no CA."""
    if arguments not in ([], ["extract"]):
        print(f"Error: unknown command: {shlex.join(arguments)}", file=sys.stderr)
        return 1
    anchors = sorted(
        path for place in _TRUST_SOURCES for path in (host.root / place).glob("*") if path.is_file()
    )
    bundle = host.root / "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    scratch = bundle.with_suffix(".new")
    scratch.write_bytes(b"".join(anchor.read_bytes() for anchor in anchors))
    scratch.replace(bundle)
    return 0


_PROGRAMS: Mapping[str, Callable[[ProgramContext, list[str]], int]] = {
    "bootc": _run_bootc,
    "podman": _run_podman,
    "ostree": _run_ostree,
    "journalctl": _run_journalctl,
    "update-ca-trust": _run_update_ca_trust,
    "crictl": run_crictl,
    "ctr": run_ctr,
}
_ON_PATH = ("crictl", "ctr")


def main() -> int:
    """Run the program that the first arguments name."""
    root, catalogue, settings_file, program, *arguments = sys.argv[1:]
    host = ProgramContext(
        Path(root), Path(catalogue), lambda: settings.load_settings(Path(settings_file)), time.sleep
    )
    return _PROGRAMS[program](host, arguments)


if __name__ == "__main__":
    sys.exit(main())
