"""The command ``treenail-lab install``, and the demo of an installation."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from treenail.api.machineconfigpool import MASTER
from treenail.errors import HostError, UsageError
from treenail.kube.api_client import Json
from treenail_lab.demo.rollout import wrap_line
from treenail_lab.help_text import LabParser
from treenail_lab.image_builds import find_build_refusal
from treenail_lab.install.install_lab import (
    CONTAINERFILES,
    INSTALL_CONFIG,
    InstallInputs,
    InstallLab,
    find_containerfile,
    make_install_plan,
)
from treenail_lab.install.install_run import InstallRun
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.ignition import ignition

JSON_HELP = (
    "print the result as one JSON document on the standard output, and the table on the standard "
    "error"
)
_DEFAULT_LIMIT_S = 600.0
_DIGEST_DIGITS = 12


def add_command(commands: "argparse._SubParsersAction[LabParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "install",
        help="install a cluster in image mode: bootstrap host, control plane and workers",
        description="Install a cluster in image mode, from an install directory to a finished "
        "rollout: a bootstrap host, three machines of the control plane, and workers. Needs root. "
        "Exit code 1: a machine booted more than once after Ignition, a machine does not run the "
        "image of its pool, or the new cluster rendered or built again.",
        examples=(
            ("install in a temporary directory", "treenail-lab install"),
            ("keep the install directory", "treenail-lab install --dir cluster"),
        ),
    )
    parser.add_argument(
        "--dir",
        dest="install_directory",
        type=Path,
        metavar="DIR",
        help="install directory, which is kept (default: a temporary one)",
    )
    parser.add_argument(
        "--workers",
        type=_parse_workers,
        default=2,
        metavar="N",
        help="number of workers, from 0 to 5 (default: 2)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=_DEFAULT_LIMIT_S,
        metavar="S",
        help="time limit of the installation, in seconds (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(run=run_install)


def _parse_workers(text: str) -> int:
    if text not in tuple("012345"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 5")
    return int(text)


def check_installation() -> None:
    """Raise `HostError` where this host can run no installation."""
    why, remedy = find_build_refusal()
    if why := why or ignition.find_refusal():
        raise HostError(f"cannot install a cluster: {why}", remedy=remedy)


def run_install(arguments: argparse.Namespace) -> int:
    """Install a cluster, and show it; return 1 if a promise of the installation is broken."""
    check_installation()
    stream = sys.stderr if arguments.json else sys.stdout
    with (
        owner.temporary_directory() as place,
        _open_install_directory(arguments.install_directory, place) as root,
        InstallLab(place, make_install_plan(workers=arguments.workers)) as lab,
    ):
        run = InstallRun(lab, root, InstallInputs(CONTAINERFILES), stream, arguments.limit)
        try:
            document = show_installation(run, lab, root, stream)
        finally:
            run.stop()
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        _print_result(document, stream)
    return 1 if document["problems"] else 0


@contextmanager
def _open_install_directory(chosen: Path | None, place: Path) -> Iterator[Path]:
    if chosen is None:
        yield place / "cluster"
        return
    chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = {find_containerfile(pool) for pool in CONTAINERFILES}
    if others := sorted(path.name for path in chosen.iterdir() if path.name not in known):
        raise UsageError(
            f"cannot install in {chosen}: it has {others[0]}",
            remedy="name a new directory, or one with Containerfiles only",
        )
    yield chosen


def show_installation(run: InstallRun, lab: InstallLab, root: Path, stream: TextIO) -> Json:
    """Run the installation; return what it led to."""
    run.write_inputs()
    _print_command(f"grep -A10 imageMode {INSTALL_CONFIG}", stream)
    _print_field((root / INSTALL_CONFIG).read_text("utf-8"), stream)
    _print_command("treenail-controller install prepare", stream)
    prepared = run.prepare()
    _print_lines(prepared.text.splitlines(), stream)
    if prepared.code:
        raise HostError("cannot prepare the installation: see above")
    _print_command("treenail-controller install bootstrap", stream)
    run.start_bootstrap()
    run.start_cluster()
    lab.open_final_registry()
    run.wait_for_control_plane()
    installed = run.find_installed_digest()
    _print_command("treenail-controller status --watch", stream)
    run.show_cluster()
    run.join_workers()
    run.wait_for_workers()
    run.wait_for_handover()
    run.finish()
    return build_result(run, lab, installed)


def build_result(run: InstallRun, lab: InstallLab, installed: str) -> Json:
    """Return the document of the result, with each broken promise as a problem."""
    nodes = run.list_nodes()
    problems = [f"{node.name} booted {node.boots} times" for node in nodes if node.boots != 2]
    problems += [f"{node.name} was updated after its first boot" for node in nodes if node.updates]
    problems += [
        f"{node.name} does not run the image of the installation"
        for node in nodes
        if node.name in lab.plan.control_plane and node.image != installed
    ]
    after, builds = run.list_rendered(), run.list_builds()
    if other := set(after) ^ set(run.list_installed_configs()):
        problems.append(f"the cluster rendered other configs: {', '.join(sorted(other))}")
    pools = 2 if len(nodes) > len(lab.plan.control_plane) else 1
    if len(builds) > 2 or len(builds) < pools:
        problems.append(f"expected one build for each pool, found {', '.join(builds)}")
    return {
        "nodes": [node.to_json() for node in nodes],
        "installed": installed,
        "rendered": list(after),
        "builds": list(builds),
        "problems": list(problems),
        "seconds": round(run.elapsed_s, 3),
    }


def _print_command(command: str, stream: TextIO) -> None:
    print(f"\n$ {command}", file=stream, flush=True)


def _print_lines(lines: Iterable[str], stream: TextIO) -> None:
    for line in lines:
        print("\n".join(wrap_line(line, stream)), file=stream, flush=True)


def _print_field(text: str, stream: TextIO) -> None:
    lines = text.splitlines()
    begin = lines.index("imageMode:")
    _print_lines(lines[begin : begin + 11], stream)


def _print_result(document: Json, stream: TextIO) -> None:
    nodes = document["nodes"]
    for node in nodes if isinstance(nodes, list) else []:
        digest = str(node["image"]).removeprefix("sha256:")[:_DIGEST_DIGITS]
        print(f"{node['name']:<10} booted {node['boots']} times, runs {digest}", file=stream)
    problems = document["problems"]
    lines = [f"problem: {problem}" for problem in problems] if isinstance(problems, list) else []
    if not lines:
        done = f"installed in {document['seconds']:.0f} s; the image of pool {MASTER} was built "
        lines = [done + "on the bootstrap host, and the nodes know that host no longer"]
    _print_lines(lines, stream)
