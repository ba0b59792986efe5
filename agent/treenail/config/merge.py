"""Merge of MachineConfigs into a rendered one, by the rules of the Machine Config Operator.

Their Ignition configs are merged by Ignition's rules. A field of a later config overrides the
earlier one, a missing field leaves it unchanged. List entries with the same key are merged in place
of the earlier one, new ones follow at the end. Some lists share their keys, so that a link replaces
the file at its path. Some only grow.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treenail import errors
from treenail.api import decode, machineconfig
from treenail.api.ignition import model, parser, schema
from treenail.config.provenance import Provenance, list_named_entries

ROLE = "machineconfiguration.openshift.io/role"
GENERATED_BY = "machineconfiguration.openshift.io/generated-by-controller-version"
WORKER = "worker"

_SourceNames = dict[tuple[str, str], list[str]]


@dataclass(frozen=True, slots=True)
class DefaultImages:
    """Images that nodes run when no MachineConfig names another one."""

    os: str = ""
    extensions: str = ""


@dataclass(frozen=True, slots=True)
class MergedConfig:
    """Rendered config without a name."""

    spec: decode.Json = field(repr=False)
    """MachineConfigSpec with all its fields."""
    sources: tuple[str, ...]
    """Names of the MachineConfigs, in the order of merging."""
    provenance: Provenance = field(repr=False)
    has_os_image_override: bool


def read_ignition(config: machineconfig.MachineConfig) -> decode.Json | None:
    """Return the Ignition config in version 3.5; raise `ConfigError` with the MachineConfig."""
    if config.config is None:
        return None
    try:
        return parser.parse_ignition(config.config).to_json()
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"MachineConfig {config.name}: {error}", remedy=error.remedy
        ) from error


def merge_machine_configs(
    configs: Iterable[machineconfig.MachineConfig],
    base: DefaultImages,
    *,
    read: Callable[[machineconfig.MachineConfig], decode.Json | None] = read_ignition,
) -> MergedConfig:
    """Merge the configs; their order in ``configs`` does not matter.

    Those of role worker come first, then all others, both sorted by name. A custom pool's config
    therefore overrides them. ``read`` may know their Ignition configs from validation; they do not
    change. Raises `ConfigError` with the name of the MachineConfig.
    """
    ordered = sort_configs(configs)
    sources: _SourceNames = {}
    merged = _merge_ignition([(config, read(config)) for config in ordered], sources)
    for config in ordered:
        for entry in _list_own_entries(config):
            sources.setdefault(entry, []).append(config.name)
    kernel = _find_last(
        (
            config.kernel_type
            for config in ordered
            if config.kernel_type != machineconfig.DEFAULT_KERNEL
        ),
        machineconfig.DEFAULT_KERNEL,
    )
    _reject_kernel_devel(kernel, sources)
    # Generated MachineConfigs name the image of the release, which is the base already.
    by_users = [config for config in ordered if not _is_generated(config)]
    os_image = _find_last((config.os_image_url for config in by_users), base.os)
    spec: decode.Json = {
        "osImageURL": os_image,
        "baseOSExtensionsContainerImage": _find_last(
            (config.extensions_image for config in by_users), base.extensions
        ),
        "config": merged,
        "kernelArguments": [word for config in ordered for word in config.kernel_arguments],
        "kernelType": kernel,
        "extensions": [name for config in ordered for name in config.extensions],
        "fips": any(config.fips for config in ordered),
    }
    return MergedConfig(
        spec=spec,
        sources=tuple(config.name for config in ordered),
        provenance=Provenance({entry: tuple(names) for entry, names in sources.items()}),
        has_os_image_override=os_image != base.os,
    )


def sort_configs(
    configs: Iterable[machineconfig.MachineConfig],
) -> tuple[machineconfig.MachineConfig, ...]:
    """Sort MachineConfigs in the order of merging; names sort by their bytes."""
    return tuple(
        sorted(
            configs,
            key=lambda config: (config.metadata.labels.get(ROLE) != WORKER, config.name.encode()),
        )
    )


def _merge_ignition(
    configs: Sequence[tuple[machineconfig.MachineConfig, decode.Json | None]], sources: _SourceNames
) -> decode.Json:
    merging = IgnitionMerger()
    merging.add_config({"ignition": {"version": model.VERSION}}, "")
    merged = False
    for index, (config, own) in enumerate(configs):
        if own is None:
            continue
        document = own
        if index:
            # The Machine Config Operator adds an empty compression before the merge, so that a
            # plain file replaces a compressed one, and removes it after the merge.
            document = _map_files(document, _add_compression)
            merged = True
        merging.add_config(document, f"MachineConfig {config.name}: spec.config")
        for entry in list_named_entries(document):
            sources.setdefault(entry, []).append(config.name)
    document = merging.to_json()
    for entry in sources.keys() - set(list_named_entries(document)):
        del sources[entry]
    # Ignition does not replace an existing file without overwrite, MachineConfigs always did.
    document = _map_files(document, lambda file: {"overwrite": True, **file})
    return _map_files(document, _drop_empty_compression) if merged else document


def _map_files(config: decode.Json, change: Callable[[decode.Json], decode.Json]) -> decode.Json:
    storage = decode.Fields.from_json(config, "").get_object("storage")
    files = [change(file.values) for file in storage.iter_objects("files")]
    return {**config, "storage": {**storage.values, "files": files}} if files else config


def _add_compression(file: decode.Json) -> decode.Json:
    contents = decode.Fields(file, "").get_object("contents").values
    return {**file, "contents": {"compression": "", **contents}}


def _drop_empty_compression(file: decode.Json) -> decode.Json:
    contents = decode.Fields(file, "").get_object("contents")
    left = (
        contents.values
        if contents.get_text("compression")
        else contents.get_other_fields("compression")
    )
    others = {name: value for name, value in file.items() if name != "contents"}
    return {**others, "contents": left} if left else others


def _list_own_entries(config: machineconfig.MachineConfig) -> Iterator[tuple[str, str]]:
    """Yield the provenance entries of a config outside its Ignition config."""
    for argument in config.kernel_arguments:
        yield "kernelArguments", argument
    for extension in config.extensions:
        yield "extensions", extension
    if config.kernel_type not in ("", machineconfig.DEFAULT_KERNEL):
        yield "kernelType", ""
    if config.fips:
        yield "fips", ""
    if not _is_generated(config):
        if config.os_image_url:
            yield "osImageURL", ""
        if config.extensions_image:
            yield "baseOSExtensionsContainerImage", ""


def _is_generated(config: machineconfig.MachineConfig) -> bool:
    return bool(config.metadata.annotations.get(GENERATED_BY))


def _find_last(names: Iterable[str], default: str) -> str:
    present = [name for name in names if name]
    return present[-1] if present else default


def _reject_kernel_devel(kernel: str, sources: _SourceNames) -> None:
    devel_sources = sources.get(("extensions", "kernel-devel"))
    if devel_sources and kernel != machineconfig.DEFAULT_KERNEL:
        raise errors.ConfigError(
            f"MachineConfig {devel_sources[-1]}: the extension kernel-devel needs the default "
            f"kernel, but MachineConfig {sources['kernelType', ''][-1]} sets kernelType {kernel}",
            remedy="remove one of the two from the pool",
        )


class IgnitionMerger:
    """Accumulator of Ignition configs; fields unknown to Ignition 3.5 are dropped."""

    __slots__ = ("_tree",)

    def __init__(self) -> None:
        self._tree = _MergedObject(schema.CONFIG)

    def add_config(self, config: decode.Json, place: str) -> None:
        """Merge a config of version 3.5 into the accumulated one.

        Raises `IgnitionError` with the place of a value of the wrong type.
        """
        self._tree.add_fields(decode.Fields(config, place, errors.IgnitionError))

    def to_json(self) -> decode.Json:
        """Return the merged config, without empty objects and lists."""
        return self._tree.to_json()


class _MergedObject:
    """Merged object; its lists are stored by key, in the order of the first occurrence."""

    __slots__ = ("_lists", "_objects", "_plain", "_shape")

    def __init__(self, shape: schema.ObjectShape) -> None:
        self._shape = shape
        self._plain: dict[str, object] = {}
        self._objects: dict[str, _MergedObject] = {}
        self._lists: dict[str, dict[object, _MergedObject | str]] = {}

    def add_fields(self, fields: decode.Fields) -> None:
        values = fields.values
        for name, kind in self._shape.plain.items():
            if name in values and values[name] is not None:
                self._plain[name] = _read_plain(fields, name, kind)
        for name, part in self._shape.nested.items():
            if name not in values or values[name] is None:
                continue
            if isinstance(part, schema.ObjectShape):
                self._objects.setdefault(name, _MergedObject(part)).add_fields(
                    fields.get_object(name)
                )
            else:
                self._merge_list(fields, name, part)

    def to_json(self) -> decode.Json:
        document: decode.Json = {name: "" for name in self._shape.always if name not in self._plain}
        document.update(self._plain)
        for name in self._shape.unless_zero:
            if not document.get(name, True):
                del document[name]
        for name, inner in self._objects.items():
            document[name] = inner.to_json()
        for name, entries in self._lists.items():
            document[name] = [
                entry if isinstance(entry, str) else entry.to_json() for entry in entries.values()
            ]
        return {name: value for name, value in document.items() if value not in ({}, [])}

    def _merge_list(self, fields: decode.Fields, name: str, part: schema.ListShape) -> None:
        own = self._lists.setdefault(name, {})
        family = [self._lists.get(other, {}) for other in part.family if other != name]
        for key, entry in _read_keyed_entries(fields, name, part):
            for others in family:
                others.pop(key, None)
            present = own.get(key)
            if isinstance(entry, str) or part.entry is None:
                own[key] = str(entry)
            elif isinstance(present, _MergedObject) and _is_removal(entry, part.entry):
                del own[key]
            elif isinstance(present, _MergedObject):
                present.add_fields(entry)
            else:
                own[key] = tree = _MergedObject(part.entry)
                tree.add_fields(entry)


def _read_plain(fields: decode.Fields, name: str, kind: type) -> str | int | bool | None:
    if kind is str:
        return fields.get_optional_text(name)
    return fields.get_optional_integer(name) if kind is int else fields.get_optional_bool(name)


def _read_keyed_entries(
    fields: decode.Fields, name: str, part: schema.ListShape
) -> Iterator[tuple[object, decode.Fields | str]]:
    """Yield the entries of a list with their keys; appended entries have unique keys."""
    if part.entry is None:
        for text in fields.get_text_list(name):
            yield (object() if part.is_appended else text), text
        return
    for entry in fields.iter_objects(name):
        yield (object() if part.is_appended else _compute_key(entry, part.key, part.entry)), entry


def _compute_key(entry: decode.Fields, names: Sequence[str], shape: schema.ObjectShape) -> object:
    for name in names:
        if value := _read_plain(entry, name, shape.plain[name]):
            return name, value
    return None


def _is_removal(entry: decode.Fields, shape: schema.ObjectShape) -> bool:
    """Return whether the entry is a header without a value, which removes the earlier one."""
    return shape is schema.HEADER and entry.values.get("value") is None
