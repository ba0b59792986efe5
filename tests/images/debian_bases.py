"""Debian root directories, each standing for the base image of a node or of the controllers.

debootstrap makes them, as root and with Debian's repositories. They stay in the user's cache.
"""

import hashlib
import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treenail-images"
MIRROR = "http://deb.debian.org/debian"
# For every suite of Debian, also for those that are newer than the host's debootstrap.
SCRIPT = "/usr/share/debootstrap/scripts/sid"
SOURCES = ("LICENSE", "pyproject.toml", "agent", "rpm", "systemd", "tools")
LIMIT_S = 1800

# The first argument is the root directory. Nothing that is mounted here stays.
_BUILD = """
mount --bind "$1" "$1" && cd "$1" && mount -t proc proc proc && mount --rbind /dev dev
mkdir -p base && mount --bind "$2" base && cp -L /etc/resolv.conf etc/resolv.conf
shift 2; exec chroot . env -i PATH=/usr/sbin:/usr/bin HOME=/tmp LANG=C.UTF-8 \
    PIP_CERT=/host-certificates PIP_CACHE_DIR=/var/cache/pip "$@"
"""
_RUN = """
mount --bind "$1" "$1" && cd "$1" && mount -t proc proc proc && mount --bind /dev dev
mount -t tmpfs tmpfs tmp && mount -o remount,ro,bind .
shift; exec chroot . setpriv --reuid="$1" --regid="$1" --clear-groups \
    env -i PATH=/usr/sbin:/usr/bin HOME=/ sh -ec "$2"
"""
# As a pod: a read-only root directory, a user without a name, and a credential that it can read.
_SERVE = """
mount --bind "$1" "$1" && cd "$1" && mount -t proc proc proc && mount --bind /dev dev
mount -t tmpfs tmpfs tmp && uid=$2 && shift 2
for word; do case $word in --kubeconfig=*) cp "${word#*=}" tmp/kubeconfig;; esac; done
chown "$uid" tmp/kubeconfig && mount -o remount,ro tmp && mount -o remount,ro,bind .
exec chroot . setpriv --reuid="$uid" --regid="$uid" --clear-groups \
    env -i PATH=/usr/bin POD_NAME="$POD_NAME" POD_NAMESPACE="$POD_NAMESPACE" \
    treenail-controller "$@" --kubeconfig=/tmp/kubeconfig
"""


@dataclass(frozen=True)
class Base:
    """A base image: what it is made of, and the interpreter for treenail's tree."""

    suite: str
    packages: tuple[str, ...]
    python: str
    options: tuple[str, ...] = ()


def make_base(base: Base) -> Path:
    """Make the root directory of the base; return its path."""
    place = CACHE / f"base-{_digest(base.suite, *base.packages)}"
    if not place.exists():
        new = _clear(place.with_suffix(".new"))
        include = [f"--include={','.join(base.packages)}"] if base.packages else []
        _call("debootstrap", "--variant=minbase", *include, base.suite, new, MIRROR, SCRIPT)
        new.rename(place)
    return place


def build_tree(base: Base, program: str, target: Path) -> None:
    """Build a tree for the base in a stage on the base, as the Containerfile does."""
    stage = _make_stage(base)
    source = _clear(stage / "source")
    for name in SOURCES:
        _copy(ROOT / name, source / name)
    made = _clear(stage / "tree")
    command = (base.python, "/source/tools/python_tree.py", program, "/tree", "--base", "/base")
    _build(stage, make_base(base), *command, *base.options)
    shutil.copytree(made, target, symlinks=True)


def install_tree(base: Base, tree: Path, root: Path) -> None:
    """Copy the base, then the tree, as the last stage of the Containerfile does."""
    _call("cp", "-a", "--reflink=auto", make_base(base), root)
    _call("cp", "-a", f"{tree}/.", root)


def run_in(root: Path, script: str, uid: int = 0) -> str:
    """Run a shell script in a read-only root directory without network; return its output.

    Only /tmp can be written. The standard error is part of the output.
    """
    command = ("unshare", "--mount", "--net", "sh", "-ec", _RUN, "sh", root, str(uid), script)
    return _call(*command)


def make_service_command(root: Path, uid: int) -> tuple[str, ...]:
    """Make a command that runs treenail-controller of a root directory on the host's network."""
    return ("unshare", "--mount", "sh", "-ec", _SERVE, "sh", str(root), str(uid))


def list_content(root: Path) -> dict[str, tuple[int, str]]:
    """Return mode and digest of each file below a directory, by its path."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode, _digest_file(path))
        for path in root.rglob("*")
        if path.is_file()
    }


def _make_stage(base: Base) -> Path:
    installer = ROOT / "tools/base_packages"
    key = _digest(base.suite, *base.packages, base.python, installer.read_text())
    place = CACHE / f"stage-{key}"
    if not place.exists():
        new = place.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        _call("cp", "-a", "--reflink=auto", make_base(base), new)
        # The stage need not survive a power cut.
        (new / "etc/dpkg/dpkg.cfg.d/fast").write_text("force-unsafe-io\n")
        # A mirror may be weeks old.
        (new / "etc/apt/apt.conf.d/old").write_text('Acquire::Check-Valid-Until "false";\n')
        shutil.copy(installer, new / "base_packages")
        # A proxy of the host may have certificates of its own.
        shutil.copy(ssl.get_default_verify_paths().cafile or "/dev/null", new / "host-certificates")
        _build(new, new, "/base_packages", base.python)
        new.rename(place)
    return place


def _build(stage: Path, base: Path, *command: str) -> None:
    _call("unshare", "--mount", "sh", "-ec", _BUILD, "sh", stage, base, *command)


def _call(*command: str | Path) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def _clear(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _digest(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def _digest_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
