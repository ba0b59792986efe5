"""Many MachineConfigs made into one, as the Machine Config Operator does it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treenail.api import ignition
from treenail.api.decode import Fields, Json
from treenail.api.ignition_model import VERSION
from treenail.api.machineconfig import DEFAULT_KERNEL, MachineConfig
from treenail.config.ignition_merge import Merging
from treenail.config.provenance import Provenance, named
from treenail.errors import ConfigError

ROLE = "machineconfiguration.openshift.io/role"
GENERATED_BY = "machineconfiguration.openshift.io/generated-by-controller-version"
WORKER = "worker"

_Told = dict[tuple[str, str], list[str]]


@dataclass(frozen=True, slots=True)
class BaseImages:
    """What nodes run when no MachineConfig names another image."""

    os: str = ""
    extensions: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """A rendered config before it has a name."""

    spec: Json = field(repr=False)
    """A MachineConfigSpec, with every field of it."""
    sources: tuple[str, ...]
    """The MachineConfigs, in the order of merging."""
    provenance: Provenance = field(repr=False)
    overrides_os_image: bool


def merge(configs: Iterable[MachineConfig], base: BaseImages) -> Merged:
    """The configs merged, in whatever order they come.

    Those of role worker go first, then all others, both by name, so that a custom pool's always
    win. Raises `ConfigError` that names the MachineConfig.
    """
    ordered = in_order(configs)
    told: _Told = {}
    merged = _ignition(ordered, told)
    for config in ordered:
        for entry in _own(config):
            told.setdefault(entry, []).append(config.name)
    kernel = _last(
        (each.kernel_type for each in ordered if each.kernel_type != DEFAULT_KERNEL),
        DEFAULT_KERNEL,
    )
    _refuse_kernel_devel(kernel, told)
    # What the controllers generate names the image of the release, which is the base already.
    people = [each for each in ordered if not _is_generated(each)]
    os_image = _last((each.os_image_url for each in people), base.os)
    spec: Json = {
        "osImageURL": os_image,
        "baseOSExtensionsContainerImage": _last(
            (each.extensions_image for each in people), base.extensions
        ),
        "config": merged,
        "kernelArguments": [word for each in ordered for word in each.kernel_arguments],
        "kernelType": kernel,
        "extensions": [name for each in ordered for name in each.extensions],
        "fips": any(each.fips for each in ordered),
    }
    return Merged(
        spec=spec,
        sources=tuple(each.name for each in ordered),
        provenance=Provenance({entry: tuple(names) for entry, names in told.items()}),
        overrides_os_image=os_image != base.os,
    )


def in_order(configs: Iterable[MachineConfig]) -> tuple[MachineConfig, ...]:
    """The order in which MachineConfigs are merged; names sort by their bytes."""
    return tuple(
        sorted(
            configs,
            key=lambda each: (each.metadata.labels.get(ROLE) != WORKER, each.name.encode()),
        )
    )


def _ignition(configs: Sequence[MachineConfig], told: _Told) -> Json:
    merging = Merging()
    merging.add({"ignition": {"version": VERSION}}, "")
    merged = False
    for index, config in enumerate(configs):
        if config.config is None:
            continue
        found = _read(config)
        if index:
            # The reference says "not compressed" aloud in what it merges, so that a plain file
            # replaces a compressed one, and takes it back at the end.
            found = _each_file(found, _spoken)
            merged = True
        merging.add(found, f"MachineConfig {config.name}: spec.config")
        for entry in named(found):
            told.setdefault(entry, []).append(config.name)
    found = merging.to_json()
    for entry in told.keys() - set(named(found)):
        del told[entry]
    # Ignition keeps a file that is there, MachineConfigs never did.
    found = _each_file(found, lambda file: {"overwrite": True, **file})
    return _each_file(found, _silent) if merged else found


def _read(config: MachineConfig) -> Json:
    try:
        return ignition.read(config.config).to_json()
    except ConfigError as error:
        raise ConfigError(f"MachineConfig {config.name}: {error}", remedy=error.remedy) from error


def _each_file(config: Json, change: Callable[[Json], Json]) -> Json:
    storage = Fields.of(config, "").nested("storage")
    files = [change(file.values) for file in storage.objects("files")]
    return {**config, "storage": {**storage.values, "files": files}} if files else config


def _spoken(file: Json) -> Json:
    contents = Fields(file, "").nested("contents").values
    return {**file, "contents": {"compression": "", **contents}}


def _silent(file: Json) -> Json:
    contents = Fields(file, "").nested("contents")
    left = contents.values if contents.text("compression") else contents.others("compression")
    others = {name: value for name, value in file.items() if name != "contents"}
    return {**others, "contents": left} if left else others


def _own(config: MachineConfig) -> Iterator[tuple[str, str]]:
    """What the config says beside its Ignition config, as entries of the provenance."""
    for argument in config.kernel_arguments:
        yield "kernelArguments", argument
    for extension in config.extensions:
        yield "extensions", extension
    if config.kernel_type not in ("", DEFAULT_KERNEL):
        yield "kernelType", ""
    if config.fips:
        yield "fips", ""
    if not _is_generated(config):
        if config.os_image_url:
            yield "osImageURL", ""
        if config.extensions_image:
            yield "baseOSExtensionsContainerImage", ""


def _is_generated(config: MachineConfig) -> bool:
    return bool(config.metadata.annotations.get(GENERATED_BY))


def _last(names: Iterable[str], default: str) -> str:
    found = [name for name in names if name]
    return found[-1] if found else default


def _refuse_kernel_devel(kernel: str, told: _Told) -> None:
    wants = told.get(("extensions", "kernel-devel"))
    if wants and kernel != DEFAULT_KERNEL:
        raise ConfigError(
            f"MachineConfig {wants[-1]}: the extension kernel-devel needs the default kernel, but "
            f"MachineConfig {told['kernelType', ''][-1]} asks for {kernel}",
            remedy="take one of the two out of the pool",
        )
