"""The command ``treenail-lab``: run a cluster and its machines on this host.

``demo`` shows a rollout. ``up`` keeps a lab running for kubectl. ``reboot``, ``power-cut`` and
``fault`` act on a machine of a lab that is up, through a socket of its process.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.machineconfig import MachineConfig
from treenail.clocks import SystemClock
from treenail.controllers.runtime.http_server import ServerThread
from treenail.errors import ConfigError, HostError, TreenailError, UsageError
from treenail_lab import image_builds, provision
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool, rollout
from treenail_lab.demo.pool import CONTAINERFILE, check_builds
from treenail_lab.demo.rollout import PODS_PER_NODE, DemoScenario, RolloutDemo
from treenail_lab.help_text import LabParser
from treenail_lab.hosted.demo import print_hosted_result, run_hosted_demo
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.install import install_command
from treenail_lab.lifetime.owner import OWNER_FILE, owner, remove_if_abandoned
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.workload import Workload

CONTROL_SOCKET = "control.sock"
_TIMEOUT_S = 60.0
_MAX_BYTES = 65536

LabCommands = dict[str, Callable[[list[str]], str]]


class ControlSocketServer(ServerThread):
    """Accepts commands, each a name and its words, and answers each with a line."""

    def __init__(self, directory: Path, commands: LabCommands) -> None:
        self._path = directory / CONTROL_SOCKET
        self._path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            server = _ThreadingServer(str(self._path), _build_request_class(commands))
        finally:
            os.umask(before)
        super().__init__(server, "lab-control")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._path.unlink(missing_ok=True)


def send_command(directory: Path, words: list[str]) -> str:
    """Send a command to a running lab; return its answer."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(directory / CONTROL_SOCKET))
            connection.sendall(json.dumps(words).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(_MAX_BYTES))
        except (OSError, ValueError) as error:
            raise HostError(
                f"cannot reach a lab in {directory}: {error}",
                remedy="run: treenail-lab up, or name its --directory",
            ) from error
    if "error" in answer:
        raise UsageError(str(answer["error"]))
    return str(answer["result"])


