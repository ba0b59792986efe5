"""Build of the images of the control plane on the bootstrap host.

The plan is that of the build controller, so that names, content keys, layers and labels are those
of the future cluster, which adopts the image. With a Containerfile, extensions or a kernel type,
processes of this host build the system part; the config is one layer on top, added in the registry.
"""

import logging
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treenail import clocks, errors, memory
from treenail.api import annotations as key
from treenail.api import component_names, machineconfigpool, machineosconfig, node, pullspec
from treenail.config import image_mirrors
from treenail.controllers.image_build import (
    build_facts,
    build_planner,
    cluster_reader,
    decide,
    layer_builder,
    tag_resolver,
)
from treenail.controllers.pools import image_tags
from treenail.image import build_inputs, build_result, input_checks
from treenail.installer import install_steps
from treenail.installer.directory import install_files, install_manifests, manifest_checks
from treenail.installer.images import build_attempt, built_image
from treenail.registry.proxies import read_proxy_settings

log = logging.getLogger(__name__)

OBJECT_LIMIT = memory.MIB
"""Bytes of a file of `InstallDirectory.cluster_objects`."""
_WAIT_S = 5.0
_CAUSE_LIMIT = 500  # characters
_HOST_REMEDIES = {
    build_result.BuildReason.DEADLINE_EXCEEDED: (
        "allow more time: --build-timeout TIME, --push-timeout TIME"
    ),
    build_result.BuildReason.DISK_FULL: "free disk space below DIR",
    build_result.BuildReason.REGISTRY_FULL: (
        "free disk space below DIR, or set a higher limit with --registry-storage-limit"
    ),
    build_result.BuildReason.OUT_OF_MEMORY: (
        "free memory on this host, or reduce what the instruction needs"
    ),
    build_result.BuildReason.EVICTED: "free memory on this host: the build was killed",
    build_result.BuildReason.BUILDER_FAILED: (
        "check that buildah is installed, and that this host allows user namespaces: "
        "sysctl user.max_user_namespaces"
    ),
}
"""Remedies on this host, where those of Jobs do not help."""
_FINAL = frozenset({
    build_result.BuildReason.BASE_LOGIN_REFUSED,
    build_result.BuildReason.PUSH_LOGIN_REFUSED,
    build_result.BuildReason.DEADLINE_EXCEEDED,
})  # fmt: skip
"""Reasons that no attempt ends: only a user changes Secrets of a directory, and time limits.

In a cluster other programs replace logins, so that the build controller tries again.
"""
_BUILD_FACTOR = 4
"""Space of a build, in sizes of the compressed base: as it is pulled, unpacked and built."""


class PoolBuildError(errors.TreenailError):
    """The image of a pool cannot be built."""


@dataclass(frozen=True, slots=True)
class PoolImageInputs:
    """The pool, and what its build reads."""

    config: machineosconfig.MachineOSConfig
    pool: machineconfigpool.MachineConfigPool
    """Its configuration names the rendered config."""
    objects: cluster_reader.ObjectGetter
    """Has the rendered config, the ControllerConfig, Secrets and ConfigMaps."""
    namespace: str = ""
    """Of Secrets and ConfigMaps; `objects` may look in other ones, too."""
    architecture: str = ""
    """Of the pool's nodes; empty for that of this host."""
    mirror_rules: tuple[image_mirrors.MirrorRule, ...] = ()
    """Mirrors of registries beside those of the rendered config."""


def get_host_architecture() -> str:
    """Return the architecture of this host, as in the label ``kubernetes.io/arch``."""
    return node.convert_machine_name(platform.machine())


def get_object_path(directory: install_files.InstallDirectory, pool: str) -> Path:
    """Return the file with the MachineOSBuild of a pool."""
    return directory.cluster_objects / f"machineosbuild-{pool}.json"


def read_built_image(
    directory: install_files.InstallDirectory, files: install_files.InstallFiles, pool: str
) -> built_image.BuiltPoolImage | None:
    """Return the image of a pool that was built; None before. Raises `FileError`, `ConfigError`."""
    path = get_object_path(directory, pool)
    content = files.read(path, limit=OBJECT_LIMIT)
    return None if content is None else built_image.decode_built_image(content, where=str(path))


