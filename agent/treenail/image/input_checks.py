"""Checks of the inputs of a build before any Job runs.

They read the MachineOSConfig alone and beside its pool, the objects that it names, and the rendered
config.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from treenail import errors, memory
from treenail.api import annotations as key
from treenail.api import decode, machineconfig, machineconfigpool, machineosconfig, node, pullspec
from treenail.config import pullsecret
from treenail.encoding import json_text
from treenail.image import build_inputs, build_result, containerfile


class InputReason(StrEnum):
    """Why a MachineOSConfig is not accepted: the reason of its condition ``Accepted``."""

    ANNOTATION_INVALID = "AnnotationInvalid"
    ARCHITECTURE_MISSING = "ArchitectureMissing"
    BASE_IMAGE_INVALID = "BaseImageInvalid"
    BASE_IMAGE_UNRESOLVED = build_result.BASE_IMAGE_UNRESOLVED
    BUILDER_UNSUPPORTED = "BuilderUnsupported"
    CONFIG_INVALID = "ConfigInvalid"
    CONFIG_NOT_BAKEABLE = "ConfigNotBakeable"
    CONFIG_TOO_LARGE = "ConfigTooLarge"
    CONTAINERFILE_INVALID = "ContainerfileInvalid"
    CONTEXT_INVALID = "ContextInvalid"
    EXTENSION_UNSUPPORTED = "ExtensionUnsupported"
    POOL_DEGRADED = "PoolDegraded"
    POOL_NOT_FOUND = "PoolNotFound"
    POOL_NOT_RENDERED = "PoolNotRendered"
    POOL_TAKEN = "PoolTaken"
    PUSH_SPEC_INVALID = "PushSpecInvalid"
    REQUEST_REFUSED = "RequestRefused"
    # Names of reasons, not passwords.
    SECRET_INVALID = "SecretInvalid"  # noqa: S105
    # Likewise.
    SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105


@dataclass(frozen=True, slots=True)
class InputFinding:
    """One wrong input of a build."""

    reason: InputReason
    field: str
    """Where the input is: ``spec.renderedImagePushSpec``, or ``Secret builds/push``."""
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}; {self.remedy}"


MIN_DEADLINE_S, MAX_DEADLINE_S, DEFAULT_DEADLINE_S = 60, 86400, 3600
_DEADLINE_DIGITS = 5
_JOB = "Job"

BLOCKING_POOL_CONDITIONS = ("RenderDegraded", "PinnedImageSetsDegraded", "PoolSynchronizerDegraded")
"""Conditions of a pool during which nothing is built."""
_NODE_DEGRADED = "NodeDegraded"
"""Blocks the first build only: later another image is often the remedy."""


def find_config_findings(config: machineosconfig.MachineOSConfig) -> Iterator[InputFinding]:
    """Yield what is wrong with the spec and the annotations of a MachineOSConfig."""
    if config.builder_type not in ("", _JOB):
        yield InputFinding(
            InputReason.BUILDER_UNSUPPORTED,
            "spec.imageBuilder.imageBuilderType",
            _JOB,
            repr(config.builder_type)[:60],
            f"set it to {_JOB}",
        )
    yield from _check_push_spec(config)
    yield from _check_containerfiles(config)
    yield from _check_annotations(config)


def find_pool_findings(
    config: machineosconfig.MachineOSConfig,
    pool: machineconfigpool.MachineConfigPool | None,
    owner: machineosconfig.MachineOSConfig | None,
) -> Iterator[InputFinding]:
    """Yield why the pool cannot get an image now.

    ``owner`` is the MachineOSConfig that builds for the pool; it never changes to a newer one.
    """
    where = "spec.machineConfigPool.name"
    if owner is not None and owner.name != config.name:
        yield InputFinding(
            InputReason.POOL_TAKEN,
            where,
            "a pool without another MachineOSConfig",
            f"pool {config.pool}, for which MachineOSConfig {owner.name} builds",
            f"delete one of the two: kubectl delete machineosconfig {config.name}",
        )
    if pool is None or pool.is_deleting:
        yield InputFinding(
            InputReason.POOL_NOT_FOUND,
            where,
            "the name of a MachineConfigPool",
            f"{config.pool!r:.260}, which does not exist",
            "create the pool, or delete the MachineOSConfig",
        )
        return
    blocking = (*BLOCKING_POOL_CONDITIONS, *(() if config.pull_spec else (_NODE_DEGRADED,)))
    for condition in pool.conditions:
        if condition.type in blocking and condition.status == "True":
            yield InputFinding(
                InputReason.POOL_DEGRADED,
                f"pool {pool.name}",
                f"{condition.type}=False",
                f"{condition.type}=True ({condition.message or condition.reason})"[:1000],
                "repair the pool first",
            )
    if not pool.configuration.name:
        yield InputFinding(
            InputReason.POOL_NOT_RENDERED,
            f"pool {pool.name}",
            "a rendered MachineConfig in spec.configuration",
            "none",
            "wait for the render controller",
        )


def find_architecture_findings(
    config: machineosconfig.MachineOSConfig, architectures: Collection[str]
) -> Iterator[InputFinding]:
    """Yield why no image can be built for one of the architectures of the pool's nodes."""
    if not config.containerfiles:
        return
    entries = ", ".join(entry.architecture for entry in config.containerfiles)
    for architecture in sorted(architectures):
        name = build_inputs.ARCHITECTURES.get(architecture)
        if name is None or config.find_containerfile(name) is None:
            yield InputFinding(
                InputReason.ARCHITECTURE_MISSING,
                "spec.containerFile",
                f"an entry for {repr(str(name or architecture))[:40]}, the architecture of nodes",
                f"entries for {entries}",
                f"add an entry for {machineosconfig.ContainerfileArch.NO_ARCH}, "
                "or one for each architecture",
            )


