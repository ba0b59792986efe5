"""Generate the MachineConfigs of all pools from the objects that describe them.

Pure: the controller ``generate`` and the commands that read files share `generate_configs`. Names,
suffixes, owners and contents are those of the Machine Config Operator (MCO).
"""

import base64
import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from treenail import __version__, label_selector
from treenail.api import annotations as key
from treenail.api import decode, kinds, machineconfigpool, object_meta
from treenail.api.machineconfig import MachineConfig
from treenail.config import merge, node_paths
from treenail.config.generated import container_runtime, kubelet, policies, registries, sources
from treenail.errors import ConfigError

POOL_KINDS = {"KubeletConfig": "kubelet", "ContainerRuntimeConfig": "containerruntime"}
"""Kinds that select pools, and the end of the names of their MachineConfigs."""
POLICY_KINDS = (policies.CLUSTER_KIND, policies.NAMESPACE_KIND)
_GENERATOR_KINDS = (*POOL_KINDS, "Image", machineconfigpool.KIND)
_SELECTOR = "machineConfigPoolSelector"
_MASTER_LABEL = "node-role.kubernetes.io/master"
_MAX_SUFFIX, _MAX_TITLES, _MAX_SHOWN = 9, 500, 5
_MORE = "..."
# Older versions of the MCO had the UID of the pool in place of "generated".
_NAME = re.compile(
    r"99-.+-(?:generated|[0-9a-f][0-9a-f-]*)-(?:kubelet|containerruntime|registries).*"
)
_SUFFIX_TITLE = f"the annotation {key.CONFIG_NAME_SUFFIX}"

