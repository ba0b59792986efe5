"""The host's real Ignition in the guest, as a unit before the agent's first boot.

In an initramfs Ignition runs before the root directory is entered. Here it runs in that directory:
the initramfs of the guest has busybox only.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from treenail_lab.machine.ignition.ignition import PROGRAM, USER_DATA
from vmlab.machine import Machine

UNIT = "ignition.service"
HOST_NAME = "kubernetes.default.svc"
"""A name of the lab's certificates, with which the guest reaches this host."""
_HOST = "10.0.2.2"
_PLACE = "/var/lib/ignition"
_POLICY = "/etc/selinux/targeted/contexts/files"
_RUN = f"{_PLACE}/ignition -platform=file -root=/"
_TEXT = f"""\
[Unit]
Description=Ignition
Before=treenail-firstboot.service
ConditionPathExists=!/etc/.ignition-result.json
[Service]
Type=oneshot
RemainAfterExit=yes
Environment=PATH={_PLACE}:/usr/sbin:/usr/bin IGNITION_CONFIG_FILE=/{USER_DATA}
ExecStart={_RUN} -stage=fetch
# Ignition refuses a root without SELinux's settings, and runs setfiles. libostree would compile the
# policy of a root that has settings.
ExecStart=/bin/mkdir -p {_POLICY}
ExecStart=/bin/cp {_PLACE}/selinux.config /etc/selinux/config
ExecStart=/bin/touch {_POLICY}/file_contexts
ExecStart={_RUN} -stage=files
ExecStart=/bin/rm -r /etc/selinux
[Install]
RequiredBy=treenail-firstboot.service
"""
_DOWNLOAD = (
    f"import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], '{_PLACE}/ignition')"
)


def install(machine: Machine, user_data: str) -> None:
    """Install Ignition and user data; it runs in the next boot."""
    machine.sh("mount -o remount,rw /boot")
    machine.sh(f"mkdir -p {_PLACE} /boot/ignition")
    with _serve_program() as port:
        url = f"http://{_HOST}:{port}/{PROGRAM.name}"
        machine.sh(f'python3 -c "{_DOWNLOAD}" {url}', limit_s=300.0)
    for path, text in (
        (f"{_PLACE}/setfiles", "#!/bin/sh\nexec cat >/dev/null\n"),
        (f"{_PLACE}/selinux.config", "SELINUX=disabled\nSELINUXTYPE=targeted\n"),
        (f"/{USER_DATA}", user_data),
        (f"/etc/systemd/system/{UNIT}", _TEXT),
    ):
        machine.sh(f"umask 077; cat > {path}", stdin=text)
    machine.sh(f"echo {_HOST} {HOST_NAME} >> /etc/hosts; chmod 755 {_PLACE}/*")
    machine.sh(f"systemctl enable {UNIT}")


@contextmanager
def _serve_program() -> Iterator[int]:
    """Serve the program's directory to the guest; yield the port."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(PROGRAM.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
