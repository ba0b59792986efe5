"""Updates of a machine in a directory, each from a machine at rest until it is at rest again."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.crash.stored import StoredWorld
from tests.fakes.disk import Entry
from tests.fakes.world import World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.wanted_state import read_wanted_state
from treenail.update.state.ledger_record import Target

Json = dict[str, object]

OLD, NEW, LIVE, FAILS, PASSED, IMAGE, PASSWORD, TWO = map(
    Target, ("old", "new", "live", "fails", "passed", "image", "password", "two")
)
DEGRADED = NodeState.DEGRADED.value
BAKED = Target("baked", B.image)
UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
BAKED_FILE = "/etc/baked.conf"
"""The file of the config that only its image has."""
NEW_CONTENTS = {"/etc/motd": b"new", "/etc/app.conf": b"other", BAKED_FILE: b"baked"}
"""Files by which the targets with a boot trial are known."""
LIVE_FILE = "/etc/nmstate/openshift/free"


def _file(path: str, text: str, mode: int = 0o644) -> Json:
    source = {"source": f"data:,{text}"}
    return {"path": path, "contents": source, "mode": mode, "overwrite": True}


def _config(
    name: str,
    files: list[Json],
    *,
    image: str = A.image,
    units: list[Json] | None = None,
    user: Json | None = None,
    arguments: tuple[str, ...] = (),
) -> MachineConfig:
    config: Json = {
        "ignition": {"version": "3.4.0"},
        "storage": {"files": files},
        "systemd": {"units": units or []},
        "passwd": {"users": [{"name": "core", **(user or {})}]},
    }
    return MachineConfig(
        ObjectMeta(name=name), config=config, os_image_url=image, kernel_arguments=arguments
    )


OLD_FILES = [
    _file("/etc/app.conf", "old"),
    _file("/etc/d/vendor", "old"),
    _file("/etc/gone.conf", "old"),
    _file("/etc/healed", "right"),
    _file(LIVE_FILE, "old"),
]
NEW_FILES = [
    _file("/etc/app.conf", "new-and-longer", 0o600),
    _file("/etc/motd", "new"),
    _file("/etc/made/deep/file", "new"),
    _file("/etc/healed", "right"),
    _file(LIVE_FILE, "old"),
    _file("/opt/x", ""),
]
TWO_FILES = [_file("/etc/app.conf", "other"), _file("/etc/d/vendor", "other")]
ENABLED: Json = {"name": "app.service", "contents": UNIT, "enabled": True}
OTHER: Json = {"name": "other.service", "contents": UNIT, "enabled": True}
BAD: Json = {**ENABLED, "name": "bad.service", "contents": UNIT.replace("multi-user", "%H")}
KEYS: Json = {"sshAuthorizedKeys": ["ssh-ed25519 AAAA"], "passwordHash": "$6$salt$one"}
CONFIGS = {
    each.name: each
    for each in (
        _config(OLD.config, OLD_FILES, units=[ENABLED]),
        _config(NEW.config, NEW_FILES, units=[OTHER], user=KEYS),
        _config(LIVE.config, [*OLD_FILES[:4], _file(LIVE_FILE, "new")], units=[ENABLED]),
        _config(TWO.config, [*TWO_FILES, *OLD_FILES[2:]], units=[ENABLED]),
        _config(PASSWORD.config, OLD_FILES, units=[ENABLED], user=KEYS),
        _config(PASSED.config, NEW_FILES, units=[ENABLED, {**BAD, "enabled": None}]),
        _config(FAILS.config, NEW_FILES, units=[ENABLED, BAD]),
        _config(IMAGE.config, NEW_FILES, image=C.image, arguments=("quiet",)),
        _config(BAKED.config, [*OLD_FILES, _file(BAKED_FILE, "baked")]),
    )
}


def make_world(target: Target) -> StoredWorld:
    world = StoredWorld(booted=A.digest)
    world.configs = dict(CONFIGS)
    files = {**read_wanted_state(CONFIGS[BAKED.config]).files}
    world.vendor = {
        B.digest: {
            path.removeprefix("/etc/"): Entry("file", each.mode, each.contents.decode_bytes())
            for path, each in files.items()
        }
    }
    world.request_target(target)
    return world


def request(target: Target) -> Callable[[StoredWorld, Path], None]:
    return lambda world, _: world.request_target(target)


def request_bad_boot(target: Target) -> Callable[[StoredWorld, Path], None]:
    """Request a target in whose boot trial the kubelet fails."""

    def change(world: StoredWorld, root: Path) -> None:
        request(target)(world, root)
        world.is_unhealthy = has_new_file

    return change


def request_bad_agent(world: StoredWorld, root: Path) -> None:
    """Request an image whose agent crashes at each start."""
    request(IMAGE)(world, root)
    world.crashes = lambda world: world.booted == C.digest


def has_new_file(world: World) -> bool:
    return any(world.file(path) == content for path, content in NEW_CONTENTS.items())


def cancel_when_staged(world: StoredWorld) -> None:
    """Request the old target again as soon as the image of another one is staged."""
    if world.staging is not None:
        world.request_target(OLD)


def cancel_in_trial(world: StoredWorld) -> None:
    """Request the old target again as soon as another one is booted."""
    if has_new_file(world) and world.booted == C.digest:
        world.request_target(OLD)


def link_own_file(world: StoredWorld) -> None:
    """Make a link at a path of the failed target, once, as soon as its files are undone."""
    if world.annotations.get(key.STATE) != DEGRADED or world.has_own_link:
        return
    directory = world.disk.root / "opt"
    if not os.path.lexists(directory / "x"):
        os.symlink("/etc/others.conf", directory / "x")
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    world.has_own_link = True


def damage_file(_world: StoredWorld, root: Path) -> None:
    (root / "etc/healed").write_text("wrong")


@dataclass(frozen=True, slots=True)
class Twist:
    """A change of the world that comes with the crash; the machine may end at either target."""

    name: str
    change: Callable[[StoredWorld], None]


def fail_from_now(world: StoredWorld) -> None:
    """Make the kubelet fail with the new files, from the next start of the agent on."""
    world.is_unhealthy = has_new_file


def pass_from_now(world: StoredWorld) -> None:
    """Make all checks pass from the next start of the agent on."""
    world.is_unhealthy = lambda _: False


FAILS_LATER = Twist("checks fail after the crash", fail_from_now)
PASSES_LATER = Twist("checks pass after the crash", pass_from_now)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A change of a machine at ``before``; ``change`` requests it."""

    name: str
    change: Callable[[StoredWorld, Path], None]
    target: Target
    """The target that the machine has at the end."""
    before: Target = OLD
    prepare: Callable[[Path], None] = lambda _: None
    """Changes the directory of the machine at rest before the agent starts."""
    state: str = "Done"
    """The node's state at the end."""
    passed: Target | None = None
    """The target whose files the machine has for a time."""
    passed_starts: bool = False
    """A boot trial of `passed` starts the kubelet with these files."""
    change_is_update: bool = True
    """The change is a request, so the Node's annotations say which tree the machine has."""
    during: Callable[[StoredWorld], None] = lambda _: None
    """What a user does before a turn; it depends on the world alone."""
    twists: tuple[Twist, ...] = ()
    turns: int = 2
    """After so many turns without a change the machine is at rest."""


