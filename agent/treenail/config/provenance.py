"""Where every entry of a rendered config came from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api.decode import Fields, Json

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
    """The MachineConfigs behind each entry, the one that had the last word at the end.

    An entry is a section and a name: ``files`` and ``/etc/a``, ``dropins`` and
    ``a.service/10-b.conf``, ``kernelArguments`` and an argument, or a section alone for what there
    is only one of, such as ``kernelType``.
    """

    entries: Mapping[tuple[str, str], tuple[str, ...]]

    def of(self, section: str, name: str = "") -> tuple[str, ...]:
        """Who said so; empty when nobody did."""
        return self.entries.get((section, name), ())

    def to_json(self) -> Json:
        """Short enough to be kept beside the config: every MachineConfig is named once."""
        sources = list(dict.fromkeys(name for found in self.entries.values() for name in found))
        at = {name: index for index, name in enumerate(sources)}
        sections: dict[str, dict[str, list[int]]] = {}
        for (section, name), found in self.entries.items():
            sections.setdefault(section, {})[name] = [at[source] for source in found]
        return {"sources": sources, "entries": sections}

    @classmethod
    def from_json(cls, document: object) -> "Provenance":
        """What `to_json` wrote; raises `ConfigError`."""
        fields = Fields.of(document, "")
        sources = fields.texts("sources")
        entries: dict[tuple[str, str], tuple[str, ...]] = {}
        sections = fields.nested("entries")
        for section in sections.values:
            names = sections.nested(section)
            for name in names.values:
                indexes = names.list_of(name)
                known = [at for at in indexes if isinstance(at, int) and 0 <= at < len(sources)]
                if len(known) != len(indexes):
                    raise names.refuse(name, "indexes of sources")
                entries[section, name] = tuple(sources[at] for at in known)
        return cls(entries)


def named(config: Json) -> Iterator[tuple[str, str]]:
    """Section and name of every entry that an Ignition config has."""
    fields = Fields.of(config, "")
    for section, (parent, key) in _NAMED.items():
        for entry in fields.nested(parent).objects(section):
            name = entry.text(key)
            yield section, name
            for dropin in entry.objects("dropins"):
                yield "dropins", f"{name}/{dropin.text('name')}"
    for name in ("shouldExist", "shouldNotExist"):
        for argument in fields.nested("kernelArguments").texts(name):
            yield f"kernelArguments.{name}", argument
