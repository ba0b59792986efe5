"""Decide the next writes for the image builds of one MachineOSConfig.

All functions are pure. The controller observes, executes the actions in their order, and decides
again after a change, after an answer of a registry, or after `BuildDecision.requeue_after_s`.
Nothing is remembered between two decisions: the process may end between any two writes.
"""

from dataclasses import dataclass, replace

from treenail.api.machineosbuild import BuildState
from treenail.controllers.build.actions import (
    AcceptRebuild,
    AdoptJob,
    AskRegistry,
    BuildAction,
    CreateBuild,
    CreateJob,
    DeleteBuild,
    DeleteJob,
    FinishRebuild,
    ReportPool,
    SetBuildStatus,
    SetConfigStatus,
    SetCurrentBuild,
    SetReport,
    SetSystemImage,
)
from treenail.controllers.build.cleanup import find_build_deletions, find_job_deletions
from treenail.controllers.build.facts import (
    POOL_TAKEN,
    Answer,
    AppendConfig,
    AttemptFailure,
    BuildFacts,
    BuildReport,
    BuildSituation,
    CheckImage,
    CheckPush,
    JobFacts,
    JobState,
    Question,
    WantedBuild,
)
from treenail.controllers.build.job_name import make_job_name
from treenail.controllers.build.status import (
    compute_config_conditions,
    format_failure,
    format_job_progress,
    format_retry,
)
from treenail.image.build_reason import (
    BuildReason,
    RetryClass,
    classify_retry,
    compute_retry_delay,
)
from treenail.image.job_status import can_change_state

PROBLEM_RETRY_S = 30.0
"""Delay until a problem is looked at again. Secrets and ConfigMaps are not watched."""
NO_BUILD = "none"
"""In place of the UID of a build to replace, when there is none."""


@dataclass(frozen=True, slots=True)
class BuildDecision:
    """Writes now, in this order, and when time alone may change the decision."""

    actions: tuple[BuildAction, ...] = ()
    requeue_after_s: float | None = None


def decide_builds(situation: BuildSituation) -> BuildDecision:
    """Decide the next writes for a MachineOSConfig."""
    return _Decider(situation).decide()


