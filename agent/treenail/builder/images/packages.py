"""Read the packages of an image from its RPM or dpkg database, and from the list for `push`.

In the table ``Packages`` of rpmdb.sqlite a header is the number of entries, the size of the data,
the entries of 16 bytes (tag, type, offset, count; big-endian), and the data (rpm,
docs/manual/format.md). `build` leaves the list in the work directory.
"""

import json
import logging
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from treenail import errors, memory
from treenail.api.decode import load_json
from treenail.builder.buildah.stored_tree import StoredTree
from treenail.image.oci import attachments

# rpm-ostree and bootc keep the database below /usr, other systems below /var.
_RPM_DATABASES = (
    "/usr/share/rpm/rpmdb.sqlite",
    "/usr/lib/sysimage/rpm/rpmdb.sqlite",
    "/var/lib/rpm/rpmdb.sqlite",
)
_DPKG_DATABASES = ("/var/lib/dpkg/status", "/usr/lib/sysimage/dpkg/status")
_RELEASES = ("/usr/lib/os-release", "/etc/os-release")
_INSTALLED = "ok installed"


def read_packages(tree: StoredTree, scratch: Path) -> attachments.PackageList | None:
    """Return the packages; None if the tree has no database that can be read.

    ``scratch`` is a directory for a copy. Raises `FileError` for a damaged database.
    """
    for path in _RPM_DATABASES:
        if (content := tree.read_file(path)) is not None:
            # Commits that no checkpoint has moved to the database.
            wal = tree.read_file(f"{path}-wal")
            return attachments.PackageList(
                tuple(_read_rpm(content, wal, scratch, path)), _read_id(tree)
            )
    for path in _DPKG_DATABASES:
        if (content := tree.read_file(path)) is not None:
            return attachments.PackageList(tuple(parse_dpkg_status(content)), _read_id(tree))
    return None


def parse_dpkg_status(content: bytes) -> Iterator[attachments.InstalledPackage]:
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
        if count > attachments.MAX_PACKAGES:
            return
        yield attachments.InstalledPackage(
            "deb",
            fields["Package"],
            fields.get("Version", ""),
            fields.get("Architecture", ""),
            source=fields.get("Source", ""),
        )


def _read_rpm(
    content: bytes, wal: bytes | None, scratch: Path, path: str
) -> Iterator[attachments.InstalledPackage]:
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            place = Path(directory) / "rpmdb.sqlite"
            place.write_bytes(content)
            if wal:
                place.with_name("rpmdb.sqlite-wal").write_bytes(wal)
            with closing(sqlite3.connect(place)) as database:
                # The text of a view or trigger of the file must not run anything.
                database.execute("PRAGMA trusted_schema = OFF")
                rows = database.execute(
                    "SELECT blob FROM Packages LIMIT ?", (attachments.MAX_PACKAGES,)
                )
                for (blob,) in rows:
                    if isinstance(blob, bytes) and (header := parse_header(blob)) is not None:
                        yield header
    except OSError as error:
        raise errors.FileError(f"cannot copy {path}: {error.strerror}") from error
    except (sqlite3.Error, ValueError) as error:
        raise errors.FileError(f"cannot read {path}: {error}") from error


def _read_id(tree: StoredTree) -> str:
    """Return the ID of os-release(5)."""
    for path in _RELEASES:
        for line in (tree.read_file(path) or b"").decode("utf-8", "replace").split("\n"):
            if line.startswith("ID="):
                return line[3:].strip().strip("\"'")
    return ""


log = logging.getLogger(__name__)

_PACKAGE_FILE = "packages.json"
_PACKAGE_FILE_LIMIT = 16 * memory.MIB


def write_packages(work: Path, storage: Path, driver: str, image: str) -> None:
    """Write the packages of an image of the storage; a failure is logged, and leaves no list.

    `push` has a login, and must not parse databases that the instructions of a user wrote.
    """
    place = work / _PACKAGE_FILE
    try:
        place.unlink(missing_ok=True)
        package_list = read_packages(StoredTree(storage, driver, image), work)
        if package_list is None:
            log.info("the image has no database of packages")
            return
        place.write_text(json.dumps(package_list.to_json()))
    except OSError as error:
        log.warning("cannot list the packages of the image: %s", error.strerror)
    except errors.TreenailError as error:
        log.warning("cannot list the packages of the image: %s", error)
    else:
        log.info("the image has %d packages", len(package_list.packages))


def read_package_file(work: Path) -> attachments.PackageList | None:
    """Read the list; None without one. Raises `ConfigError` and `FileError`."""
    place = work / _PACKAGE_FILE
    try:
        with place.open("rb") as file:
            content = file.read(_PACKAGE_FILE_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.FileError(f"cannot read {place}: {error.strerror}") from error
    if len(content) > _PACKAGE_FILE_LIMIT:
        raise errors.FileError(
            f"cannot read {place}: it is longer than {_PACKAGE_FILE_LIMIT} bytes"
        )
    return attachments.PackageList.from_json(load_json(content, where=_PACKAGE_FILE))


# Tags and types of rpm (docs/manual/tags.md; rpmtag.h).
_NAME, _VERSION, _RELEASE, _EPOCH = 1000, 1001, 1002, 1003
_LICENSE, _ARCH, _SOURCE = 1014, 1022, 1044
_INT32, _STRING, _I18N = 4, 6, 9
_ENTRY = struct.Struct(">iIII")
_PRELUDE = struct.Struct(">II")
_MAX_ENTRIES = 10_000
_TEXT_LIMIT = 1000
# The signing key of a distribution is stored as a package without files.
_KEY_NAME = "gpg-pubkey"


def parse_header(content: bytes) -> attachments.InstalledPackage | None:
    """Return the package; None for a stored key. Raises `ValueError` for anything else."""
    try:
        count, size = _PRELUDE.unpack_from(content)
        if count > _MAX_ENTRIES:
            raise ValueError("too many entries")
        start = _PRELUDE.size + count * _ENTRY.size
        data = content[start : start + size]
        entries = {
            tag: (kind, offset)
            for tag, kind, offset, _ in (
                _ENTRY.unpack_from(content, _PRELUDE.size + number * _ENTRY.size)
                for number in range(count)
            )
        }
        name = _read_text(entries, data, _NAME)
        if not name:
            raise ValueError("it has no name")
        if name == _KEY_NAME:
            return None
        version = f"{_read_text(entries, data, _VERSION)}-{_read_text(entries, data, _RELEASE)}"
        epoch = _read_number(entries, data, _EPOCH)
    except struct.error as error:
        raise ValueError(f"its header ends early: {error}") from error
    return attachments.InstalledPackage(
        "rpm",
        name,
        # rpm prints the epoch only where a package has one; no epoch counts as 0.
        version if epoch is None else f"{epoch}:{version}",
        _read_text(entries, data, _ARCH),
        _read_text(entries, data, _LICENSE),
        _read_text(entries, data, _SOURCE),
    )


def _read_text(entries: dict[int, tuple[int, int]], data: bytes, tag: int) -> str:
    kind, offset = entries.get(tag, (0, 0))
    if kind not in (_STRING, _I18N):
        return ""
    # The first text of an I18NSTRING is that of the locale C.
    text = data[offset : offset + _TEXT_LIMIT].partition(b"\0")[0]
    return text.decode("utf-8", "replace")


def _read_number(entries: dict[int, tuple[int, int]], data: bytes, tag: int) -> int | None:
    kind, offset = entries.get(tag, (0, 0))
    if kind != _INT32:
        return None
    (number,) = struct.unpack_from(">I", data, offset)
    return int(number)
