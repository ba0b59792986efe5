"""Run a program of a machine's initramfs in mount and network namespaces of its own.

::

    python -m treenail_lab.machine.ignition.ignition_process PORT SOCKET PROGRAM [ARGUMENT]...

The program reaches PORT of the host's loopback through the Unix socket SOCKET, and nothing else.
The process exits with the code of the program, and kills it when its own parent ends.

It starts without site-packages: it imports the standard library, `kernel` and `sandbox_process`.
"""

import os
import subprocess
import sys

from treenail_lab.kubelet.processes import kernel, sandbox_process

_JOURNAL = "/run/systemd/journal"


def main(port: str, path: str, *command: str) -> int:
    """Run the program; return its exit code."""
    kernel.set_parent_death_signal()
    kernel.unshare_namespaces(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if os.path.isdir(_JOURNAL):  # noqa: PTH112  # pathlib is slow to import
        # Ignition would log to the journal of this host.
        kernel.mount("tmpfs", _JOURNAL, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.start_loopback()
    sandbox_process.start_forward(int(port), path)
    # A child inherits no death signal (prctl(2)).
    done = subprocess.run(command, check=False, preexec_fn=kernel.set_parent_death_signal)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
