"""One attempt to build and push the image of a pool on this host.

While buildah runs the Containerfile, the base is uploaded to the bootstrap registry. Its layers are
most of an image, and known before the build ends. The push finds them in the registry, and uploads
only the others.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import BinaryIO, Protocol

from treenail import clocks, errors, memory
from treenail.api import decode, machineosconfig, pullspec
from treenail.builder import build_layout, build_spec, failures, local
from treenail.builder.buildah.program import choose_own_id_maps
from treenail.builder.phases.transfers import upload_image
from treenail.config import pullsecret
from treenail.controllers.image_build import build_facts, build_planner, layer_builder
from treenail.controllers.pools import image_tags
from treenail.image import build_result
from treenail.installer.directory import install_files
from treenail.registry import authorization, names, transport
from treenail.registry.client import RegistryClient

log = logging.getLogger(__name__)


CONTAINERFILE, OUTPUT, REPORT = "Containerfile", "output.log", "report.json"
_MAX_ATTEMPTS = 30
"""Attempts of a pool whose logs are kept."""
_OUTPUT_LIMIT = 16 * memory.MIB  # bytes
_NAME = "attempt-"


class AttemptLog:
    """The log of one attempt; close it. Its directory has mode 0700."""

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        files: install_files.InstallFiles,
        pool: str,
    ) -> None:
        """Begin the log of the next attempt; raises `FileError`."""
        parent = directory.get_build_logs(pool, 0).parent
        known = sorted(_read_number(name) for name in files.list_names(parent))
        self.number = max(known, default=0) + 1
        self.path = directory.get_build_logs(pool, self.number)
        self._files = files
        self._size = 0
        for old in known[: max(len(known) + 1 - _MAX_ATTEMPTS, 0)]:
            shutil.rmtree(directory.get_build_logs(pool, old), ignore_errors=True)
        files.make_directory(self.path)
        self._output = self._open_output()

    def write_containerfile(self, text: str) -> None:
        """Write the composed Containerfile."""
        self._files.write(self.path / CONTAINERFILE, text.encode())

    def write_line(self, line: str) -> None:
        """Add a line of output. A full disk ends the build, not its log."""
        content = line.encode("utf-8", "replace") + b"\n"
        if self._size < _OUTPUT_LIMIT <= self._size + len(content):
            content = b"the rest of the output is left out\n"
            self._size = _OUTPUT_LIMIT
        if self._size <= _OUTPUT_LIMIT:
            self._size += len(content)
            with suppress(OSError):
                self._output.write(content)

    def write_report(self, document: decode.Json) -> None:
        """Write how the attempt ended."""
        content = json.dumps(document, indent=1).encode() + b"\n"
        self._files.write(self.path / REPORT, content)

    def close(self) -> None:
        """Close the output."""
        with suppress(OSError):
            self._output.close()

    def _open_output(self) -> BinaryIO:
        path: Path = self.path / OUTPUT
        try:
            # Unbuffered: the log of a killed process is complete.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.FileError(f"cannot write {path}: {error.strerror}") from error
        return os.fdopen(descriptor, "wb", buffering=0)


def _read_number(name: str) -> int:
    text = name.removeprefix(_NAME)
    return int(text) if name.startswith(_NAME) and text.isascii() and text.isdigit() else 0


_DAMAGED = frozenset(
    {build_result.BuildReason.DIGEST_MISMATCH, build_result.BuildReason.BUILDER_FAILED}
)
"""Reasons of a build or push that used damaged layers."""


class PushRegistry(Protocol):
    """The bootstrap registry as a build uses it."""

    @property
    def push_address(self) -> str: ...

    @property
    def push_login(self) -> authorization.Login: ...

    @property
    def ca_pem(self) -> str: ...

    def find_problem(self) -> str:
        """Return why the registry accepts no push; empty if it does."""

    def check_room(self, image_bytes: int) -> None:
        """Raise `HostError` unless the registry may have an image of this size."""

    def sync_storage(self) -> None:
        """Flush what was pushed: a power cut loses none of it. Raises `FileError`."""


@dataclass(frozen=True, slots=True)
class PoolBuildSettings:
    """Options of builds on this host."""

    build_timeout_s: float = 3600.0
    push_timeout_s: float = 1800.0
    driver: str = "overlay"
    """Storage driver of buildah; another one than the cluster's changes content keys."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """With the proxies of registries."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Result of an attempt that succeeded."""

    image: str
    """Final pull spec."""
    systems: dict[str, build_facts.SystemFacts]
    seconds: dict[str, float]
    warning: str = ""


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """A planned build, and what it reads."""

    plan: build_planner.BuildPlan
    config: machineosconfig.MachineOSConfig
    """With its base by digest."""
    planner: build_planner.BuildPlanner = field(repr=False)
    context: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The user's files for COPY."""
    mounts: Mapping[str, tuple[str, Mapping[str, bytes]]] = field(default_factory=dict, repr=False)
    """Entitlements by name: where instructions see them, and their files."""


