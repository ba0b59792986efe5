"""A node in a virtual machine, and the cluster on this host that it belongs to."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.drains import Drains
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.kube.api_client import Json
from treenail.kube.resources import NODES
from treenail_lab.apiserver.objects import Json as Document
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from vmlab import registry
from vmlab.drivers import Driver
from vmlab.image.build import Builder, Built
from vmlab.image.layers import Entry
from vmlab.machine import BOOT_LIMIT_S, SNAPSHOT, Machine
from vmlab.snapshot import copy_snapshot, prepare_snapshot
from vmlab.story import Story
from vmlab.tools import PATIENCE, ToolError, say

NODE = "node"
DRAINER = "drain-controller"
_SETTINGS = f"""\
[limits]
retry_first_s = 1.0
retry_max_s = 5.0
[health]
deadline_s = {120.0 * PATIENCE}
settle_s = 2.0
failing_s = {20.0 * PATIENCE}
ready_s = {30.0 * PATIENCE}
outage_s = {60.0 * PATIENCE}
"""
_LOOK_S = 0.25
SETTLE_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Goal:
    """A rendered config, and the image beside it or, outside image mode, within it."""

    config: str
    pull_spec: str
    image_mode: bool = True

    @property
    def digest(self) -> str:
        return self.pull_spec.partition("@")[2]


class Site:
    """One node at rest at the image it was installed from, and the means to interfere with it."""

    def __init__(
        self,
        directory: Path,
        built: Built,
        builder: Builder,
        driver: Driver,
        *,
        disk: Path | None = None,
        write_log: Path | None = None,
    ) -> None:
        """``disk`` is a raw one to boot instead of the snapshot; its writes go to ``write_log``."""
        self._directory = directory
        self._disk = disk
        self._built = built
        self._driver = driver
        self._builder = builder
        self._goals = 0
        self._open = ExitStack()
        self._holding = False
        self.story = Story(NODE, built.pull_spec.partition("@")[2])
        self.lab = Lab(directory / "cluster", LabPlan(nodes=(), images=()))
        self.machine = Machine(
            directory,
            disk or directory / "disk.qcow2",
            driver=driver,
            booted=self._booted,
            disk_format="raw" if disk else "qcow2",
            write_log=write_log,
        )
        self.first = Goal("", built.pull_spec)

    def power_on(self, on_node: Callable[[], None] = lambda: None) -> None:
        """Start the machine that becomes a node, and return when it runs with all its files.

        ``on_node`` is called when the API server has the Node, before the machine starts.
        """
        if self._disk is None:
            snapshot = prepare_snapshot(self._built, self._driver)
            copy_snapshot(snapshot, self._directory / "disk.qcow2")
        self._open.enter_context(self.lab)
        self.lab.server.call_api(lambda api: api.store.add_listener(self.story.see))
        self.start_drains()
        credential = json.loads(self.lab.add_node(NODE).read_text())
        cluster = credential["clusters"][0]["cluster"]
        cluster["server"] = cluster["server"].replace("127.0.0.1", "10.0.2.2")
        cluster["tls-server-name"] = "localhost"
        on_node()
        if self._disk is None:
            self.machine.start(SNAPSHOT)
        else:
            self.machine.start()
            self.machine.wait_boots(1)
        self._install(json.dumps(credential))

    def start_drains(self) -> None:
        """Start the drain controller, again after ``drains.stop()``."""
        drainer = self.lab.server.write_kubeconfig(DRAINER, ["system:masters"])
        self.drains = Drains(self.lab.open_client(drainer), SystemClock())
        self.drains.start()
        self._open.callback(self.drains.stop)

    def join(self) -> None:
        """Return once the node is at rest and says so."""
        self.machine.sh("systemctl restart kubelet; systemctl restart --no-block treenail")
        self.first = self.goal(self._built.pull_spec)
        self.reach(self.first)

    def stop(self) -> None:
        """Pull the plug and end everything."""
        self.machine.stop()
        self._open.close()
        (self._directory / "disk.qcow2").unlink(missing_ok=True)
        shutil.rmtree(self._directory / "cluster", ignore_errors=True)

    def image(self, version: str, entries: Mapping[str, Entry] | None = None) -> str:
        """Publish another image; returns its pull spec."""
        return self._builder.variant(self._built, version, entries or {})

    def agent_sources(self, name: str) -> Path:
        """Return the directory for the sources of another agent; it is kept on failure."""
        return self._directory / name

    def image_with_agent(
        self, version: str, source: Path, entries: Mapping[str, Entry] | None = None
    ) -> str:
        """Publish an image with the agent of a source tree; returns its pull spec."""
        return self.image(version, {**self._builder.agent(source), **(entries or {})})

    def goal(
        self,
        pull_spec: str,
        spec: Mapping[str, object] | None = None,
        *,
        image_mode: bool = True,
    ) -> Goal:
        """Another rendered config, with this image beside it or, outside image mode, within it."""
        self._goals += 1
        inside = {} if image_mode else {"osImageURL": pull_spec}
        name = f"rendered-worker-{self._goals}"
        if not image_mode:
            self.story.images[name] = pull_spec.partition("@")[2]
        self.lab.add_config(build_rendered_config(name, {**inside, **(spec or {})}))
        return Goal(name, pull_spec, image_mode)

    def ask(self, goal: Goal) -> None:
        """Ask the node for the goal."""
        image = goal.pull_spec if goal.image_mode else None
        notes: Json = {key.DESIRED_CONFIG: goal.config, key.DESIRED_OS_IMAGE: image}
        self.patch({"metadata": {"annotations": notes}})

    def settle(self, goal: Goal, limit_s: float = SETTLE_LIMIT_S) -> None:
        """Wait until the node is at the goal, says so and is in service."""
        self.wait(lambda: self.is_at(goal), f"{goal.config} is reached", limit_s)

    def reach(self, goal: Goal) -> None:
        """Ask for the goal and wait until it is reached."""
        self.ask(goal)
        self.settle(goal)

    def is_at(self, goal: Goal) -> bool:
        """Whether the Node says so, is in service, and the image runs."""
        node = self.node()
        notes = self.notes()
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == goal.config
            and notes.get(key.CURRENT_OS_IMAGE) == (goal.pull_spec if goal.image_mode else None)
            and notes.get(key.DESIRED_DRAIN) == notes.get(key.LAST_APPLIED_DRAIN)
            and not node["spec"].get("unschedulable")
            and self.story.digest == goal.digest
        )

    def is_ready(self) -> bool:
        """Whether the kubelet of the boot that runs says so."""
        status = self.node().get("status", {})
        ready = {each["type"]: each["status"] for each in status.get("conditions", [])}.get("Ready")
        boot = self.machine.sh("cat /proc/sys/kernel/random/boot_id").strip()
        return ready == "True" and status.get("nodeInfo", {}).get("bootID") == boot

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
        """Wait until the condition holds; raises `ToolError` naming what did not come about."""
        limit_s *= PATIENCE
        end = time.monotonic() + limit_s
        while not condition():
            self.machine.check()
            if time.monotonic() > end:
                raise ToolError(
                    f"not within {limit_s:g} s: {what}\n" + "\n".join(self.story.events)
                )
            time.sleep(_LOOK_S)

    def node(self) -> Document:
        """The Node as the API server has it."""
        found = self.lab.server.call_api(
            lambda api: api.store.find_object(("", "nodes"), ("", NODE))
        )
        assert found is not None
        return found

    def notes(self) -> dict[str, str]:
        """The Node's annotations."""
        return dict(self.node()["metadata"].get("annotations") or {})

    def patch(self, body: Json) -> None:
        """Change the Node as an administrator."""
        self.lab.client.patch(NODES, NODE, body)

    def journal(self, *matches: str) -> list[dict[str, str]]:
        """The journal's entries of all boots that match, in order."""
        lines = self.machine.sh(f"journalctl --no-pager -o json {' '.join(matches)}").splitlines()
        return [json.loads(line) for line in lines]

    def add_settings(self, text: str) -> None:
        """Add settings to the agent's agent.toml and restart it."""
        self.machine.sh("cat >> /etc/treenail/agent.toml", stdin=text)
        self.machine.sh("sync; systemctl restart treenail")

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of the boot trial, in seconds."""
        change = f"s/^deadline_s = .*/deadline_s = {seconds * PATIENCE}/"
        self.machine.sh(f"sed -i '{change}' /etc/treenail/agent.toml")
        self.machine.sh("sync; systemctl restart treenail")

    def hold_back_writes(self) -> None:
        """Delay the kernel's write-back of unsynced data from seconds to minutes."""
        self._holding = True
        self.machine.sh(
            "sysctl -qw vm.dirty_writeback_centisecs=0 vm.dirty_expire_centisecs=360000; "
            "mount -o remount,commit=300 /var"
        )

    def cut_power(self) -> str:
        """Cut the power and wait for the next boot; returns what the ledger then said."""
        before = len(self.story.boots)
        self.machine.reset()
        self.wait(lambda: len(self.story.boots) > before, "the machine boots", BOOT_LIMIT_S)
        if self._holding:
            self.hold_back_writes()
        ledger = self.story.boots[-1].ledger
        update = ledger.get("update") if isinstance(ledger, dict) else None
        return str(update["phase"]) if update else "at rest"

    def let_pass(self, changes: int, seconds: float, *, until: Callable[[], bool]) -> None:
        """Let the story go on by so many lines, then time pass; no longer than until it holds."""
        seen = len(self.story.events)
        while len(self.story.events) < seen + changes and not until():
            self.machine.check()
            time.sleep(_LOOK_S)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            time.sleep(_LOOK_S)

    def misprogram(self, module: str, *, line: str, instead: str) -> None:
        """Replace one line of the node's agent by a faulty one, which the rules must notice."""
        place = "/var/lib/misprogrammed"
        self.machine.sh(f"mkdir {place} && cp -r /usr/lib/python3/dist-packages/treenail {place}")
        # Otherwise Python would run the compiled module: the image has no modification times.
        self.machine.sh(f"rm -r {place}/treenail/{module.rpartition('/')[0]}/__pycache__")
        path = f"{place}/treenail/{module}"
        text = self.machine.sh(f"cat {path}")
        if text.count(line) != 1:
            raise ToolError(f"{module} has {line!r} {text.count(line)} times")
        self.machine.sh(f"cat > {path}", stdin=text.replace(line, instead))
        drop_in = "/etc/systemd/system/treenail.service.d"
        setting = f"[Service]\nEnvironment=PYTHONPATH={place}\n"
        self.machine.sh(f"mkdir {drop_in}; cat > {drop_in}/wrong.conf", stdin=setting)
        self.machine.sh("sync; systemctl daemon-reload; systemctl restart treenail")

    def report(self) -> str:
        """Everything that helps to see what went wrong; it is kept in the directory, too."""
        try:
            journal = self.machine.sh("journalctl --no-pager -n 3000; ostree admin status")
        except ToolError as error:
            journal = str(error)
        (self._directory / "journal.txt").write_text(journal)
        (self._directory / "story.txt").write_text("\n".join(self.story.events))
        return "\n".join(("story:", *self.story.events, "console:", self.machine.last_lines()))

    def _booted(self, found: Document) -> None:
        self.story.booted(found)
        say(f"booted {self.story.digest[:19]}")

    def _install(self, kubeconfig: str) -> None:
        """Write what provisioning leaves on a node, beside the agent of the image."""
        self.machine.sh(f"hostname {NODE}")
        self.machine.sh("mkdir -p /var/lib/kubelet /etc/treenail; chmod 700 /var/lib/kubelet")
        for path, content in (
            ("/var/lib/kubelet/kubeconfig", kubeconfig),
            ("/var/lib/kubelet/config.json", registry.pull_secret()),
            ("/etc/treenail/agent.toml", _SETTINGS),
        ):
            self.machine.sh(f"umask 077; cat > {path}", stdin=content)
        self.machine.sh("sync")
