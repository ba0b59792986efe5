"""The layers that images are made of, as tar files; the same content gives the same digest."""

import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmlab.image import rootfs
from vmlab.tools import REPOSITORY, run

AGENT_SOURCES = ("agent/treenail", "systemd")
"""The folders of a source tree that the agent of an image is made of."""
OTHER_AGENT = "usr/lib/treenail-other"
"""Where an image has the agent of another version."""
_LATER = 1_700_000_000
# On a busy host udev took longer than the default of 90 s to find the disk of /boot, and the boot
# ended in emergency mode.
_BUSY_HOST = b"[Manager]\nDefaultDeviceTimeoutSec=15min\n"
_UNITS = REPOSITORY / "vm-tests/vmlab/guest/units"


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed tar file, and its digests compressed and not."""

    path: Path
    digest: str
    content_digest: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, or a link, of a small layer."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


def of_tree(tree: Path, target: Path) -> Layer:
    """A layer of everything below ``tree``."""
    sort = ("--sort=name", "--numeric-owner", f"--mtime=@{_LATER}", "--xattrs")
    plain = target.with_suffix(".tar")
    run("tar", "-C", tree, *sort, "-cf", plain, ".")
    content_digest = digest(plain)
    run("sh", "-c", 'gzip -1nc "$1" > "$2"', "sh", plain, target)
    plain.unlink()
    return Layer(target, digest(target), content_digest)


def of_entries(entries: Mapping[str, Entry], target: Path) -> Layer:
    """A layer of these files, and the directories they need."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folders = {str(parent) for name in entries for parent in Path(name).parents} - {"."}
        for folder in sorted(folders):
            member = tarfile.TarInfo(folder)
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, _LATER
            archive.addfile(member)
        for name, entry in sorted(entries.items()):
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = entry.mode, _LATER
            if entry.link:
                member.type, member.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(member)
            else:
                member.size = len(entry.content)
                archive.addfile(member, io.BytesIO(entry.content))
    content_digest = f"sha256:{hashlib.sha256(plain.getvalue()).hexdigest()}"
    with target.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        shutil.copyfileobj(io.BytesIO(plain.getvalue()), packed)
    return Layer(target, digest(target), content_digest)


def agent(version: str, *, emulated: bool = True) -> dict[str, Entry]:
    """Return the agent as a node has it, and the parts of the lab that this machine needs.

    With ``emulated``, the lab's rpm-ostree is among them.
    """
    site = "usr/lib/python3/dist-packages"
    entries = {
        f"{site}/{path.relative_to(REPOSITORY / folder)}": Entry(path.read_bytes())
        for folder, package in (("agent", "treenail"), ("lab", "treenail_lab"))
        for path in _sources(REPOSITORY / folder / package)
    }
    lab = REPOSITORY / "vm-tests"
    entries |= {
        f"usr/lib/treenail-vm/{path.relative_to(lab)}": Entry(path.read_bytes())
        for path in (*_sources(lab / "vmlab/guest"), lab / "vmlab/__init__.py")
    }
    start = (
        "#!/usr/bin/python3\nimport sys\n\n"
        "from treenail.cli.node.main import main\n\nsys.exit(main())\n"
    )
    entries["usr/bin/treenail"] = Entry(start.encode(), 0o755)
    units = REPOSITORY / "systemd"
    own_units = ("treenail.service", "treenail-firstboot.service")
    for name in own_units:
        entries[f"usr/lib/systemd/system/{name}"] = _file(units / name)
    preset = "".join(f"enable {name}\n" for name in own_units)
    entries["usr/lib/systemd/system-preset/80-treenail.preset"] = Entry(preset.encode())
    requires = "usr/lib/systemd/system/kubelet.service.requires"
    entries[f"{requires}/treenail-firstboot.service"] = Entry(link="../treenail-firstboot.service")
    entries["usr/lib/tmpfiles.d/treenail.conf"] = _file(units / "treenail.tmpfiles")
    entries["usr/lib/systemd/catalog/treenail.catalog"] = _file(units / "treenail.catalog")
    entries["usr/lib/systemd/system.conf.d/busy-host.conf"] = Entry(_BUSY_HOST)
    for name in ("crio", "kubelet", "vm-shell", "vm-boot"):
        entries[f"usr/lib/systemd/system/{name}.service"] = _file(_UNITS / f"{name}.service")
    for name in ("treenail", "crio", "kubelet", "vm-shell", "vm-boot"):
        wants = "usr/lib/systemd/system/multi-user.target.wants"
        entries[f"{wants}/{name}.service"] = Entry(link=f"../{name}.service")
    return entries | (_emulated_rpm_ostree() if emulated else {}) | release(version)


def _emulated_rpm_ostree() -> dict[str, Entry]:
    name = "org.projectatomic.rpmostree1"
    return {
        "usr/lib/systemd/system/rpm-ostreed.service": _file(_UNITS / "rpm-ostreed.service"),
        f"usr/share/dbus-1/system.d/{name}.conf": _file(_UNITS / f"{name}.conf"),
        f"usr/share/dbus-1/system-services/{name}.service": _file(_UNITS / f"{name}.activation"),
    }


def other_agent(source: Path) -> dict[str, Entry]:
    """Return another agent, of the source tree ``source``, which the services run in its place."""
    package, units = (source / name for name in AGENT_SOURCES)
    entries = {
        f"{OTHER_AGENT}/{path.relative_to(package.parent)}": _file(path)
        for path in _sources(package)
    }
    setting = f"[Service]\nEnvironment=PYTHONPATH=/{OTHER_AGENT}\n"
    for name in ("treenail.service", "treenail-firstboot.service"):
        unit = f"usr/lib/systemd/system/{name}"
        entries[unit] = _file(units / name)
        # The stand-ins for the kubelet and for rpm-ostree run with the agent of this clone.
        entries[f"{unit}.d/other.conf"] = Entry(setting.encode())
    return entries


def release(version: str) -> dict[str, Entry]:
    """Write the files that distinguish one version of the image from another."""
    return {"usr/lib/treenail-vm/version": Entry(f"{version}\n".encode())}


def read_directory(directory: Path) -> dict[str, Entry]:
    """Return the files and links below a directory; those of /etc are in /usr/etc of an image."""
    entries = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        name = f"usr/{name}" if name.startswith("etc/") else name
        if path.is_symlink():
            entries[name] = Entry(link=str(path.readlink()))
        elif path.is_file():
            entries[name] = Entry(path.read_bytes(), path.stat().st_mode & 0o7777)
    return entries


def compiled(entries: Mapping[str, Entry], tree: Path) -> dict[str, Entry]:
    """The entries and their compiled Python modules, made by the interpreter of a root."""
    with tempfile.TemporaryDirectory(dir=tree / "tmp") as scratch:
        place = Path(scratch)
        for name, entry in entries.items():
            if name.endswith(".py"):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(entry.content)
        inside = f"/tmp/{place.name}"
        rootfs.compile_modules(tree, inside, strip=inside)
        found = {
            str(path.relative_to(place)): Entry(path.read_bytes()) for path in place.rglob("*.pyc")
        }
    return {**entries, **found}


def _sources(folder: Path) -> list[Path]:
    kept = {".py", ".xml", ".yaml", ".typed"}
    return sorted(path for path in folder.rglob("*") if path.suffix in kept and path.is_file())


def _file(path: Path) -> Entry:
    return Entry(path.read_bytes())


def digest(path: Path) -> str:
    """Of a file, as registries write it."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
