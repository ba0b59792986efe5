"""Decide the next writes for the system part of a build, and which builds and Jobs to delete.

The system part is decided for one architecture at a time. All functions are pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.machineosbuild import BuildState
from treenail.controllers.image_build import build_facts, status
from treenail.controllers.pools import image_tags
from treenail.image import build_result

KEPT_BUILDS = 3
"""Ended builds that a MachineOSConfig keeps beside the current one, the newest ones."""
_ENDED = "all of its builds have ended"


def find_job_deletions(
    situation: build_facts.BuildSituation,
    builds: Sequence[build_facts.BuildFacts],
    actions: Iterable[build_facts.BuildAction],
) -> tuple[build_facts.DeleteJob, ...]:
    """Find Jobs that no build needs. The last Job of a failed build stays for its logs.

    That of an interrupted build does not stay, even if it ended just before the interruption: the
    Secrets of a Job are copies of logins.

    ``builds`` are the builds of the MachineOSConfig as they are after the ``actions``.
    """
    needed = {
        share_key for build in builds if not build.has_ended for share_key in build.share_keys
    }
    needed |= situation.needed_keys
    wanted = situation.wanted
    if wanted is not None and all(build.name != wanted.name for build in builds):
        # The build that takes the Job over is not created yet.
        needed |= wanted.share_keys
    deleted = {action.job.name for action in actions if isinstance(action, build_facts.DeleteJob)}
    reasons = (
        (job, _find_reason(job, situation.config.name, builds, frozenset(needed)))
        for job in situation.jobs
        if not job.is_deleting and job.name not in deleted
    )
    return tuple(build_facts.DeleteJob(job, why, why == _ENDED) for job, why in reasons if why)


def _find_reason(
    job: build_facts.JobFacts,
    image_config: str,
    builds: Sequence[build_facts.BuildFacts],
    needed: frozenset[str],
) -> str:
    """Return why a Job must be deleted now; empty while it must stay."""
    own = [build for build in builds if build.uid in job.owners]
    if job.is_orphan:
        return "its build was deleted" if job.image_config == image_config else ""
    if not own:
        return ""
    if job.is_running and any(job.name in build.report.jobs for build in own):
        return "its attempt failed"
    if not job.is_running and any(
        build.name == job.build
        and job.attempt < build.report.attempts
        and job.name != build.get_system(job.architecture).job
        for build in own
    ):
        return "a later attempt failed"
    if job.share_key in needed or not all(build.has_ended for build in own):
        return ""
    if job.is_running or any(build.state is not BuildState.FAILED for build in own):
        return _ENDED
    return ""


def find_build_deletions(
    config: build_facts.ImageConfigFacts,
    builds: Iterable[build_facts.BuildFacts],
    current: str,
    actions: Iterable[build_facts.BuildAction],
) -> tuple[build_facts.DeleteBuild, ...]:
    """Find the oldest ended builds. Images are not deleted with them."""
    kept = {config.current_build, config.pull_spec_build, current}
    kept |= {action.name for action in actions if isinstance(action, build_facts.DeleteBuild)}
    ended = [
        build
        for build in builds
        if build.has_ended and not build.is_deleting and build.name not in kept
    ]
    ended.sort(key=lambda build: (build.created, build.name), reverse=True)
    why = f"{KEPT_BUILDS} newer builds have ended"
    # The oldest first: images are marked as expired in this order.
    return tuple(
        build_facts.DeleteBuild(build.name, build.uid, why)
        for build in reversed(ended[KEPT_BUILDS:])
    )


@dataclass(frozen=True, slots=True)
class SystemStep:
    """Result of one decision about the system part for one architecture."""

    facts: build_facts.SystemFacts
    """Of the system part afterwards."""
    state: BuildState | None = None
    """None leaves the status of the build."""
    reason: str = ""
    message: str = ""
    failure: build_result.AttemptFailure | None = None
    """Why the attempt failed."""
    is_cancelled: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase of a Job that succeeded."""
    warning: str = ""
    """What a Job that succeeded could not attach to its image."""


