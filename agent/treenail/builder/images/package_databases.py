"""Reads the packages of a tree from its RPM or dpkg database."""

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

from treenail.builder.images.rpm_header import parse_header
from treenail.errors import FileError
from treenail.image.oci.packages import MAX_PACKAGES, InstalledPackage, PackageList

# rpm-ostree and bootc keep the database below /usr, other systems below /var.
_RPM_DATABASES = (
    "/usr/share/rpm/rpmdb.sqlite",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite",
    "/var/lib/rpm/rpmdb.sqlite",
)
_DPKG_DATABASES = ("/var/lib/dpkg/status", "/usr/lib/sysimage/dpkg/status")
_RELEASES = ("/usr/lib/os-release", "/etc/os-release")
_INSTALLED = "ok installed"


class Tree(Protocol):
    """Files of an image; raises `FileError`."""

    def read_file(self, path: str) -> bytes | None: ...


def read_packages(tree: Tree, scratch: Path) -> PackageList | None:
    """Return the packages; None if the tree has no database that can be read.

    ``scratch`` is a directory for a copy. Raises `FileError` for a damaged database.
    """
    for path in _RPM_DATABASES:
        if (content := tree.read_file(path)) is not None:
            # Commits that no checkpoint has moved to the database.
            log = tree.read_file(f"{path}-wal")
            return PackageList(tuple(_read_rpm(content, log, scratch, path)), _read_id(tree))
    for path in _DPKG_DATABASES:
        if (content := tree.read_file(path)) is not None:
            return PackageList(tuple(parse_dpkg_status(content)), _read_id(tree))
    return None


def parse_dpkg_status(content: bytes) -> Iterator[InstalledPackage]:
    """Yield the installed packages of a dpkg status file (deb822(5))."""
    count = 0
    for paragraph in content.decode("utf-8", "replace").split("\n\n"):
        fields = {
            name: value.strip()
            for name, colon, value in (line.partition(":") for line in paragraph.split("\n"))
            if colon and not name.startswith((" ", "\t"))
        }
        if not fields.get("Status", "").endswith(_INSTALLED) or not fields.get("Package"):
            continue
        count += 1
        if count > MAX_PACKAGES:
            return
        yield InstalledPackage(
            "deb",
            fields["Package"],
            fields.get("Version", ""),
            fields.get("Architecture", ""),
            source=fields.get("Source", ""),
        )


def _read_rpm(
    content: bytes, log: bytes | None, scratch: Path, path: str
) -> Iterator[InstalledPackage]:
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            place = Path(directory) / "rpmdb.sqlite"
            place.write_bytes(content)
            if log:
                place.with_name("rpmdb.sqlite-wal").write_bytes(log)
            with closing(sqlite3.connect(place)) as database:
                # The text of a view or trigger of the file must not run anything.
                database.execute("PRAGMA trusted_schema = OFF")
                rows = database.execute("SELECT blob FROM Packages LIMIT ?", (MAX_PACKAGES,))
                for (blob,) in rows:
                    if isinstance(blob, bytes) and (found := parse_header(blob)) is not None:
                        yield found
    except OSError as error:
        raise FileError(f"cannot copy {path}: {error.strerror}") from error
    except (sqlite3.Error, ValueError) as error:
        raise FileError(f"cannot read {path}: {error}") from error


def _read_id(tree: Tree) -> str:
    """Return the ID of os-release(5)."""
    for path in _RELEASES:
        for line in (tree.read_file(path) or b"").decode("utf-8", "replace").split("\n"):
            if line.startswith("ID="):
                return line[3:].strip().strip("\"'")
    return ""
