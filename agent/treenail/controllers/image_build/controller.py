"""Build controller: watches, threads and writes of image builds.

`treenail.controllers.image_build.decide` decides. The keys are MachineOSConfigs, so that two events
for one of them become one turn, and no pool waits for another one's build. `make_build_controller`
connects the controller with the builders of the two parts of an image.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import machineosbuild, machineosconfig
from treenail.builder.images.attachments import SigningKey
from treenail.controllers.image_build import (
    build_facts,
    build_objects,
    build_planner,
    cluster_reader,
    decide,
    job_builder,
    layer_builder,
    status,
    tag_resolver,
    writer,
)
from treenail.controllers.image_build.pruner import ImagePruner, ReferenceReader
from treenail.controllers.pools import image_tags, os_image, registry_requests
from treenail.controllers.runtime import controller_metrics, informer_set, own_writes
from treenail.image import build_inputs, input_checks
from treenail.kube import api_client, event_recorder, lease, resources
from treenail.registry.transport import RegistryLimits

log = logging.getLogger(__name__)

MAX_ROUNDS = 12
"""Decisions of one turn. Each sees the writes of the one before."""
_BUSY_RETRY_S = 0.2
_STALE_RETRY_S = 1.0
_ROLE_REMEDY = (
    "apply the output of treenail-controller manifests again, with the options of the installation"
)
_NEEDED_KINDS = frozenset(
    resource.plural
    for resource in (
        resources.MACHINEOSCONFIGS,
        resources.MACHINEOSBUILDS,
        resources.MACHINECONFIGPOOLS,
        resources.JOBS,
        resources.PODS,
    )
)
SOFT_REASONS = frozenset({input_checks.InputReason.POOL_DEGRADED})
"""Findings that let a running build continue."""
FindHoldReason = Callable[[str], str]
"""Returns why the first build of a pool must wait; empty if it can begin. Raises `ClusterError`."""


def find_no_hold_reason(_pool: str) -> str:
    """Let every build begin."""
    return ""


@dataclass(frozen=True, slots=True)
class BuildDependencies:
    """Collaborators of the controller."""

    planner: build_planner.BuildPlanner
    jobs: job_builder.JobBuilder
    layers: layer_builder.LayerBuilder
    tags: registry_requests.TagSource
    events: writer.BuildEvents
    pruner: ImagePruner | None = None
    """Deletes images that nothing refers to; None leaves all."""
    find_hold_reason: FindHoldReason = find_no_hold_reason


class BuildController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are MachineOSConfigs."""

    name = "build"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        dependencies: BuildDependencies,
        *,
        namespace: str,
        metrics: controller_metrics.ControllerMetrics | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._dependencies = dependencies
        self._namespace = namespace
        self._executor = ThreadPoolExecutor(
            registry_requests.MAX_PARALLEL, thread_name_prefix="build-registry"
        )
        self._own_configs: own_writes.OwnWrites[machineosconfig.MachineOSConfig] = (
            own_writes.OwnWrites(clock)
        )
        self._own_builds: own_writes.OwnWrites[machineosbuild.MachineOSBuild] = (
            own_writes.OwnWrites(clock)
        )
        self._own_job_deletions = own_writes.OwnDeletions(clock)
        self._writer = writer.BuildWriter(
            client, clock, self._own_configs, self._own_builds, namespace=namespace
        )
        self._views = cluster_reader.BuildViews(namespace)
        self._metrics = (
            None if metrics is None else writer.BuildMetrics(metrics, self._read_objects)
        )
        self._tag_metrics = (
            None if metrics is None else registry_requests.TagMetrics(metrics, "base_image")
        )
        self._facts: dict[str, tuple[str, build_facts.BuildFacts]] = {}
        self._refusals: dict[str, str] = {}
        """The last refused write of each MachineOSConfig. Only its worker accesses it."""
        self._requests: registry_requests.RegistryRequests[build_facts.Question]
        self._informers: informer_set.InformerSet

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch the objects of builds, and the Jobs and pods in the namespace of builds."""
        self._informers = informers
        self._requests = registry_requests.RegistryRequests(self._executor, self._clock, enqueue)
        self._views.register_watches(informers, enqueue)
        if self._dependencies.pruner is not None:
            self._dependencies.pruner.start(self._executor, enqueue)

    def sync_key(self, key: str) -> float | None:
        """Decide and write until nothing is left; raise `ClusterError` to try again."""
        if reason := self._informers.describe_staleness(_NEEDED_KINDS):
            # A build or Job that a stale list lacks would be created again, or count as deleted.
            # A pool's config from before an etcd restore would interrupt the restored build.
            log.debug("build: waiting: %s", reason)
            return _STALE_RETRY_S
        try:
            delay_s = self._sync_config(key)
        except (errors.ForbiddenError, errors.InvalidError) as error:
            # Of a role, a quota or an admission webhook. Only a user can change that.
            self._refusals[key] = str(error)
            self._report_refusal(key)
            raise
        if self._refusals.pop(key, ""):
            return _BUSY_RETRY_S
        return delay_s

    def _sync_config(self, key: str) -> float | None:
        for _ in range(MAX_ROUNDS):
            objects = self._find_objects(key)
            if objects is None or objects.config.is_deleting:
                self._requests.keep_answers(key, lambda _: False)
                return None
            base = self._decide_base(objects)
            if base.write is not None or base.drops_record:
                self._record_base(objects.config, base)
                continue
            if base.is_waiting:
                return None
            plan, situation = self._observe_situation(objects, base)
            decision = decide.decide_builds(situation)
            writes = [
                action
                for action in decision.actions
                if not isinstance(action, build_facts.CallRegistry)
            ]
            for action in decision.actions:
                self._execute_action(action, key, plan)
            if not writes:
                delays = (
                    decision.requeue_after_s,
                    base.requeue_after_s,
                    self._prune_images(objects),
                    decide.IMAGE_CHECK_S if objects.config.pull_spec else None,
                )
                return min((delay for delay in delays if delay is not None), default=None)
        return _BUSY_RETRY_S

    def _report_refusal(self, key: str) -> None:
        """Write the refusal to the conditions of the MachineOSConfig, if that is permitted."""
        if (objects := self._find_objects(key)) is None or objects.config.is_deleting:
            return
        self._dependencies.events.record_refusal(objects.config, self._refusals[key])
        with suppress(errors.ClusterError):
            _, situation = self._observe_situation(objects, self._decide_base(objects))
            for action in decide.decide_builds(situation).actions:
                if isinstance(action, build_facts.SetConfigStatus):
                    self._writer.execute(action, objects)

    def close(self) -> None:
        """Stop the threads that ask registries."""
        # A registry that hangs must not delay the end of the process.
        self._executor.shutdown(wait=False, cancel_futures=True)

    # Observation

    def _read_objects(
        self,
    ) -> tuple[
        Iterable[machineosconfig.MachineOSConfig], Mapping[str, machineosbuild.MachineOSBuild]
    ]:
        return self._views.configs.get_all().values(), self._views.builds.get_all()

    def _make_facts(
        self, builds: Mapping[str, machineosbuild.MachineOSBuild]
    ) -> list[build_facts.BuildFacts]:
        """Return the facts of all builds; those of an unchanged one are computed once."""
        facts = []
        for name, build in builds.items():
            version = build.metadata.resource_version
            known = self._facts.get(name)
            if known is None or known[0] != version:
                known = (version, build_objects.make_build_facts(build))
                self._facts[name] = known
            facts.append(known[1])
        if len(self._facts) > 2 * len(builds) + 16:
            self._facts = {name: self._facts[name] for name in builds if name in self._facts}
        return facts

    def _find_objects(self, name: str) -> writer.CachedObjects | None:
        config = self._own_configs.overlay(self._views.configs).get(name)
        if config is None:
            return None
        builds = self._own_builds.overlay(self._views.builds)
        return writer.CachedObjects(config, builds, self._views.pools.find(config.pool))

    def _decide_base(self, objects: writer.CachedObjects) -> image_tags.TagDecision:
        """Decide about the tag of the base image, and ask its registry if necessary."""
        config = objects.config
        try:
            facts = image_tags.make_base_facts(config)
        except errors.ConfigError as error:
            return image_tags.TagDecision(
                problem=image_tags.ImageProblem(
                    input_checks.InputReason.ANNOTATION_INVALID, str(error)
                )
            )
        tags, secret = self._dependencies.tags, config.base_pull_secret
        try:
            login = tags.compute_access_version(secret) if facts.is_unresolved else ""
        except errors.ConfigError as error:
            # Of the ControllerConfig: its CAs are needed before the tag can be resolved.
            message = f"cannot resolve the base image: {error}"
            return image_tags.TagDecision(
                problem=image_tags.ImageProblem(input_checks.InputReason.CONFIG_INVALID, message)
            )
        except errors.ForbiddenError as error:
            return image_tags.TagDecision(problem=_describe_refused_read(error))
        self._requests.keep_answers(
            config.name,
            lambda asked: not isinstance(asked, image_tags.TagQuestion) or facts.concerns(asked),
        )
        answers = {
            asked: answer
            for asked, answer in self._requests.get_answers(config.name).items()
            if isinstance(asked, image_tags.TagQuestion)
        }
        base = image_tags.decide_base(facts, answers, self._clock.now(), login=login)
        if (question := base.question) is not None:
            architectures = frozenset(
                build_planner.choose_architectures(self._find_architectures(objects))
            )
            self._requests.ask(
                config.name,
                question.image,
                question,
                lambda: tags.resolve_tag(question.image, architectures, secret),
            )
        return base

    def _record_base(
        self, config: machineosconfig.MachineOSConfig, base: image_tags.TagDecision
    ) -> None:
        """Store the decision, then report what changed for users."""
        text = "" if base.write is None else image_tags.encode_base_record(base.write)
        self._writer.record_base(config, text)
        if base.change is None:
            return
        self._dependencies.events.record_tag_change(config, base.change)
        if self._tag_metrics is not None:
            self._tag_metrics.record_change(base.change, config.pool)

    def _observe_situation(
        self, objects: writer.CachedObjects, base: image_tags.TagDecision
    ) -> tuple[build_planner.BuildPlan | None, build_facts.BuildSituation]:
        config = objects.config
        plan, problem = self._plan_build(objects, base.problem)
        all_builds = self._make_facts(objects.builds)
        own = tuple(build for build in all_builds if build.image_config == config.name)
        wanted = None if plan is None else plan.wanted
        if plan is not None and problem is None and _needs_secrets(own, plan):
            problem = self._check_secrets(config)
        share_keys = frozenset[str]() if wanted is None else wanted.share_keys
        running = [build for build in all_builds if not build.has_ended]
        own_uids = {build.uid for build in own}
        self._requests.keep_answers(
            config.name,
            lambda asked: isinstance(asked, image_tags.TagQuestion) or asked.build in own_uids,
        )
        condition = next(
            (
                condition
                for condition in (() if objects.pool is None else objects.pool.conditions)
                if condition.type == "ImageBuildDegraded"
            ),
            None,
        )
        uids = frozenset(build.uid for build in all_builds)
        is_first = not (config.pull_spec or config.pre_built_image)
        situation = build_facts.BuildSituation(
            config=build_objects.make_config_facts(config, holds_rebuild=base.holds_rebuild),
            now=self._clock.now(),
            wanted=wanted,
            problem=problem,
            hold_reason=self._dependencies.find_hold_reason(config.pool) if is_first else "",
            builds=own,
            jobs=tuple(self._observe_jobs(config.name, share_keys, own, uids)),
            needed_keys=frozenset(
                share_key
                for build in running
                if build.image_config != config.name
                for share_key in build.share_keys
            ),
            system_images=build_planner.find_system_images(
                all_builds, share_keys, build_planner.find_pushed_systems(config, plan)
            ),
            answers=self._requests.get_answers(config.name),
            pool_condition=condition,
            base_condition=base.condition,
            refusal=self._refusals.get(config.name, ""),
        )
        return plan, situation

    def _find_architectures(self, objects: writer.CachedObjects) -> frozenset[str]:
        """Return the architectures of the pool's nodes; without a node, those of its image."""
        present = self._views.find_architectures(objects.config.pool)
        current = objects.builds.get(objects.config.current_build)
        return present or frozenset(
            () if current is None else build_objects.read_architectures(current)
        )

    def _plan_build(
        self, objects: writer.CachedObjects, base: image_tags.ImageProblem | None
    ) -> tuple[build_planner.BuildPlan | None, image_tags.ImageProblem | None]:
        """Return the plan, and why it must not begin."""
        config, pool = objects.config, objects.pool
        owner = os_image.find_pool_owner(config.pool, self._views.configs.get_all().values())
        findings = list(input_checks.find_pool_findings(config, pool, owner))
        hard = next((finding for finding in findings if finding.reason not in SOFT_REASONS), None)
        if hard is not None or pool is None:
            return None, _describe_problem(hard or findings[0])
        if base is not None:
            return None, base
        try:
            plan = self._dependencies.planner.plan_build(
                config, pool, self._find_architectures(objects), objects.has_ended
            )
        except build_planner.BuildRefused as error:
            return None, error.problem
        except (errors.ConfigError, errors.NotFoundError) as error:
            return None, image_tags.ImageProblem(
                input_checks.InputReason.CONFIG_INVALID, f"cannot plan the build: {error}"
            )
        except errors.ForbiddenError as error:
            return None, _describe_refused_read(error)
        return plan, next(map(_describe_problem, findings), None)

    def _check_secrets(
        self, config: machineosconfig.MachineOSConfig
    ) -> image_tags.ImageProblem | None:
        try:
            return self._dependencies.planner.check_secrets(config)
        except errors.ForbiddenError as error:
            return _describe_refused_read(error)

    def _observe_jobs(
        self,
        name: str,
        share_keys: frozenset[str],
        builds: tuple[build_facts.BuildFacts, ...],
        uids: frozenset[str],
    ) -> list[build_facts.JobFacts]:
        own_uids = {build.uid for build in builds}
        jobs = {job.facts.name: job for job in self._views.jobs.get_all().values()}
        for build in builds:
            # A Job that the watch does not show yet must not count as deleted.
            for recorded in (system.job for system in build.systems.values() if not system.image):
                if not build.has_ended and recorded and recorded not in jobs:
                    self._add_live_job(recorded, jobs)
        pods = list(self._views.pods.get_all().values())
        uids_shown = {job.facts.uid for job in jobs.values()}
        deleted = self._own_job_deletions.find_hidden(self._views.jobs, uids_shown)
        observed_jobs = []
        for job in jobs.values():
            facts = job.facts
            is_own = facts.image_config == name or own_uids & set(facts.owners)
            if is_own or facts.share_key in share_keys:
                observed = build_objects.make_job_facts(job, pods, uids)
                if observed.has_unknown_end:
                    observed = build_objects.make_job_facts(
                        job, self._list_live_pods(facts.name), uids
                    )
                is_deleting = observed.is_deleting or facts.uid in deleted
                observed_jobs.append(replace(observed, is_deleting=is_deleting))
        return observed_jobs

    def _add_live_job(self, name: str, jobs: dict[str, build_objects.ObservedJob]) -> None:
        try:
            document = self._client.get(resources.JOBS, name, namespace=self._namespace)
        except errors.NotFoundError:
            return
        jobs[name] = build_objects.ObservedJob.from_json(document)

    def _list_live_pods(self, job: str) -> list[build_objects.ObservedPod]:
        """List the pods of a Job that ended before the watch showed the end of its pods."""
        params = {"labelSelector": f"{key.BUILD_KEY}"}
        listed = self._client.list(resources.PODS, namespace=self._namespace, params=params).items
        pods = [build_objects.ObservedPod.from_json(document) for document in listed]
        return [pod for pod in pods if pod.job == job]

    # Writes

    def _prune_images(self, objects: writer.CachedObjects) -> float | None:
        """Delete images of deleted builds from the registry; return when to try again."""
        config, pruner = objects.config, self._dependencies.pruner
        if pruner is None:
            return None
        name = config.name
        builds = [build for build in objects.builds.values() if build.image_config == name]
        if unrecorded := build_objects.find_unrecorded_images(config, builds):
            self._writer.record_images(config, unrecorded)
            return _BUSY_RETRY_S
        gone = pruner.get_gone_images(name)
        if gone:
            self._writer.forget_images(config, gone)
            pruner.forget_images(name, gone)
            return _BUSY_RETRY_S
        condition = status.make_prune_condition(config.conditions, pruner.get_problem(name))
        if condition is not None:
            self._writer.execute(build_facts.SetConfigStatus((condition,)), objects)
            return _BUSY_RETRY_S
        return pruner.consider(config, build_objects.find_prune_candidates(config, builds))

    def _execute_action(
        self, action: build_facts.BuildAction, name: str, plan: build_planner.BuildPlan | None
    ) -> None:
        objects = self._find_objects(name)
        if objects is None:
            return
        match action:
            case build_facts.CallRegistry(question):
                if plan is not None and not isinstance(question, image_tags.TagQuestion):
                    ready = plan
                    self._requests.ask(
                        name,
                        _get_image(question),
                        question,
                        lambda: self._dependencies.layers.run_request(
                            question, ready, objects.config
                        ),
                    )
            case build_facts.CreateJob(system, build, attempt):
                if plan is not None:
                    is_first = self._views.has_only_control_plane()
                    self._dependencies.jobs.start_attempt(
                        replace(plan, can_use_control_plane=is_first),
                        plan.get_system(system.name),
                        objects.config,
                        objects.builds[build],
                        attempt,
                    )
            case build_facts.AdoptJob(job, build):
                self._dependencies.jobs.adopt_attempt(job, objects.builds[build])
            case build_facts.DeleteJob(job, why, has_inputs):
                self._dependencies.jobs.end_attempt(job, has_inputs=has_inputs)
                self._own_job_deletions.record_deletion(job.uid)
                log.info("deleted Job %s: %s", job.name, why)
            case _:
                self._writer.execute(action, objects)
                if isinstance(action, build_facts.SetBuildStatus):
                    self._record_status(action, objects)

    def _record_status(
        self, action: build_facts.SetBuildStatus, objects: writer.CachedObjects
    ) -> None:
        build, config = objects.builds[action.build], objects.config
        if action.digest and self._dependencies.pruner is not None:
            self._dependencies.pruner.request(config.name)
        self._dependencies.events.record_status(action, build, config)
        if self._metrics is None:
            return
        self._metrics.record_status(action, build, config.pool, self._clock.now())
        push_s = build_objects.make_build_facts(build).report.seconds.get("push")
        if action.digest and push_s is not None:
            self._metrics.record_push(config.pool, push_s)


