"""Updates of a machine in a directory, each from a machine at rest until it is at rest again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.crash.stored import StoredWorld
from tests.fakes.disk import Entry
from tests.fakes.world import World
from tests.update.build import A, B, C
from treenail.api.annotations import NodeState
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.config.wanted import read_wanted_state
from treenail.update.state.record import Target

Json = dict[str, object]

OLD, NEW, LIVE, FAILS, PASSED, IMAGE = map(
    Target, ("old", "new", "live", "fails", "passed", "image")
)
DEGRADED = NodeState.DEGRADED.value
BAKED = Target("baked", B.image)
UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
BAKED_FILE = "/etc/baked.conf"
"""The file of the config that only its image has."""
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


def has_new_file(world: World) -> bool:
    return world.file("/etc/motd") == b"new"


def cancel_when_staged(world: StoredWorld) -> None:
    """Request the old target again as soon as the image of another one is staged."""
    if world.staging is not None:
        world.request_target(OLD)


def cancel_in_trial(world: StoredWorld) -> None:
    """Request the old target again as soon as another one is booted."""
    if has_new_file(world) and world.booted == C.digest:
        world.request_target(OLD)


def damage_file(_world: StoredWorld, root: Path) -> None:
    (root / "etc/healed").write_text("wrong")


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
        Scenario("config", request(NEW), NEW),
        Scenario("live config", request(LIVE), LIVE),
        Scenario("image", request(IMAGE), IMAGE),
        Scenario("image mode", request(BAKED), BAKED),
        Scenario("cancelled", request(IMAGE), OLD, during=cancel_when_staged),
        Scenario(
            "cancelled in its boot trial",
            request_bad_boot(IMAGE),
            OLD,
            during=cancel_in_trial,
            passed=IMAGE,
            passed_starts=True,
        ),
        Scenario(
            "rolled back",
            request_bad_boot(IMAGE),
            OLD,
            passed=IMAGE,
            passed_starts=True,
            state=DEGRADED,
        ),
        Scenario(
            "rolled back config",
            request_bad_boot(NEW),
            OLD,
            passed=NEW,
            passed_starts=True,
            state=DEGRADED,
        ),
        Scenario("failed step", request(FAILS), OLD, passed=PASSED, state=DEGRADED),
        Scenario("drift", damage_file, OLD, change_is_update=False, turns=12),
        Scenario("agent version", request(NEW), NEW, prepare=downgrade_ledger),
    )
}