class PoolImageBuilder:
    """Builds images of pools into the bootstrap registry, or into the final one without it."""

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        registry: build_attempt.PushRegistry | None,
        settings: build_attempt.PoolBuildSettings,
        clock: clocks.Clock,
        files: install_files.InstallFiles,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._files = files
        self._options = build_inputs.list_builder_options(driver=settings.driver)

    def build_pool_image(
        self, inputs: PoolImageInputs, context: install_steps.StepContext
    ) -> built_image.BuiltPoolImage:
        """Build and push the image of a pool, and write its MachineOSBuild for the cluster.

        An image of equal inputs that the registry has is not built again. A failed attempt is
        repeated as by the build controller, at the latest until the step's time limit. Raises
        `PoolBuildError`, and `StepOverdueError` while it waits.
        """
        pool, began = inputs.pool.name, self._clock.now()
        planned, layers, base = self._plan_build(inputs)
        if known := self._find_built(planned, layers):
            log.info("image of pool %s is built already: %s", pool, known.pull_spec)
            return known
        self._check_space(planned, layers)
        builder = build_attempt.SystemImageBuilder(
            self._directory.builds, self._settings, self._registry, self._clock, self._files
        )
        attempt = build_attempt.BuildAttempt(planned, layers, builder)
        result, report = self._run_attempts(planned, attempt, context)
        if self._registry is not None:
            # Before the record of the build: an image that is recorded is not built again.
            self._registry.sync_storage()
        document = built_image.make_built_object(
            planned.plan.wanted,
            planned.config,
            result.systems,
            result.image,
            report,
            built_image.BuildTimes(began, self._clock.now()),
            base,
        )
        path = get_object_path(self._directory, pool)
        content = built_image.encode_built_object(document)
        self._files.write(path, content)
        builder.discard(planned)
        built = built_image.decode_built_image(content, where=str(path))
        log.info("built the image of pool %s: %s", pool, built.pull_spec)
        return built

    def plan_image(self, inputs: PoolImageInputs) -> build_planner.BuildPlan:
        """Return the plan; raise `PoolBuildError`. The tag of a base is resolved once."""
        return self._plan_build(inputs)[0].plan

    def find_image(self, inputs: PoolImageInputs) -> built_image.BuiltPoolImage | None:
        """Return the image of these inputs if it is built; raise `PoolBuildError`."""
        planned, layers, _ = self._plan_build(inputs)
        return self._find_built(planned, layers)

    # Planning

    def _plan_build(
        self, inputs: PoolImageInputs
    ) -> tuple[build_attempt.PlannedImage, layer_builder.LayerBuilder, image_tags.TagRecord | None]:
        """Plan the build; return also how the tag of the base image was resolved."""
        reader = cluster_reader.ClusterReader(
            inputs.objects, self._clock, namespace=inputs.namespace
        )
        planner = build_planner.BuildPlanner(
            reader, options=self._options, mirror_rules=inputs.mirror_rules
        )
        pool = inputs.pool.name
        architecture = inputs.architecture or get_host_architecture()
        config, base = inputs.config, None
        try:
            layers = self._make_layer_builder(planner, config)
            if image_tags.is_tag(config.base_image):
                mirrors = planner.read_mirrors(inputs.pool.configuration.name)
                resolver = tag_resolver.TagResolver(
                    reader,
                    self._clock,
                    proxies=read_proxy_settings(self._settings.environ),
                    mirrors=mirrors,
                )
                base = self._resolve_base(config, architecture, resolver)
                config = _record_base(config, base)
            plan = planner.plan_build(config, inputs.pool, frozenset({architecture}))
            problem = planner.check_secrets(config)
            context, mounts = build_planner.read_build_files(reader, plan)
        except build_planner.BuildRefused as error:
            raise _make_refusal(pool, error.problem) from error
        except errors.ConfigError as error:
            raise _make_error(
                pool, input_checks.InputReason.CONFIG_INVALID, str(error), error.remedy
            ) from error
        if problem is not None:
            raise _make_refusal(pool, problem)
        return build_attempt.PlannedImage(plan, config, planner, context, mounts), layers, base

    def _make_layer_builder(
        self, planner: build_planner.BuildPlanner, config: machineosconfig.MachineOSConfig
    ) -> layer_builder.LayerBuilder:
        """Make the builder of the config layer; the bootstrap registry has the final names."""
        endpoints = {}
        if (registry := self._registry) is not None:
            spec = pullspec.parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
            endpoints[f"{spec.registry}/{spec.repository}"] = layer_builder.RegistryEndpoint(
                registry.push_address, registry.push_login, registry.ca_pem
            )
        return layer_builder.LayerBuilder(
            planner,
            self._clock,
            proxies=read_proxy_settings(self._settings.environ),
            endpoints=endpoints,
        )

    def _resolve_base(
        self,
        config: machineosconfig.MachineOSConfig,
        architecture: str,
        resolver: tag_resolver.TagResolver,
    ) -> image_tags.TagRecord:
        """Resolve the tag of the base image, once: later runs use the record of the first one."""
        pool = config.pool
        path = self._directory.builds / f"base-{pool}.json"
        known = self._files.read(path, limit=OBJECT_LIMIT)
        if known is not None:
            record = image_tags.decode_base_record(known.decode("utf-8", "replace"))
            if record is not None and record.tag == config.base_image:
                return record
        tag = config.base_image
        answer = resolver.resolve_tag(tag, frozenset({architecture}), config.base_pull_secret)
        if answer.failure is not None:
            failure = answer.failure
            raise _make_error(
                pool, failure.reason, failure.message, build_result.REMEDIES[failure.reason]
            )
        record = image_tags.make_tag_record(tag, answer)
        self._files.write(path, image_tags.encode_base_record(record).encode())
        return record

    def _find_built(
        self, planned: build_attempt.PlannedImage, layers: layer_builder.LayerBuilder
    ) -> built_image.BuiltPoolImage | None:
        """Return the image of an earlier run with equal inputs, if the registry has it."""
        wanted = planned.plan.wanted
        try:
            known = read_built_image(self._directory, self._files, planned.config.pool)
        except errors.ConfigError as error:
            log.warning("building the image of pool %s again: %s", planned.config.pool, error)
            return None
        if known is None or (known.build_name, known.key, known.push_spec, known.architectures) != (
            wanted.name, wanted.content_key, wanted.push_spec, wanted.architectures,
        ):  # fmt: skip
            return None
        try:
            is_complete = layers.has_complete_image(known.pull_spec, planned.config)
        except layer_builder.AttemptFailed as error:
            log.warning("cannot look up %s: %s", known.pull_spec, error.failure.message)
            return None
        return known if is_complete else None

    def _check_space(
        self, planned: build_attempt.PlannedImage, layers: layer_builder.LayerBuilder
    ) -> None:
        """Raise `PoolBuildError` before a build that cannot have enough space."""
        pool, base_bytes = planned.config.pool, layers.measure_base(planned.plan, planned.config)
        if self._registry is not None:
            try:
                self._registry.check_room(base_bytes)
            except errors.HostError as error:
                raise _make_error(
                    pool, build_result.BuildReason.REGISTRY_FULL, str(error), error.remedy
                ) from error
        if not planned.plan.wanted.needs_job:
            return
        path = self._directory.builds
        self._files.make_directory(path)
        free, needed = shutil.disk_usage(path).free, base_bytes * _BUILD_FACTOR
        if free < needed:
            raise _make_error(
                pool,
                build_result.BuildReason.DISK_FULL,
                f"the file system of {path} has {memory.format_bytes(free)} free, and a "
                f"build on this base image needs {memory.format_bytes(needed)}",
                f"free space below {path}",
            )

    # Attempts

    def _run_attempts(
        self,
        planned: build_attempt.PlannedImage,
        attempt: build_attempt.BuildAttempt,
        context: install_steps.StepContext,
    ) -> tuple[build_attempt.AttemptResult, build_facts.BuildReport]:
        """Run attempts until one succeeds, or until none is left."""
        report = build_facts.BuildReport()
        while True:
            outcome = self._run_attempt(planned, attempt, report.attempts + 1, context)
            if isinstance(outcome, build_attempt.AttemptResult):
                kept = replace(
                    report, retry_at=None, seconds=outcome.seconds, warning=outcome.warning
                )
                return outcome, kept
            report = decide.count_failure(report, outcome, self._clock.now())
            if report.retry_at is None or outcome.reason in _FINAL:
                raise self._make_failure(planned, outcome, report.attempts)
            context.report(self._format_retry(outcome, report.attempts, report.retry_at))
            try:
                while (left_s := report.retry_at - self._clock.now()) > 0:
                    context.wait(min(left_s, _WAIT_S))
            except install_steps.StepOverdueError as error:
                # Users need the reason more than the time limit.
                failed = self._make_failure(planned, outcome, report.attempts)
                remedy = "; ".join(filter(None, (failed.remedy, error.remedy)))
                text = f"{failed}, and the time limit has passed"
                raise PoolBuildError(text, remedy=remedy) from error

    def _run_attempt(
        self,
        planned: build_attempt.PlannedImage,
        attempt: build_attempt.BuildAttempt,
        number: int,
        context: install_steps.StepContext,
    ) -> build_attempt.AttemptResult | build_result.AttemptFailure:
        plan, pool = planned.plan, planned.config.pool
        attempt_log = build_attempt.AttemptLog(self._directory, self._files, pool)
        began = self._clock.now()
        what = "building" if plan.wanted.needs_job else "adding the config to the base image"
        context.report(f"{what}: log in {attempt_log.path}")
        outcome: build_attempt.AttemptResult | build_result.AttemptFailure
        try:
            outcome = attempt.run(number, attempt_log)
        except layer_builder.AttemptFailed as error:
            outcome = self._check_registry(error.failure)
        finally:
            attempt_log.close()
        failure = outcome if isinstance(outcome, build_result.AttemptFailure) else None
        attempt_log.write_report({
            "attempt": number,
            "pool": pool,
            "machineOSBuild": plan.wanted.name,
            "contentKey": plan.wanted.content_key,
            "began": clocks.format_rfc3339(began),
            "ended": clocks.format_rfc3339(self._clock.now()),
            "image": outcome.image if isinstance(outcome, build_attempt.AttemptResult) else "",
            "reason": failure.reason.value if failure else "",
            "message": failure.message if failure else "",
            "line": failure.line if failure else 0,
            "output": failure.log if failure else "",
            "seconds": {name: round(value, 3) for name, value in outcome.seconds.items()},
        })  # fmt: skip
        return outcome

    def _check_registry(self, failure: build_result.AttemptFailure) -> build_result.AttemptFailure:
        """Name the cause if the bootstrap registry refuses pushes."""
        problem = self._registry.find_problem() if self._registry is not None else ""
        if not problem:
            return failure
        return build_result.AttemptFailure(
            build_result.BuildReason.REGISTRY_FULL, f"the bootstrap registry is full: {problem}"
        )

    def _format_retry(
        self, failure: build_result.AttemptFailure, attempts: int, retry_at: float
    ) -> str:
        cause = f"{failure.reason}: {_format_place(failure)}{failure.message}"
        return (
            f"attempt {attempts} failed: {cause[:_CAUSE_LIMIT]}; next attempt at "
            f"{clocks.format_rfc3339(retry_at)}; {self._find_remedy(failure.reason)}"
        )

    def _find_remedy(self, reason: build_result.BuildReason) -> str:
        """Return the remedy on this host, which differs from that of a Job."""
        if reason is build_result.BuildReason.REGISTRY_FULL and self._registry is None:
            return build_result.REMEDIES[reason]
        remedy = _HOST_REMEDIES.get(reason)
        if remedy is None:
            return build_result.REMEDIES[reason]
        return remedy.replace("DIR", str(self._directory.private))

    def _make_failure(
        self,
        planned: build_attempt.PlannedImage,
        failure: build_result.AttemptFailure,
        attempts: int,
    ) -> PoolBuildError:
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        remedy = self._find_remedy(failure.reason)
        if (hidden := planned.plan.wanted.instruction_remedy) and (
            failure.reason is build_result.BuildReason.INSTRUCTION_FAILED
        ):
            remedy += f"; {hidden}"
        again = f"treenail-controller install bootstrap --dir {self._directory.root}"
        return _make_error(
            planned.config.pool,
            failure.reason,
            f"{_format_place(failure)}{failure.message}{tried}",
            f"{remedy}; then run: {again}",
        )