def read_deadline(config: machineosconfig.MachineOSConfig) -> int:
    """Return the seconds until a Job is ended; the default for an invalid annotation."""
    text = config.metadata.annotations.get(key.BUILD_DEADLINE, "")
    if text.isascii() and text.isdecimal() and len(text) <= _DEADLINE_DIGITS:
        seconds = int(text)
        if MIN_DEADLINE_S <= seconds <= MAX_DEADLINE_S:
            return seconds
    return DEFAULT_DEADLINE_S


def _check_push_spec(config: machineosconfig.MachineOSConfig) -> Iterator[InputFinding]:
    where = "spec.renderedImagePushSpec"
    try:
        pullspec.parse_push_spec(config.push_spec, where=where)
    except errors.ConfigError as error:
        problem = str(error).removeprefix(f"{where} is ").replace(", but ", ": ", 1)
        yield InputFinding(
            InputReason.PUSH_SPEC_INVALID, where, "REGISTRY/REPOSITORY:TAG", problem, error.remedy
        )


def _check_containerfiles(config: machineosconfig.MachineOSConfig) -> Iterator[InputFinding]:
    seen: set[str] = set()
    for index, entry in enumerate(config.containerfiles):
        where = f"spec.containerFile[{index}]"
        if entry.architecture not in tuple(machineosconfig.ContainerfileArch):
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.containerfileArch",
                " or ".join(machineosconfig.ContainerfileArch),
                repr(entry.architecture)[:60],
                "correct it",
            )
        if entry.architecture in seen:
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.containerfileArch",
                "at most one entry for each architecture",
                f"two for {entry.architecture:.60}",
                "remove one of them",
            )
        seen.add(entry.architecture)
        for problem in containerfile.find_containerfile_problems(entry.content):
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.content",
                "a valid Containerfile",
                str(problem),
                problem.remedy,
            )


def _check_annotations(config: machineosconfig.MachineOSConfig) -> Iterator[InputFinding]:
    notes = config.metadata.annotations
    sees = notes.get(key.BUILD_SEES_CONFIG)
    if sees not in (None, "true", "false"):
        yield _describe_annotation(key.BUILD_SEES_CONFIG, '"true" or "false"', sees)
    deadline = notes.get(key.BUILD_DEADLINE)
    if deadline is not None and str(read_deadline(config)) != deadline:
        expected = f"{MIN_DEADLINE_S} to {MAX_DEADLINE_S} seconds"
        yield _describe_annotation(key.BUILD_DEADLINE, expected, deadline)
    if config.base_image:
        yield from _check_base_annotation(config.base_image)


def _check_base_annotation(image: str) -> Iterator[InputFinding]:
    try:
        if "@" in image:
            pullspec.parse_pull_spec(image, where=key.BASE_IMAGE)
        else:
            # A tag: only this annotation may name one, and the controller resolves it.
            pullspec.parse_push_spec(image, where=key.BASE_IMAGE)
    except errors.ConfigError:
        expected = "REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:DIGEST"
        yield _describe_annotation(key.BASE_IMAGE, expected, image)