def _get_image(
    question: build_facts.CheckImage | build_facts.CheckPush | build_facts.AppendConfig,
) -> str:
    """Return the image that a question concerns most: the one that is pushed."""
    return question.push_spec if isinstance(question, build_facts.AppendConfig) else question.image


def _describe_refused_read(error: errors.ForbiddenError) -> image_tags.ImageProblem:
    message = f"cannot plan the build: {error}; {_ROLE_REMEDY}"
    return image_tags.ImageProblem(input_checks.InputReason.REQUEST_REFUSED, message)


def _describe_problem(finding: input_checks.InputFinding) -> image_tags.ImageProblem:
    return image_tags.ImageProblem(finding.reason, str(finding))


def _needs_secrets(
    builds: tuple[build_facts.BuildFacts, ...], plan: build_planner.BuildPlan
) -> bool:
    build = next((build for build in builds if build.name == plan.wanted.name), None)
    return build is None or not build.has_ended


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Settings that an installation may choose."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Has the proxy of a cluster whose ControllerConfig names none."""
    signing_key: SigningKey | None = None
    limits: RegistryLimits | None = None
    """Of requests that add the config to an image."""
    find_hold_reason: FindHoldReason = find_no_hold_reason
    late_writes: lease.LateWrites | None = None
    """None for a process that always leads."""