class _ThreadingServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def _build_request_class(commands: LabCommands) -> type[socketserver.StreamRequestHandler]:
    class CommandRequest(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                name, *words = json.loads(self.rfile.readline(_MAX_BYTES))
                answer = {"result": commands[name](words)}
            except (KeyError, ValueError, TypeError, UsageError, HostError) as error:
                answer = {"error": str(error)}
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    return CommandRequest


REPOSITORY = "os/node"
BEFORE_VERSION, AFTER_VERSION = "41.20260101", "42.20260601"
_MB = 1_000_000
_FAILURES = ("stage", "drain", "reboot")
_MAX_NODES = 20
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0 when done, 1 when it failed, 2 when it was used wrongly."""
    parsed = create_parser().parse_args(arguments)
    # Log records without a handler would go to stderr, across the table.
    logging.getLogger().addHandler(logging.NullHandler())
    with _orderly_interrupts():
        try:
            code: int = parsed.run(parsed)
        except UsageError as error:
            return _print_error(error, 2)
        except TreenailError as error:
            return _print_error(error, 1)
        except KeyboardInterrupt:
            return 130
        return code


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of all commands."""
    parser = LabParser(
        prog="treenail-lab",
        description="Run a cluster and its machines on this host, to try treenail with.",
        examples=(
            ("watch three nodes move to a new OS image", "treenail-lab demo"),
            ("run a cluster for kubectl", "treenail-lab up"),
        ),
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="show a rollout from one OS image to another",
        description="Show the plan of treenail-controller for a pool with a new OS image, and with "
        "its command status --watch the rollout to its nodes: one first, then the others one after "
        "the other. The rollout halts at the first failed node. Exit code 1: a node did not reach "
        "the image, or with --fail the phase did not fail.",
        examples=(
            ("watch five nodes", "treenail-lab demo --nodes 5"),
            ("watch a rollout halt", "treenail-lab demo --fail stage"),
        ),
    )
    demo.set_defaults(run=_run_demo)
    _add_lab_options(demo)
    demo.add_argument(
        "--image",
        metavar="PULLSPEC",
        help="request this image for the pool (default: an image in the registry of the lab)",
    )
    demo.add_argument(
        "-f",
        dest="file",
        metavar="FILE",
        help="add the MachineConfig in FILE, YAML or JSON, to the pool",
    )
    demo.add_argument(
        "--fail", choices=_FAILURES, help="make this phase fail, and show how the rollout ends"
    )
    demo.add_argument(
        "--build",
        nargs="?",
        const="",
        metavar="CONTAINERFILE",
        help="build the new image in the cluster, from this file or an example (as root, with the "
        "package buildah)",
    )
    demo.add_argument(
        "--install",
        action="store_true",
        help="install a cluster in image mode instead, as treenail-lab install does (as root)",
    )
    demo.add_argument(
        "--hosted",
        action="store_true",
        help="show nodes of a hosted cluster instead, which treenail updates in place from a "
        "management cluster",
    )
    demo.add_argument(
        "--limit",
        type=float,
        default=300.0,
        metavar="S",
        help="time limit of a node, in seconds (default: 300)",
    )
    demo.add_argument("--journal", action="store_true", help="print the journal of one update, too")
    demo.add_argument("--json", action="store_true", help=install_command.JSON_HELP)

    up = commands.add_parser(
        "up",
        help="keep a lab running for kubectl",
        description="Run a lab with its controllers until Ctrl-C, and print how kubectl connects "
        "to it.",
        examples=(
            ("run two nodes until Ctrl-C", "treenail-lab up --nodes 2"),
            ("run a registry and a node for builds, too", "treenail-lab up --registry"),
            ("provision another machine by Ignition", "treenail-lab up --nodes 2 --provision"),
        ),
    )
    up.set_defaults(run=_run_lab)
    _add_lab_options(up)
    up.add_argument(
        "--registry",
        action="store_true",
        help="run an image registry and a node for builds; install the nodes from that registry",
    )
    up.add_argument(
        "--provision",
        action="store_true",
        help="run the server of Ignition configs, and add a machine that has only user data (as "
        "root, with the package ignition)",
    )

    install_command.add_command(commands)

    for name, text in (
        ("reboot", "reboot a machine cleanly"),
        ("power-cut", "cut the power of a machine and restore it"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text.capitalize()}.",
            examples=((text, f"treenail-lab {name} worker-0"),),
        )
        command.set_defaults(run=_send_command, command=name, settings=[])
        _add_directory_option(command)
        _add_node_argument(command)
    fault = commands.add_parser(
        "fault",
        help="change how a machine behaves from now on",
        description="Inject a fault into a machine from now on, or show its settings.",
        examples=(("pull at 1 MB/s", "treenail-lab fault worker-0 pull_bytes_per_s=1000000"),),
    )
    fault.set_defaults(run=_send_command, command="fault")
    _add_directory_option(fault)
    named = ", ".join(field.name for field in fields(MachineSettings))
    _add_node_argument(fault)
    fault.add_argument(
        "settings",
        nargs="*",
        metavar="NAME=VALUE",
        help=f"change this setting (default: show all): {named}",
    )
    return parser


def _add_lab_options(parser: argparse.ArgumentParser) -> None:
    _add_directory_option(parser)
    parser.add_argument(
        "--nodes",
        type=_parse_node_count,
        default=3,
        metavar="N",
        help="number of nodes, from 1 to 20 (default: 3)",
    )
    parser.add_argument(
        "--size", type=int, default=400, metavar="MB", help="size of the new image (default: 400)"
    )
    parser.add_argument(
        "--speed",
        type=int,
        default=200,
        metavar="MB/S",
        help="speed of the registry (default: 200)",
    )


def _add_node_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node, such as worker-0")


def _add_directory_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory of the lab, removed at its end (default: treenail-lab-UID in "
        "$XDG_RUNTIME_DIR; for demo a temporary one)",
    )


def _parse_node_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MAX_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_NODES}")
    return int(text)