def _describe_annotation(name: str, expected: str, actual: str) -> InputFinding:
    return InputFinding(
        InputReason.ANNOTATION_INVALID,
        f"annotation {name}",
        expected,
        repr(actual[:100]),
        "correct it, or remove the annotation",
    )


CONFIG_MAP_LIMIT = memory.MIB
"""Maximum bytes of all values in a ConfigMap."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Files for COPY by name."""

    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """Digest of names and contents; empty without files."""
        if not self.files:
            return ""
        hashed = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            hashed.update(f"{len(name.encode())} {len(content)} {name}".encode())
            hashed.update(content)
        return f"sha256:{hashed.hexdigest()}"


def find_rendered_findings(
    rendered: machineconfig.MachineConfig,
    *,
    base_image: str = "",
    architecture: str = node.DEFAULT_ARCHITECTURE,
) -> Iterator[InputFinding]:
    """Yield why no image can be built for a rendered config.

    ``base_image`` replaces the ``osImageURL`` of the config; a tag is resolved already.
    """
    where = f"annotation {key.BASE_IMAGE}" if base_image else f"osImageURL of {rendered.name}"
    yield from _check_image(base_image or rendered.os_image_url, where)
    needs_packages = bool(rendered.extensions)
    for extension in rendered.extensions:
        if extension not in machineconfig.EXTENSIONS:
            yield InputFinding(
                InputReason.EXTENSION_UNSUPPORTED,
                f"extensions of {rendered.name}",
                " or ".join(machineconfig.EXTENSIONS),
                repr(extension)[:60],
                "remove it from the MachineConfigs of the pool, and install its packages in the "
                "Containerfile",
            )
    kernel = rendered.kernel_type or machineconfig.DEFAULT_KERNEL
    if (
        kernel not in machineconfig.KERNEL_TYPES
        or machineconfig.KERNEL_ARCHITECTURES.get(kernel, architecture) != architecture
    ):
        expected = [
            kernel_type
            for kernel_type in machineconfig.KERNEL_TYPES
            if machineconfig.KERNEL_ARCHITECTURES.get(kernel_type, architecture) == architecture
        ]
        yield InputFinding(
            InputReason.EXTENSION_UNSUPPORTED,
            f"kernelType of {rendered.name}",
            f"{' or '.join(expected)} on {architecture:.20}",
            repr(kernel)[:60],
            "set another kernelType in the MachineConfigs of the pool",
        )
    elif needs_packages or kernel != machineconfig.DEFAULT_KERNEL:
        yield from _check_image(
            rendered.extensions_image, f"baseOSExtensionsContainerImage of {rendered.name}"
        )


def find_push_secret_findings(
    document: object | None, where: str, push_spec: str
) -> Iterator[InputFinding]:
    """Yield why a Secret cannot be used for the push; ``document`` is None when it is absent.

    ``where`` is ``Secret NAMESPACE/NAME``.
    """
    yield from _check_secret(document, where, "spec.renderedImagePushSecret", push_spec)


def find_pull_secret_findings(document: object | None, where: str) -> Iterator[InputFinding]:
    """Yield why the Secret that ``spec.baseImagePullSecret`` names cannot be used.

    A registry without a login in it is no finding: the image may be public.
    """
    yield from _check_secret(document, where, "spec.baseImagePullSecret", "")


def read_context(document: object, where: str, *, is_secret: bool = False) -> BuildContext:
    """Read the files of a ConfigMap or Secret; raise `ConfigError`."""
    fields = decode.Fields.from_json(document, where)
    plain, encoded = ("stringData", "data") if is_secret else ("data", "binaryData")
    files = {name: text.encode() for name, text in fields.get_text_map(plain).items()}
    for name, text in fields.get_text_map(encoded).items():
        try:
            files[name] = json_text.decode_base64(text)
        except ValueError:
            # Without its cause, which contains the content.
            raise errors.ConfigError(f"{where}: expected base64 in {encoded}, key {name}") from None
    return BuildContext(files)


def find_source_findings(
    config: machineosconfig.MachineOSConfig, context: BuildContext
) -> Iterator[InputFinding]:
    """Yield the sources of COPY and ADD that the build does not have."""
    for index, entry in enumerate(config.containerfiles):
        for problem in containerfile.find_source_problems(entry.content, context.files):
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"spec.containerFile[{index}].content",
                "files of the context",
                str(problem),
                problem.remedy,
            )


