"""The stage ``prepare`` of an installation, on the user's machine.

It changes nothing before all checks pass. Then it writes one file with all manifests, and removes
the field from the install configuration. A kill between the two leaves the field, so that the next
run does the same again.

A problem of an object that the stage would write is reported at the place of the user's input: the
file with these objects does not exist yet.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from treenail import errors
from treenail.api import annotations as key
from treenail.api import (
    component_names,
    decode,
    documents,
    machineconfigpool,
    machineosconfig,
)
from treenail.config.pullsecret import PullSecret
from treenail.controllers.handover import image_mode, image_mode_field
from treenail.encoding import yaml11
from treenail.image import containerfile
from treenail.installer.directory import (
    install_config,
    install_files,
    install_manifests,
    install_state,
    manifest_checks,
    online_checks,
    prepared_logins,
    prepared_manifests,
)
from treenail.installer.directory.problems import (
    InstallDirectoryError,
    InstallProblem,
    locate_problems,
    split_location,
)

_ACTION = "read the install directory"


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Options of the command."""

    pull_secret: Path | None = None
    """Logins of registries of base images; None for those of the install configuration."""
    push_secret: Path | None = None
    """Logins of registries of built images; None for the same logins."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Architecture of machines by pool; overrides the install configuration."""


@dataclass(slots=True)
class _Preparation:
    """Findings and decisions for one directory."""

    problems: list[InstallProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    content: bytes | None = None
    """New content of the file with manifests; empty to remove it, None to keep it."""
    previous: bytes | None = None
    """Its present content; None without the file."""


@dataclass(frozen=True, slots=True)
class CheckedDirectory:
    """An install directory as the stage leaves it; nothing is written yet."""

    root: Path
    config: install_config.InstallConfig | None
    manifests: install_manifests.InstallManifests
    architectures: Mapping[str, str]
    problems: tuple[InstallProblem, ...]
    notes: tuple[str, ...]
    generated: bytes | None
    """New content of the file with manifests; empty to remove it, None to keep it."""
    new_config: bytes
    """New content of the install configuration; empty to keep it."""
    is_prepared: bool = True
    """True when the directory has these contents already."""


def prepare_directory(
    root: Path,
    options: PrepareOptions,
    files: install_files.InstallFiles,
    online: online_checks.OnlineChecks | None = None,
) -> list[str]:
    """Check and complete an install directory; return lines for the user.

    ``online`` asks registries; None leaves these checks out. Raises `InstallDirectoryError` with
    all problems, `UsageError` without anything to prepare, `HostError` while another process
    prepares the directory, and `FileError`.
    """
    install_files.require_directory(root, _ACTION)
    with install_state.hold_prepare_lock(root):
        return _write_prepared(root, check_directory(root, options, online), files)


def _write_prepared(
    root: Path, checked: CheckedDirectory, files: install_files.InstallFiles
) -> list[str]:
    if checked.problems:
        raise InstallDirectoryError(f"cannot prepare {root}", checked.problems)
    config, path = (
        checked.config,
        install_files.InstallDirectory(root).manifests / prepared_manifests.FILE_NAME,
    )
    edited = drop_prebuilt_tags(root, checked.manifests)
    lines = [*checked.notes]
    if checked.generated and _write_file(files, path, checked.generated, 0o600, root.stat()):
        lines.append(f"wrote {prepared_manifests.GENERATED_FILE}")
    if checked.generated == b"" and files.remove(path):
        lines.append(f"removed {prepared_manifests.GENERATED_FILE}")
    for name, content in edited.items():
        status = _read_status(root / name)
        _write_file(files, root / name, content, status.st_mode & 0o777, status)
        lines.append(f"removed the tag beside the digest of the pre-built image in {name}")
    if config and checked.new_config:
        status = _read_status(root / config.name)
        _write_file(files, root / config.name, checked.new_config, status.st_mode & 0o777, status)
        lines.append(f"removed the field {image_mode_field.FIELD} from {config.name}")
    return [*lines, _describe_result(root, checked.manifests, config)]


def check_directory(
    root: Path, options: PrepareOptions, online: online_checks.OnlineChecks | None = None
) -> CheckedDirectory:
    """Check an install directory; raise `UsageError`, `ConfigError` and `FileError`.

    Its manifests are those that `prepare_directory` would leave.
    """
    config = read_install_config(root)
    state = _Preparation(problems=[*(config.problems if config else ())])
    manifests = _prepare_manifests(root, options, config, state)
    state.notes += manifests.notes
    architectures = {**(config.architectures if config else {}), **options.architectures}
    state.problems += manifest_checks.find_manifest_problems(
        manifests,
        architectures,
        # Another installer adds MachineConfigs and the base image later.
        is_complete=config is not None and config.is_own and not state.problems,
    )
    new_config = b""
    if config and config.mode.settings and not config.is_own:
        new_config = _remove_field(config, state)
    if online is not None and not state.problems:
        problems, notes = online.find_problems(manifests, architectures)
        state.problems += problems
        state.notes += notes
    return CheckedDirectory(
        root,
        config,
        manifests,
        architectures,
        tuple(_locate_problems(root, config, manifests, state)),
        tuple(state.notes),
        state.content,
        new_config,
        is_prepared=not new_config and state.content in (None, state.previous or b""),
    )


def read_install_config(root: Path) -> install_config.InstallConfig | None:
    """Read the install configuration; None without one. Raises `ConfigError` and `FileError`."""
    install_files.require_directory(root, _ACTION)
    configs = []
    for name in (install_files.INSTALL_CONFIG, install_files.OWN_INSTALL_CONFIG):
        content = _read_config_file(root, name)
        if content is None:
            continue
        try:
            configs.append(install_config.parse_install_config(content, name))
        except errors.ConfigError as error:
            text, line = split_location(str(error), name)
            problem = InstallProblem(name, text, error.remedy or "correct the file", line)
            raise InstallDirectoryError(f"cannot read {root}", [problem]) from error
    with_field = [config for config in configs if config.mode.settings is not None]
    if len(with_field) > 1:
        raise errors.UsageError(
            f"cannot prepare {root}: {install_files.INSTALL_CONFIG} and "
            f"{install_files.OWN_INSTALL_CONFIG} both have the field {image_mode_field.FIELD}",
            remedy="remove one of the two fields",
        )
    return next(iter([*with_field, *configs]), None)


def _read_config_file(root: Path, name: str) -> bytes | None:
    """Read an install configuration; None without one. A link must not lead out: it is edited."""
    path = root / name
    problem = install_manifests.find_link_problem(root, path, name)
    if problem is not None:
        raise InstallDirectoryError(f"cannot read {root}", [problem])
    return install_files.InstallFiles().read(path, limit=install_files.CONFIG_LIMIT)


def _prepare_manifests(
    root: Path,
    options: PrepareOptions,
    config: install_config.InstallConfig | None,
    state: _Preparation,
) -> install_manifests.InstallManifests:
    """Return the manifests as they will be; set the content of the new file."""
    settings = config.mode.settings if config else None
    if config is None or settings is None:
        manifests, problems = install_manifests.collect_install_manifests(root)
        state.problems += problems
        if not problems and manifests.settings is None and not manifests.image_configs:
            where = (
                config.name
                if config
                else f"{install_files.INSTALL_CONFIG} or {install_files.OWN_INSTALL_CONFIG}"
            )
            raise errors.UsageError(
                f"cannot prepare {root}: there is no field {image_mode_field.FIELD} in {where}, "
                "and no MachineOSConfig among the manifests",
                remedy=f"add the field {image_mode_field.FIELD}, see treenail-install(7), or name "
                "the install directory: treenail-controller install prepare --dir DIR",
            )
        return manifests
    generated = install_files.InstallDirectory(root).manifests / prepared_manifests.FILE_NAME
    if problem := install_manifests.find_link_problem(
        root, generated, prepared_manifests.GENERATED_FILE
    ):
        state.problems.append(problem)
    state.previous = previous = install_files.InstallFiles().read(
        generated, limit=install_files.CONFIG_LIMIT
    )
    if previous is not None and not prepared_manifests.is_unchanged(previous):
        state.problems.append(
            InstallProblem(
                prepared_manifests.GENERATED_FILE,
                f"it was edited, and {config.name} has the field {image_mode_field.FIELD} that it "
                "is written from",
                "move your objects to a file of another name, and run: "
                f"rm '{root / prepared_manifests.GENERATED_FILE}'",
            )
        )
    manifests, problems = install_manifests.collect_install_manifests(
        root, {prepared_manifests.GENERATED_FILE: b""}
    )
    state.problems += problems
    if not settings.is_enabled:
        state.notes.append(f"{image_mode_field.FIELD} is not enabled: no manifest is written")
        state.content = b""
        return manifests
    if config.is_own and config.machines is None:
        state.notes.append(
            f"{config.name} does not say how many machines the control plane has: the first one "
            "that joins completes the installation; add, for example: "
            f"{install_config.CONTROL_PLANE_MACHINES}: {{replicas: 3}}"
        )
    inputs = _collect_inputs(root, options, config, settings, manifests, previous or b"", state)
    if state.problems:
        return manifests
    state.content = prepared_manifests.format_manifests(inputs)
    manifests, problems = install_manifests.collect_install_manifests(
        root, {prepared_manifests.GENERATED_FILE: state.content}
    )
    state.problems += problems
    return manifests


def _collect_inputs(
    root: Path,
    options: PrepareOptions,
    config: install_config.InstallConfig,
    settings: image_mode.ImageMode,
    manifests: install_manifests.InstallManifests,
    previous: bytes,
    state: _Preparation,
) -> prepared_manifests.PreparedInputs:
    owners = {
        image_config.pool: image_config.name for image_config in manifests.image_configs.values()
    }
    images = []
    for pool, line in zip(settings.pools, config.mode.pool_lines, strict=True):
        if pool.name not in manifests.pools and pool.name not in prepared_manifests.BUILT_IN_POOLS:
            known = ", ".join(sorted({*manifests.pools, *prepared_manifests.BUILT_IN_POOLS}))
            text = f"unknown pool {pool.name:.60}, expected one of {known}"
            remedy = "correct the name, or add a MachineConfigPool of this name to the manifests"
            state.problems.append(InstallProblem(config.name, text, remedy, line))
        elif pool.name in owners:
            manifest = manifests.objects["MachineOSConfig", "", owners[pool.name]]
            state.notes.append(
                f"{manifest.location}: MachineOSConfig {manifest.name} takes precedence over "
                f"{config.name}, line {line}"
            )
        else:
            images.append(_read_image(root, config, pool, line, state))
    named = {*owners, *(pool.name for pool in settings.pools)}
    for name in (machineconfigpool.MASTER, machineconfigpool.WORKER):
        if name not in named and not config.mode.problems:
            state.problems.append(
                InstallProblem(
                    config.name,
                    f"{image_mode_field.FIELD}.pools has no entry for pool {name}: its image needs "
                    "a renderedImagePushSpec",
                    f"add: - name: {name}, with renderedImagePushSpec: REGISTRY/REPOSITORY:TAG",
                    config.mode.line,
                )
            )
    logins = prepared_logins.read_logins(options.pull_secret, options.push_secret, config, previous)
    state.problems += logins.problems
    pushes = prepared_logins.select_push_logins(
        config, [image.pool for image in images], logins.push
    )
    # Secrets of these names among the manifests take precedence.
    secrets = {
        secret.name
        for secret in manifests.list_kind("Secret")
        if secret.namespace == component_names.NAMESPACE
    }
    if prepared_manifests.PUSH_SECRET not in secrets:
        state.problems += pushes.problems
        state.notes += pushes.notes
    wanted = [
        pool_name
        for pool_name in prepared_manifests.BUILT_IN_POOLS
        if pool_name in {machineconfigpool.MASTER, machineconfigpool.WORKER, *named}
    ]
    return prepared_manifests.PreparedInputs(
        settings=settings,
        images=images,
        pools=[pool_name for pool_name in wanted if pool_name not in manifests.pools],
        has_namespace=manifests.find("Namespace", component_names.NAMESPACE) is not None,
        is_openshift=not config.is_own,
        has_pull_secret=prepared_manifests.PULL_SECRET in secrets,
        pull_secret=PullSecret() if prepared_manifests.PULL_SECRET in secrets else logins.pull,
        push_secret=PullSecret() if prepared_manifests.PUSH_SECRET in secrets else pushes.logins,
        from_options=logins.from_options,
    )


def _read_image(
    root: Path,
    config: install_config.InstallConfig,
    pool: image_mode.ImageModePool,
    line: int,
    state: _Preparation,
) -> prepared_manifests.PreparedImage:
    if not pool.container_file:
        return prepared_manifests.PreparedImage(pool)
    text, problems = read_containerfile(root, pool.container_file, where=config.name, line=line)
    state.problems += problems
    if not manifest_checks.is_based_on_system(text):
        state.notes.append(
            f"{pool.container_file}: the last stage is not based on the OS image of the release; "
            f"an image that is begins with: FROM {containerfile.CONFIGS_STAGE} AS final"
        )
    return prepared_manifests.PreparedImage(pool, text)


def _locate_problems(
    root: Path,
    config: install_config.InstallConfig | None,
    manifests: install_manifests.InstallManifests,
    state: _Preparation,
) -> list[InstallProblem]:
    """Return the problems with the lines of files that the user has."""
    problems = state.problems
    if config is not None and state.content and state.content != state.previous:
        objects = {
            manifest.line: manifest
            for manifest in manifests.objects.values()
            if manifest.file == prepared_manifests.GENERATED_FILE
        }
        problems = [
            move_problem(problem, objects.get(problem.line), config)
            if problem.file == prepared_manifests.GENERATED_FILE
            else problem
            for problem in problems
        ]
    return locate_problems(problems, partial(install_manifests.read_manifest, root))


def _remove_field(config: install_config.InstallConfig, state: _Preparation) -> bytes:
    try:
        return install_config.remove_field(
            config.content, image_mode_field.FIELD, where=config.name
        )
    except errors.ConfigError as error:
        problem = InstallProblem(config.name, str(error), error.remedy, config.mode.line)
        state.problems.append(problem)
        return b""


def _read_status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise errors.FileError(f"cannot read {path}: {error.strerror}") from error


def _write_file(
    files: install_files.InstallFiles, path: Path, content: bytes, mode: int, owner: os.stat_result
) -> bool:
    """Write a file; as root, for the owner of another file: other installers read it as a user.

    Of a link, its target is written.
    """
    path = path.resolve()
    is_new_directory = not path.parent.exists()
    has_changed = files.write(path, content, mode=mode)
    if os.geteuid() == 0:
        try:
            for owned_path in (path, *([path.parent] if is_new_directory else [])):
                os.chown(owned_path, owner.st_uid, owner.st_gid)
        except OSError as error:
            raise errors.FileError(f"cannot set the owner of {path}: {error.strerror}") from error
    return has_changed


def _describe_result(
    root: Path,
    manifests: install_manifests.InstallManifests,
    config: install_config.InstallConfig | None,
) -> str:
    pools = sorted(image_config.pool for image_config in manifests.image_configs.values())
    if config and config.mode.settings and not config.mode.settings.is_enabled:
        return f"{root} installs without image mode"
    return f"{root} is prepared; pools with an image: {', '.join(pools)}"


_MAX_BYTES = 4 * machineosconfig.CONTAINERFILE_LIMIT
"""Characters have up to 4 bytes."""


def read_containerfile(
    root: Path, name: str, *, where: str, line: int
) -> tuple[str, list[InstallProblem]]:
    """Return the text and its problems; ``where`` and ``line`` are those of the field.

    The file is below the install directory, also through links.
    """

    def refuse(text: str, remedy: str) -> tuple[str, list[InstallProblem]]:
        return "", [InstallProblem(where, f"containerFile {name[:200]!r}: {text}", remedy, line)]

    try:
        inside = root.resolve()
        path = (root / name).resolve()
        if Path(name).is_absolute() or not path.is_relative_to(inside):
            return refuse(
                "it is outside of the install directory",
                "copy it into the install directory, and name it by its path there",
            )
        if path.is_dir():
            return refuse("it is a directory", "name a file in it")
        content, size = install_files.read_regular_file(path, _MAX_BYTES)
    except FileNotFoundError:
        return refuse("no such file in the install directory", "correct the name, or create it")
    except install_files.NotAFileError:
        return refuse("it is a pipe, a socket or a device", "name a regular file")
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        return refuse(f"cannot read it: {cause or 'its name cannot be used'}", "correct the name")
    if size > _MAX_BYTES:
        return "", [
            InstallProblem(
                name,
                f"expected at most {machineosconfig.CONTAINERFILE_LIMIT} characters, found {size} "
                "bytes",
                "move files into the ConfigMap that the annotation treenail.io/context names, and "
                "copy them",
            )
        ]
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        return "", [InstallProblem(name, "expected UTF-8", "save the file as UTF-8", line_number)]
    if not text.strip():
        # Not an image with the config alone: the user named a file, and lost its content.
        return refuse("the file is empty", "write instructions, or remove the field containerFile")
    problems = [
        *containerfile.find_containerfile_problems(text),
        *containerfile.find_source_problems(text, ()),
    ]
    return text, [
        InstallProblem(name, problem.text, problem.remedy, problem.line) for problem in problems
    ]


def drop_prebuilt_tags(
    root: Path, manifests: install_manifests.InstallManifests
) -> dict[str, bytes]:
    """Return the new contents of files by path below the directory; all other bytes stay.

    Raises `InstallDirectoryError` where an annotation is written in a way that no edit can change
    safely, and `FileError`.
    """
    contents: dict[str, bytes] = {}
    files = install_files.InstallFiles()
    for manifest in manifests.list_kind(machineosconfig.KIND):
        annotations = manifests.image_configs[manifest.name].metadata.annotations
        if key.PRE_BUILT_IMAGE not in annotations:
            continue
        image = manifest_checks.parse_prebuilt_image(annotations[key.PRE_BUILT_IMAGE])
        if not image.has_tag:
            continue
        content = contents.get(manifest.file) or files.read(root / manifest.file) or b""
        edited = content.replace(image.text.encode(), str(image.spec).encode())
        if not _has_values(edited, content, image.text, str(image.spec)):
            problem = manifest.make_problem(
                f"cannot remove the tag from annotation {key.PRE_BUILT_IMAGE}",
                f"set it to {image.spec}",
            )
            raise InstallDirectoryError(f"cannot prepare {root}", [problem])
        contents[manifest.file] = edited
    return contents


def _has_values(edited: bytes, content: bytes, old: str, new: str) -> bool:
    """Return whether the edit replaced annotations alone, and at least one."""
    try:
        before = documents.load_documents(content, where="")
        after = documents.load_documents(edited, where="")
    except errors.ConfigError:
        return False
    return (
        before != after
        and [_replace_annotation(document, old, new) for document in before] == after
    )


def _replace_annotation(value: object, old: str, new: str) -> object:
    if isinstance(value, list):
        return [_replace_annotation(element, old, new) for element in value]
    if not isinstance(value, dict):
        return value
    changed: decode.Json = {
        name: _replace_annotation(member, old, new) for name, member in value.items()
    }
    if changed.get(key.PRE_BUILT_IMAGE) == old:
        changed[key.PRE_BUILT_IMAGE] = new
    return changed


_POOL_FIELDS = {
    "containerFile": "containerFile",
    "renderedImagePushSpec": "renderedImagePushSpec",
}
"""Fields of a pool by those of its MachineOSConfig."""


def move_problem(
    problem: InstallProblem,
    manifest: install_manifests.ManifestObject | None,
    config: install_config.InstallConfig,
) -> InstallProblem:
    """Return a problem of a generated object with file and line of the install configuration."""
    try:
        text = documents.decode_text(config.content, config.name)
        positions = yaml11.find_positions(text, where=config.name)
    except errors.ConfigError:
        positions = yaml11.YamlPositions()
    path = _find_origin(problem, manifest, config, positions)
    return InstallProblem(config.name, problem.text, problem.remedy, positions.find_line(*path))


def _find_origin(
    problem: InstallProblem,
    manifest: install_manifests.ManifestObject | None,
    config: install_config.InstallConfig,
    positions: yaml11.YamlPositions,
) -> yaml11.FieldPath:
    if manifest is None or config.mode.settings is None:
        return (image_mode_field.FIELD,)
    if manifest.kind == "Secret":
        return (
            (install_config.PULL_SECRET_FIELD,)
            if (install_config.PULL_SECRET_FIELD,) in positions.lines
            else (image_mode_field.FIELD,)
        )
    if manifest.kind != machineosconfig.KIND:
        return (image_mode_field.FIELD,)
    names = [pool.name for pool in config.mode.settings.pools]
    lines = dict(zip(names, config.mode.pool_lines, strict=True))
    for path, line in positions.lines.items():
        if path[:-1] == (image_mode_field.FIELD, "pools") and line == lines.get(manifest.name):
            inner = _POOL_FIELDS.get(str(problem.path[1])) if len(problem.path) > 1 else None
            return (*path, inner) if inner else path
    return (image_mode_field.FIELD,)
