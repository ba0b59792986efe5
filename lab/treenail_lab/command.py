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
from treenail_lab.cluster import Lab, Plan
from treenail_lab.controllers import Controllers
from treenail_lab.demo import pool
from treenail_lab.demo.rollout import PODS_PER_NODE, Demo, Ending, Story
from treenail_lab.demo.table import Json
from treenail_lab.demo.terminal import Screen
from treenail_lab.images import Credential, Image, make_image
from treenail_lab.machine.node.machine import Machine
from treenail_lab.machine.settings import Settings
from treenail_lab.workload import Workload

REPOSITORY = "os/node"
BEFORE, AFTER = "41.20260101", "42.20260601"
_MB = 1_000_000
_FAILURES = ("stage", "drain", "reboot")
_MOST_NODES = 20


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 failed, 2 used wrongly."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.act(parsed)
    except UsageError as error:
        return _complain(error, 2)
    except TreenailError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treenail-lab", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="show a rollout from one OS image to another")
    demo.set_defaults(act=_demo)
    _makes_a_lab(demo)
    demo.add_argument("--image", metavar="PULLSPEC", help="the image to ask for")
    demo.add_argument("-f", dest="file", metavar="FILE", help="a MachineConfig that the pool gets")
    demo.add_argument("--fail", choices=_FAILURES, help="let this phase fail")
    demo.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for a node")
    demo.add_argument("--json", action="store_true", help="print the outcome as one document")

    up = commands.add_parser("up", help="keep a lab running, for kubectl")
    up.set_defaults(act=_up)
    _makes_a_lab(up)

    for name, text in (
        ("reboot", "reboot a machine in order"),
        ("power-cut", "take a machine's power away and give it back"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(act=_order, order=name)
        _names_a_lab(command)
        command.add_argument("words", nargs=1, metavar="NODE")
    fault = commands.add_parser("fault", help="let something go wrong on a machine from now on")
    fault.set_defaults(act=_order, order="fault")
    _names_a_lab(fault)
    named = ", ".join(field.name for field in fields(Settings))
    fault.add_argument("words", nargs="+", metavar="NODE [NAME=VALUE]", help=f"NAME: {named}")
    return parser


def _makes_a_lab(parser: argparse.ArgumentParser) -> None:
    _names_a_lab(parser)
    parser.add_argument("--nodes", type=_node_count, default=3, metavar="N", help="1 to 20")
    parser.add_argument("--size", type=int, default=600, metavar="MB", help="of the new image")
    parser.add_argument("--speed", type=int, default=200, metavar="MB/S", help="of the registry")


def _names_a_lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where the lab lives")


def _node_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_NODES}")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    plan, story = _told(arguments)
    screen = Screen(
        sys.stderr if arguments.json else sys.stdout,
        title=f"{len(plan.nodes)} nodes: {plan.images[0].version} to {story.image.version}",
    )
    with _stopped_by_signals(), _directory(arguments) as directory, Lab(directory, plan) as lab:
        demo = Demo(lab, story, SystemClock(), screen.show)
        try:
            demo.prepare()
            screen.tell(f"$ treenail-controller plan -f change.yaml\n{demo.plan()}")
            ending = demo.run()
        finally:
            demo.stop()
        screen.end()
        journal = _one_update(lab, ending)
        if arguments.json:
            document: Json = {
                "nodes": [view.as_json() for view in demo.views()],
                "updated": ending.updated,
                "failed": ending.failed,
                "halted": ending.halted,
                "cordoned": sorted(ending.cordoned),
                "mostOutOfService": ending.most_out_of_service,
                "seconds": round(ending.seconds, 3),
                "journal": journal,
            }
            print(json.dumps(document, indent=1))
        else:
            _print_ending(ending, journal)
    return 1 if ending.failed else 0


def _up(arguments: argparse.Namespace) -> int:
    plan, _ = _told(
        argparse.Namespace(**vars(arguments), image=None, file=None, fail=None, limit=0)
    )
    stop = threading.Event()
    with _stopped_by_signals(), _directory(arguments) as directory, Lab(directory, plan) as lab:
        controllers = Controllers(lab)
        workload = Workload(lab.client, replicas=PODS_PER_NODE * len(plan.nodes))
        controllers.install()
        pool.create(lab, plan.images[0].pull_spec)
        controllers.start()
        workload.start()
        try:
            with control_socket.Control(directory, _orders(lab)):
                _print_way_in(lab)
                stop.wait()
        finally:
            workload.stop()
            controllers.stop()
    return 0


def _order(arguments: argparse.Namespace) -> int:
    print(control_socket.order(_place(arguments), [arguments.order, *arguments.words]))
    return 0


def _orders(lab: Lab) -> control_socket.Orders:
    def machine(words: list[str]) -> Machine:
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
        found.power_cut()
        return f"{found.name} lost its power and has it back"

    def fault(words: list[str]) -> str:
        found = machine(words)
        changes = dict(_setting(word) for word in words[1:])
        found.change(**changes)
        return f"{found.name}: {found.behaviour()}"

    return {"reboot": reboot, "power-cut": power_cut, "fault": fault}


def _setting(word: str) -> tuple[str, object]:
    name, equals, text = word.partition("=")
    known = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    if not equals or name not in known:
        raise UsageError(f"{word!r} is not NAME=VALUE with a NAME of {', '.join(known)}")
    if isinstance(known[name], tuple):
        return name, tuple(filter(None, text.split(",")))
    try:
        return name, type(known[name])(text)
    except ValueError as error:
        raise UsageError(f"{word!r}: the value is not a number") from error


def _told(arguments: argparse.Namespace) -> tuple[Plan, Story]:
    """The lab and the story that the arguments ask for."""
    login = Credential("lab", "let-me-pull")
    before = make_image(REPOSITORY, BEFORE, 500 * _MB, credential=login)
    faults = {"pull": "received unexpected HTTP status: 500"} if arguments.fail == "stage" else {}
    after = make_image(REPOSITORY, AFTER, arguments.size * _MB, credential=login, faults=faults)
    if arguments.image is not None:
        after = _renamed(after, arguments.image)
    behaviour = Settings(
        pull_bytes_per_s=arguments.speed * float(_MB),
        boot_s=1.0,
        finalization_error="Bootloader write config: No space left on device"
        if arguments.fail == "reboot"
        else "",
    )
    story = Story(
        image=after,
        pull_spec=after.pull_spec if arguments.image is None else arguments.image,
        document=_document(arguments.file),
        limit_s=20.0 if arguments.fail == "drain" else arguments.limit,
        disrupted=0 if arguments.fail == "drain" else PODS_PER_NODE,
    )
    nodes = tuple(f"worker-{number}" for number in range(arguments.nodes))
    return Plan(nodes=nodes, images=(before, after), behaviour=behaviour), story


def _renamed(image: Image, pull_spec: str) -> Image:
    """The image under another name: what the registry has, if the name is one by digest."""
    name, _, digest = pull_spec.partition("@")
    registry, _, repository = name.partition("/")
    return replace(image, registry=registry, repository=repository, digest=digest)


def _document(file: str | None) -> Json:
    if file is None:
        return pool.config("change", {"kernelArguments": ["audit=1"]})
    try:
        found = documents.load_all(Path(file).read_bytes(), where=file)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    if len(found) != 1:
        raise ConfigError(f"{file} holds {len(found)} documents; allowed is one MachineConfig")
    return MachineConfig.from_json(found[0]).to_json()


def _one_update(lab: Lab, ending: Ending) -> list[str]:
    """The journal of the last node that was updated, or that failed, across its reboot."""
    node = next(iter(ending.failed), None) or next(reversed(ending.updated), None)
    if node not in lab.machines:
        return []
    entries = lab.machines[node].journal({"SYSLOG_IDENTIFIER": "treenail"})
    updates = [str(entry["TREENAIL_UPDATE"]) for entry in entries if entry.get("TREENAIL_UPDATE")]
    if not updates:
        return [str(entry.get("MESSAGE")) for entry in entries]
    return [
        f"{node} {entry.get('TREENAIL_PHASE', ''):<10} {entry.get('MESSAGE')}"
        for entry in entries
        if entry.get("TREENAIL_UPDATE") == updates[-1]
    ]


def _print_ending(ending: Ending, journal: list[str]) -> None:
    print()
    print(
        f"{len(ending.updated)} nodes updated in {ending.seconds:.0f} s, "
        f"never more than {ending.most_out_of_service} out of service at once"
    )
    for node, why in ending.failed.items():
        print(f"{node} failed: {why}")
    if ending.halted:
        print(f"pool: {ending.halted}")
    if not journal:
        return
    print("\njournalctl TREENAIL_UPDATE=… of one node:")
    for line in journal:
        print(f"  {line}")


def _print_way_in(lab: Lab) -> None:
    images = {image.version: image.pull_spec for image in lab.plan.images}
    print(f"export KUBECONFIG={lab.server.admin_kubeconfig}")
    print(f"# images: {json.dumps(images)}")
    after = lab.plan.images[-1].pull_spec
    print(f"# try: kubectl annotate mcp worker --overwrite {OS_IMAGE}={after}")
    print("# end with Ctrl-C", flush=True)


def _place(arguments: argparse.Namespace) -> Path:
    """Where the lab that ``up`` runs lives unless named: the same for both commands."""
    if arguments.directory is not None:
        return Path(arguments.directory)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(runtime) / f"treenail-lab-{os.getuid()}"


@contextmanager
def _directory(arguments: argparse.Namespace) -> Iterator[Path]:
    """A directory of the lab's own, which goes with it."""
    place = _place(arguments) if arguments.act is _up else None
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
def _stopped_by_signals() -> Iterator[None]:
    """While inside, SIGTERM ends the command as Ctrl-C does: in order."""

    def interrupted(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: TreenailError, code: int) -> int:
    print(f"treenail-lab: {error}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)
    return code