def _run_demo(arguments: argparse.Namespace) -> int:
    if arguments.install:
        return _run_install_demo(arguments)
    if arguments.hosted:
        return _run_hosted_demo(arguments)
    plan, scenario = build_scenario(arguments)
    stream = sys.stderr if arguments.json else sys.stdout
    versions = f"from {plan.images[0].version} to {scenario.image.version}"
    if arguments.build is not None:
        if arguments.fail or arguments.image or arguments.file:
            raise UsageError(
                "cannot use --build with --fail, --image or -f", remedy="leave one of them out"
            )
        check_builds()
        text = _read_text(arguments.build) if arguments.build else CONTAINERFILE
        plan = replace(plan, registry_version=BEFORE_VERSION)
        scenario = replace(scenario, containerfile=text, pull_spec="")
        versions = "to an image that their cluster builds"
    print(f"starting {len(plan.nodes)} machines, which will move {versions}", file=stream)
    stream.flush()
    with _prepare_directory(arguments) as directory, Lab(directory, plan) as lab:
        demo = RolloutDemo(lab, scenario, SystemClock(), stream)
        try:
            demo.prepare_pool()
            if scenario.containerfile:
                rollout.print_containerfile(scenario.containerfile, stream)
            else:
                rollout.print_plan(demo.run_plan(), stream)
            print("\n$ treenail-controller status --watch", file=stream)
            result = demo.run_rollout()
        finally:
            demo.stop()
        journal = rollout.collect_journal(lab, result)
        if arguments.json:
            document: Json = {
                "nodes": [node.to_json() for node in demo.list_nodes()],
                "updated": result.updated_nodes,
                "failed": result.failures,
                "halted": result.halt_message,
                "resume": result.resume_command,
                "cordoned": sorted(result.cordoned_nodes),
                "maxOutOfService": result.max_out_of_service,
                "seconds": round(result.seconds, 3),
                "image": demo.image,
                "journal": journal,
            }
            print(json.dumps(document, indent=1))
        else:
            rollout.print_result(result, journal if arguments.journal else [])
    return 0 if rollout.has_shown_scenario(scenario, result) else 1


def _run_hosted_demo(arguments: argparse.Namespace) -> int:
    _check_alone(arguments, "--hosted")
    stream = sys.stderr if arguments.json else sys.stdout
    with _prepare_directory(arguments) as directory:
        result = run_hosted_demo(directory, arguments.nodes, arguments.limit, stream)
    if arguments.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print_hosted_result(result, stream)
    return 1 if result.failure else 0


def _check_alone(arguments: argparse.Namespace, option: str) -> None:
    others = (arguments.build, arguments.fail, arguments.image, arguments.file)
    if any(other is not None for other in others):
        raise UsageError(
            f"cannot use {option} with --build, --fail, --image or -f",
            remedy="leave one of them out",
        )


def _run_install_demo(arguments: argparse.Namespace) -> int:
    _check_alone(arguments, "--install")
    chosen = {"install_directory": None, "workers": 2, "json": arguments.json}
    return install_command.run_install(argparse.Namespace(**chosen, limit=2 * arguments.limit))


