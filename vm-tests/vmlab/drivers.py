"""Two ways to run a virtual machine: virt-install on a libvirt of our own, or QEMU alone."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vmlab.tools import ToolError, run

MEMORY_MIB = int(os.environ.get("TREENAIL_VM_MEMORY_MIB", "1024"))
PROCESSOR = os.environ.get("TREENAIL_VM_CPU", "qemu64,-cx16")
"""Under emulation."""
CHANNELS = ("shell", "boot")
_START_LIMIT_S = 30.0
_MONITOR_LIMIT_S = 180.0
_ACCOUNTS = {
    "passwd": "libvirt-qemu:x:64055:64055:libvirt QEMU:/var/lib/libvirt:/usr/sbin/nologin",
    "group": "libvirt-qemu:x:64055:",
}
_QEMU_CONFIG = """\
user = "root"
group = "root"
security_driver = "none"
remember_owner = 0
cgroup_controllers = [ ]
namespaces = [ ]
stdio_handler = "file"
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a machine; its console and channels are sockets in a directory."""

    name: str
    disk: Path
    sockets: Path
    log: Path
    ignition: Path | None = None
    """The Ignition config that the firmware hands to the first boot."""
    disk_format: str = "qcow2"
    write_log: Path | None = None
    """Where QEMU logs writes and flushes of a raw disk; see `vmlab.write_log`."""

    def socket(self, name: str) -> Path:
        return self.sockets / name

    def options(self, snapshot: str) -> list[str]:
        """QEMU's options that libvirt has no words for."""
        found = ["-loadvm", snapshot] if snapshot else []
        if self.ignition is not None:
            found += ["-fw_cfg", f"name=opt/com.coreos/config,file={self.ignition}"]
        return found


class Driver(Protocol):
    """Runs one machine at a time."""

    name: str

    def start(self, hardware: Hardware, snapshot: str) -> None:
        """Power on, or go on from a snapshot that this driver took of the same hardware."""

    def monitor(self, command: str) -> str:
        """Return the answer of QEMU's monitor."""

    def stop(self) -> None:
        """Pull the plug; the machine does not start again."""


class Qemu:
    """QEMU as a child of this process."""

    name = "qemu"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor = Path()

    def start(self, hardware: Hardware, snapshot: str) -> None:
        self._monitor = hardware.socket("monitor")
        words = [*_command(hardware), *hardware.options(snapshot)]
        with hardware.log.open("ab") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log)
        _wait_for(self._monitor, f"QEMU did not start; see {hardware.log}")

    def monitor(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_MONITOR_LIMIT_S)
            line.connect(str(self._monitor))
            _until_prompt(line)
            line.sendall(f"{command}\n".encode())
            return _until_prompt(line)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()


