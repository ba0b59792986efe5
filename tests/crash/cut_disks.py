"""Checks the disk of a power cut of a virtual machine by a start of the agent on it."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.recorder import read_tree
from tests.crash.states import Visible, differ
from tests.crash.stored import STATUS_PATH, DirectoryDisk, StoredNode, StoredWorld, VisibleEntry
from tests.fakes.world import Killed, System, WentDown
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.errors import TreenailError
from treenail.host.system.state_file import LEDGER_PATH
from treenail.kube.api_client import Json
from treenail_lab.apiserver.store import StoreEvent
from treenail_lab.cluster import build_rendered_config
from vmlab.cut_disk import CutMachine
from vmlab.recording import OTHERS, STATE, NodeEvent, RestPoint
from vmlab.site import NODE
from vmlab.story import Story


@dataclass(frozen=True, slots=True)
class Reference:
    """The machine at rest at a goal."""

    rest: RestPoint
    visible: Visible
    digest: str


@dataclass(frozen=True, slots=True)
class CutVerdict:
    """``wrong`` has a sentence for each broken rule."""

    wrong: list[str]
    phase: str
    config: str
    """The config whose files the agent's start left."""
    digest: str = ""
    """The image that boots."""
    has_restored: bool = False
    """The agent's start has changed files."""


@dataclass(frozen=True, slots=True)
class DiskSystem(System):
    """A deployment on a disk."""

    real_id: str = ""

    @property
    def id(self) -> str:
        return self.real_id


def read_reference(machine: CutMachine, rest: RestPoint) -> Reference:
    return Reference(rest, read_visible(machine.root), machine.digest)


def read_visible(root: Path) -> Visible:
    """Read all of /etc, and of /var what a config or the test has put there."""
    found = {f"/etc{path}": each for path, each in read_tree(root / "etc").items()}
    for path in (STATE, *OTHERS):
        if path.startswith("/var/") and (root / path[1:]).exists():
            (entry,) = read_tree(root / path[1:]).values()
            found[path] = entry
    return {
        path: VisibleEntry(entry.kind, entry.version)
        for path, entry in found.items()
        if "/.treenail" not in path and path not in _VARYING
    }


_VARYING = {"/etc/.pwd.lock", "/etc/.updated"}


def check_cut(machine: CutMachine, event: NodeEvent, old: Reference, new: Reference) -> CutVerdict:
    """Start the agent on the disk of a power cut in the update from ``old`` to ``new``."""
    before = after = read_visible(machine.root)
    ledger = _read_json(machine.root / LEDGER_PATH[1:])
    wrong = _find_torn(before, old.visible, new.visible)
    wrong += _check_story(machine, event, ledger)
    try:
        _start_agent(machine, event, (old, new))
        after = read_visible(machine.root)
        wrong += _find_mixed(after, machine, event, old, new)
        wrong += _check_status(machine.root)
        _start_agent(machine, event, (old, new))
        again = read_visible(machine.root)
        wrong += [f"the second start changed {path}" for path in differ(again, after)]
    except (Killed, WentDown, TreenailError) as error:
        wrong.append(f"the start of the agent ends with {type(error).__name__}: {error}")
    update = ledger.get("update") if isinstance(ledger, dict) else None
    return CutVerdict(
        wrong,
        str(update["phase"]) if isinstance(update, dict) else "at rest",
        (old if after == old.visible else new).rest.goal.config,
        machine.digest,
        after != before,
    )


def _start_agent(
    machine: CutMachine, event: NodeEvent, references: Sequence[Reference]
) -> StoredWorld:
    """Start the agent's process until the kubelet may start, without an API server until then."""
    world = StoredWorld(booted=machine.digest)
    current, *others = (
        DiskSystem(digest, machine.arguments, real_id=name) for name, digest in machine.deployments
    )
    world.system, world.previous = current, next(iter(others), None)
    world.attach(DirectoryDisk(machine.root))
    for each in references:
        config = build_rendered_config(each.rest.goal.config, each.rest.config)
        world.configs[each.rest.goal.config] = MachineConfig.from_json(config)
    world.annotations = dict(event.node["metadata"].get("annotations") or {})
    world.unschedulable = bool(event.node.get("spec", {}).get("unschedulable"))
    node = StoredNode(world)
    node.clock.move(time.time() - node.clock.now())
    node.start_process().loop.finish_boot()
    return world


def _find_torn(found: Visible, old: Visible, new: Visible) -> list[str]:
    """Find entries that are neither old nor new, which programs see that start before the agent."""
    return [
        f"{path} is torn: {found.get(path)}"
        for path in sorted({*found, *old, *new})
        if found.get(path) not in (old.get(path), new.get(path))
        # A new directory may still be without its mode.
        and not (path not in old and path in new and new[path].kind == "directory")
        # The agent removes a new file or link, and systemd's links go apart.
        and not (path not in found and ".wants/" in path)
    ]


def _find_mixed(
    found: Visible, machine: CutMachine, event: NodeEvent, old: Reference, new: Reference
) -> list[str]:
    """Check that the kubelet finds all of one config and its image, as the Node says."""
    notes = event.node["metadata"].get("annotations") or {}
    allowed = [each for each in (old, new) if each.rest.goal.config == notes[key.CURRENT_CONFIG]]
    if notes[key.DESIRED_CONFIG] != notes[key.CURRENT_CONFIG]:
        # Neither is reported before the update ends.
        allowed = [old, new]
    for each in allowed:
        if (found, machine.digest) == (each.visible, each.digest):
            return []
    nearest = min((differ(found, each.visible) for each in allowed), key=len)
    names = " or ".join(each.rest.goal.config for each in allowed)
    return [f"after the start not {names}: {nearest}, with {machine.digest[:19]}"]


def _check_story(machine: CutMachine, event: NodeEvent, ledger: Json | str | None) -> list[str]:
    """Apply the rules of `vmlab.story` to the boot after the power cut."""
    story = Story(NODE, event.digest)
    story.see(("", "nodes"), StoreEvent("MODIFIED", 1, event.node, None))
    story.booted({"digest": machine.digest, "ledger": ledger})
    return story.violations


def _check_status(root: Path) -> list[str]:
    status, ledger = _read_json(root / STATUS_PATH[1:]), _read_json(root / LEDGER_PATH[1:])
    shown, kept = _get_config(status), _get_config(ledger)
    return [] if shown in ("", kept) else [f"the status shows {shown}, the ledger has {kept}"]


def _get_config(document: Json | str | None) -> str:
    current = document.get("current") if isinstance(document, dict) else None
    return str(current.get("config", "")) if isinstance(current, dict) else ""


def _read_json(path: Path) -> Json | str | None:
    try:
        found: Json = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return "broken"
    return found