class RegistryQuestions:
    """Finds the answers of registries, and appends the questions without one to the actions."""

    def __init__(
        self,
        situation: build_facts.BuildSituation,
        actions: list[build_facts.BuildAction],
        delays: list[float],
    ) -> None:
        self._situation = situation
        self._actions = actions
        self._delays = delays

    def ask_registry(self, question: build_facts.Question) -> image_tags.ImageAnswer | None:
        """Return the answer of a registry; None, and a request for it, without one."""
        answer = self._situation.answers.get(question)
        if answer is None:
            self._actions.append(build_facts.CallRegistry(question))
        return answer

    def retry_question(
        self, question: build_facts.Question, answer: image_tags.ImageAnswer
    ) -> None:
        """Ask again after a failure, at once or after the delay."""
        due = answer.compute_retry_time()
        if due <= self._situation.now:
            self._actions.append(build_facts.CallRegistry(question))
        else:
            self._delays.append(due - self._situation.now)


class SystemDecider:
    """Decides about the system parts of one build."""

    def __init__(
        self,
        situation: build_facts.BuildSituation,
        actions: list[build_facts.BuildAction],
        registry: RegistryQuestions,
    ) -> None:
        self._situation = situation
        self._actions = actions
        self._registry = registry

    def decide_system(
        self, system: build_facts.WantedSystem, build: build_facts.BuildFacts, *, is_waiting: bool
    ) -> SystemStep:
        """Follow the Job of the system part, or start one unless the next attempt is not due."""
        known = build.get_system(system.name)
        facts = replace(system.initial, job=known.job)
        job = self._find_own_job(system, build)
        if job is not None:
            return self._follow_job(system, build, replace(facts, job=job.name), job)
        if is_waiting:
            return SystemStep(facts)
        if not build.rebuild_of and not known.job:
            for image in self._situation.system_images.get(system.share_key, ()):
                question = build_facts.CheckImage(
                    build.uid, image, build.report.attempts + 1, system.content_key
                )
                answer = self._registry.ask_registry(question)
                if answer is None:
                    return SystemStep(facts)
                if answer.failure is not None:
                    return SystemStep(facts, failure=answer.failure)
                if answer.pull_spec:
                    return SystemStep(replace(facts, image=image))
        return self._start_job(system, build, facts)

    def _find_own_job(
        self, system: build_facts.WantedSystem, build: build_facts.BuildFacts
    ) -> build_facts.JobFacts | None:
        """Find the Job of the present attempt: the recorded one, or one that was just created."""
        attempt = build.report.attempts + 1
        recorded = build.get_system(system.name).job
        own = [
            job
            for job in self._situation.jobs
            if build.uid in job.owners
            and job.share_key == system.share_key
            and not _is_counted(job, build)
            and (job.name == recorded or (job.build, job.attempt) == (build.name, attempt))
        ]
        return min(own, key=lambda job: job.name != recorded, default=None)

    def _start_job(
        self,
        system: build_facts.WantedSystem,
        build: build_facts.BuildFacts,
        facts: build_facts.SystemFacts,
    ) -> SystemStep:
        attempt = build.report.attempts + 1
        own_name = build_facts.make_job_name(build.name, attempt, system.name)
        if facts.job == own_name and facts.job not in build.report.jobs:
            return _make_cancelled_step(facts)
        same = [job for job in self._situation.jobs if job.share_key == system.share_key]
        unfinished = [
            job
            for job in same
            if job.state in (build_facts.JobState.PREPARED, build_facts.JobState.BUILDING)
        ]
        if any(job.is_deleting or job.is_orphan for job in unfinished):
            # Two Jobs of the same key must not run; the end of this one is an event.
            return SystemStep(facts)
        usable = [
            job
            for job in same
            if job.is_running
            or (job.state is build_facts.JobState.SUCCEEDED and job.digest and not build.rebuild_of)
        ]
        usable = [
            job
            for job in usable
            if not (_is_counted(job, build) or job.is_deleting or job.is_orphan)
        ]
        if usable:
            first = min(usable, key=lambda job: job.name)
            if build.uid not in first.owners:
                self._actions.append(build_facts.AdoptJob(first, build.name))
            return self._follow_job(system, build, replace(facts, job=first.name), first)
        if any(job.is_running for job in unfinished):
            # It has the name of a Job that failed: only one of a key may run.
            return SystemStep(facts)
        namesake = next((job for job in self._situation.jobs if job.name == own_name), None)
        if namesake is not None:
            # It belongs to an earlier build of the same name.
            if not namesake.is_deleting:
                self._actions.append(
                    build_facts.DeleteJob(namesake, f"{build.name} was created again")
                )
            return SystemStep(facts)
        if self._situation.problem is not None:
            return SystemStep(facts)
        # One answer for all architectures: they are pushed to one repository.
        answer = self._registry.ask_registry(
            build_facts.CheckPush(build.uid, build.push_spec, attempt)
        )
        if answer is None:
            return SystemStep(facts)
        if answer.failure is not None:
            return SystemStep(facts, failure=answer.failure)
        self._actions.append(build_facts.CreateJob(system, build.name, attempt))
        message = f"created Job {own_name}"
        return SystemStep(replace(facts, job=own_name), BuildState.PREPARED, "", message)

    def _follow_job(
        self,
        system: build_facts.WantedSystem,
        build: build_facts.BuildFacts,
        facts: build_facts.SystemFacts,
        job: build_facts.JobFacts,
    ) -> SystemStep:
        return _name_architecture(self._observe_job(system, build, facts, job), system)

    def _observe_job(
        self,
        system: build_facts.WantedSystem,
        build: build_facts.BuildFacts,
        facts: build_facts.SystemFacts,
        job: build_facts.JobFacts,
    ) -> SystemStep:
        if job.state is build_facts.JobState.SUCCEEDED:
            return self._accept_system(system, build, facts, job)
        if job.failure is not None and (
            job.state is build_facts.JobState.FAILED
            or build_result.classify_retry(job.failure.reason)
            is not build_result.RetryClass.EXTERNAL
        ):
            # Also while the Job runs: the API server may ignore podFailurePolicy.
            return SystemStep(facts, failure=job.failure)
        if job.state is build_facts.JobState.FAILED:
            message = f"Job {job.name} failed, and its pods are gone"
            return SystemStep(
                facts,
                failure=build_result.AttemptFailure(build_result.BuildReason.EVICTED, message),
            )
        if job.is_deleting:
            return SystemStep(facts) if job.build != build.name else _make_cancelled_step(facts)
        state = BuildState(job.state.value)
        reason = status.UNSCHEDULABLE if job.unschedulable and not job.phase else ""
        message = status.format_job_progress(job, build.report, system.architecture)
        return SystemStep(facts, state, reason, message)

    def _accept_system(
        self,
        system: build_facts.WantedSystem,
        build: build_facts.BuildFacts,
        facts: build_facts.SystemFacts,
        job: build_facts.JobFacts,
    ) -> SystemStep:
        """Accept the digest that a pod reported once the registry confirms it."""
        repository = system.push_spec.rpartition(":")[0]
        image = f"{repository}@{job.digest}"
        if not job.digest:
            message = f"Job {job.name} succeeded, but its pod was deleted with its result"
            return SystemStep(
                facts,
                failure=build_result.AttemptFailure(build_result.BuildReason.EVICTED, message),
            )
        question = build_facts.CheckImage(build.uid, image)
        answer = self._registry.ask_registry(question)
        if answer is None:
            return SystemStep(facts, BuildState.BUILDING, "", f"verifying {image}")
        if answer.failure is not None:
            self._registry.retry_question(question, answer)
            message = f"cannot verify {image}: {answer.failure.message}; verifying it again"
            return SystemStep(facts, BuildState.BUILDING, answer.failure.reason, message)
        if not answer.pull_spec:
            message = f"Job {job.name} reported {image}, but the registry does not have it"
            failure = build_result.AttemptFailure(build_result.BuildReason.DIGEST_MISMATCH, message)
            return SystemStep(facts, failure=failure)
        return SystemStep(replace(facts, image=image), seconds=job.seconds, warning=job.warning)


def _is_counted(job: build_facts.JobFacts, build: build_facts.BuildFacts) -> bool:
    """Return whether the failure of a Job belongs to an attempt that has failed already."""
    if job.name in build.report.jobs:
        return True
    # The Jobs of one attempt end one after the other. A success, and an error of the user, count.
    return (
        build.uid in job.owners
        and (job.build, job.state) == (build.name, build_facts.JobState.FAILED)
        and bool(job.architecture)
        and job.attempt <= build.report.attempts
        and (
            job.failure is None
            or build_result.classify_retry(job.failure.reason) is build_result.RetryClass.EXTERNAL
        )
    )


def _make_cancelled_step(facts: build_facts.SystemFacts) -> SystemStep:
    message = f"Job {facts.job} was deleted while it ran"
    return SystemStep(facts, message=message, is_cancelled=True)


def _name_architecture(step: SystemStep, system: build_facts.WantedSystem) -> SystemStep:
    """Name the architecture in a failure, if the build has several."""
    if not system.name or step.failure is None:
        return step
    message = f"for {system.architecture}: {step.failure.message}"
    return replace(step, failure=replace(step.failure, message=message))