class BuildAttempt:
    """Runs one attempt. Everything that it finished is used again by the next one."""

    def __init__(
        self,
        planned: PlannedImage,
        layers: layer_builder.LayerBuilder,
        builder: "SystemImageBuilder",
    ) -> None:
        self._planned = planned
        self._layers = layers
        self._builder = builder

    def run(self, number: int, attempt_log: AttemptLog) -> AttemptResult:
        """Build and push what is missing; raise `AttemptFailed`, or `FileError` for its log."""
        plan, config = self._planned.plan, self._planned.config
        seconds: dict[str, float] = {}
        warning = ""
        if plan.wanted.needs_job:
            self._require_success(
                self._layers.run_request(
                    build_facts.CheckPush("", plan.wanted.push_spec, number), plan, config
                )
            )
        systems: dict[str, build_facts.SystemFacts] = {}
        for system in plan.systems:
            facts = system.wanted.initial
            if system.wanted.needs_job:
                pushed = system.wanted.push_spec
                answer = self._require_success(self._layers.find_system_image(pushed, config))
                image = answer.pull_spec
                if image and not self._layers.has_complete_image(image, config):
                    log.warning("building %s again: the registry lost a part of it", pushed)
                    image = ""
                if not image:
                    result = self._builder.build(self._planned, system, attempt_log)
                    seconds |= result.seconds
                    warning = result.message
                    spec = pullspec.parse_push_spec(pushed, where="the system part")
                    image = spec.make_pull_spec(result.digest)
                facts = replace(facts, image=image)
            systems[system.wanted.name] = facts
        sources = tuple(
            (system.architecture, systems[system.wanted.name].image or plan.wanted.base_image)
            for system in plan.systems
        )
        question = build_facts.AppendConfig(
            "", number, sources, plan.wanted.push_spec, plan.wanted.config
        )
        answer = self._require_success(self._layers.run_request(question, plan, config))
        warning = "; ".join(filter(None, (warning, answer.warning)))
        return AttemptResult(answer.pull_spec, systems, {**seconds, **answer.seconds}, warning)

    @staticmethod
    def _require_success(answer: image_tags.ImageAnswer) -> image_tags.ImageAnswer:
        if answer.failure is not None:
            raise layer_builder.AttemptFailed(answer.failure)
        return answer