def make_build_controller(
    client: api_client.Client,
    clock: clocks.Clock,
    recorder: event_recorder.EventRecorder,
    metrics: controller_metrics.ControllerMetrics,
    settings: job_builder.JobSettings,
    options: BuildOptions | None = None,
) -> BuildController:
    """Make the controller; its Jobs are in the namespace of the settings."""
    chosen = options or BuildOptions()
    reader = cluster_reader.ClusterReader(
        client, clock, namespace=settings.namespace, environ=chosen.environ
    )
    planner = build_planner.BuildPlanner(
        reader, options=build_inputs.list_builder_options(has_cache=bool(settings.cache_repository))
    )
    repository_lock, events = layer_builder.RepositoryLock(), writer.BuildEvents(recorder)
    dependencies = BuildDependencies(
        planner,
        job_builder.JobBuilder(client, planner, settings, chosen.late_writes),
        layer_builder.LayerBuilder(
            planner,
            clock,
            signing_key=chosen.signing_key,
            limits=chosen.limits,
            repository_lock=repository_lock,
        ),
        tag_resolver.TagResolver(reader, clock, limits=chosen.limits),
        events,
        ImagePruner(planner, ReferenceReader(client, reader), events, clock, repository_lock),
        chosen.find_hold_reason,
    )
    return BuildController(
        client, clock, dependencies, namespace=settings.namespace, metrics=metrics
    )
