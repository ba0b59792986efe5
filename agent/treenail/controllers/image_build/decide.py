"""Decide the next writes for the image builds of one MachineOSConfig.

All functions are pure. The controller observes, executes the actions in their order, and decides
again after a change, after an answer of a registry, or after `BuildDecision.requeue_after_s`.
Nothing is remembered between two decisions: the process may end between any two writes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from treenail.api.machineosbuild import BuildState
from treenail.controllers.image_build import build_facts, decide_systems, status
from treenail.controllers.pools import image_tags
from treenail.image import build_result

MAX_COUNTED = 8
"""Failed Jobs in a report: more than those of one attempt, which have an architecture each."""
PROBLEM_RETRY_S = 30.0
"""Delay until a problem is looked at again. Secrets are not watched."""
IMAGE_CHECK_S = 3600.0
"""Between two requests to the registry whether it has the image of a pool."""
HOLD_RETRY_S = 10.0
"""Delay until the hold reason is looked up again: nothing watches its ConfigMap."""
NO_BUILD = "none"
"""In place of the UID of a build to replace, when there is none."""


def count_failure(
    report: build_facts.BuildReport,
    failure: build_result.AttemptFailure,
    now: float,
    jobs: tuple[str, ...] = (),
) -> build_facts.BuildReport:
    """Return the report after a failed attempt; without `BuildReport.retry_at` it was the last."""
    attempts = report.attempts + 1
    retry = build_result.classify_retry(failure.reason)
    is_repeated = report.failure is not None and report.failure.reason == failure.reason
    count = (2 if is_repeated else 1) if retry is build_result.RetryClass.ONCE else attempts
    delay = build_result.compute_retry_delay(count, retry)
    retry_at = None if delay is None else now + delay.total_seconds()
    counted = tuple(dict.fromkeys((*report.jobs, *jobs)))[-MAX_COUNTED:]
    return build_facts.BuildReport(attempts, failure, retry_at, counted, failure.seconds)


@dataclass(frozen=True, slots=True)
class BuildDecision:
    """Writes now, in this order, and when time alone may change the decision."""

    actions: tuple[build_facts.BuildAction, ...] = ()
    requeue_after_s: float | None = None


def decide_builds(situation: build_facts.BuildSituation) -> BuildDecision:
    """Decide the next writes for a MachineOSConfig."""
    return _BuildDecider(situation).decide()


class _BuildDecider:
    """Collects the actions of one decision."""

    def __init__(self, situation: build_facts.BuildSituation) -> None:
        self._situation = situation
        self._config = situation.config
        self._builds = {build.name: build for build in situation.builds}
        self._is_missing = False
        """The registry no longer has the image of the pool."""
        self._actions: list[build_facts.BuildAction] = []
        self._delays: list[float] = []
        self._registry = decide_systems.RegistryQuestions(situation, self._actions, self._delays)
        self._systems = decide_systems.SystemDecider(situation, self._actions, self._registry)

    def decide(self) -> BuildDecision:
        wanted = self._situation.wanted
        build = None if wanted is None else self._builds.get(wanted.name)
        if self._situation.problem is not None:
            self._delays.append(PROBLEM_RETRY_S)
            if self._situation.problem.reason == build_facts.POOL_TAKEN:
                self._end_superseded("", self._situation.problem.message)
        if wanted is not None:
            message = f"MachineOSBuild {wanted.name} of newer inputs replaces it"
            self._end_superseded(wanted.name, message)
            build = self._decide_wanted(wanted, build)
        self._report_config(build)
        builds = tuple(self._builds.values())
        self._actions += decide_systems.find_job_deletions(self._situation, builds, self._actions)
        kept = "" if build is None else build.name
        self._actions += decide_systems.find_build_deletions(
            self._situation.config, builds, kept, self._actions
        )
        return BuildDecision(tuple(self._actions), min(self._delays, default=None))

    # The build of the present inputs

    def _decide_wanted(
        self, wanted: build_facts.WantedBuild, build: build_facts.BuildFacts | None
    ) -> build_facts.BuildFacts | None:
        """Continue with the wanted build; return it as it is after the actions, or None."""
        if self._config.rebuild_requested:
            uid = NO_BUILD if build is None else build.uid
            self._actions.append(build_facts.AcceptRebuild(uid))
            self._config = replace(self._config, rebuild_requested=False, rebuild_of=uid)
        if build is not None and build.is_deleting:
            return None
        if build is None:
            self._create_build(wanted)
            return None
        if self._config.rebuild_of == build.uid:
            self._actions.append(
                build_facts.DeleteBuild(build.name, build.uid, "a rebuild is requested")
            )
            return None
        if why := find_changed_inputs(wanted, build):
            self._actions.append(build_facts.DeleteBuild(build.name, build.uid, why))
            return None
        if self._config.rebuild_of:
            self._actions.append(build_facts.FinishRebuild())
        if self._config.current_build != build.name:
            self._actions.append(build_facts.SetCurrentBuild(build.name))
        match build.state:
            case BuildState.SUCCEEDED:
                return self._publish_image(build)
            case BuildState.INTERRUPTED if build.reason != build_result.BuildReason.CANCELLED:
                # Its inputs are wanted again. A build that has ended cannot begin again.
                why = "its inputs are requested again"
                self._actions.append(build_facts.DeleteBuild(build.name, build.uid, why))
                return None
            case BuildState.FAILED | BuildState.INTERRUPTED:
                return build
            case _:
                return self._advance_build(wanted, build)

    def _create_build(self, wanted: build_facts.WantedBuild) -> None:
        if self._situation.problem is not None:
            return
        if self._situation.hold_reason:
            self._delays.append(HOLD_RETRY_S)
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
        self._actions.append(build_facts.CreateBuild(wanted, self._config.rebuild_of, failed))

    def _publish_image(self, build: build_facts.BuildFacts) -> build_facts.BuildFacts | None:
        """Give the image of a finished build to the pool while the registry has it."""
        is_published = self._config.pull_spec == build.digest
        if self._is_given(build):
            return build
        if is_published:
            reasons = {condition.reason for condition in self._config.conditions}
            self._is_missing = status.IMAGE_MISSING in reasons
        # A number of its own: an answer of an hour ago does not permit to publish the image.
        question = build_facts.CheckImage(build.uid, build.digest, int(is_published))
        answer = self._registry.ask_registry(question)
        if answer is None:
            return build
        if answer.failure is not None:
            self._registry.retry_question(question, answer)
            return build
        if is_published:
            self._is_missing = not answer.pull_spec
            if self._situation.now >= answer.at + IMAGE_CHECK_S:
                self._actions.append(build_facts.CallRegistry(question))
        elif not answer.pull_spec:
            why = f"the registry no longer has {build.digest}"
            self._actions.append(build_facts.DeleteBuild(build.name, build.uid, why))
            return None
        return build

    def _is_given(self, build: build_facts.BuildFacts) -> bool:
        """Return whether a finished build has the image that the pool's machines joined with.

        Its final registry may get it only at the hand-over.
        """
        if build.reason == build_result.BUILT_AT_INSTALL:
            return self._config.pull_spec in ("", build.digest)
        return (
            build.reason == build_result.PRE_BUILT_SEEDED and build.digest == self._config.pre_built
        )

    def _advance_build(
        self, wanted: build_facts.WantedBuild, build: build_facts.BuildFacts
    ) -> build_facts.BuildFacts:
        report = build.report
        if self._config.pre_built and not self._config.pull_spec:
            # The nodes have it since their first boot. Later inputs get a build of their own, with
            # the base of the rendered config: the pool is not frozen at this image.
            return self._set_status(
                replace(build, digest=self._config.pre_built),
                BuildState.SUCCEEDED,
                build_result.PRE_BUILT_SEEDED,
                "The image was built before the installation",
            )
        if self._situation.hold_reason and build.state is BuildState.INITIAL:
            self._delays.append(HOLD_RETRY_S)
            return build
        is_waiting = report.retry_at is not None and self._situation.now < report.retry_at
        if is_waiting and report.retry_at is not None:
            self._delays.append(report.retry_at - self._situation.now)
        systems = [system for system in wanted.systems if system.needs_job]
        if any(not build.get_system(system.name).image for system in systems):
            return self._build_systems(wanted, build, is_waiting=is_waiting)
        if is_waiting:
            return self._set_status(build, BuildState.BUILDING, *status.format_retry(report))
        return self._append_config(wanted, build)

    def _append_config(
        self, wanted: build_facts.WantedBuild, build: build_facts.BuildFacts
    ) -> build_facts.BuildFacts:
        sources = tuple(
            (system.architecture, build.get_system(system.name).image or wanted.base_image)
            for system in wanted.systems
        )
        attempt = build.report.attempts + 1
        if build.state is BuildState.INITIAL:
            build = self._set_status(
                build, BuildState.BUILDING, "", "adding the config to the image"
            )
        question = build_facts.AppendConfig(
            build.uid, attempt, sources, build.push_spec, wanted.config
        )
        answer = self._registry.ask_registry(question)
        if answer is None:
            return build
        if answer.failure is not None:
            return self._fail_attempt(build, answer.failure)
        report = replace(
            build.report,
            retry_at=None,
            seconds={**build.report.seconds, **answer.seconds},
            warning="; ".join(filter(None, (build.report.warning, answer.warning))),
        )
        self._set_report(build, report)
        return self._set_status(
            replace(build, report=report, digest=answer.pull_spec), BuildState.SUCCEEDED
        )

    # The system part

    def _build_systems(
        self, wanted: build_facts.WantedBuild, build: build_facts.BuildFacts, *, is_waiting: bool
    ) -> build_facts.BuildFacts:
        """Continue with the system part of each architecture; with all of them, add the config."""
        steps: dict[str, decide_systems.SystemStep] = {}
        for system in wanted.systems:
            if system.needs_job and not build.get_system(system.name).image:
                steps[system.name] = self._systems.decide_system(
                    system, build, is_waiting=is_waiting
                )
        before = build.systems
        changed = {name: step.facts for name, step in steps.items()}
        build = replace(build, systems={**before, **changed}, job=_choose_job(steps) or build.job)
        build = self._add_results(build, steps.values())
        if self._needs_record(before, build):
            self._actions.append(build_facts.SetSystems(build.name, build.systems))
        if cancelled := next((step for step in steps.values() if step.is_cancelled), None):
            reason = build_result.BuildReason.CANCELLED
            remedy = build_result.REMEDIES[reason].replace("NAME", self._situation.config.name)
            message = f"{cancelled.message}; {remedy}"
            return self._set_status(build, BuildState.INTERRUPTED, reason, message)
        if any(step.failure is not None for step in steps.values()):
            return self._fail_systems(build, steps)
        if is_waiting:
            return self._set_status(build, BuildState.BUILDING, *status.format_retry(build.report))
        if all(step.facts.image for step in steps.values()):
            if build.state is BuildState.INITIAL:
                images = ", ".join(step.facts.image for step in steps.values())
                build = self._set_status(build, BuildState.BUILDING, "", f"reusing {images}")
            return self._append_config(wanted, build)
        return self._report_progress(build, steps)

    def _add_results(
        self, build: build_facts.BuildFacts, steps: Iterable[decide_systems.SystemStep]
    ) -> build_facts.BuildFacts:
        """Report warnings, and the longest duration of each phase: Jobs run side by side."""
        longest, warning = dict(build.report.seconds), build.report.warning
        for step in steps:
            durations = step.seconds.items()
            longest |= {name: max(value, longest.get(name, 0.0)) for name, value in durations}
            warning = warning or step.warning
        report = replace(build.report, seconds=longest, warning=warning)
        self._set_report(build, report)
        return replace(build, report=report)

    @staticmethod
    def _needs_record(
        before: Mapping[str, build_facts.SystemFacts], build: build_facts.BuildFacts
    ) -> bool:
        """Return whether an annotation must change; the status has the Job of the only part."""
        if "" not in build.systems:
            return before != build.systems
        return before.get("", build_facts.SystemFacts()).image != build.systems[""].image

    def _report_progress(
        self, build: build_facts.BuildFacts, steps: Mapping[str, decide_systems.SystemStep]
    ) -> build_facts.BuildFacts:
        """Write the state of the Jobs. The build is prepared while none of them runs."""
        shown = [step for step in steps.values() if step.state is not None]
        if not shown:
            return build
        states = {step.state for step in shown}
        has_image = any(step.facts.image for step in steps.values())
        is_building = BuildState.BUILDING in states or has_image
        state = BuildState.BUILDING if is_building else BuildState.PREPARED
        reason = next((step.reason for step in shown if step.reason), "")
        message = "; ".join(step.message for step in shown)[: status.MESSAGE_LIMIT]
        return self._set_status(build, state, reason, message)

    def _fail_systems(
        self, build: build_facts.BuildFacts, steps: Mapping[str, decide_systems.SystemStep]
    ) -> build_facts.BuildFacts:
        """Fail the attempt. A cause that waits for a user counts before one that is retried."""
        failed = [(step.failure, step.facts.job) for step in steps.values() if step.failure]
        failures = [failure for failure, _ in failed]
        chosen = min(
            failures,
            key=lambda failure: (
                build_result.classify_retry(failure.reason) is not build_result.RetryClass.USER
            ),
        )
        return self._fail_attempt(build, chosen, tuple(job for _, job in failed if job))

    def _fail_attempt(
        self,
        build: build_facts.BuildFacts,
        failure: build_result.AttemptFailure,
        jobs: tuple[str, ...] = (),
    ) -> build_facts.BuildFacts:
        """Count a failed attempt; end the build, or schedule the next attempt."""
        report = count_failure(build.report, failure, self._situation.now, jobs)
        self._set_report(build, report)
        build = replace(build, report=report)
        if report.retry_at is None:
            wanted = self._situation.wanted
            hidden = wanted.instruction_remedy if wanted else ""
            text = status.format_failure(failure, report.attempts, hidden, config=self._config.name)
            return self._set_status(build, BuildState.FAILED, failure.reason, text)
        self._delays.append(report.retry_at - self._situation.now)
        return self._set_status(build, BuildState.BUILDING, *status.format_retry(report))

    # Everything else

    def _end_superseded(self, wanted: str, message: str) -> None:
        for build in self._situation.builds:
            if not build.has_ended and not build.is_deleting and build.name != wanted:
                ended = self._set_status(
                    build, BuildState.INTERRUPTED, build_result.BuildReason.SUPERSEDED, message
                )
                self._builds[build.name] = ended

    def _report_config(self, build: build_facts.BuildFacts | None) -> None:
        """Write the status of the MachineOSConfig, and the condition of the pool."""
        if build is not None:
            self._builds[build.name] = build
        situation = self._situation
        serves = (
            build is not None
            and build.state is BuildState.SUCCEEDED
            and (
                self._config.pull_spec == build.digest
                or self._is_given(build)
                or situation.answers.get(
                    build_facts.CheckImage(build.uid, build.digest), image_tags.ImageAnswer(0.0)
                ).pull_spec
                or any(
                    isinstance(action, build_facts.SetBuildStatus) and action.digest == build.digest
                    for action in self._actions
                )
            )
        )
        pull_spec = build.digest if build is not None and serves else self._config.pull_spec
        problem = situation.problem
        is_taken = problem is not None and problem.reason == build_facts.POOL_TAKEN
        conditions = status.compute_config_conditions(
            problem,
            build,
            is_served=bool(serves),
            pull_spec=pull_spec,
            # The image of the installation is for the other MachineOSConfig.
            hold_reason="" if is_taken else situation.hold_reason,
            refusal=situation.refusal,
        )
        if self._is_missing:
            conditions = status.report_missing_image(conditions, pull_spec, self._config.name)
        if situation.base_condition is not None:
            conditions += (situation.base_condition,)
        present = {condition.type: condition for condition in self._config.conditions}
        changed = tuple(
            condition
            for condition in conditions
            if condition.type not in present
            or replace(present[condition.type], last_transition_time="") != condition
        )
        name = build.name if build is not None and serves else self._config.pull_spec_build
        if (
            changed
            or (pull_spec, name) != (self._config.pull_spec, self._config.pull_spec_build)
            or self._config.observed_generation < self._config.generation
        ):
            self._actions.append(build_facts.SetConfigStatus(conditions, pull_spec, name))
        if build is not None and build.state is BuildState.FAILED:
            message = f"Failed to build OS image for pool {self._config.pool} (mosb: {build.name})"
            self._report_pool("BuildFailed", f"{message}: {build.message}")
        elif (
            build is None
            and situation.problem is not None
            # The first image comes from the installation, whose objects may still be missing.
            and not situation.hold_reason
            # The pool is well: it gets the images of the other MachineOSConfig.
            and situation.problem.reason != build_facts.POOL_TAKEN
        ):
            self._report_pool(situation.problem.reason, situation.problem.message)

    def _report_pool(self, reason: str, message: str) -> None:
        condition = self._situation.pool_condition
        known = (
            None if condition is None else (condition.status, condition.reason, condition.message)
        )
        if known != ("True", reason, message):
            self._actions.append(build_facts.ReportPool(reason, message))

    def _set_report(self, build: build_facts.BuildFacts, report: build_facts.BuildReport) -> None:
        if report != build.report:
            self._actions.append(build_facts.SetReport(build.name, report))

    def _set_status(
        self, build: build_facts.BuildFacts, state: BuildState, reason: str = "", message: str = ""
    ) -> build_facts.BuildFacts:
        """Request a status that differs from the observed one; return the build with it."""
        before = next(
            observed for observed in self._situation.builds if observed.name == build.name
        )
        if (build.state, state) == (BuildState.BUILDING, BuildState.PREPARED):
            state = BuildState.BUILDING
        if state is not before.state and not build_result.can_change_state(before.state, state):
            return build
        after = replace(build, state=state, reason=str(reason) or state.value, message=message)
        if (before.state, before.reason, before.message, before.job, before.digest) != (
            after.state, after.reason, after.message, after.job, after.digest,
        ):  # fmt: skip
            # In place: the deciders of the system parts append to the same list.
            self._actions[:] = [
                action
                for action in self._actions
                if not (
                    isinstance(action, build_facts.SetBuildStatus) and action.build == build.name
                )
            ]
            self._actions.append(
                build_facts.SetBuildStatus(
                    build.name, state, str(reason), message, after.digest, after.job
                )
            )
        return after


def find_changed_inputs(wanted: build_facts.WantedBuild, build: build_facts.BuildFacts) -> str:
    """Return which inputs that its name does not cover make a build useless; empty for none."""
    if not build.has_ended and build.share_key != wanted.share_key:
        return "the files or the architectures that it is built for changed"
    if not build.has_ended or not (build.architectures or len(wanted.systems) > 1):
        return ""
    missing = sorted(set(wanted.architectures) - set(build.architectures))
    if missing:
        return f"nodes of the pool have the architecture {', '.join(missing)}"
    if build.state is not BuildState.SUCCEEDED and set(build.architectures) != set(
        wanted.architectures
    ):
        return "the pool has fewer architectures now"
    return ""


def _choose_job(steps: Mapping[str, decide_systems.SystemStep]) -> str:
    """Return the Job to name in the status: the first one that has not ended well."""
    jobs = [step.facts.job for step in steps.values() if step.facts.job and not step.facts.image]
    return next(iter(jobs), "") or next((step.facts.job for step in steps.values()), "")