class SystemImageBuilder:
    """Builds the system part of an image with processes of this host, and pushes it.

    A killed or failed build leaves the images that it pulled and built to the next one of equal
    inputs.
    """

    def __init__(
        self,
        directory: Path,
        settings: PoolBuildSettings,
        registry: PushRegistry | None,
        clock: clocks.Clock,
        files: install_files.InstallFiles,
    ) -> None:
        """``directory`` is for files of builds; without a registry, push to the final one."""
        self._directory = directory
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._files = files

    def build(
        self, planned: PlannedImage, system: build_planner.SystemPlan, attempt_log: AttemptLog
    ) -> build_result.BuildResult:
        """Return the result of the push; raise `AttemptFailed`, or `FileError` for the log."""
        attempt_log.write_containerfile(system.containerfile)
        try:
            with self._write_logins(planned) as (pull, push):
                builder = self._make_builder(pull, push, attempt_log.write_line)
                result = self._build_system(builder, planned, system)
        except errors.TreenailError as error:
            failure = build_result.AttemptFailure(
                failures.choose_reason(error, build_result.BuildPhase.BUILD), str(error)
            )
            raise layer_builder.AttemptFailed(failure) from error
        if result.reason is not None:
            head, _, output = result.message.partition("\n")
            failure = build_result.AttemptFailure(
                result.reason, head, result.line, output, result.seconds
            )
            raise layer_builder.AttemptFailed(failure)
        return result

    def discard(self, planned: PlannedImage) -> None:
        """Remove what builds of this pool left."""
        builder = self._make_builder(None, None, lambda _: None)
        for system in planned.plan.systems:
            builder.discard_build(_make_name(planned.config, system))

    def _build_system(
        self, builder: local.LocalBuilder, planned: PlannedImage, system: build_planner.SystemPlan
    ) -> build_result.BuildResult:
        plan, registry = planned.plan, self._registry
        spec = build_spec.BuildSpec(
            push_spec=system.wanted.push_spec,
            architecture=system.architecture,
            user_line=system.user_line,
            push_registry=registry.push_address if registry is not None else "",
            mirrors=plan.mirrors,
            labels=system.labels,
        )
        ca_pem = "\n".join(filter(None, (plan.ca_pem, registry.ca_pem if registry else "")))
        limit_s = min(float(plan.deadline_s), self._settings.build_timeout_s)
        with builder.continue_build(
            _make_name(planned.config, system),
            system.wanted.share_key,
            system.containerfile,
            spec,
            local.BuildFiles({**system.own_files, **planned.context}, planned.mounts, ca_pem),
            timeout_s=limit_s,
        ) as build:
            has_layers = build.has_layers
            uploads = partial(self._upload_base, planned, build)
            result = (
                self._push_image(build)
                if build.has_image
                else self._run_phases(build, limit_s, uploads)
            )
            if has_layers and result.reason in _DAMAGED:
                # A power cut may have damaged what the earlier attempt left.
                log.warning("building %s again: %s", system.wanted.push_spec, result.message)
                build.forget_images()
                result = self._run_phases(build, limit_s, uploads)
            return result

    def _run_phases(
        self,
        build: local.LocalBuild,
        limit_s: float,
        upload_base: Callable[[], AbstractContextManager[None]],
    ) -> build_result.BuildResult:
        end = self._clock.monotonic() + limit_s
        seconds: dict[str, float] = {}
        for phase in (build_result.BuildPhase.FETCH, build_result.BuildPhase.BUILD):
            left_s = max(end - self._clock.monotonic(), 1.0)
            build.start_phase(
                build_result.BuildPhase.PUSH
                if phase is build_result.BuildPhase.BUILD
                else build_result.BuildPhase.BUILD
            )
            with upload_base() if phase is build_result.BuildPhase.BUILD else nullcontext():
                result = build.run_phase(phase, timeout_s=left_s)
            seconds |= result.seconds
            if not result.has_succeeded:
                return replace(result, seconds=seconds)
        result = self._push_image(build)
        return replace(result, seconds={**seconds, **result.seconds})

    def _upload_base(
        self, planned: PlannedImage, build: local.LocalBuild
    ) -> AbstractContextManager[None]:
        """Return the upload of the base; nothing with an external registry, which mounts it."""
        registry, base_image = self._registry, planned.plan.wanted.base_image
        if registry is None:
            return nullcontext()
        target = pullspec.parse_push_spec(planned.plan.wanted.push_spec, where="the push spec")
        client = RegistryClient(
            registry.push_address,
            self._clock,
            login=registry.push_login,
            tls=transport.TlsSettings(registry.ca_pem),
            # The push tries again.
            limits=transport.RegistryLimits(attempts=1),
        )
        return upload_base(client, target.repository, build.directories, base_image)

    def _push_image(self, build: local.LocalBuild) -> build_result.BuildResult:
        return build.run_phase(
            build_result.BuildPhase.PUSH, timeout_s=self._settings.push_timeout_s
        )

    def _make_builder(
        self, pull: Path | None, push: Path | None, show_line: Callable[[str], None]
    ) -> local.LocalBuilder:
        settings = local.LocalSettings(
            self._directory, pull_secret=pull, push_secret=push, driver=self._settings.driver
        )
        maps = choose_own_id_maps()
        return local.LocalBuilder(settings, self._settings.environ, self._clock, maps, show_line)

    @contextmanager
    def _write_logins(self, planned: PlannedImage) -> Iterator[tuple[Path, Path]]:
        """Write the logins for the processes of the build, and remove them afterwards."""
        registry, planner, config = self._registry, planned.planner, planned.config
        if registry is None:
            push_login = planner.read_push_login(config)
        else:
            auth = registry.push_login.basic.removeprefix("Basic ")
            push_login = pullsecret.PullSecret(
                {registry.push_address: pullsecret.RegistryCredential(auth)}
            )
        pull, push = self._directory / "pull.json", self._directory / "push.json"
        try:
            self._files.write(pull, pullsecret.encode_pull_secret(planner.read_base_login(config)))
            self._files.write(push, pullsecret.encode_pull_secret(push_login))
            yield pull, push
        finally:
            for path in (pull, push):
                self._files.remove(path)


def _make_name(config: machineosconfig.MachineOSConfig, system: build_planner.SystemPlan) -> str:
    """Return the name of the build's directory, which has layers for the next Containerfile."""
    return f"{config.pool}-{system.architecture}"


@contextmanager
def upload_base(
    client: RegistryClient,
    repository: str,
    directories: build_spec.BuildDirectories,
    base_image: str,
) -> Iterator[None]:
    """Upload the base from the layout while within, and wait for the end of the upload.

    A failure is none of the build. Closes the client.
    """
    # Before buildah adds images to the layout.
    base = _find_base(directories, base_image)
    if base is None:
        yield
        return
    # A daemon: after a signal nothing waits for it.
    thread = Thread(
        target=_upload_image,
        args=(client, repository, directories, base),
        name="base-upload",
        daemon=True,
    )
    thread.start()
    yield
    thread.join()


def _find_base(directories: build_spec.BuildDirectories, base_image: str) -> names.Manifest | None:
    try:
        images = directories.read_fetched().images
        name = next((image.name for image in images if image.reference == base_image), None)
        return (
            None if name is None else build_layout.ImageLayout(directories.layout).read_named(name)
        )
    except errors.TreenailError as error:
        log.debug("cannot upload the base early: %s", error)
        return None


def _upload_image(
    client: RegistryClient,
    repository: str,
    directories: build_spec.BuildDirectories,
    image: names.Manifest,
) -> None:
    layout = build_layout.ImageLayout(directories.layout)
    try:
        with closing(client):
            upload_image(client, repository, layout, image, build_spec.FetchOutput())
    except errors.TreenailError as error:
        log.debug("uploaded the base in part: %s", error)
    except Exception:
        # A bug in what only saves time must not end the installation.
        log.exception("cannot upload the base early")
