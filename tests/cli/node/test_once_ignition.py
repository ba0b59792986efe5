"""Results of ``treenail once`` compared with those of Ignition."""

import base64
import gzip
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.cli.node.main import main

# Where distributions have it: it is for the initial RAM disk.
ENGINE = shutil.which(
    "ignition", path="/usr/lib/dracut/modules.d/30ignition:/usr/bin:/usr/lib/ignition"
)
pytestmark = pytest.mark.skipif(
    ENGINE is None or os.geteuid() != 0, reason="needs Ignition, and gives files to other users"
)
# Ignition's own notes, ours, and what tools leave that change users.
NOT_COMPARED = (
    "etc/.ignition-result.json",
    "etc/.pwd.lock",
    "etc/group-",
    "etc/gshadow-",
    "etc/passwd-",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "etc/systemd/system-preset",
    "var",
)


def packed(content: bytes) -> str:
    return "data:;base64," + base64.b64encode(gzip.compress(content)).decode()


UNIT = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
CONFIGS = {
    "files": {
        "storage": {
            "files": [
                {"path": "/etc/plain", "contents": {"source": "data:,a%20b%0A"}},
                {
                    "path": "/opt/a/b",
                    "mode": 0o600,
                    "contents": {"source": "data:;base64,AAEC/w=="},
                },
                {"path": "/etc/empty"},
                {"path": "/etc/run", "mode": 0o755, "contents": {"source": "data:,%23!/bin/sh"}},
            ]
        }
    },
    "data URLs": {
        "storage": {
            "files": [
                {"path": f"/etc/{number}", "contents": {"source": source}}
                for number, source in enumerate(
                    [
                        "data:,",
                        "data:text/plain,plus+stays=equal%3d",
                        "data:text/plain;charset=utf-8,%C3%A4%0d%0a",
                        "data:text/plain;charset=utf-8;base64,w6Q=",
                        "data:,trailing%20%20%0A%0A",
                        "data:,~a!b$c&d'e(f)g*h;i:j@k/l?m",
                    ]
                )
            ]
        }
    },
    "gzip": {
        "storage": {
            "files": [
                {
                    "path": "/etc/packed",
                    "contents": {"source": packed(b"many\n" * 999), "compression": "gzip"},
                },
                {"path": "/etc/as-it-is", "contents": {"source": packed(b"x"), "compression": ""}},
            ]
        }
    },
    "owners": {
        "storage": {
            "files": [
                {"path": "/etc/by-number", "user": {"id": 5}, "group": {"id": 6}},
                {"path": "/etc/by-name", "user": {"name": "core"}, "group": {"name": "web"}},
                {"path": "/etc/half", "group": {"name": "web"}, "mode": 0o640},
            ],
            "directories": [{"path": "/etc/owned", "user": {"name": "core"}, "mode": 0o700}],
        }
    },
    "directories and links": {
        "storage": {
            "directories": [{"path": "/etc/d/e"}, {"path": "/srv/x", "mode": 0o2775 & 0o777}],
            "files": [{"path": "/etc/d/e/f", "contents": {"source": "data:,f"}}],
            "links": [
                {"path": "/etc/soft", "target": "d/e/f"},
                {"path": "/etc/nowhere", "target": "/none"},
                {"path": "/usr/lib/hard", "target": "/etc/d/e/f", "hard": True},
            ],
        }
    },
    "units": {
        "systemd": {
            "units": [
                {
                    "name": "ours.service",
                    "enabled": True,
                    "contents": UNIT,
                    "dropins": [{"name": "10-a.conf", "contents": "[Unit]\nAfter=b.service\n"}],
                },
                {"name": "masked.service", "mask": True},
                {"name": "vendor.service", "dropins": [{"name": "a.conf", "contents": "[Unit]\n"}]},
                {"name": "off.service", "enabled": False, "contents": UNIT},
            ]
        }
    },
    "users": {
        "passwd": {
            "users": [
                {
                    "name": "core",
                    "passwordHash": "$6$salt$hash",
                    "sshAuthorizedKeys": ["ssh-ed25519 AAAA one", "ssh-rsa BBBB two"],
                }
            ]
        }
    },
}


def machine(top: Path) -> Path:
    for directory in ("etc/selinux", "home/core", "usr/lib/systemd/system", "opt", "srv", "run"):
        (top / directory).mkdir(parents=True)
    (top / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n"
    )
    (top / "etc/group").write_text("root:x:0:\ncore:x:1000:\nweb:x:44:\n")
    (top / "etc/shadow").write_text("root:!:1::::::\ncore:*:1::::::\n")
    (top / "etc/selinux/config").write_text("SELINUX=disabled\nSELINUXTYPE=targeted\n")
    os.chown(top / "home/core", 1000, 1000)
    return top


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """Each entry with type, mode, owner, content and the first of its names."""
    found: dict[str, tuple[object, ...]] = {}
    names: dict[int, str] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if name.startswith(NOT_COMPARED) or ".wants" in name:
            continue
        status = path.lstat()
        first = "" if path.is_dir() else names.setdefault(status.st_ino, name)
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
            if name == "etc/shadow":
                content = without_days(path.read_text())
            if name.endswith("authorized_keys.d/ignition"):
                content = path.read_text().split()
        found[name] = stat.filemode(status.st_mode), status.st_uid, status.st_gid, first, content
    return found


def without_days(shadow: str) -> list[list[str]]:
    return [line.split(":")[:2] for line in shadow.splitlines()]


def ignition(config: Path, root: Path, state: Path) -> None:
    assert ENGINE
    # Labels are not compared; they come last, whether the machine has a policy or not.
    setfiles = state / "setfiles"
    setfiles.write_text("#!/bin/sh\n")
    setfiles.chmod(0o755)
    path = f"{state}:{os.environ['PATH']}"
    for stage in ("fetch", "files"):
        done = subprocess.run(
            [
                *(ENGINE, "-root", root, "-stage", stage, "-platform", "file", "-log-to-stdout"),
                *("-config-cache", state / "cache", "-neednet", state / "net"),
                *("-state-file", state / "state"),
            ],
            env={**os.environ, "PATH": path, "IGNITION_CONFIG_FILE": str(config)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that other users can enter, as Ignition does when it writes their keys."""
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.process
def test_once_result_equals_result_of_ignition(folder, name, capsys):
    config = folder / "config.json"
    config.write_text(json.dumps({"ignition": {"version": "3.3.0"}, **CONFIGS[name]}))
    ours, theirs = machine(folder / "ours"), machine(folder / "theirs")
    ignition(config, theirs, folder)
    assert main(["once", str(config), "--root", str(ours)]) == 0
    assert tree(ours) == tree(theirs)
    assert enabled(ours) == preset(theirs)


def enabled(top: Path) -> set[str]:
    return {path.name for path in top.glob("etc/systemd/system/*.wants/*")}


def preset(top: Path) -> set[str]:
    """Ignition leaves it to systemd's first boot to enable units."""
    lines = [
        line.split()
        for path in top.glob("etc/systemd/system-preset/*")
        for line in path.read_text().splitlines()
    ]
    return {words[1] for words in lines if words[0] == "enable"}