_Pool = machineconfigpool.MachineConfigPool


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated MachineConfigs by name, and one result for each object."""

    configs: dict[str, MachineConfig] = field(default_factory=dict)
    results: dict[tuple[str, str, str], sources.ObjectResult] = field(default_factory=dict)
    obsolete: list[str] = field(default_factory=list)
    """Present MachineConfigs that were generated and that no object requires."""


def generate_configs(
    objects: sources.Sources,
    pools: Iterable[_Pool],
    configs: Iterable[MachineConfig],
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
    incomplete: Collection[str] = tuple(kinds.GENERATOR_KINDS),
) -> Generation:
    """Return the MachineConfigs that the objects require; ``configs`` are all of the cluster.

    An object with a problem changes nothing: its present generated config, if ``configs`` has
    one, is in the result unchanged. The cluster may have objects of the ``incomplete`` kinds that
    ``objects`` lacks, as files do: what such objects generated stays too.
    """
    generator = _Generator(objects, pools, configs, facts, frozenset(incomplete))
    for kind in POOL_KINDS:
        generator.generate_pool_kind(kind)
    generator.generate_registries()
    generator.find_obsolete()
    return generator.generation


def find_generator(config: MachineConfig) -> str:
    """Return the kind that a generated MachineConfig comes from; empty for any other config.

    It is Image for mirror sets and policies too, and the pool for a rendered config.
    """
    titles = _list_titles(config)
    origins = [owner.kind for owner in config.metadata.owner_references] + _list_kinds(titles)
    known = (kind for kind in origins if kind in _GENERATOR_KINDS)
    return next(known, "Image" if titles else "")


def find_unobserved(
    pool: _Pool, objects: Iterable[sources.SourceObject], *, is_generating: bool
) -> sources.SourceObject | None:
    """Return an object of the pool whose last change no controller has observed yet.

    An object without status counts only if a controller is sure to come (``is_generating``).
    """
    for source in objects:
        observed = source.status.get("observedGeneration")
        is_behind = observed != source.metadata.generation and (is_generating or observed)
        if is_behind and not source.metadata.is_deleting and _selects(source, pool):
            return source
    return None


class _Generator:
    def __init__(
        self,
        objects: sources.Sources,
        pools: Iterable[_Pool],
        configs: Iterable[MachineConfig],
        facts: sources.ClusterFacts,
        incomplete: frozenset[str],
    ) -> None:
        self.facts, self.incomplete = facts, incomplete
        self.pools = sorted(pools, key=lambda pool: pool.name)
        self.present = {config.name: config for config in configs}
        self.base = [config for config in self.present.values() if not find_generator(config)]
        self.objects = sorted(
            objects.values(), key=lambda source: (source.metadata.created, source.key)
        )
        # An object that is being deleted generates nothing, and no other one gets its suffix.
        self.suffixes = {
            source.key: source.metadata.annotations.get(key.CONFIG_NAME_SUFFIX)
            for source in self.objects
        }
        live = [source for source in self.objects if not source.metadata.is_deleting]
        results = {source.key: sources.ObjectResult(source) for source in live}
        self.generation = Generation(results=results)
        self.registry_files: dict[object, tuple[sources.GeneratedFile, ...]] = {}

    def generate_pool_kind(self, kind: str) -> None:
        """Generate from the objects of a kind that selects pools."""
        for result in [*self.generation.results.values()]:
            source = result.source
            if source.kind != kind:
                continue
            try:
                configs = self._build_pool_configs(source)
            except ConfigError as error:
                result.problems.append(error)
                name, present = source.metadata.name, self.present.values()
                configs = [config for config in present if _get_owner(config, kind) == name]
            result.config_names.extend(sorted(config.name for config in configs))
            self.generation.configs.update((config.name, config) for config in configs)
            self.generation.results[source.key] = replace(result, suffix=self.suffixes[source.key])
        for pool in self.pools:
            self._warn_of_replaced_fields(pool, kind)

    def generate_registries(self) -> None:
        """Generate from the mirror sets, the image config and the policies of the cluster."""
        results = self.generation.results.values()
        used = [result for result in results if result.source.kind not in POOL_KINDS]
        for result in used:
            others = [other.source for other in used if other is not result]
            try:
                if result.source.kind in POLICY_KINDS:
                    policies.check_policy(result.source, others, self.facts)
                    partial = policies.list_partial_problems(result.source, others)
                    result.warnings.extend(map(str, partial))
                else:
                    registries.check_registries(result.source, others, self.facts)
            except ConfigError as error:
                result.problems.append(error)
        good = [result for result in used if not result.problems]
        bad = [_format_title(result.source) for result in used if result.problems]
        built_in = [
            pool for pool in self.pools if pool.metadata.labels.get(key.BUILT_IN_POOL) == ""
        ]
        for pool in (built_in or self.pools) if used else ():
            name = _format_name(pool, "registries")
            present = self.present.get(name)
            try:
                config = self._build_registries(pool, name, [each.source for each in good], bad)
            except ConfigError as error:
                config = present if present and _get_owner(present, "Image") else None
                for result in good:
                    result.problems.append(error)
            if config is not None:
                self.generation.configs[name] = config
                for result in good:
                    result.config_names.append(name)

    def find_obsolete(self) -> None:
        """Find what no object requires, unless its sources may be unknown."""
        for name, config in self.present.items():
            kind, titles = find_generator(config), _list_titles(config)
            if kind in ("", machineconfigpool.KIND) or name in self.generation.configs:
                continue
            owner = self.generation.results.get((kind, "", _get_owner(config, kind) or ""))
            if owner is not None and not titles and "-generated-" in name:
                # The MCO does not delete it. A takeover must not change a node.
                owner.warnings.append(
                    f"MachineConfig {name} stays, although the object does not select its pool; to "
                    f"remove it: kubectl delete machineconfig {name}"
                )
            elif self.incomplete.isdisjoint([kind, *_list_kinds(titles)]) and _NAME.fullmatch(name):
                # A copy that a user made under another name is the user's.
                self.generation.obsolete.append(name)

    def _build_pool_configs(self, source: sources.SourceObject) -> list[MachineConfig]:
        selector = _read_selector(source)
        pools = [pool for pool in self.pools if selector.matches(pool.metadata.labels)]
        if not pools:
            known = ", ".join(pool.name for pool in self.pools[:_MAX_SHOWN]) or "no pools"
            raise ConfigError(
                f"spec.{_SELECTOR}: expected the labels of a MachineConfigPool, found "
                f"{selector.query:.200}, which selects none of {known}",
                remedy="set the labels on a pool, or correct the selector",
            )
        if source.kind == "KubeletConfig":
            is_control_plane = any(map(_is_control_plane, pools))
            kubelet.check_kubelet_config(source, is_control_plane=is_control_plane)
        else:
            container_runtime.check_runtime_config(source)
        suffix = self.suffixes[source.key]
        if suffix is None:
            suffix = self.suffixes[source.key] = self._choose_suffix(source, pools)
        built = []
        for pool in pools:
            name = _format_name(pool, POOL_KINDS[source.kind], suffix)
            self._check_writable(name, pool, source.kind, source.metadata.name)
            base = self._select_base(pool)
            if source.kind == "KubeletConfig":
                text = _find_kubelet_text(pool, base)
                files = kubelet.generate_kubelet_files(source, text, self.facts)
            else:
                files = container_runtime.generate_runtime_files(source, sources.BaseFiles(base))
            built.append(self._build_config(name, pool, files, source, [source]))
        return built

    def _build_registries(
        self, pool: _Pool, name: str, used: list[sources.SourceObject], bad: list[str]
    ) -> MachineConfig | None:
        self._check_writable(name, pool, "Image", "cluster")
        # What a source in effect says stays until all of them are readable. Without titles the MCO
        # generated the config, from all objects.
        present = self.present.get(name)
        titles = _list_titles(present) if present else []
        known = {*map(_format_title, used), *bad}
        has_all = present is not None and (not titles or _MORE in titles)
        waits = [title for title in bad if has_all or title in titles]
        waits += [
            title
            for title in titles
            if title not in known and {*_list_kinds([title])} & self.incomplete
        ]
        if waits:
            raise ConfigError(
                f"MachineConfig {name} stays as it is: it was generated also from "
                + ", ".join(waits[:_MAX_SHOWN]),
                remedy="correct or delete these objects; with files, add them",
            )
        if not used:
            return None
        files = self._generate_registry_files(used, sources.BaseFiles(self._select_base(pool)))
        image = next((source for source in used if source.kind == "Image"), None)
        return self._build_config(name, pool, files, image, used)

    def _generate_registry_files(
        self, used: list[sources.SourceObject], base: sources.BaseFiles
    ) -> tuple[sources.GeneratedFile, ...]:
        text = base.find_text(node_paths.REGISTRIES_CONF) or ""
        # Most pools have the same base.
        inputs = text, base.find_text(policies.POLICY_PATH)
        if inputs not in self.registry_files:
            written = registries.generate_registry_files(used, base, self.facts)
            listed = registries.list_registries(used, text, self.facts)
            signed = policies.generate_policy_files(used, base, self.facts, listed)
            # The MCO writes the drop-in with search registries last.
            first = tuple(file for file in written if file.path == node_paths.REGISTRIES_CONF)
            rest = (file for file in written if file not in first)
            self.registry_files[inputs] = (*first, *signed, *rest)
        return self.registry_files[inputs]

    def _choose_suffix(self, source: sources.SourceObject, pools: Iterable[_Pool]) -> str:
        """Choose the suffix of an object without annotation.

        It keeps the name that it has. A new object gets the next number, unless it is the only
        one of its pools; the MCO gives the first of several new ones a number too.
        """
        number = 0
        for pool in pools:
            begin = _format_name(pool, POOL_KINDS[source.kind])
            for name, config in self.present.items():
                is_own = _get_owner(config, source.kind) == source.metadata.name
                if is_own and (name == begin or name.startswith(f"{begin}-")):
                    return name.removeprefix(begin).removeprefix("-")
            rivals = [
                self.suffixes[other.key] or ""
                for other in self.objects
                if other.kind == source.kind and other is not source and _selects(other, pool)
            ]
            if rivals:
                numbers = (int(text[:5]) for text in rivals if text.isdecimal())
                number = max(number, max(numbers, default=0) + 1)
        if number > _MAX_SUFFIX:
            raise ConfigError(
                f"expected a number up to {_MAX_SUFFIX} for another object of kind {source.kind} "
                f"for a pool, found {number - 1} in use; a number below it is not used again",
                remedy="write all fields of the pool in one object, and delete the others",
            )
        return str(number or "")

    def _check_writable(self, name: str, pool: _Pool, kind: str, owner: str) -> None:
        """Raise for a config that belongs to another object, or that its pool does not select."""
        present, selector = self.present.get(name), pool.machine_config_selector
        found = _get_owner(present, kind) if present else owner
        is_foreign = found != owner and (kind, "", found) in self.generation.results
        if not object_meta.is_object_name(name):
            problem = f"expected a name of at most 253 characters a-z, 0-9, -, found {name:.300}"
            remedy = f"shorten the name of the pool, or remove {_SUFFIX_TITLE}"
        elif selector is None or not selector.matches({merge.ROLE: pool.name}):
            problem = f"expected MachineConfigPool {pool.name} to select its label, found another"
            remedy = f"add {pool.name} to the values of {merge.ROLE} in machineConfigSelector"
        elif found is None:
            problem = f"expected {kind} {owner} as its owner, found no {kind}"
            remedy = "delete the MachineConfig, or create it again with another name"
        elif is_foreign or name in self.generation.configs:
            problem = f"expected one {kind} with this suffix for the pool, found another one"
            remedy = f"remove {_SUFFIX_TITLE} from {kind} {owner}"
        else:
            return
        raise ConfigError(f"cannot generate MachineConfig {name:.300}: {problem}", remedy=remedy)

    def _warn_of_replaced_fields(self, pool: _Pool, kind: str) -> None:
        """Name the fields without effect: of several objects for a pool the last name wins."""
        named = {
            _format_name(pool, POOL_KINDS[kind], result.suffix or ""): result
            for result in self.generation.results.values()
            if result.source.kind == kind and not result.problems
        }
        names = sorted(name for name, result in named.items() if name in result.config_names)
        for name, later in itertools.combinations(names, 2):
            other = named[later].source
            if fields := _list_replaced_fields(named[name].source.spec, other.spec):
                named[name].warnings.append(
                    f"{', '.join(fields)}: no effect in MachineConfig {name}, because "
                    f"{other.title} writes the file in {later}; write all fields of a pool in one "
                    "object"
                )

    def _select_base(self, pool: _Pool) -> list[MachineConfig]:
        return [config for config in self.base if pool.selects(config.metadata.labels)]

    def _build_config(
        self,
        name: str,
        pool: _Pool,
        files: Iterable[sources.GeneratedFile],
        owner: sources.SourceObject | None,
        objects: Iterable[sources.SourceObject],
    ) -> MachineConfig:
        titles = sorted(map(_format_title, objects))
        if len(titles) > _MAX_TITLES:
            titles[_MAX_TITLES:] = [_MORE]
        annotations = {merge.GENERATED_BY: f"treenail-{__version__}"}
        present = self.present.get(name, MachineConfig(object_meta.ObjectMeta(name=name)))
        ignition = build_ignition(files)
        if present.config == ignition:
            # The MCO need not write its own version again after a handback.
            annotations |= present.metadata.annotations
        annotations[key.GENERATED_FROM] = ",".join(titles)
        metadata = replace(
            present.metadata,
            labels={**present.metadata.labels, merge.ROLE: pool.name},
            annotations=annotations,
            owner_references=_build_owners(owner),
        )
        return replace(present, metadata=metadata, config=ignition)


def _list_replaced_fields(earlier: decode.Json, later: decode.Json) -> list[str]:
    own, others = map(_list_fields, (earlier, later))
    # A KubeletConfig writes the whole kubelet.conf; other files are of one field each.
    fields = [
        f"spec.{name}"
        for name, value in own.items()
        if (name in others or name.startswith("kubeletConfig.")) and others.get(name) != value
    ]
    more = [f"{len(fields) - _MAX_SHOWN} more"] if len(fields) > _MAX_SHOWN else []
    return fields[:_MAX_SHOWN] + more


def _list_fields(spec: decode.Json) -> decode.Json:
    """Return the fields that a node gets, by their names below ``spec``."""
    fields: decode.Json = {}
    for name, value in spec.items():
        if isinstance(value, dict) and name in ("kubeletConfig", "containerRuntimeConfig"):
            fields.update((f"{name}.{inner}", setting) for inner, setting in value.items())
        elif name != _SELECTOR:
            fields[name] = value
    return fields


def _read_selector(source: sources.SourceObject) -> label_selector.LabelSelector:
    document = source.spec.get(_SELECTOR) or {}
    selector = label_selector.LabelSelector.from_json(document, f"spec.{_SELECTOR}")
    if selector.is_empty:
        raise ConfigError(
            f"spec.{_SELECTOR}: expected at least one label, found none, which selects no pool",
            remedy="select a pool, for example with matchLabels: "
            "{pools.operator.machineconfiguration.openshift.io/worker: ''}",
        )
    return selector


def _selects(source: sources.SourceObject, pool: _Pool) -> bool:
    try:
        return _read_selector(source).matches(pool.metadata.labels)
    except ConfigError:
        return False


def _is_control_plane(pool: _Pool) -> bool:
    requirements = pool.node_selector.requirements if pool.node_selector else ()
    return pool.name in machineconfigpool.CONTROL_PLANE_POOLS or any(
        requirement.key == _MASTER_LABEL and requirement.operator in ("Exists", "In")
        for requirement in requirements
    )


def _find_kubelet_text(pool: _Pool, base: list[MachineConfig]) -> str | None:
    # The MCO adds feature gates and the Node config to its template; these two have the result.
    for name in (f"98-{pool.name}-generated-kubelet", f"97-{pool.name}-generated-kubelet"):
        first = sources.BaseFiles(config for config in base if config.name == name)
        if (text := first.find_text(kubelet.KUBELET_CONF)) is not None:
            return text
    return sources.BaseFiles(base).find_text(kubelet.KUBELET_CONF)


def _format_name(pool: _Pool, end: str, suffix: str = "") -> str:
    return f"99-{pool.name}-generated-{end}" + (f"-{suffix}" if suffix else "")


def _format_title(source: sources.SourceObject) -> str:
    return "/".join(filter(None, source.key))


def _list_titles(config: MachineConfig) -> list[str]:
    return [*filter(None, config.metadata.annotations.get(key.GENERATED_FROM, "").split(","))]


def _list_kinds(titles: Iterable[str]) -> list[str]:
    return [title.partition("/")[0] for title in titles]


def _get_owner(config: MachineConfig, kind: str) -> str | None:
    """Return the name of the object that owns a generated config; None for another kind."""
    if find_generator(config) != kind:
        return None
    if kind == "Image":
        return "cluster"
    owners = [owner.name for owner in config.metadata.owner_references if owner.kind == kind]
    return [*owners, *(title.partition("/")[2] for title in _list_titles(config))][0]


def _build_owners(
    source: sources.SourceObject | None,
) -> tuple[object_meta.OwnerReference, ...]:
    if source is None or not source.metadata.uid:
        return ()  # An object from a file has no UID, and an owner reference needs one.
    version, metadata = kinds.GENERATOR_KINDS[source.kind], source.metadata
    reference = object_meta.OwnerReference(version, source.kind, metadata.name, metadata.uid)
    is_controller = True if source.kind in POOL_KINDS else None
    return (replace(reference, controller=is_controller, block_owner_deletion=is_controller),)


def build_ignition(files: Iterable[sources.GeneratedFile]) -> decode.Json:
    """Return the Ignition config that writes the files."""
    begin = "data:text/plain;charset=utf-8;base64,"
    entries = [
        {
            "path": file.path,
            "overwrite": True,
            "mode": file.mode,
            "contents": {
                "compression": "",
                "source": begin + base64.b64encode(file.contents.encode()).decode(),
            },
        }
        for file in files
    ]
    ignition: decode.Json = {"ignition": {"version": "3.5.0"}}
    return ignition | ({"storage": {"files": entries}} if entries else {})
