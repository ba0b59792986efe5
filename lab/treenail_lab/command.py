"""``treenail-lab``: a cluster and its machines on this host.

``demo`` shows a rollout; ``up`` keeps a lab running for kubectl; ``reboot``, ``power-cut`` and
``fault`` act on a machine of a lab that is up.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.clock import SystemClock
from treenail.controllers.rollout.gates.os_image import OS_IMAGE
from treenail.errors import ConfigError, TreenailError, UsageError
from treenail_lab import control_socket
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.rollout import PODS_PER_NODE, DemoResult, DemoScenario, RolloutDemo
from treenail_lab.demo.table import Json
from treenail_lab.demo.terminal import RolloutScreen
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.workload import Workload

REPOSITORY = "os/node"
BEFORE_VERSION, AFTER_VERSION = "41.20260101", "42.20260601"
_MB = 1_000_000
_FAILURES = ("stage", "drain", "reboot")
_MAX_NODES = 20


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 used wrongly."""
    parsed = _build_parser().parse_args(arguments)
    try:
        code: int = parsed.act(parsed)
    except UsageError as error:
        return _print_error(error, 2)
    except TreenailError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt:
        return 130
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treenail-lab", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="show a rollout from one OS image to another")
    demo.set_defaults(act=_run_demo)
    _add_lab_options(demo)
    demo.add_argument("--image", metavar="PULLSPEC", help="the image to ask for")
    demo.add_argument("-f", dest="file", metavar="FILE", help="a MachineConfig that the pool gets")
    demo.add_argument("--fail", choices=_FAILURES, help="let this phase fail")
    demo.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for a node")
    demo.add_argument("--json", action="store_true", help="print the outcome as one document")

    up = commands.add_parser("up", help="keep a lab running, for kubectl")
    up.set_defaults(act=_run_lab)
    _add_lab_options(up)

    for name, text in (
        ("reboot", "reboot a machine in order"),
        ("power-cut", "take a machine's power away and give it back"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(act=_send_command, order=name)
        _add_directory_option(command)
        command.add_argument("words", nargs=1, metavar="NODE")
    fault = commands.add_parser("fault", help="let something go wrong on a machine from now on")
    fault.set_defaults(act=_send_command, order="fault")
    _add_directory_option(fault)
    named = ", ".join(field.name for field in fields(MachineSettings))
    fault.add_argument("words", nargs="+", metavar="NODE [NAME=VALUE]", help=f"NAME: {named}")
    return parser


def _add_lab_options(parser: argparse.ArgumentParser) -> None:
    _add_directory_option(parser)
    parser.add_argument("--nodes", type=_parse_node_count, default=3, metavar="N", help="1 to 20")
    parser.add_argument("--size", type=int, default=600, metavar="MB", help="of the new image")
    parser.add_argument("--speed", type=int, default=200, metavar="MB/S", help="of the registry")


def _add_directory_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where the lab lives")


def _parse_node_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_NODES}")
    return int(text)


def _run_demo(arguments: argparse.Namespace) -> int:
    plan, story = _build_scenario(arguments)
    screen = RolloutScreen(
        sys.stderr if arguments.json else sys.stdout,
        title=f"{len(plan.nodes)} nodes: {plan.images[0].version} to {story.image.version}",
    )
    with (
        _interrupt_on_sigterm(),
        _prepare_directory(arguments) as directory,
        Lab(directory, plan) as lab,
    ):
        demo = RolloutDemo(lab, story, SystemClock(), screen.show_rollout)
        try:
            demo.prepare_pool()
            screen.print_text(f"$ treenail-controller plan -f change.yaml\n{demo.run_plan()}")
            ending = demo.run_rollout()
        finally:
            demo.stop()
        screen.finish()
        journal = _collect_update_journal(lab, ending)
        if arguments.json:
            document: Json = {
                "nodes": [view.to_json() for view in demo.list_views()],
                "updated": ending.updated_nodes,
                "failed": ending.failures,
                "halted": ending.halt_message,
                "cordoned": sorted(ending.cordoned_nodes),
                "mostOutOfService": ending.max_out_of_service,
                "seconds": round(ending.seconds, 3),
                "journal": journal,
            }
            print(json.dumps(document, indent=1))
        else:
            _print_result(ending, journal)
    return 1 if ending.failures else 0


def _run_lab(arguments: argparse.Namespace) -> int:
    plan, _ = _build_scenario(
        argparse.Namespace(**vars(arguments), image=None, file=None, fail=None, limit=0)
    )
    stop = threading.Event()
    with (
        _interrupt_on_sigterm(),
        _prepare_directory(arguments) as directory,
        Lab(directory, plan) as lab,
    ):
        controllers = ControllerReplicas(lab)
        workload = Workload(lab.client, replicas=PODS_PER_NODE * len(plan.nodes))
        controllers.create_manifests()
        pool.create_pool(lab, plan.images[0].pull_spec)
        controllers.start_replica()
        workload.start()
        try:
            with control_socket.ControlSocketServer(directory, _build_commands(lab)):
                _print_access(lab)
                stop.wait()
        finally:
            workload.stop()
            controllers.stop()
    return 0


def _send_command(arguments: argparse.Namespace) -> int:
    print(
        control_socket.send_command(_find_directory(arguments), [arguments.order, *arguments.words])
    )
    return 0


def _build_commands(lab: Lab) -> control_socket.LabCommands:
    def machine(words: list[str]) -> LabMachine:
        if not words or words[0] not in lab.machines:
            named = ", ".join(lab.machines)
            raise UsageError(f"there is no node {' '.join(words[:1])!r}; there are {named}")
        return lab.machines[words[0]]

    def reboot(words: list[str]) -> str:
        found = machine(words)
        found.reboot()
        return f"{found.name} rebooted"

    def power_cut(words: list[str]) -> str:
        found = machine(words)
        found.cut_power()
        return f"{found.name} lost its power and has it back"

    def fault(words: list[str]) -> str:
        found = machine(words)
        changes = dict(_parse_setting(word) for word in words[1:])
        found.change_settings(**changes)
        return f"{found.name}: {found.read_settings()}"

    return {"reboot": reboot, "power-cut": power_cut, "fault": fault}


def _parse_setting(word: str) -> tuple[str, object]:
    name, equals, text = word.partition("=")
    known = {
        field.name: getattr(MachineSettings(), field.name) for field in fields(MachineSettings)
    }
    if not equals or name not in known:
        raise UsageError(f"{word!r} is not NAME=VALUE with a NAME of {', '.join(known)}")
    if isinstance(known[name], tuple):
        return name, tuple(filter(None, text.split(",")))
    try:
        return name, type(known[name])(text)
    except ValueError as error:
        raise UsageError(f"{word!r}: the value is not a number") from error


def _build_scenario(arguments: argparse.Namespace) -> tuple[LabPlan, DemoScenario]:
    """The lab and the story that the arguments ask for."""
    login = Credential("lab", "let-me-pull")
    before = make_image(REPOSITORY, BEFORE_VERSION, 500 * _MB, credential=login)
    faults = {"pull": "received unexpected HTTP status: 500"} if arguments.fail == "stage" else {}
    after = make_image(
        REPOSITORY, AFTER_VERSION, arguments.size * _MB, credential=login, faults=faults
    )
    if arguments.image is not None:
        after = _rename_image(after, arguments.image)
    behaviour = MachineSettings(
        pull_bytes_per_s=arguments.speed * float(_MB),
        boot_s=1.0,
        finalization_error="Bootloader write config: No space left on device"
        if arguments.fail == "reboot"
        else "",
    )
    story = DemoScenario(
        image=after,
        pull_spec=after.pull_spec if arguments.image is None else arguments.image,
        document=_read_machine_config(arguments.file),
        node_timeout_s=20.0 if arguments.fail == "drain" else arguments.limit,
        max_unavailable_pods=0 if arguments.fail == "drain" else PODS_PER_NODE,
    )
    nodes = tuple(f"worker-{number}" for number in range(arguments.nodes))
    return LabPlan(nodes=nodes, images=(before, after), machine_settings=behaviour), story


def _rename_image(image: Image, pull_spec: str) -> Image:
    """The image under another name: what the registry has, if the name is one by digest."""
    name, _, digest = pull_spec.partition("@")
    registry, _, repository = name.partition("/")
    return replace(image, registry=registry, repository=repository, digest=digest)


def _read_machine_config(file: str | None) -> Json:
    if file is None:
        return pool.build_config("change", {"kernelArguments": ["audit=1"]})
    try:
        found = documents.load_documents(Path(file).read_bytes(), where=file)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    if len(found) != 1:
        raise ConfigError(f"{file} holds {len(found)} documents; allowed is one MachineConfig")
    return MachineConfig.from_json(found[0]).to_json()


def _collect_update_journal(lab: Lab, ending: DemoResult) -> list[str]:
    """The journal of the last node that was updated, or that failed, across its reboot."""
    node = next(iter(ending.failures), None) or next(reversed(ending.updated_nodes), None)
    if node not in lab.machines:
        return []
    entries = lab.machines[node].read_journal({"SYSLOG_IDENTIFIER": "treenail"})
    updates = [str(entry["TREENAIL_UPDATE"]) for entry in entries if entry.get("TREENAIL_UPDATE")]
    if not updates:
        return [str(entry.get("MESSAGE")) for entry in entries]
    return [
        f"{node} {entry.get('TREENAIL_PHASE', ''):<10} {entry.get('MESSAGE')}"
        for entry in entries
        if entry.get("TREENAIL_UPDATE") == updates[-1]
    ]


def _print_result(ending: DemoResult, journal: list[str]) -> None:
    print()
    print(
        f"{len(ending.updated_nodes)} nodes updated in {ending.seconds:.0f} s, "
        f"never more than {ending.max_out_of_service} out of service at once"
    )
    for node, why in ending.failures.items():
        print(f"{node} failed: {why}")
    if ending.halt_message:
        print(f"pool: {ending.halt_message}")
    if not journal:
        return
    print("\njournalctl TREENAIL_UPDATE=… of one node:")
    for line in journal:
        print(f"  {line}")


def _print_access(lab: Lab) -> None:
    images = {image.version: image.pull_spec for image in lab.plan.images}
    print(f"export KUBECONFIG={lab.server.admin_kubeconfig}")
    print(f"# images: {json.dumps(images)}")
    after = lab.plan.images[-1].pull_spec
    print(f"# try: kubectl annotate mcp worker --overwrite {OS_IMAGE}={after}")
    print("# end with Ctrl-C", flush=True)


def _find_directory(arguments: argparse.Namespace) -> Path:
    """Where the lab that ``up`` runs lives unless named: the same for both commands."""
    if arguments.directory is not None:
        return Path(arguments.directory)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(runtime) / f"treenail-lab-{os.getuid()}"


@contextmanager
def _prepare_directory(arguments: argparse.Namespace) -> Iterator[Path]:
    """A directory of the lab's own, which goes with it."""
    place = _find_directory(arguments) if arguments.act is _run_lab else None
    if place is None and arguments.directory is not None:
        place = arguments.directory
    if place is None:
        place = Path(tempfile.mkdtemp(prefix="tn"))
    elif place.exists() and any(place.iterdir()):
        raise UsageError(
            f"{place} is not empty", remedy="name a new --directory, or remove what is left there"
        )
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        # In a directory for all, somebody else may have been there first.
        raise UsageError(f"{place} is not yours", remedy="name another --directory")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """While inside, SIGTERM ends the command as Ctrl-C does: in order."""

    def interrupted(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_error(error: TreenailError, code: int) -> int:
    print(f"treenail-lab: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
    return code