class Libvirt:
    """virt-install on a libvirtd that sees a configuration and a state of our own."""

    name = "libvirt"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._uri = f"qemu:///system?socket={directory}/run/libvirt-sock"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._domain = ""

    def start(self, hardware: Hardware, snapshot: str) -> None:
        if hardware.disk_format != "qcow2":
            raise ToolError("libvirt boots qcow2 disks only; set TREENAIL_VM_DRIVER=qemu")
        self._start_daemon()
        self._domain = hardware.name
        console = f"unix,source.mode=bind,source.path={hardware.socket('console')}"
        channels = (
            f"--channel=unix,source.mode=bind,source.path={hardware.socket(each)},"
            f"target.type=virtio,target.name=treenail.{each}"
            for each in CHANNELS
        )
        further = hardware.options(snapshot)
        more = [f"--qemu-commandline={' '.join(further)}"] if further else []
        kvm = accelerator() == "kvm"
        run(
            "virt-install", "--connect", self._uri, "--name", hardware.name,
            "--virt-type", "kvm" if kvm else "qemu",
            "--cpu", "host-passthrough" if kvm else PROCESSOR,
            "--memory", str(MEMORY_MIB), "--vcpus", str(processors()), "--import",
            "--disk", f"path={hardware.disk},format=qcow2,bus=virtio,cache=writeback",
            "--osinfo", "detect=off,require=off", "--network", "user,model=virtio",
            "--graphics", "none", "--noautoconsole", "--serial", console, *channels,
            "--rng", "/dev/urandom", "--memballoon", "none", "--controller", "usb,model=none",
            "--transient", *more,
        )  # fmt: skip

    def monitor(self, command: str) -> str:
        return run("virsh", "-c", self._uri, "qemu-monitor-command", "--hmp", self._domain, command)

    def stop(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is None:
            return
        with suppress(ToolError):
            run("virsh", "-c", self._uri, "destroy", self._domain, limit_s=60.0)
        daemon.terminate()
        daemon.wait(30)

    def _start_daemon(self) -> None:
        for name in ("etc", "run", "lib", "log", "cache"):
            shutil.rmtree(self._directory / name, ignore_errors=True)
            (self._directory / name).mkdir(parents=True)
        (self._directory / "etc/qemu.conf").write_text(_QEMU_CONFIG)
        places = {
            "etc": "/etc/libvirt",
            "run": "/run/libvirt",
            "lib": "/var/lib/libvirt",
            "log": "/var/log/libvirt",
            "cache": "/var/cache/libvirt",
        }
        # In a mount namespace, so that a libvirt which this host may have is left alone.
        binds = [f"mount --bind {self._directory / own} {its}" for own, its in places.items()]
        # Debian's libvirt-daemon alone does not ship /var/lib/libvirt and /var/log/libvirt.
        for its in places.values():
            Path(its).mkdir(parents=True, exist_ok=True)
        # libvirtd looks up its user before it reads qemu.conf; the package that adds the user
        # (libvirt-daemon-system) would start a libvirtd of its own.
        for name, entry in _ACCOUNTS.items():
            accounts = self._directory / name
            accounts.write_text(_with_account(Path("/etc", name).read_text(), entry))
            binds.append(f"mount --bind {accounts} /etc/{name}")
        script = " && ".join([*binds, f"exec libvirtd --pid-file {self._directory}/libvirtd.pid"])
        with (self._directory / "libvirtd.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        _wait_for(
            self._directory / "run/libvirt-sock",
            f"libvirtd did not start; see {self._directory}/libvirtd.log",
        )


def _with_account(accounts: str, entry: str) -> str:
    """Return the text of a passwd or group file that has ``entry``."""
    name = entry.partition(":")[0]
    if any(line.startswith(f"{name}:") for line in accounts.splitlines()):
        return accounts
    return f"{accounts.rstrip()}\n{entry}\n"


def driver(directory: Path) -> Driver:
    """libvirt where it is installed, else QEMU alone; TREENAIL_VM_DRIVER chooses."""
    chosen = os.environ.get("TREENAIL_VM_DRIVER")
    present = all(map(shutil.which, ("virt-install", "libvirtd", "virsh", "unshare")))
    if chosen == "libvirt" or (chosen is None and present):
        return Libvirt(directory)
    return Qemu()


def processors() -> int:
    """One under emulation: with more, QEMU now and then runs into a kernel's code while another
    processor patches it, and the guest dies of an int3."""
    return 2 if accelerator() == "kvm" else 1


def accelerator() -> str:
    """``kvm`` where it can be trusted, else ``tcg``; TREENAIL_VM_ACCEL chooses."""
    chosen = os.environ.get("TREENAIL_VM_ACCEL")
    if chosen in ("kvm", "tcg"):
        return chosen
    modules = {path.name for path in Path("/sys/module").glob("kvm*")}
    # Paravirtual KVM in a guest runs firmware, and 64-bit kernels crawl and die on cmpxchg16b.
    hardware = modules & {"kvm_intel", "kvm_amd"}
    return "kvm" if hardware and os.access("/dev/kvm", os.W_OK) else "tcg"


def describe_machine(driver: Driver) -> str:
    """Return all that a snapshot depends on besides its disk and the code that makes it."""
    unnamed = Hardware("", Path("disk"), Path("sockets"), Path("log"))
    # The text of this module has the options of virt-install.
    parts = [driver.name, run("qemu-system-x86_64", "--version"), Path(__file__).read_text()]
    parts += _command(unnamed)
    if driver.name == Libvirt.name:
        parts.append(run("libvirtd", "--version"))
    if accelerator() == "kvm":
        processor, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        kept = ("model name", "microcode", "flags")
        parts += [line for line in processor.splitlines() if line.startswith(kept)]
    return "\n".join(parts)


def _command(hardware: Hardware) -> list[str]:
    kvm = accelerator() == "kvm"
    channels = [
        word
        for each in CHANNELS
        for word in (
            "-chardev", _socket(hardware, each),
            "-device", f"virtserialport,chardev={each},name=treenail.{each}",
        )
    ]  # fmt: skip
    return [
        "qemu-system-x86_64", "-machine", "q35", "-nodefaults", "-display", "none",
        "-accel", "kvm" if kvm else "tcg,thread=multi",
        "-cpu", "host" if kvm else PROCESSOR,
        "-m", str(MEMORY_MIB), "-smp", str(processors()),
        *_disk(hardware),
        # The name that its DHCP server gives.
        "-netdev", "user,id=net,hostname=node", "-device", "virtio-net-pci,netdev=net,romfile=",
        "-device", "virtio-rng-pci", "-device", "virtio-serial-pci",
        "-chardev", _socket(hardware, "console"), "-serial", "chardev:console", *channels,
        "-chardev", _socket(hardware, "monitor"), "-mon", "chardev=monitor",
    ]  # fmt: skip


def _disk(hardware: Hardware) -> list[str]:
    device = "virtio-blk-pci,drive=disk,bootindex=1"
    if hardware.write_log is None:
        drive = f"if=none,id=disk,file={hardware.disk},format={hardware.disk_format}"
        return ["-drive", f"{drive},cache=writeback", "-device", device]
    # The files are on a host that stays up, so that a flush reaches the log only.
    files = {"disk-file": hardware.disk, "log": hardware.write_log}
    nodes = [
        f"driver=file,node-name={name},filename={path},cache.no-flush=on"
        for name, path in files.items()
    ]
    nodes.append("driver=raw,node-name=raw,file=disk-file")
    nodes.append("driver=blklogwrites,node-name=disk,file=raw,log=log,log-sector-size=512")
    # Concurrent zero writes spoil the log before QEMU 8.2 (block/blklogwrites.c).
    device = f"{device},write-cache=on,discard=off,write-zeroes=off"
    return [*(word for node in nodes for word in ("-blockdev", node)), "-device", device]


def _socket(hardware: Hardware, name: str) -> str:
    return f"socket,id={name},path={hardware.socket(name)},server=on,wait=off"


def _wait_for(path: Path, complaint: str) -> None:
    end = time.monotonic() + _START_LIMIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise ToolError(complaint)
        time.sleep(0.05)


def _until_prompt(line: socket.socket) -> str:
    found = b""
    while not found.rstrip().endswith(b"(qemu)"):
        content = line.recv(4096)
        if not content:
            raise ToolError("QEMU's monitor hung up")
        found += content
    return found.decode(errors="replace")
