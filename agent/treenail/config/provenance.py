"""Provenance: the source MachineConfigs of every entry of a rendered config."""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api import decode
from treenail.errors import ConfigError

PROVENANCE = "treenail.io/provenance"
"""Annotation of a rendered MachineConfig with the sources of its entries."""

_PLAIN_LIMIT = 32 * 1024
_TEXT_LIMIT = 16 * 1024 * 1024
_PACKED = "zlib,"

# Lists of an Ignition config whose entries have a name, and the field that holds it.
_NAMED = {
    "directories": ("storage", "path"),
    "files": ("storage", "path"),
    "links": ("storage", "path"),
    "disks": ("storage", "device"),
    "filesystems": ("storage", "device"),
    "luks": ("storage", "name"),
    "raid": ("storage", "name"),
    "units": ("systemd", "name"),
    "users": ("passwd", "name"),
    "groups": ("passwd", "name"),
}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Names of the MachineConfigs that set each entry, the one that takes effect last.

    An entry is a section and a name: ``files`` and ``/etc/a``, ``dropins`` and
    ``a.service/10-b.conf``, ``kernelArguments`` and an argument. The name is empty for a section
    with a single value, such as ``kernelType``.
    """

    entries: Mapping[tuple[str, str], tuple[str, ...]]

    def find_sources(self, section: str, name: str = "") -> tuple[str, ...]:
        """Return the MachineConfigs that set the entry; empty without any."""
        return self.entries.get((section, name), ())

    def find_section_sources(self, section: str) -> tuple[str, ...]:
        """Return the MachineConfigs that set any entry of the section."""
        matches = (names for (where, _name), names in self.entries.items() if where == section)
        return tuple(dict.fromkeys(name for names in matches for name in names))

    def to_text(self) -> str:
        """Encode the provenance for the annotation; long text is compressed."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        if len(text) <= _PLAIN_LIMIT:
            return text
        return _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode()

    @classmethod
    def from_text(cls, text: str) -> "Provenance":
        """Decode the output of `to_text`; raises `ConfigError`."""
        where = f"annotation {PROVENANCE}"
        if text.startswith(_PACKED):
            unpacker = zlib.decompressobj()
            try:
                packed = base64.b64decode(text[len(_PACKED) :], validate=True)
                text = unpacker.decompress(packed, _TEXT_LIMIT).decode()
            except (ValueError, zlib.error) as error:
                raise ConfigError(f"{where}: expected compressed JSON, found other data") from error
        return cls.from_json(decode.load_json(text, where=where))

    def to_json(self) -> decode.Json:
        """Encode the provenance as JSON; each MachineConfig name occurs once, to save space."""
        sources = list(dict.fromkeys(name for setters in self.entries.values() for name in setters))
        at = {name: index for index, name in enumerate(sources)}
        sections: dict[str, dict[str, list[int]]] = {}
        for (section, name), setters in self.entries.items():
            sections.setdefault(section, {})[name] = [at[source] for source in setters]
        return {"sources": sources, "entries": sections}

    @classmethod
    def from_json(cls, document: object) -> "Provenance":
        """Decode the output of `to_json`; raises `ConfigError`."""
        fields = decode.Fields.from_json(document, "")
        sources = fields.get_text_list("sources")
        entries: dict[tuple[str, str], tuple[str, ...]] = {}
        sections = fields.get_object("entries")
        for section in sections.values:
            names = sections.get_object(section)
            for name in names.values:
                indexes = names.get_list(name)
                known = [at for at in indexes if isinstance(at, int) and 0 <= at < len(sources)]
                if len(known) != len(indexes):
                    raise names.make_error(name, "indexes of sources")
                entries[section, name] = tuple(sources[at] for at in known)
        return cls(entries)


def list_named_entries(config: decode.Json) -> Iterator[tuple[str, str]]:
    """Yield section and name of every entry of an Ignition config."""
    fields = decode.Fields.from_json(config, "")
    for section, (parent, key) in _NAMED.items():
        if fields.values.get(parent) is None:
            continue
        for entry in fields.get_object(parent).iter_objects(section):
            name = entry.get_text(key)
            yield section, name
            for dropin in entry.iter_objects("dropins"):
                yield "dropins", f"{name}/{dropin.get_text('name')}"
    for name in ("shouldExist", "shouldNotExist"):
        for argument in fields.get_object("kernelArguments").get_text_list(name):
            yield f"kernelArguments.{name}", argument