def _run_lab(arguments: argparse.Namespace) -> int:
    plan, _ = build_scenario(
        argparse.Namespace(**vars(arguments), image=None, file=None, fail=None, limit=0)
    )
    if arguments.provision and arguments.registry:
        raise UsageError(
            "cannot use --provision with --registry", remedy="leave one of the two out"
        )
    if arguments.provision:
        provision.check_provisioning()
    if arguments.registry:
        plan = replace(plan, registry_version=BEFORE_VERSION)
    stop = threading.Event()
    with _prepare_directory(arguments) as directory, Lab(directory, plan) as lab:
        more = {"build": arguments.registry, "approve": arguments.provision}
        enable = (*ALL_CONTROLLERS, *(name for name, is_needed in more.items() if is_needed))
        controllers = ControllerReplicas(lab, enable=enable)
        workload = Workload(lab.client, replicas=PODS_PER_NODE * len(plan.nodes))
        controllers.create_manifests()
        pool.create_pool(lab, lab.installed_image.pull_spec)
        controllers.start_replica()
        workload.start()
        newcomer = provision.Newcomer(lab, sys.stdout) if arguments.provision else None
        try:
            if newcomer is not None:
                newcomer.start()
            with ControlSocketServer(directory, _build_commands(lab)):
                _print_access(lab)
                if lab.registry is not None:
                    image_builds.print_registry_access(lab.registry, directory, sys.stdout)
                stop.wait()
        finally:
            if newcomer is not None:
                newcomer.stop()
            workload.stop()
            controllers.stop()
    return 0


def _send_command(arguments: argparse.Namespace) -> int:
    words = [arguments.command, arguments.node, *arguments.settings]
    print(send_command(_find_directory(arguments), words))
    return 0


def _build_commands(lab: Lab) -> LabCommands:
    def find_machine(words: list[str]) -> LabMachine:
        if not words or words[0] not in lab.machines:
            raise UsageError(
                f"cannot find node {' '.join(words[:1])!r}: the lab has {', '.join(lab.machines)}"
            )
        return lab.machines[words[0]]

    def reboot(words: list[str]) -> str:
        machine = find_machine(words)
        machine.reboot()
        return f"rebooted {machine.name}"

    def cut_power(words: list[str]) -> str:
        machine = find_machine(words)
        machine.cut_power()
        return f"cut and restored the power of {machine.name}"

    def change_settings(words: list[str]) -> str:
        machine = find_machine(words)
        changes = dict(_parse_setting(word) for word in words[1:])
        machine.change_settings(**changes)
        return f"{machine.name}: {machine.read_settings()}"

    return {"reboot": reboot, "power-cut": cut_power, "fault": change_settings}


def _parse_setting(word: str) -> tuple[str, object]:
    name, equals, text = word.partition("=")
    known = {
        field.name: getattr(MachineSettings(), field.name) for field in fields(MachineSettings)
    }
    if not equals or name not in known:
        raise UsageError(
            f"cannot read {word!r}: not NAME=VALUE",
            remedy=f"use one of these names: {', '.join(known)}",
        )
    if isinstance(known[name], tuple):
        return name, tuple(filter(None, text.split(",")))
    try:
        return name, type(known[name])(text)
    except ValueError as error:
        raise UsageError(f"cannot read {word!r}: the value is not a number") from error


def build_scenario(arguments: argparse.Namespace) -> tuple[LabPlan, DemoScenario]:
    """Return the lab and the scenario that the arguments describe."""
    login = Credential("lab", "let-me-pull")
    before = make_image(REPOSITORY, BEFORE_VERSION, 500 * _MB, credential=login)
    faults = {"pull": "received unexpected HTTP status: 500"} if arguments.fail == "stage" else {}
    after = make_image(
        REPOSITORY, AFTER_VERSION, arguments.size * _MB, credential=login, faults=faults
    )
    if arguments.image is not None:
        after = _rename_image(after, arguments.image)
    machine_settings = MachineSettings(
        pull_bytes_per_s=arguments.speed * float(_MB),
        boot_s=1.0,
        finalization_error="Bootloader write config: No space left on device"
        if arguments.fail == "reboot"
        else "",
    )
    scenario = DemoScenario(
        image=after,
        pull_spec=after.pull_spec if arguments.image is None else arguments.image,
        document=_read_machine_config(arguments.file),
        node_timeout_s=20.0 if arguments.fail == "drain" else arguments.limit,
        max_unavailable_pods=0 if arguments.fail == "drain" else PODS_PER_NODE,
        failing_phase=arguments.fail or "",
    )
    nodes = tuple(f"worker-{number}" for number in range(arguments.nodes))
    # The image of the demo has no file of a MachineConfig.
    agent_settings = 'image_files = "write"\n' if arguments.file else ""
    plan = LabPlan(
        nodes=nodes,
        images=(before, after),
        machine_settings=machine_settings,
        agent_settings=agent_settings,
    )
    return plan, scenario