class _Decider:
    """Collects the actions of one decision."""

    def __init__(self, situation: BuildSituation) -> None:
        self._situation = situation
        self._config = situation.config
        self._builds = {build.name: build for build in situation.builds}
        self._actions: list[BuildAction] = []
        self._delays: list[float] = []

    def decide(self) -> BuildDecision:
        wanted = self._situation.wanted
        build = None if wanted is None else self._builds.get(wanted.name)
        if self._situation.problem is not None:
            self._delays.append(PROBLEM_RETRY_S)
            if self._situation.problem.reason == POOL_TAKEN:
                self._end_superseded("", self._situation.problem.message)
        if wanted is not None:
            message = f"MachineOSBuild {wanted.name} of newer inputs replaces it"
            self._end_superseded(wanted.name, message)
            build = self._decide_wanted(wanted, build)
        self._report(build)
        builds = tuple(self._builds.values())
        self._actions += find_job_deletions(self._situation, builds, self._actions)
        kept = "" if build is None else build.name
        self._actions += find_build_deletions(self._situation.config, builds, kept, self._actions)
        return BuildDecision(tuple(self._actions), min(self._delays, default=None))

    # The build of the present inputs

    def _decide_wanted(self, wanted: WantedBuild, build: BuildFacts | None) -> BuildFacts | None:
        """Continue with the wanted build; return it as it is after the actions, or None."""
        if self._config.rebuild_requested:
            uid = NO_BUILD if build is None else build.uid
            self._actions.append(AcceptRebuild(uid))
            self._config = replace(self._config, rebuild_requested=False, rebuild_of=uid)
        if build is not None and build.is_deleting:
            return None
        if build is None:
            self._create(wanted)
            return None
        if self._config.rebuild_of == build.uid:
            self._actions.append(DeleteBuild(build.name, build.uid, "a rebuild is requested"))
            return None
        if not build.has_ended and build.share_key != wanted.share_key:
            # Files that its name does not cover changed: the context or the trust bundle.
            why = "the files that it is built from changed"
            self._actions.append(DeleteBuild(build.name, build.uid, why))
            return None
        if self._config.rebuild_of:
            self._actions.append(FinishRebuild())
        if self._config.current_build != build.name:
            self._actions.append(SetCurrentBuild(build.name))
        match build.state:
            case BuildState.SUCCEEDED:
                return self._serve(build)
            case BuildState.INTERRUPTED if build.reason != BuildReason.CANCELLED:
                # Its inputs are wanted again. A build that has ended cannot begin again.
                why = "its inputs are requested again"
                self._actions.append(DeleteBuild(build.name, build.uid, why))
                return None
            case BuildState.FAILED | BuildState.INTERRUPTED:
                return build
            case _:
                return self._advance(wanted, build)

    def _create(self, wanted: WantedBuild) -> None:
        if self._situation.problem is not None:
            return
        failed = ""
        if self._config.rebuild_of:
            failed = next(
                (
                    f"{build.reason}: {build.message}"
                    for build in self._situation.builds
                    if build.uid == self._config.rebuild_of and build.state is BuildState.FAILED
                ),
                "",
            )
        self._actions.append(CreateBuild(wanted, self._config.rebuild_of, failed))

    def _serve(self, build: BuildFacts) -> BuildFacts | None:
        """Give the image of a finished build to the pool, once the registry has it."""
        if self._config.pull_spec == build.digest:
            return build
        answer = self._ask(CheckImage(build.uid, build.digest))
        if answer is None:
            return build
        if answer.failure is not None:
            self._retry_question(CheckImage(build.uid, build.digest), answer)
            return build
        if not answer.pull_spec:
            why = f"the registry no longer has {build.digest}"
            self._actions.append(DeleteBuild(build.name, build.uid, why))
            return None
        return build

    def _advance(self, wanted: WantedBuild, build: BuildFacts) -> BuildFacts:
        report = build.report
        if report.retry_at is not None and self._situation.now < report.retry_at:
            self._delays.append(report.retry_at - self._situation.now)
            return self._set_status(build, BuildState.BUILDING, *format_retry(report))
        if not wanted.needs_job:
            return self._append(wanted, build, wanted.base_image)
        if build.system_image:
            return self._append(wanted, build, build.system_image)
        return self._build_system(wanted, build)

    def _append(self, wanted: WantedBuild, build: BuildFacts, source: str) -> BuildFacts:
        attempt = build.report.attempts + 1
        if build.state is BuildState.INITIAL:
            build = self._set_status(
                build, BuildState.BUILDING, "", "adding the config to the image"
            )
        question = AppendConfig(build.uid, attempt, source, build.push_spec, wanted.config)
        answer = self._ask(question)
        if answer is None:
            return build
        if answer.failure is not None:
            return self._fail(build, answer.failure)
        report = replace(
            build.report,
            retry_at=None,
            seconds={**build.report.seconds, **answer.seconds},
            warning=answer.warning,
        )
        self._set_report(build, report)
        return self._set_status(
            replace(build, report=report, digest=answer.pull_spec), BuildState.SUCCEEDED
        )

    # The system part

    def _build_system(self, wanted: WantedBuild, build: BuildFacts) -> BuildFacts:
        job = self._find_own_job(build)
        if job is not None:
            return self._follow(wanted, build, job)
        if not build.rebuild_of and not build.job:
            for image in self._situation.system_images:
                question = CheckImage(build.uid, image, build.report.attempts + 1)
                answer = self._ask(question)
                if answer is None:
                    return build
                if answer.failure is not None:
                    return self._fail(build, answer.failure)
                if answer.pull_spec:
                    return self._set_system_image(wanted, build, image)
        return self._start(wanted, build)

    def _find_own_job(self, build: BuildFacts) -> JobFacts | None:
        """Find the Job of the present attempt: the recorded one, or one that was just created."""
        attempt = build.report.attempts + 1
        own = [
            job
            for job in self._situation.jobs
            if build.uid in job.owners
            and job.name != build.report.job
            and (job.name == build.job or (job.build, job.attempt) == (build.name, attempt))
        ]
        return min(own, key=lambda job: job.name != build.job, default=None)

    def _start(self, wanted: WantedBuild, build: BuildFacts) -> BuildFacts:
        attempt = build.report.attempts + 1
        own_name = make_job_name(build.name, attempt)
        if build.job == own_name and build.job != build.report.job:
            return self._cancel(build, build.job)
        same = [job for job in self._situation.jobs if job.share_key == build.share_key]
        unfinished = [job for job in same if job.state in (JobState.PREPARED, JobState.BUILDING)]
        if any(job.is_deleting or job.is_orphan for job in unfinished):
            # Two Jobs of the same key must not run; the end of this one is an event.
            return build
        usable = [
            job
            for job in same
            if job.is_running
            or (job.state is JobState.SUCCEEDED and job.digest and not build.rebuild_of)
        ]
        usable = [
            job
            for job in usable
            if job.name != build.report.job and not (job.is_deleting or job.is_orphan)
        ]
        if usable:
            found = min(usable, key=lambda job: job.name)
            if build.uid not in found.owners:
                self._actions.append(AdoptJob(found, build.name))
            return self._follow(wanted, build, found)
        namesake = next((job for job in self._situation.jobs if job.name == own_name), None)
        if namesake is not None:
            # It belongs to an earlier build of the same name.
            if not namesake.is_deleting:
                self._actions.append(DeleteJob(namesake, f"{build.name} was created again"))
            return build
        if self._situation.problem is not None:
            return build
        answer = self._ask(CheckPush(build.uid, wanted.system_push_spec, attempt))
        if answer is None:
            return build
        if answer.failure is not None:
            return self._fail(build, answer.failure)
        self._actions.append(CreateJob(wanted, build.name, attempt))
        message = f"created Job {own_name}"
        return self._set_status(replace(build, job=own_name), BuildState.PREPARED, "", message)

    def _cancel(self, build: BuildFacts, job: str) -> BuildFacts:
        message = f"Job {job} was deleted while it ran"
        return self._set_status(build, BuildState.INTERRUPTED, BuildReason.CANCELLED, message)

    def _follow(self, wanted: WantedBuild, build: BuildFacts, job: JobFacts) -> BuildFacts:
        build = replace(build, job=job.name)
        if job.state is JobState.SUCCEEDED:
            return self._accept_system(wanted, build, job)
        if job.failure is not None and (
            job.state is JobState.FAILED
            or classify_retry(job.failure.reason) is not RetryClass.EXTERNAL
        ):
            # Also while the Job runs: the API server may ignore podFailurePolicy.
            return self._fail(build, job.failure, job.name)
        if job.state is JobState.FAILED:
            message = f"Job {job.name} failed, and its pods are gone"
            return self._fail(build, AttemptFailure(BuildReason.EVICTED, message), job.name)
        if job.is_deleting:
            if job.build != build.name:
                return build
            return self._cancel(build, job.name)
        state = BuildState(job.state.value)
        return self._set_status(build, state, "", format_job_progress(job, build.report))

    def _accept_system(self, wanted: WantedBuild, build: BuildFacts, job: JobFacts) -> BuildFacts:
        """Accept the digest that a pod reported once the registry confirms it."""
        repository = wanted.system_push_spec.rpartition(":")[0]
        image = f"{repository}@{job.digest}"
        if not job.digest:
            message = f"Job {job.name} succeeded, but its pod was deleted with its result"
            failure = AttemptFailure(BuildReason.EVICTED, message)
            return self._fail(build, failure, job.name)
        question = CheckImage(build.uid, image)
        answer = self._ask(question)
        if answer is None:
            return self._set_status(build, BuildState.BUILDING, "", f"verifying {image}")
        if answer.failure is not None:
            self._retry_question(question, answer)
            return self._set_status(
                build,
                BuildState.BUILDING,
                answer.failure.reason,
                f"cannot verify {image}: {answer.failure.message}; verifying it again",
            )
        if not answer.pull_spec:
            message = f"Job {job.name} reported {image}, but the registry does not have it"
            failure = AttemptFailure(BuildReason.DIGEST_MISMATCH, message)
            return self._fail(build, failure, job.name)
        report = replace(build.report, seconds={**build.report.seconds, **job.seconds})
        self._set_report(build, report)
        build = replace(build, report=report)
        return self._set_system_image(wanted, build, image)

    def _set_system_image(self, wanted: WantedBuild, build: BuildFacts, image: str) -> BuildFacts:
        self._actions.append(SetSystemImage(build.name, image))
        build = replace(build, system_image=image)
        if build.state is BuildState.INITIAL:
            build = self._set_status(build, BuildState.BUILDING, "", f"reusing {image}")
        return self._append(wanted, build, image)

    def _fail(self, build: BuildFacts, failure: AttemptFailure, job: str = "") -> BuildFacts:
        """Count a failed attempt; end the build, or schedule the next attempt."""
        report = build.report
        attempts = report.attempts + 1
        retry = classify_retry(failure.reason)
        is_repeated = report.failure is not None and report.failure.reason == failure.reason
        count = (2 if is_repeated else 1) if retry is RetryClass.ONCE else attempts
        delay = compute_retry_delay(count, retry)
        retry_at = None if delay is None else self._situation.now + delay.total_seconds()
        report = BuildReport(attempts, failure, retry_at, job or report.job, failure.seconds)
        self._set_report(build, report)
        build = replace(build, report=report)
        if retry_at is None:
            wanted = self._situation.wanted
            hidden = wanted.instruction_remedy if wanted else ""
            text = format_failure(failure, attempts, hidden, config=self._config.name)
            return self._set_status(build, BuildState.FAILED, failure.reason, text)
        self._delays.append(retry_at - self._situation.now)
        return self._set_status(build, BuildState.BUILDING, *format_retry(report))

    # Everything else

    def _end_superseded(self, wanted: str, message: str) -> None:
        for build in self._situation.builds:
            if not build.has_ended and not build.is_deleting and build.name != wanted:
                ended = self._set_status(
                    build, BuildState.INTERRUPTED, BuildReason.SUPERSEDED, message
                )
                self._builds[build.name] = ended

    def _report(self, build: BuildFacts | None) -> None:
        """Write the status of the MachineOSConfig, and the condition of the pool."""
        if build is not None:
            self._builds[build.name] = build
        situation = self._situation
        serves = (
            build is not None
            and build.state is BuildState.SUCCEEDED
            and (
                self._config.pull_spec == build.digest
                or situation.answers.get(CheckImage(build.uid, build.digest), Answer(0.0)).pull_spec
                or any(
                    isinstance(each, SetBuildStatus) and each.digest == build.digest
                    for each in self._actions
                )
            )
        )
        pull_spec = build.digest if build is not None and serves else self._config.pull_spec
        conditions = compute_config_conditions(
            situation.problem, build, is_served=bool(serves), pull_spec=pull_spec
        )
        if situation.base_condition is not None:
            conditions += (situation.base_condition,)
        present = {each.type: each for each in self._config.conditions}
        changed = tuple(
            each
            for each in conditions
            if each.type not in present
            or replace(present[each.type], last_transition_time="") != each
        )
        name = build.name if build is not None and serves else self._config.pull_spec_build
        if (
            changed
            or (pull_spec, name) != (self._config.pull_spec, self._config.pull_spec_build)
            or self._config.observed_generation < self._config.generation
        ):
            self._actions.append(SetConfigStatus(conditions, pull_spec, name))
        if build is not None and build.state is BuildState.FAILED:
            message = f"Failed to build OS image for pool {self._config.pool} (mosb: {build.name})"
            self._report_pool("BuildFailed", f"{message}: {build.message}")
        elif (
            build is None
            and situation.problem is not None
            # The pool is well: it gets the images of the other MachineOSConfig.
            and situation.problem.reason != POOL_TAKEN
        ):
            self._report_pool(situation.problem.reason, situation.problem.message)

    def _report_pool(self, reason: str, message: str) -> None:
        found = self._situation.pool_condition
        known = None if found is None else (found.status, found.reason, found.message)
        if known != ("True", reason, message):
            self._actions.append(ReportPool(reason, message))

    def _ask(self, question: Question) -> Answer | None:
        """Return the answer of a registry; None, and a request for it, without one."""
        answer = self._situation.answers.get(question)
        if answer is None:
            self._actions.append(AskRegistry(question))
        return answer

    def _retry_question(self, question: Question, answer: Answer) -> None:
        delay = compute_retry_delay(answer.count)
        due = answer.at + (3600.0 if delay is None else delay.total_seconds())
        if due <= self._situation.now:
            self._actions.append(AskRegistry(question))
        else:
            self._delays.append(due - self._situation.now)

    def _set_report(self, build: BuildFacts, report: BuildReport) -> None:
        if report != build.report:
            self._actions.append(SetReport(build.name, report))

    def _set_status(
        self, build: BuildFacts, state: BuildState, reason: str = "", message: str = ""
    ) -> BuildFacts:
        """Request a status that differs from the observed one; return the build with it."""
        before = next(each for each in self._situation.builds if each.name == build.name)
        if (build.state, state) == (BuildState.BUILDING, BuildState.PREPARED):
            state = BuildState.BUILDING
        if state is not before.state and not can_change_state(before.state, state):
            return build
        after = replace(build, state=state, reason=str(reason) or state.value, message=message)
        if (before.state, before.reason, before.message, before.job, before.digest) != (
            after.state, after.reason, after.message, after.job, after.digest,
        ):  # fmt: skip
            self._actions = [
                each
                for each in self._actions
                if not (isinstance(each, SetBuildStatus) and each.build == build.name)
            ]
            self._actions.append(
                SetBuildStatus(build.name, state, str(reason), message, after.digest, after.job)
            )
        return after