def find_context_findings(document: object | None, where: str) -> Iterator[InputFinding]:
    """Yield why a ConfigMap cannot be the context; ``document`` is None when it is absent.

    ``where`` is ``ConfigMap NAMESPACE/NAME``, or ``ConfigMap NAME`` of files.
    """
    field_name = f"annotation {key.BUILD_CONTEXT}"
    if document is None:
        yield InputFinding(
            InputReason.CONTEXT_INVALID,
            field_name,
            "the name of a ConfigMap",
            f"{where}, which does not exist",
            f"create it with: kubectl create configmap {_format_target(where)} --from-file=DIR"
            if "/" in where
            else "add the ConfigMap to the files",
        )
        return
    try:
        context = read_context(document, where)
    except errors.ConfigError as error:
        yield InputFinding(
            InputReason.CONTEXT_INVALID, where, "a ConfigMap with files", str(error), "correct it"
        )
        return
    for name in sorted(context.files):
        if name.startswith(containerfile.OWN_PREFIX):
            yield InputFinding(
                InputReason.CONTEXT_INVALID,
                where,
                f"names that do not begin with {containerfile.OWN_PREFIX}",
                repr(name)[:80],
                "rename the file",
            )
    size = sum(map(len, context.files.values()))
    if size > CONFIG_MAP_LIMIT:
        yield InputFinding(
            InputReason.CONTEXT_INVALID,
            where,
            f"at most {CONFIG_MAP_LIMIT} bytes",
            f"{size} bytes",
            "put large files into an image of their own, and copy them with COPY --from=IMAGE",
        )


def find_size_findings(
    rendered: str, size: int, limit: int = CONFIG_MAP_LIMIT
) -> Iterator[InputFinding]:
    """Yield a finding if the compressed layer of the config is too large for a Job to see."""
    if size > limit:
        yield InputFinding(
            InputReason.CONFIG_TOO_LARGE,
            f"files of {rendered}",
            f"at most {limit} compressed bytes while {key.BUILD_SEES_CONFIG} is true",
            f"{size} bytes",
            f"remove the annotation {key.BUILD_SEES_CONFIG}, or make the files smaller",
        )


def _check_image(image: str, where: str) -> Iterator[InputFinding]:
    try:
        pullspec.parse_pull_spec(image, where=where)
    except errors.ConfigError as error:
        problem = str(error).removeprefix(f"{where} is ").replace(", but ", ": ", 1)
        yield InputFinding(
            InputReason.BASE_IMAGE_INVALID,
            where,
            "REGISTRY/REPOSITORY@sha256:DIGEST",
            problem,
            "name the image by its digest; skopeo inspect docker://IMAGE prints it",
        )


def _format_target(where: str) -> str:
    """Return name and namespace of ``Secret NAMESPACE/NAME`` as arguments of kubectl."""
    namespace, _, name = where.rpartition(" ")[2].partition("/")
    return f"{name} -n {namespace}"


def _check_secret(
    document: object | None, where: str, field_name: str, push_spec: str
) -> Iterator[InputFinding]:
    if document is None:
        yield InputFinding(
            InputReason.SECRET_NOT_FOUND,
            field_name,
            "the name of a Secret with a registry login",
            f"{where}, which does not exist",
            f"create it with: kubectl create secret docker-registry {_format_target(where)} "
            "--docker-server=REGISTRY --docker-username=USER --docker-password=PASSWORD",
        )
        return
    try:
        secret = pullsecret.read_login_secret(document, where=where)
    except errors.CredentialError as error:
        yield InputFinding(
            InputReason.SECRET_INVALID,
            field_name,
            "a Secret with a registry login",
            str(error),
            error.remedy,
        )
        return
    if not push_spec:
        return
    try:
        spec = pullspec.parse_push_spec(push_spec, where="spec.renderedImagePushSpec")
    except errors.ConfigError:
        return  # find_config_findings reports it.
    if pullsecret.find_credential(secret, spec.registry, spec.repository) is None:
        count = len(secret.credentials)
        yield InputFinding(
            InputReason.SECRET_INVALID,
            field_name,
            f"a login for {spec.registry}",
            f"{where} with {count} login{'' if count == 1 else 's'} for other registries",
            f"add a login for {spec.registry} to the Secret",
        )
