"""Headers of RPM, as the table ``Packages`` of rpmdb.sqlite stores them.

A header is the number of entries, the size of the data, the entries of 16 bytes (tag, type, offset,
count; big-endian), and the data (rpm, docs/manual/format.md).
"""

import struct

from treenail.image.oci.packages import InstalledPackage

_NAME, _VERSION, _RELEASE, _EPOCH = 1000, 1001, 1002, 1003
_LICENSE, _ARCH, _SOURCE = 1014, 1022, 1044
_INT32, _STRING, _I18N = 4, 6, 9
_ENTRY = struct.Struct(">iIII")
_PRELUDE = struct.Struct(">II")
_MAX_ENTRIES = 10_000
_TEXT_LIMIT = 1000
# The signing key of a distribution is stored as a package without files.
_KEY_NAME = "gpg-pubkey"


def parse_header(content: bytes) -> InstalledPackage | None:
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
    return InstalledPackage(
        "rpm",
        name,
        version if epoch is None else f"{epoch}:{version}",
        _read_text(entries, data, _ARCH),
        _read_text(entries, data, _LICENSE),
        _read_text(entries, data, _SOURCE),
    )


def _read_text(entries: dict[int, tuple[int, int]], data: bytes, tag: int) -> str:
    kind, offset = entries.get(tag, (0, 0))
    if kind not in (_STRING, _I18N):
        return ""
    text = data[offset : offset + _TEXT_LIMIT].partition(b"\0")[0]
    return text.decode("utf-8", "replace")


def _read_number(entries: dict[int, tuple[int, int]], data: bytes, tag: int) -> int | None:
    kind, offset = entries.get(tag, (0, 0))
    if kind != _INT32:
        return None
    (number,) = struct.unpack_from(">I", data, offset)
    return int(number)
