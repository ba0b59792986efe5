"""Values read from serialized variants, compared with GLib."""

from gi.repository import GLib
from hypothesis import given
from hypothesis import strategies as st

from treenail.host.ostree.sysroot import find_boolean

KEYS = st.sampled_from(["locked", "", "target", "merge-deployment", "x" * 300])
VALUES = st.one_of(
    st.booleans().map(lambda value: GLib.Variant("b", value)),
    st.text(max_size=400).filter(lambda text: "\0" not in text).map(
        lambda value: GLib.Variant("s", value.encode("utf-8", "replace").decode())
    ),
    st.integers(0, 2**64 - 1).map(lambda value: GLib.Variant("t", value)),
    st.lists(st.sampled_from(["a", "bc", ""]), max_size=5).map(
        lambda value: GLib.Variant("as", value)
    ),
)  # fmt: skip
ENTRIES = st.lists(st.tuples(KEYS, VALUES), max_size=8)


@given(ENTRIES)
def test_boolean_is_that_of_glib(entries: list[tuple[str, GLib.Variant]]) -> None:
    content = serialize(entries)
    assert find_boolean(content, "locked") == ask_glib(content, "locked")


@given(ENTRIES, st.data())
def test_damaged_record_never_raises_and_is_not_invented(
    entries: list[tuple[str, GLib.Variant]], data: st.DataObject
) -> None:
    content = bytearray(serialize(entries))
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    found = find_boolean(bytes(content), "locked")
    assert found is None or b"locked\0" in content


@given(st.binary(max_size=80))
def test_any_bytes_are_read_without_error(content: bytes) -> None:
    find_boolean(content, "locked")


def test_large_record_has_wide_offsets() -> None:
    entries = [("other", GLib.Variant("s", "x" * 70_000)), ("locked", GLib.Variant("b", True))]
    assert find_boolean(serialize(entries), "locked") is True


def serialize(entries: list[tuple[str, GLib.Variant]]) -> bytes:
    builder = GLib.VariantBuilder(GLib.VariantType("a{sv}"))
    for key, value in entries:
        builder.add_value(
            GLib.Variant.new_dict_entry(GLib.Variant("s", key), GLib.Variant.new_variant(value))
        )
    return bytes(builder.end().get_data_as_bytes().get_data() or b"")


def ask_glib(content: bytes, key: str) -> bool | None:
    state = GLib.Variant.new_from_bytes(GLib.VariantType("a{sv}"), GLib.Bytes.new(content), False)
    found = state.lookup_value(key, GLib.VariantType("b"))
    return None if found is None else found.get_boolean()