def _format_place(failure: build_result.AttemptFailure) -> str:
    return f"line {failure.line} of the Containerfile: " if failure.line else ""


def _record_base(
    config: machineosconfig.MachineOSConfig, record: image_tags.TagRecord
) -> machineosconfig.MachineOSConfig:
    """Return the MachineOSConfig with the record that the build controller would write."""
    meta = config.metadata
    notes = {**meta.annotations, key.RESOLVED_BASE: image_tags.encode_base_record(record)}
    recorded = replace(config, metadata=replace(meta, annotations=notes))
    return image_tags.pin_base_image(recorded)


def _make_refusal(pool: str, problem: image_tags.ImageProblem) -> PoolBuildError:
    return _make_error(pool, problem.reason, problem.message, "")


def _make_error(pool: str, reason: str, cause: str, remedy: str) -> PoolBuildError:
    return PoolBuildError(
        f"cannot build the image of pool {pool}: {reason}: {cause}", remedy=remedy
    )


def make_build_inputs(
    manifests: install_manifests.InstallManifests,
    pools: Sequence[install_manifests.RenderedPool],
    name: str,
    *,
    namespace: str = component_names.NAMESPACE,
    architecture: str = "",
) -> PoolImageInputs:
    """Return the inputs of the build for pool ``name``.

    ``namespace`` is that of builds in the future cluster.
    """
    documents = {pool.rendered.name: pool.rendered.config.to_json() for pool in pools}
    return PoolImageInputs(
        next(config for config in manifests.image_configs.values() if config.pool == name),
        next(pool.pool for pool in pools if pool.pool.name == name),
        manifest_checks.InstallObjects(manifests, documents),
        namespace,
        architecture,
        manifests.mirror_rules,
    )
