"""The part of the GVariant format that records of libostree need, without GLib.

GLib would take 5 MiB in the resting agent. The format is that of
https://docs.gtk.org/glib/gvariant-format.html. Values are not trusted: a damaged one reads as None.
"""

from collections.abc import Iterator

_ALIGNMENT = 8
"""Of a variant, and so of a dictionary entry with one."""


def find_boolean(content: bytes, key: str) -> bool | None:
    """Return the ``b`` at the key of a serialized ``a{sv}``, in the byte order of this machine.

    None without the key, or when its first value has another type.
    """
    wanted = key.encode() + b"\0"
    for entry in _split_array(content):
        size = _get_offset_size(len(entry))
        end = _read_offset(entry, len(entry) - size, size)
        if end > len(entry) - size or entry[:end] != wanted:
            continue
        # A variant is its value, a null character and the type of the value.
        value = entry[_align(end) : len(entry) - size]
        return value[0] != 0 if len(value) == 3 and value[1:] == b"\0b" else None
    return None


def _split_array(content: bytes) -> Iterator[bytes]:
    """Yield the elements of an array of dictionary entries, as its offsets say."""
    size = _get_offset_size(len(content))
    if not content:
        return
    offsets = _read_offset(content, len(content) - size, size)
    if offsets > len(content) or (len(content) - offsets) % size:
        return
    start = 0
    for place in range(offsets, len(content), size):
        end = _read_offset(content, place, size)
        if _align(start) <= end <= offsets:
            yield content[_align(start) : end]
        start = end


def _get_offset_size(length: int) -> int:
    """Return the size of the offsets in a container of this length."""
    return next(size for size in (1, 2, 4, 8) if length < 1 << 8 * size)


def _read_offset(content: bytes, place: int, size: int) -> int:
    return int.from_bytes(content[max(place, 0) : place + size], "little")


def _align(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