def downgrade_ledger(root: Path) -> None:
    """Write the ledger as version 0.1.0 does: without later keys, and without a checksum."""
    path = root / "var/lib/treenail/ledger.json"
    document: Json = json.loads(path.read_text())
    names = json.loads(OLD_LEDGER.read_text())
    path.write_text(json.dumps({name: document[name] for name in names if name in document}))


OLD_LEDGER = Path(__file__).parents[1] / "data/ledger-0.1.0.json"
SCENARIOS = {
    each.name: each
    for each in (
        Scenario("config", request(NEW), NEW, twists=(FAILS_LATER,)),
        Scenario("live config", request(LIVE), LIVE),
        Scenario("image", request(IMAGE), IMAGE, twists=(FAILS_LATER,)),
        Scenario("image mode", request(BAKED), BAKED, twists=(FAILS_LATER,)),
        Scenario("cancelled", request(IMAGE), OLD, during=cancel_when_staged),
        Scenario(
            "cancelled in its boot trial",
            request_bad_boot(IMAGE),
            OLD,
            during=cancel_in_trial,
            passed=IMAGE,
            passed_starts=True,
            twists=(PASSES_LATER,),
        ),
        Scenario(
            "rolled back",
            request_bad_boot(IMAGE),
            OLD,
            passed=IMAGE,
            passed_starts=True,
            state=DEGRADED,
            twists=(PASSES_LATER,),
        ),
        Scenario(
            "rolled back config",
            request_bad_boot(NEW),
            OLD,
            passed=NEW,
            passed_starts=True,
            state=DEGRADED,
            twists=(PASSES_LATER,),
        ),
        Scenario("two files", request(TWO), TWO, twists=(FAILS_LATER,)),
        Scenario("password", request(PASSWORD), PASSWORD),
        Scenario(
            "crashing agent",
            request_bad_agent,
            OLD,
            passed=IMAGE,
            passed_starts=True,
            state=DEGRADED,
        ),
        Scenario(
            "failed step", request(FAILS), OLD, passed=PASSED, state=DEGRADED, during=link_own_file
        ),
        Scenario("drift", damage_file, OLD, change_is_update=False, turns=12),
        Scenario(
            "agent version",
            request(NEW),
            NEW,
            prepare=downgrade_ledger,
            twists=(FAILS_LATER,),
        ),
    )
}