def _rename_image(image: Image, pull_spec: str) -> Image:
    """Return the image under another name, with the digest that the name contains."""
    name, _, digest = pull_spec.partition("@")
    registry, _, repository = name.partition("/")
    return replace(image, registry=registry, repository=repository, digest=digest)


def _read_text(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error


def _read_machine_config(file: str | None) -> Json:
    if file is None:
        return pool.build_config("change", {"kernelArguments": ["audit=1"]})
    try:
        parsed = documents.load_documents(Path(file).read_bytes(), where=file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    if len(parsed) != 1:
        raise ConfigError(
            f"cannot use {file}: it has {len(parsed)} documents",
            remedy="keep one MachineConfig in the file",
        )
    return MachineConfig.from_json(parsed[0]).to_json()


def _print_access(lab: Lab) -> None:
    images = {image.version: image.pull_spec for image in lab.plan.images}
    if lab.registry is not None:
        images[lab.installed_image.version] = lab.installed_image.pull_spec
    print(f"export KUBECONFIG={lab.server.admin_kubeconfig}")
    print(f"# images: {json.dumps(images)}")
    after = lab.plan.images[-1].pull_spec
    change = json.dumps({"spec": {"osImage": after}})
    print(f"# try: kubectl patch mcp worker --type merge -p '{change}'")
    print("# end with Ctrl-C", flush=True)


def _find_directory(arguments: argparse.Namespace) -> Path:
    """Return the directory of the lab that ``up`` runs, for ``up`` and the commands to it."""
    if arguments.directory is not None:
        return Path(arguments.directory)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(runtime) / f"treenail-lab-{os.getuid()}"


@contextmanager
def _prepare_directory(arguments: argparse.Namespace) -> Iterator[Path]:
    """Provide an empty directory that is removed with the lab, however the lab ends."""
    if arguments.run is not _run_lab and arguments.directory is None:
        with owner.temporary_directory() as place:
            yield place
        return
    place = _find_directory(arguments)
    remove_if_abandoned(place)
    _check_directory(place)
    owner.claim_directory(place)
    try:
        yield place
    finally:
        owner.remove_directory(place)


def _check_directory(place: Path) -> None:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        # In a directory that all users share, another user may have made it first.
        raise UsageError(
            f"cannot use {place}: another user owns it", remedy="name another --directory"
        )
    if (place / OWNER_FILE).exists():
        raise UsageError(
            f"cannot use {place}: a lab runs in it",
            remedy="end that lab, or name another --directory",
        )
    if any(place.iterdir()):
        raise UsageError(
            f"cannot use {place}: it is not empty",
            remedy=f"name a new --directory, or run: rm -r {place}",
        )


@contextmanager
def _orderly_interrupts() -> Iterator[None]:
    """End the command on SIGTERM and SIGHUP as on Ctrl-C, and ignore further signals.

    A second Ctrl-C would interrupt the cleanup, and one at the end Python's own shutdown: both
    print a traceback. Whatever a hung cleanup leaves, the reaper removes after a SIGKILL.
    """
    is_interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt

    for number in _ENDING_SIGNALS:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _print_error(error: TreenailError, code: int) -> int:
    print(f"treenail-lab: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
    return code
