"""Manifests of an install directory: its files, and their objects with file and line.

Files are read within limits of size, number and place.
"""

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treenail import memory
from treenail.api import (
    decode,
    documents,
    kinds,
    machineconfig,
    machineconfigpool,
    machineosconfig,
)
from treenail.config import image_mirrors
from treenail.config.generated import sources
from treenail.controllers.handover import image_mode, image_mode_field
from treenail.controllers.pools import os_image, rollout_policy
from treenail.controllers.render import render
from treenail.encoding import yaml11
from treenail.errors import ConfigError
from treenail.installer.directory import install_files
from treenail.installer.directory.problems import (
    InstallDirectoryError,
    InstallProblem,
    find_field_path,
    locate_problems,
    split_location,
)

_SUFFIXES = ("", *documents.SUFFIXES)
"""The pull secret that the Machine Config Operator writes has no suffix."""
FILE_LIMIT = 16 * memory.MIB
"""An API server accepts objects of 3 MiB at most."""
TOTAL_LIMIT = 128 * memory.MIB
_MAX_FILES = 5000


@dataclass(slots=True)
class ManifestFiles:
    """Contents by path below the install directory, and what could not be read."""

    contents: dict[str, bytes] = field(default_factory=dict, repr=False)
    problems: list[InstallProblem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Files of other types, and directories."""


def read_manifest_files(
    directory: install_files.InstallDirectory, *, skipped: frozenset[str] = frozenset()
) -> ManifestFiles:
    """Read the files of ``manifests`` and ``openshift``, without the skipped ones.

    A missing directory has none.

    The installer copies both into one directory, so that no name may be in both.
    """
    files = ManifestFiles()
    root = directory.root.resolve()
    names = {path.rpartition("/")[2]: path for path in skipped}
    total = 0
    for folder in (directory.manifests, directory.openshift):
        for name in _list_names(root, folder, files):
            where = f"{folder.name}/{name}"
            if Path(name).suffix not in _SUFFIXES:
                files.ignored.append(where)
                continue
            if len(names) >= _MAX_FILES or total > TOTAL_LIMIT:
                text = (
                    f"it has more than {_MAX_FILES} manifests or {memory.format_bytes(TOTAL_LIMIT)}"
                )
                problem = InstallProblem(folder.name, text, "remove those that are not needed")
                files.problems.append(problem)
                return files
            if names.get(name, where) != where:
                files.problems.append(
                    InstallProblem(
                        where,
                        f"the file name exists twice, also as {names[name]}; installers copy both "
                        "into one directory, where one would replace the other",
                        "rename one of the two",
                    )
                )
                continue
            names[name] = where
            if where in skipped:
                continue
            content = _read_file(root, folder / name, where, files)
            if content is not None:
                total += len(content)
                files.contents[where] = content
    return files


def _list_names(root: Path, folder: Path, files: ManifestFiles) -> Iterator[str]:
    """Yield the names in a directory in their order, without hidden files and backups."""
    try:
        if not _is_inside(root, folder):
            files.problems.append(_make_link_problem(folder.name))
            return
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except (OSError, ValueError, RuntimeError) as error:
        files.problems.append(_make_read_problem(folder.name, error))
        return
    for name in names:
        if not name.startswith(".") and not name.endswith("~"):
            yield name


def read_manifest(root: Path, where: str) -> bytes | None:
    """Return the content of a file below the directory; None if it cannot be read."""
    try:
        content, _ = install_files.read_regular_file(root / where, FILE_LIMIT)
    except (OSError, ValueError, install_files.NotAFileError):
        return None
    return content


def find_link_problem(root: Path, path: Path, where: str) -> InstallProblem | None:
    """Return why the path is unusable as a link; None for a link that stays in the directory."""
    try:
        if not _is_inside(root.resolve(), path):
            return _make_link_problem(where)
        if path.is_symlink() and not path.exists():
            return InstallProblem(
                where,
                "it is a link to a file that does not exist",
                "correct the link, or remove it",
            )
    except (OSError, ValueError, RuntimeError) as error:
        return _make_read_problem(where, error)
    return None


def _read_file(root: Path, path: Path, where: str, files: ManifestFiles) -> bytes | None:
    try:
        if not _is_inside(root, path):
            files.problems.append(_make_link_problem(where))
            return None
        if path.is_dir():
            files.ignored.append(where)
            return None
        content, size = install_files.read_regular_file(path, FILE_LIMIT)
    except install_files.NotAFileError:
        text = "it is a pipe, a socket or a device"
        files.problems.append(InstallProblem(where, text, f"remove it: rm '{where}'"))
        return None
    except (OSError, ValueError, RuntimeError) as error:
        files.problems.append(_make_read_problem(where, error))
        return None
    if len(content) > FILE_LIMIT:
        files.problems.append(
            InstallProblem(
                where,
                f"it has {memory.format_bytes(size)}, more than the limit of "
                f"{memory.format_bytes(FILE_LIMIT)}",
                "move large files into the image with COPY --from=IMAGE in the Containerfile, or "
                "split the file into one for each object",
            )
        )
        return None
    return content


def _is_inside(root: Path, path: Path) -> bool:
    """Return whether the path without its links is below the install directory."""
    return path.resolve().is_relative_to(root)


def _make_link_problem(where: str) -> InstallProblem:
    return InstallProblem(
        where,
        "it is a link that leads out of the install directory",
        f"copy the file: cp --remove-destination \"$(readlink -f '{where}')\" '{where}'",
    )


def _make_read_problem(where: str, error: Exception) -> InstallProblem:
    cause = error.strerror if isinstance(error, OSError) else "its name cannot be used"
    is_loop = isinstance(error, RuntimeError) or getattr(error, "errno", 0) == errno.ELOOP
    remedy = "remove the link" if is_loop else f"check it: ls -l '{where}'"
    return InstallProblem(where, f"cannot read it: {cause or error}", remedy)


BUILT_IN_POOL = "machineconfiguration.openshift.io/mco-built-in"
"""Label of the pools that the Machine Config Operator brings."""
_API_VERSIONS = {
    **kinds.READ_KINDS,
    "ConfigMap": "v1",
    "Namespace": "v1",
    "Secret": "v1",
}
"""Kinds that the installation uses; others are ignored."""
_MAX_OBJECTS = 20000
_MAX_LIST_DEPTH = 4
MAX_VALUES = 1_000_000
"""Keys and values in YAML of one directory."""


@dataclass(frozen=True, slots=True)
class ManifestObject:
    """One object of a file."""

    kind: str
    namespace: str
    name: str
    file: str
    """Path below the install directory."""
    line: int
    document: decode.Json = field(repr=False)
    path: yaml11.FieldPath = ()
    """Keys and indexes from the top of the document to an item of a list."""

    @property
    def location(self) -> str:
        return f"{self.file}, line {self.line}"

    @property
    def title(self) -> str:
        """Kind and name for messages."""
        return f"{self.kind} {f'{self.namespace}/' if self.namespace else ''}{self.name}"

    def make_problem(self, text: str, remedy: str) -> InstallProblem:
        """Return a problem of this object."""
        path = (*self.path, *find_field_path(text))
        return InstallProblem(self.file, f"{self.title}: {text}", remedy, self.line, path)


@dataclass(slots=True)
class InstallManifests:
    """Objects of the manifests by name; of two pools with one name, the user's."""

    objects: dict[tuple[str, str, str], ManifestObject] = field(default_factory=dict)
    """By kind, namespace and name."""
    pools: dict[str, machineconfigpool.MachineConfigPool] = field(default_factory=dict)
    configs: dict[str, machineconfig.MachineConfig] = field(default_factory=dict)
    controller_configs: dict[str, render.ControllerConfig] = field(default_factory=dict)
    image_configs: dict[str, machineosconfig.MachineOSConfig] = field(default_factory=dict)
    policies: dict[str, rollout_policy.ObservedPolicy] = field(default_factory=dict)
    image_streams: dict[str, os_image.OSImageStream] = field(default_factory=dict)
    source_objects: dict[tuple[str, str, str], sources.SourceObject] = field(default_factory=dict)
    mirror_rules: tuple[image_mirrors.MirrorRule, ...] = ()
    """Mirrors of registries of OpenShift's objects."""
    settings: image_mode.ImageMode | None = None
    """Settings that the stage ``prepare`` wrote; None before it."""
    notes: list[str] = field(default_factory=list)
    """Files and objects that are not read."""

    def find(self, kind: str, name: str, namespace: str = "") -> ManifestObject | None:
        """Return an object; None without it."""
        return self.objects.get((kind, namespace, name))

    def list_kind(self, kind: str) -> list[ManifestObject]:
        """Return the objects of a kind by namespace and name."""
        return [self.objects[key] for key in sorted(self.objects) if key[0] == kind]

    def to_input(self, *, has_locations: bool = True) -> render.InputManifests:
        """Return the objects for `treenail.controllers.render.render.render_pools`, not copied."""
        objects = self.objects if has_locations else {}
        locations = {
            (kind, name): manifest.location for (kind, _, name), manifest in objects.items()
        }
        return render.InputManifests(
            pools=self.pools,
            configs=self.configs,
            controller_configs=self.controller_configs,
            policies=self.policies,
            image_configs=self.image_configs,
            image_streams=self.image_streams,
            source_objects=self.source_objects,
            locations=locations,
            warnings=self.notes,
        )


def read_install_manifests(root: Path) -> InstallManifests:
    """Read the manifests of an install directory; raise `InstallDirectoryError`."""
    manifests, problems = collect_install_manifests(root)
    if problems:
        raise InstallDirectoryError(f"cannot read the manifests of {root}", problems)
    return manifests


def collect_install_manifests(
    root: Path, replaced: Mapping[str, bytes] | None = None, *, value_limit: int = MAX_VALUES
) -> tuple[InstallManifests, list[InstallProblem]]:
    """Read the manifests that can be read, and what is wrong with the others.

    ``replaced`` has contents by path below the directory, in place of those of the files; an empty
    content is a file without objects.
    """
    files = read_manifest_files(
        install_files.InstallDirectory(root), skipped=frozenset(replaced or ())
    )
    files.contents.update(replaced or {})
    reader = _ManifestReader(yaml11.ValueBudget(value_limit), problems=files.problems)
    reader.manifests.notes += (f"{name}: ignored: no manifest" for name in files.ignored)
    for where, content in files.contents.items():
        reader.read_file(where, content)
        if reader.budget.is_exceeded:
            break
    reader.check_pool_owners()
    reader.manifests.to_input().add_generated_configs()
    return reader.manifests, locate_problems(reader.problems, files.contents.get)


@dataclass(slots=True)
class _ManifestReader:
    budget: yaml11.ValueBudget
    manifests: InstallManifests = field(default_factory=InstallManifests)
    problems: list[InstallProblem] = field(default_factory=list)

    def read_file(self, where: str, content: bytes) -> None:
        try:
            located_documents = documents.load_located_documents(
                content, where=where, budget=self.budget
            )
        except ConfigError as error:
            text, line = split_location(str(error), where)
            remedy = error.remedy or "correct the file, or remove it"
            if self.budget.is_exceeded:
                text = f"the manifests have more than {self.budget.limit} keys and values"
                remedy = "remove the manifests that are not needed"
            self.problems.append(InstallProblem(where, text, remedy, line))
            return
        for line, document in located_documents:
            self._read_document(where, line, document, ())

    def check_pool_owners(self) -> None:
        """Find MachineOSConfigs with one pool, or with a name that an API server refuses."""
        owners: dict[str, ManifestObject] = {}
        for manifest in self.manifests.list_kind(machineosconfig.KIND):
            pool = self.manifests.image_configs[manifest.name].pool
            if not pool:
                text = "it has no spec.machineConfigPool.name"
                self.problems.append(manifest.make_problem(text, "add the name of the pool"))
            elif pool in owners:
                text = f"pool {pool} has another MachineOSConfig, {owners[pool].name} in "
                text += owners[pool].location
                self.problems.append(manifest.make_problem(text, "remove one of the two"))
            elif manifest.name != pool:
                text = f"it builds for pool {pool}, and an API server refuses another name"
                self.problems.append(manifest.make_problem(text, f"rename it to {pool}"))
            owners.setdefault(pool, manifest)

    def _read_document(
        self, file: str, line: int, document: decode.Json, path: yaml11.FieldPath
    ) -> None:
        where = f"{file}, line {line}"
        try:
            fields = decode.Fields.from_json(document, where)
            kind, version = fields.get_text("kind"), fields.get_text("apiVersion")
            items = kinds.list_items(fields) if len(path) < 2 * _MAX_LIST_DEPTH else None
            if items is not None:
                for index, item in enumerate(items):
                    self._read_document(file, line, item.values, (*path, "items", index))
                return
            unread = kinds.find_unread_object(kind, version, _API_VERSIONS)
            if unread and unread.is_mistake:
                raise ConfigError(  # noqa: TRY301  reported as every other problem below
                    f"{where}: {unread.text}", remedy=unread.remedy
                )
            if unread:
                self.manifests.notes.append(f"{where}, {kind}: {unread}")
            if version != _API_VERSIONS.get(kind):
                return
            meta = fields.get_object("metadata")
            manifest = ManifestObject(
                kind, meta.get_text("namespace"), meta.get_required_text("name"), file, line,
                document, path,
            )  # fmt: skip
            if self._add_object(manifest):
                self._parse_object(manifest)
        except ConfigError as error:
            text = str(error).removeprefix(where).lstrip(":, ")
            remedy = error.remedy or "correct the object"
            inner = (*path, *find_field_path(text))
            self.problems.append(InstallProblem(file, text, remedy, line, inner))

    def _add_object(self, manifest: ManifestObject) -> bool:
        """Add an object; return False for one that another replaces."""
        key = (manifest.kind, manifest.namespace, manifest.name)
        if len(self.manifests.objects) >= _MAX_OBJECTS:
            raise ConfigError(
                f"the directory has more than {_MAX_OBJECTS} objects",
                remedy="remove those that are not needed",
            )
        first = self.manifests.objects.get(key)
        if first is None:
            self.manifests.objects[key] = manifest
            return True
        if manifest.kind == machineconfigpool.KIND:
            # Installers bring their own copies of built-in pools.
            if _is_built_in(manifest):
                return False
            if _is_built_in(first):
                self.manifests.objects[key] = manifest
                return True
        self.problems.append(
            manifest.make_problem(
                f"it exists twice, first in {first.location}", "remove one of the two"
            )
        )
        return False

    def _parse_object(self, manifest: ManifestObject) -> None:
        """Parse an object of one of the kinds with a model; raise `ConfigError`."""
        manifests, name, document = self.manifests, manifest.name, manifest.document
        try:
            if manifest.kind in kinds.READ_KINDS:
                inputs = manifests.to_input(has_locations=False)
                inputs.add_object(manifest.kind, name, document, manifest.location)
            if manifest.kind in image_mirrors.MIRROR_LISTS:
                manifests.mirror_rules += tuple(
                    image_mirrors.read_mirror_object(document, where=manifest.title)
                )
            elif image_mode_field.is_settings_configmap(document):
                manifests.settings = image_mode_field.read_settings_configmap(
                    document, where=manifest.title
                )
        except ConfigError as error:
            if manifest.kind == machineosconfig.KIND:
                del manifests.objects[manifest.kind, manifest.namespace, name]
            text = str(error).removeprefix(f"{manifest.location}, {manifest.title}: ")
            raise ConfigError(
                f"{manifest.title}: {text.removeprefix(f'{manifest.title}, ')}",
                remedy=error.remedy,
            ) from error


def _is_built_in(manifest: ManifestObject) -> bool:
    meta = decode.Fields.from_json(manifest.document, manifest.title).get_object("metadata")
    return BUILT_IN_POOL in meta.get_object("labels").values


@dataclass(frozen=True, slots=True)
class RenderedPool:
    """A pool of the manifests with its rendered config."""

    pool: machineconfigpool.MachineConfigPool
    """The pool as the render controller leaves it; its status names the rendered config too."""
    document: decode.Json = field(repr=False)
    rendered: render.RenderedConfig


def render_install_pools(manifests: InstallManifests) -> tuple[RenderedPool, ...]:
    """Render all pools by name; raise `ConfigError` with the errors of all pools. Pure."""
    rendered_configs, errors = render.render_pools(manifests.to_input())
    if errors:
        remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
        raise ConfigError("; ".join(map(str, errors)), remedy="; ".join(remedies))
    return tuple(
        _set_rendered(manifests, name, rendered)
        for name, rendered in zip(sorted(manifests.pools), rendered_configs, strict=True)
    )


def _set_rendered(
    manifests: InstallManifests, name: str, rendered: render.RenderedConfig
) -> RenderedPool:
    """Return the pool with the rendered config in spec and status, as the MCO's bootstrap does."""
    manifest = manifests.find(machineconfigpool.KIND, name)
    if manifest is None:
        raise KeyError(name)
    configuration = rendered.to_pool_configuration()
    fields = decode.Fields.from_json(manifest.document, "")
    document = {
        **manifest.document,
        "spec": {**fields.get_object("spec").values, "configuration": configuration},
        "status": {**fields.get_object("status").values, "configuration": configuration},
    }
    return RenderedPool(machineconfigpool.MachineConfigPool.from_json(document), document, rendered)
