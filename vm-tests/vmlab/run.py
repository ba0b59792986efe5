"""Tests in virtual machines: ``python -m vmlab.run [--if-possible] [PYTEST-OPTION ...]``.

Packages that are missing are installed, and images that are missing made, before the first test.
With ``--if-possible``, a host where that can't be is no failure: one line says why.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vmlab.drivers import driver
from vmlab.image.build import Builder
from vmlab.prerequisites import lacking
from vmlab.registry import Registry
from vmlab.snapshot import FIRST_BOOT_LIMIT_S, prepare_snapshot
from vmlab.tools import (
    PANIC_EXIT,
    REPOSITORY,
    GuestCommandError,
    ToolError,
    cache,
    missing,
    run,
    say,
)

IF_POSSIBLE = "--if-possible"
ASKED = "TREENAIL_VM"
LIMIT_S = 40 * 60.0
"""For what is run if possible; its images are made before."""
QUICK_BOOT_S = 240.0
"""A machine whose first boot takes longer would not be through by then."""
_END_S = 60.0
_PYTEST = ("-m", "pytest", "vm-tests", "-s", "-o", "faulthandler_timeout=10800")
_INSTALL = (
    "apt-get", "install", "--yes", "--no-install-recommends", "--no-remove",
    "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Return what pytest does; 0 if it was not possible and did not have to be."""
    lenient = IF_POSSIBLE in words
    options = [word for word in words if word != IF_POSSIBLE]
    if lenient and os.environ.get(ASKED) == "no":
        return _left_out(f"{ASKED} is no")
    if os.geteuid() != 0 and _sudo():
        return _as_root(words)
    try:
        _prepare(QUICK_BOOT_S if lenient else FIRST_BOOT_LIMIT_S, alone=lenient)
    except ToolError as error:
        # A service of ours that fails in a machine which boots is no fault of the host.
        if lenient and not isinstance(error, GuestCommandError):
            return _left_out(str(error).splitlines()[0])
        say(f"not possible: {error}")
        return 1
    except Exception as error:
        if lenient:
            return _left_out(f"{type(error).__name__}: {error}")
        raise
    try:
        return _tests(options, LIMIT_S if lenient else None)
    finally:
        _hand_over(REPOSITORY / "build/vm")


def _prepare(first_boot_s: float, *, alone: bool) -> None:
    """Make everything that the tests start from; raises `ToolError` where that is impossible."""
    if sentence := next(lacking(), ""):
        raise ToolError(sentence)
    needs_libvirt = not alone and os.environ.get("TREENAIL_VM_DRIVER") != "qemu"
    if packages := missing(virt_install=needs_libvirt):
        say(f"installing with apt-get: {' '.join(packages)}")
        _install(packages)
    with (
        Registry(cache() / "registry") as store,
        tempfile.TemporaryDirectory(prefix="tnvm", dir="/tmp") as directory,
    ):
        prepare_snapshot(Builder(store).chosen(), driver(Path(directory)), first_boot_s)


def _install(packages: Sequence[str]) -> None:
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(*_INSTALL, *packages, environment=quiet)
    except ToolError:
        # The lists are missing or older than the mirror.
        run("apt-get", "update", "-o", "Acquire::Retries=3")
        run(*_INSTALL, *packages, environment=quiet)


def _tests(options: Sequence[str], limit_s: float | None) -> int:
    # A requested run goes on after a failure: it takes hours. The smoke test stops at the first.
    words = [sys.executable, *_PYTEST, *options, *(("-x",) if limit_s else ())]
    process = subprocess.Popen(words, cwd=REPOSITORY)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # As Ctrl-C: machines and servers are ended.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        return _left_out(f"stopped after {limit_s:g} s, for this host is too slow")
    except KeyboardInterrupt:
        # pytest received the signal too, and stops machines and servers.
        process.wait(_END_S)
        raise
    if limit_s is not None and code == PANIC_EXIT:
        return _left_out("the kernel of a machine panicked under this emulation")
    return code


def _left_out(why: str) -> int:
    say(f"virtual machines are left out: {why}; to have them: make vm-smoke")
    return 0


def _sudo() -> bool:
    """Return whether sudo works without a password: no user may be there to type it."""
    if shutil.which("sudo") is None:
        return False
    return subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0


def _as_root(words: Sequence[str]) -> int:
    passed = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("TREENAIL_") or name in {"PATH", "PYTHONPATH"}
    ]
    command = ["sudo", "-n", "env", *passed, "PYTHONDONTWRITEBYTECODE=1"]
    command += [sys.executable, "-m", "vmlab.run", *words, "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def _hand_over(directory: Path) -> None:
    """Give the files of a failed run to the user who called sudo."""
    if (user := os.environ.get("SUDO_UID")) and directory.exists():
        run("chown", "-R", user, directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
