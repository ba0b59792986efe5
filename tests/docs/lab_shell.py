"""Shells on the machines of a lab, and on a workstation that reaches its cluster.

A command on a node finds ``treenail``, which works on the machine's root and bus, and the two
programs of systemd that guides use, ``systemctl`` and ``journalctl``. The machine's emulators
carry these out.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tests.docs import send_command
from treenail.errors import UsageError
from treenail_lab.cluster import Lab
from treenail_lab.command import CONTROL_SOCKET, ControlSocketServer, LabCommands
from treenail_lab.lifetime.fork_server import build_client_command
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from treenail_lab.machine.systemd.journal import JournalEntry

CLUSTER = "cluster"
_LIMIT_S = 300.0
_AGENT = "treenail"
_ON_NODE = """#!/bin/sh
case "$1" in
-*) exec {treenail} "$@" ;;
*) command=$1; shift; exec {treenail} "$command" --root {root} "$@" ;;
esac
"""
PYTHON = (sys.executable, "-S", "-P")
_CONTROLLER = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
_OC = """#!/bin/sh
test "$1" = debug || exec kubectl "$@"
test "$3 $4 $5" = "-- chroot /host" || exit 2
case "$2" in
{places}
esac
shift 5
exec "$@"
"""
_IS_ACTIVE = """#!/bin/sh
for unit; do :; done
test -e {broken}/"$unit" || {{ echo active; exit 0; }}
echo failed
exit 3
"""
_JOURNALCTL_OPTIONS = {"-u", "--unit", "-n", "--lines", "-o", "--since", "--root"}
_JOURNALCTL_FLAGS = {"-q", "--quiet", "--no-pager"}


class LabShells:
    """Runs commands on a workstation and on nodes; use it as a context manager."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self._lab = lab
        self._directory = directory
        self.workstation = directory / "workstation"
        self.workstation.mkdir()
        self.names: dict[str, str] = {}
        """The lab's words in place of those in guides, such as the address of its registry."""
        self._broken_units: dict[str, str] = {}
        commands: LabCommands = {}
        for name, machine in lab.machines.items():
            commands[f"systemctl-{name}"] = partial(self._run_systemctl, machine)
            commands[f"journalctl-{name}"] = partial(_run_journalctl, machine)
        self._server = ControlSocketServer(directory, commands)

    def __enter__(self) -> "LabShells":
        self._install_programs()
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    def run(self, place: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command; its output has standard output and standard error together."""
        done = subprocess.run(
            ["bash", "-c", self._locate_files(place, self._replace_names(command))],
            cwd=self.workstation,
            env=self._build_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        for name, found in self.names.items():
            done.stdout = done.stdout.replace(found, name)
        return done

    def write_file(self, place: str, path: str, text: str) -> None:
        """Write a file of a node, or one in the directory of the workstation."""
        base = self.workstation if place == CLUSTER else self._lab.machines[place].root
        target = base / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self._replace_names(text), encoding="utf-8")
        if text.startswith("#!"):
            target.chmod(0o755)

    def _replace_names(self, text: str) -> str:
        for name, found in self.names.items():
            text = re.sub(rf"\b{re.escape(name)}\b", found, text)
        return text

    def break_unit(self, unit: str, digest: str) -> None:
        """Make a unit fail on all machines after each boot into this image; empty for none."""
        self._broken_units[unit] = digest
        for machine in self._lab.machines.values():
            machine.on_boot = partial(self._boot_units, machine)
            self._boot_units(machine, machine.booted_deployment)

    def _boot_units(self, machine: LabMachine, booted: SysrootDeployment | None) -> None:
        place = self._find_broken(machine)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for unit, digest in self._broken_units.items():
            if booted is not None and booted.digest == digest:
                (place / unit).touch()

    def _find_broken(self, machine: LabMachine) -> Path:
        return self._directory / f"broken-{machine.name}"

    def _locate_files(self, place: str, command: str) -> str:
        """Return the command with the paths of a node below its root, where the lab has them."""
        if place == CLUSTER:
            return command
        return re.sub(
            r"(?<![\w/])/etc/treenail/", f"{self._lab.machines[place].root}\\g<0>", command
        )

    def _build_environment(self, place: str) -> dict[str, str]:
        programs = [str(self._directory / f"bin-{place}"), os.environ.get("PATH", os.defpath)]
        environment = {
            **os.environ,
            **owner.mark_environment(),
            "PYTHONPATH": build_python_path(),
            "PATH": os.pathsep.join(programs),
            "LC_ALL": "C.UTF-8",
            "COLUMNS": "100",
        }
        if place == CLUSTER:
            return {**environment, "KUBECONFIG": str(self._lab.server.admin_kubeconfig)}
        return {**environment, "DBUS_SYSTEM_BUS_ADDRESS": self._lab.machines[place].address}

    def _install_programs(self) -> None:
        words = build_client_command((*PYTHON, "-c", _CONTROLLER))
        self._install(CLUSTER, "treenail-controller", f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        treenail = shlex.join(build_client_command((*PYTHON_MODULE, "treenail")))
        # For images: `treenail once --root`.
        self._install(CLUSTER, "treenail", f'#!/bin/sh\nexec {treenail} "$@"\n')
        self._install_oc()
        control = self._directory / CONTROL_SOCKET
        for name, machine in self._lab.machines.items():
            text = _ON_NODE.format(treenail=treenail, root=shlex.quote(str(machine.root)))
            self._install(name, "treenail", text)
            for program in ("systemctl", "journalctl"):
                words = build_client_command(
                    (*PYTHON, send_command.__file__, str(control), f"{program}-{name}")
                )
                self._install(name, program, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            # Health checks find it in the PATH of the agent, and have a time limit.
            is_active = _IS_ACTIVE.format(broken=shlex.quote(str(self._find_broken(machine))))
            self._install(name, "systemctl-is-active", is_active)
            shutil.copy2(
                self._directory / f"bin-{name}/systemctl-is-active",
                machine.root.parent / "bin/systemctl",
            )

    def _run_systemctl(self, machine: LabMachine, words: Sequence[str]) -> str:
        """Start or stop the agent; of enabling only ``--now`` has an effect in the lab."""
        verb, *rest = words
        units = [word.removesuffix(".service") for word in rest if not word.startswith("-")]
        if verb == "is-active":
            is_broken = (self._find_broken(machine) / f"{units[0]}.service").exists()
            return _encode_answer(*(("failed", 3) if is_broken else ("active", 0)))
        if verb not in ("start", "stop", "restart", "enable", "disable"):
            return _encode_answer()
        if _AGENT not in units:
            raise UsageError(f"systemctl {shlex.join(words)}: only for treenail in the lab")
        if verb in ("stop", "restart") or (verb == "disable" and "--now" in rest):
            machine.stop_agent()
        if verb in ("start", "restart") or (verb == "enable" and "--now" in rest):
            machine.start_agent()
        return _encode_answer()

    def _install_oc(self) -> None:
        """Install ``oc``: what it has in common with kubectl, and ``oc debug node/…``."""
        places = "\n".join(
            f"node/{name}) PATH={self._directory / f'bin-{name}'}:$PATH"
            f" DBUS_SYSTEM_BUS_ADDRESS={shlex.quote(machine.address)}; export PATH"
            " DBUS_SYSTEM_BUS_ADDRESS ;;"
            for name, machine in self._lab.machines.items()
        )
        self._install(CLUSTER, "oc", _OC.format(places=places))

    def _install(self, place: str, program: str, text: str) -> None:
        path = self._directory / f"bin-{place}" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def _run_journalctl(machine: LabMachine, words: Sequence[str]) -> str:
    """Print the entries of a unit, or with these fields, in the short format of journalctl."""
    unit, count, matches = "", 0, {}
    rest = iter(words)
    for word in rest:
        if word in _JOURNALCTL_OPTIONS:
            value = next(rest, "")
            unit = value.removesuffix(".service") if word in ("-u", "--unit") else unit
            count = int(value) if word in ("-n", "--lines") else count
        elif "=" in word and not word.startswith("-"):
            name, _, value = word.partition("=")
            matches[name] = value
        elif word not in _JOURNALCTL_FLAGS:
            raise UsageError(f"journalctl {word}: unknown in the lab")
    if unit:
        matches["SYSLOG_IDENTIFIER"] = unit
    entries = machine.read_journal(matches)[-count:]
    return _encode_answer("\n".join(_format_entry(machine.name, entry) for entry in entries))


def _format_entry(host: str, entry: JournalEntry) -> str:
    moment = datetime.fromtimestamp(int(str(entry["__REALTIME_TIMESTAMP"])) / 1e6, UTC)
    source = f"{entry.get('SYSLOG_IDENTIFIER')}[{entry.get('_PID')}]"
    return f"{moment:%b %d %H:%M:%S} {host} {source}: {entry.get('MESSAGE')}"


def _encode_answer(output: str = "", code: int = 0) -> str:
    return json.dumps({"output": output, "code": code})
