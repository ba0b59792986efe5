"""Names the objects and fields behind a change of a generated file. Pure."""

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from treenail.api import annotations as key
from treenail.api import documents, machineconfig
from treenail.config import wanted_state
from treenail.errors import ConfigError
from treenail.update.impact import impact

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class CauseNames:
    """Two rendered configs, and the MachineConfigs that are their sources."""

    configs: Mapping[str, machineconfig.MachineConfig]
    old: machineconfig.MachineConfig | None
    new: machineconfig.MachineConfig | None
    changed: Collection[str]
    """``KIND/NAME`` of the objects that the user changes."""

    def name(self, reason: impact.DisruptionReason) -> impact.DisruptionReason:
        """Replace a generated MachineConfig by the objects it comes from, and their fields."""
        config = self.configs.get(reason.source.removeprefix("MachineConfig "))
        origin = config.metadata.annotations.get(key.GENERATED_FROM) if config else None
        if not origin:
            return reason
        titles = origin.split(",")
        named = [title for title in titles if title in self.changed] or titles
        objects = _join(title.replace("/", " ", 1) for title in named)
        path = reason.subject.removeprefix("file ").rpartition(" ")[0]
        old, new = dict(_read_fields(self.old, path)), dict(_read_fields(self.new, path))
        names = sorted({*old, *new} - {"apiVersion", "kind"})
        fields = _join(name for name in names if old.get(name, "") != new.get(name, ""))
        return replace(reason, source=f"{objects}: {fields}" if fields else objects)


def _read_fields(
    config: machineconfig.MachineConfig | None, path: str
) -> Iterator[tuple[str, object]]:
    try:
        file = wanted_state.read_wanted_state(config).files.get(path) if config else None
        content = file.contents.decode_bytes() if file else b""
        try:
            document = tomllib.loads(content.decode())
        except ValueError:
            document = documents.load_document(content, where=path)
        yield from _list_fields("", document)
    except (ConfigError, RecursionError):
        return  # Neither TOML, YAML nor JSON.


def _list_fields(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield paths and values; registries count by their names, not by their places."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _list_fields(f"{path}.{name}" if path else name, inner)
    elif isinstance(value, list) and all(isinstance(e, dict) and "location" in e for e in value):
        yield from ((entry.get("prefix") or entry["location"], entry) for entry in value)
    else:
        yield path, value


def _join(names: Iterable[str]) -> str:
    listed = [*names]
    more = [f"{len(listed) - _MAX_NAMED} more"] if len(listed) > _MAX_NAMED else []
    return ", ".join([*listed[:_MAX_NAMED], *more])
