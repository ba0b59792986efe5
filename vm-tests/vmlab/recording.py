"""Updates of a virtual machine with a log of its disk writes and of the changes of its Node."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from treenail.kube.api_client import Json
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.store import StoreEvent
from vmlab.configs import with_files
from vmlab.drivers import Qemu
from vmlab.image.build import Builder, Built
from vmlab.site import NODE, Goal, Site
from vmlab.snapshot import prepare_snapshot
from vmlab.tools import run, say

BASE, DISK, LOG, STORY = "base.raw", "disk.raw", "writes.log", "recording.json"
CHANGED, REMOVED, RELOADED = (
    "/etc/vm-cuts/changed.conf",
    "/etc/vm-cuts/removed/file.conf",
    "/etc/containers/registries.d/vm.yaml",
)
ADDED = "/etc/vm-cuts/added.conf"
STATE = "/var/lib/vm-cuts.conf"
UNITS = ("vm-cuts-first.service", "vm-cuts-second.service")
_UNIT = "[Service]\nType=oneshot\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
WITNESS = "/run/vm-cuts-witness"
OTHERS = {
    "/etc/vm-cuts/others.conf": "of another program",
    "/etc/systemd/system/vm-others.service": "[Service]\nExecStart=/bin/true\n",
    "/var/lib/vm-others/state": "state of another program",
    # The kernel must not write what no program syncs.
    "/etc/sysctl.d/99-vm-cuts.conf": (
        "vm.dirty_writeback_centisecs = 0\nvm.dirty_expire_centisecs = 360000\n"
    ),
    "/etc/systemd/system/vm-hold.service": (
        "[Unit]\nBefore=treenail.service\n[Service]\nType=oneshot\n"
        "ExecStart=/usr/bin/mount -o remount,commit=300 /var\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
    # Between the agent's start and that of the kubelet.
    "/etc/systemd/system/vm-witness.service": (
        "[Unit]\nAfter=treenail.service\nBefore=kubelet.service\n[Service]\nType=oneshot\n"
        f"ExecStart=/bin/sh -c 'cat {CHANGED} >{WITNESS}'\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
}
"""Files that no config names."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """The Node as the API server had it when the log had ``size`` bytes."""

    size: int
    node: Json
    digest: str
    """Of the image that ran."""


@dataclass(frozen=True, slots=True)
class RestPoint:
    """The log's size when the node was at rest at a goal, and everything was synced."""

    size: int
    goal: Goal
    config: Json
    """The rendered MachineConfig."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A directory with the disk before the log, the log, and what happened beside it."""

    directory: Path
    rests: list[RestPoint]
    events: list[NodeEvent]

    @property
    def base(self) -> Path:
        return self.directory / BASE

    @property
    def log(self) -> Path:
        return self.directory / LOG

    def save(self) -> None:
        document = {
            "rests": [asdict(each) for each in self.rests],
            "events": [asdict(each) for each in self.events],
        }
        (self.directory / STORY).write_text(json.dumps(document))

    @classmethod
    def load(cls, directory: Path) -> "Recording":
        document = json.loads((directory / STORY).read_text())
        rests = [RestPoint(**{**each, "goal": Goal(**each["goal"])}) for each in document["rests"]]
        return cls(directory, rests, [NodeEvent(**each) for each in document["events"]])

    def find_event(self, size: int) -> NodeEvent:
        """Return the last change of the Node that the API server had at this size of the log."""
        return [each for each in self.events if each.size <= size][-1]


class Recorder:
    """Makes a recording of updates; ``directory`` keeps it."""

    def __init__(self, directory: Path, built: Built, builder: Builder) -> None:
        self._driver = Qemu()
        self._built = built
        self.recording = Recording(directory, [], [])
        self._disk = directory / DISK
        self.site = Site(
            directory,
            built,
            builder,
            self._driver,
            disk=self._disk,
            write_log=self.recording.log,
        )

    def record(self) -> Recording:
        """Boot the machine, move it through the updates, and save the recording."""
        disk = prepare_snapshot(self._built, self._driver)
        base = self.recording.base
        run("qemu-img", "convert", "-O", "raw", disk, base)
        run("cp", "--sparse=always", base, self._disk)
        self.recording.log.write_bytes(b"")
        site = self.site
        try:
            site.power_on()
            site.lab.server.call_api(lambda api: api.store.add_listener(self._see))
            self._plant_others()
            site.join()
            self._rest(site.first, {})
            for name, image, config in self._list_updates():
                say(f"recording: {name}")
                goal = site.goal(image, config, image_mode=False)
                site.reach(goal)
                self._rest(goal, {**config, "osImageURL": image})
            assert site.story.violations == []
        finally:
            (self.recording.directory / "story.txt").write_text("\n".join(site.story.events))
            site.stop()
            self._disk.unlink(missing_ok=True)
        self.recording.save()
        return self.recording

    def _list_updates(self) -> list[tuple[str, str, Json]]:
        first = self.site.first.pull_spec
        files = {CHANGED: "one", REMOVED: "one", RELOADED: "docker:", STATE: "one"}
        changed = {CHANGED: "two and longer", ADDED: "two" * 5000, RELOADED: "docker: {}"}
        return [
            ("files and units, with a reboot", first, _with_units(files, UNITS[:1])),
            ("a file, without a reboot", first,
             _with_units({**files, RELOADED: "docker: {}"}, UNITS[:1])),
            ("another image, files and units", self.site.image("2"),
             _with_units(changed, UNITS[1:])),
        ]  # fmt: skip

    def _plant_others(self) -> None:
        machine = self.site.machine
        for path, text in OTHERS.items():
            machine.sh(f"mkdir -p {path.rpartition('/')[0]}; cat > {path}", stdin=text)
        machine.sh("systemctl daemon-reload; systemctl enable vm-hold vm-witness; sync")
        self.site.hold_back_writes()

    def _rest(self, goal: Goal, config: Json) -> None:
        self.site.machine.sh("sync")
        size = self.recording.log.stat().st_size
        self.recording.rests.append(RestPoint(size, goal, config))
        say(f"at rest at {goal.config}; the log has {size >> 20} MiB")

    def _see(self, storage: StorageKey, event: StoreEvent) -> None:
        if storage[1] == "nodes" and event.object["metadata"]["name"] == NODE:
            size = self.recording.log.stat().st_size
            node: Json = json.loads(json.dumps(event.object))
            self.recording.events.append(NodeEvent(size, node, self.site.story.digest))


def _with_units(files: dict[str, str], units: tuple[str, ...]) -> Json:
    spec = json.loads(json.dumps(with_files(files)))
    entries = [{"name": name, "contents": _UNIT, "enabled": True} for name in units]
    spec["config"]["systemd"] = {"units": entries}
    return dict(spec)


def make_recording(directory: Path, built: Built, builder: Builder) -> Recording:
    """Make a recording in a new directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return Recorder(directory, built, builder).record()
