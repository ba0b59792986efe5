"""Checks of the objects that a MachineOSConfig names, and of the rendered config."""

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.api.decode import Fields
from treenail.api.machineconfig import (
    DEFAULT_KERNEL,
    EXTENSIONS,
    KERNEL_ARCHITECTURES,
    KERNEL_TYPES,
    MachineConfig,
)
from treenail.config.pullsecret import find_credential, read_login_secret
from treenail.errors import ConfigError, CredentialError
from treenail.image.inputs.findings import InputFinding, InputReason
from treenail.image.inputs.own_files import OWN_PREFIX
from treenail.image.push_spec import parse_push_spec

CONFIG_MAP_LIMIT = 1024 * 1024
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
    rendered: MachineConfig, *, base_image: str = "", architecture: str = "amd64"
) -> Iterator[InputFinding]:
    """Yield why no image can be built for a rendered config.

    ``base_image`` replaces the ``osImageURL`` of the config; a tag is resolved already.
    """
    where = f"annotation {key.BASE_IMAGE}" if base_image else f"osImageURL of {rendered.name}"
    yield from _check_image(base_image or rendered.os_image_url, where)
    needs_packages = bool(rendered.extensions)
    for extension in rendered.extensions:
        if extension not in EXTENSIONS:
            yield InputFinding(
                InputReason.EXTENSION_UNSUPPORTED,
                f"extensions of {rendered.name}",
                " or ".join(EXTENSIONS),
                repr(extension)[:60],
                "remove it from the MachineConfigs of the pool, and install its packages in the "
                "Containerfile",
            )
    kernel = rendered.kernel_type or DEFAULT_KERNEL
    if kernel not in KERNEL_TYPES or KERNEL_ARCHITECTURES.get(kernel, architecture) != architecture:
        expected = [
            each
            for each in KERNEL_TYPES
            if KERNEL_ARCHITECTURES.get(each, architecture) == architecture
        ]
        yield InputFinding(
            InputReason.EXTENSION_UNSUPPORTED,
            f"kernelType of {rendered.name}",
            f"{' or '.join(expected)} on {architecture:.20}",
            repr(kernel)[:60],
            "set another kernelType in the MachineConfigs of the pool",
        )
    elif needs_packages or kernel != DEFAULT_KERNEL:
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


def read_context(document: object, where: str) -> BuildContext:
    """Read the files of a ConfigMap; raise `ConfigError`."""
    fields = Fields.from_json(document, where)
    files = {name: text.encode() for name, text in fields.get_text_map("data").items()}
    for name, text in fields.get_text_map("binaryData").items():
        try:
            files[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{where}: expected base64 in binaryData, key {name}") from error
    return BuildContext(files)


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
    except ConfigError as error:
        yield InputFinding(
            InputReason.CONTEXT_INVALID, where, "a ConfigMap with files", str(error), "correct it"
        )
        return
    for name in sorted(context.files):
        if name.startswith(OWN_PREFIX):
            yield InputFinding(
                InputReason.CONTEXT_INVALID,
                where,
                f"names that do not begin with {OWN_PREFIX}",
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
    except ConfigError as error:
        found = str(error).removeprefix(f"{where} is ").replace(", but ", ": ", 1)
        yield InputFinding(
            InputReason.BASE_IMAGE_INVALID,
            where,
            "REGISTRY/REPOSITORY@sha256:DIGEST",
            found,
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
        secret = read_login_secret(document, where=where)
    except CredentialError as error:
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
        spec = parse_push_spec(push_spec, where="spec.renderedImagePushSpec")
    except ConfigError:
        return  # find_config_findings reports it.
    if find_credential(secret, spec.registry, spec.repository) is None:
        count = len(secret.credentials)
        yield InputFinding(
            InputReason.SECRET_INVALID,
            field_name,
            f"a login for {spec.registry}",
            f"{where} with {count} login{'' if count == 1 else 's'} for other registries",
            f"add a login for {spec.registry} to the Secret",
        )
