"""Builds, Jobs and a registry in memory: executes decisions, and checks each write."""

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

from treenail.api.machineosbuild import BuildState
from treenail.api.object_meta import Condition
from treenail.controllers.image_build.build_facts import (
    AcceptRebuild,
    AdoptJob,
    AppendConfig,
    BuildAction,
    BuildFacts,
    BuildSituation,
    CallRegistry,
    CheckImage,
    CheckPush,
    CreateBuild,
    CreateJob,
    DeleteBuild,
    DeleteJob,
    FinishRebuild,
    ImageConfigFacts,
    JobFacts,
    JobState,
    Question,
    ReportPool,
    SetBuildStatus,
    SetConfigStatus,
    SetCurrentBuild,
    SetReport,
    SetSystems,
    WantedBuild,
    WantedSystem,
    make_job_name,
)
from treenail.controllers.image_build.build_planner import find_system_images
from treenail.controllers.image_build.decide import BuildDecision, decide_builds
from treenail.controllers.pools.image_tags import ImageAnswer, ImageProblem
from treenail.image.build_result import AttemptFailure, BuildReason

REPOSITORY = "registry.example.com/os/node"
BASE = f"registry.example.com/base@sha256:{'b' * 64}"
MAX_STEPS = 300


class Broken(Exception):
    """A write violates an invariant."""


class Killed(Exception):
    """The controller ended between two writes."""


@dataclass
class Inputs:
    """Requests of a user and of the render controller for one MachineOSConfig."""

    content: str = "c0"
    """Containerfile; empty for the config layer alone."""
    config: str = "rendered-worker-0"
    architectures: tuple[str, ...] = ("amd64",)
    """Of the pool's nodes."""

    def make_wanted(self, name: str) -> WantedBuild:
        return WantedBuild(
            name=f"{name}-{self.content or 'layer'}{self.config[-1]}",
            config=self.config,
            push_spec=f"{REPOSITORY}:{name}-{self.content}{self.config[-1]}",
            content_key=self.content,
            share_key="key-" + "-".join((self.content, *self.architectures)),
            systems=tuple(map(self.make_system, self.architectures)),
            base_image=BASE,
            push_secret="push",
        )

    def make_system(self, architecture: str) -> WantedSystem:
        return WantedSystem(
            architecture=architecture,
            name=architecture if len(self.architectures) > 1 else "",
            content_key=f"{self.content}-{architecture}",
            share_key=f"key-{self.content}-{architecture}",
            needs_job=bool(self.content),
            push_spec=f"{REPOSITORY}:system-{self.content}-{architecture}",
        )


@dataclass
class World:
    """The cluster and the registry."""

    seed: int = 0
    now: float = 1_000_000.0
    configs: dict[str, ImageConfigFacts] = field(default_factory=dict)
    inputs: dict[str, Inputs] = field(default_factory=dict)
    problems: dict[str, ImageProblem] = field(default_factory=dict)
    builds: dict[str, BuildFacts] = field(default_factory=dict)
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    images: dict[str, tuple[str, str]] = field(default_factory=lambda: {BASE: ("", "")})
    """Content and config of each image in the registry."""
    platforms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Architectures of these images, without the base, which has all."""
    answers: dict[str, dict[Question, ImageAnswer]] = field(default_factory=dict)
    expired: dict[str, list[BuildFacts]] = field(default_factory=dict)
    """Deleted builds, whose images stay."""
    asked: list[tuple[str, Question]] = field(default_factory=list)
    pool_reports: dict[str, Condition] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    holds: dict[str, str] = field(default_factory=dict)
    """Why the first build of a MachineOSConfig waits for the installation."""
    push_failure: BuildReason | None = None
    """Why the registry refuses the login for pushes."""
    kill_at: int | None = None
    """How many writes before the process ends."""
    kills_before: bool = True
    _number: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    # Actions of users and of the cluster

    def add_config(self, name: str, **inputs: Any) -> None:
        self.configs[name] = ImageConfigFacts(name, self._make_uid(), 1, name)
        self.inputs[name] = Inputs(**inputs)

    def change(self, name: str, **inputs: Any) -> None:
        for each, value in inputs.items():
            setattr(self.inputs[name], each, value)
        known = self.configs[name]
        self.configs[name] = replace(known, generation=known.generation + 1)

    def rebuild(self, name: str) -> None:
        self.configs[name] = replace(self.configs[name], rebuild_requested=True)

    def remove_config(self, name: str) -> None:
        del self.configs[name]
        self.builds = {k: b for k, b in self.builds.items() if b.image_config != name}
        self.collect_garbage()

    def collect_garbage(self) -> None:
        uids = {build.uid for build in self.builds.values()}
        self.jobs = {name: job for name, job in self.jobs.items() if uids & set(job.owners)}

    def run_job(self, name: str) -> None:
        self._set_job(name, state=JobState.BUILDING, phase="build")

    def finish_job(self, name: str) -> None:
        job = self.jobs[name]
        self._number += 1
        digest = f"sha256:{self._number:064x}"
        _, content, architecture = job.share_key.split("-")
        self.images[f"{REPOSITORY}@{digest}"] = (content, "")
        self.platforms[f"{REPOSITORY}@{digest}"] = (architecture,)
        self._set_job(name, state=JobState.SUCCEEDED, digest=digest, seconds={"build": 2.0})

    def fail_job(self, name: str, reason: BuildReason) -> None:
        failure = AttemptFailure(reason, "it failed", line=3)
        self._set_job(name, state=JobState.FAILED, failure=failure)

    def delete_job(self, name: str) -> None:
        del self.jobs[name]

    def _set_job(self, name: str, **changes: object) -> None:
        self.jobs[name] = replace(self.jobs[name], **changes)  # type: ignore[arg-type]

    def answer(self, failure: BuildReason | None = None) -> None:
        """Answer the oldest question."""
        if self._answer_push_checks() and not self.asked:
            return
        name, question = self.asked.pop(0)
        known = self.answers.setdefault(name, {})
        if failure is not None:
            count = known[question].count + 1 if question in known else 1
            found = AttemptFailure(failure, "the registry failed")
            known[question] = ImageAnswer(self.now, found, count=count)
        elif isinstance(question, CheckImage):
            found_image = question.image if question.image in self.images else ""
            known[question] = ImageAnswer(self.now, pull_spec=found_image)
        elif isinstance(question, AppendConfig):
            (content,) = {self.images[image][0] for _, image in question.sources}
            for architecture, source in question.sources:
                if architecture not in self.platforms.get(source, (architecture,)):
                    raise Broken(f"{source} is not for {architecture}")
            self._number += 1
            image = f"{REPOSITORY}@sha256:{self._number:064x}"
            self.images[image] = (content, question.config)
            self.platforms[image] = tuple(name for name, _ in question.sources)
            known[question] = ImageAnswer(self.now, pull_spec=image, seconds={"config": 0.1})

    def _answer_push_checks(self) -> bool:
        """Answer the questions that every Job needs; return whether there were any."""
        found = [each for each in self.asked if isinstance(each[1], CheckPush)]
        self.asked = [each for each in self.asked if each not in found]
        for name, question in found:
            refused = self.push_failure
            failure = None if refused is None else AttemptFailure(refused, "the login is refused")
            self.answers.setdefault(name, {})[question] = ImageAnswer(self.now, failure)
        return bool(found)

    # The controller

    def observe(self, name: str) -> BuildSituation:
        wanted = self.inputs[name].make_wanted(name)
        own = tuple(b for b in self.builds.values() if b.image_config == name)
        uids = {build.uid for build in self.builds.values()}
        jobs = tuple(
            replace(job, is_orphan=not uids & set(job.owners))
            for job in self.jobs.values()
            if job.image_config == name or job.share_key in wanted.share_keys
        )
        others = [b for b in self.builds.values() if b.image_config != name and not b.has_ended]
        done = [b for b in self.builds.values() if b.state is BuildState.SUCCEEDED]
        done += self.expired.get(name, [])
        return BuildSituation(
            config=self.configs[name],
            now=self.now,
            wanted=wanted,
            problem=self.problems.get(name),
            hold_reason=self.holds.get(name, ""),
            builds=own,
            jobs=jobs,
            needed_keys=frozenset(each for b in others for each in b.share_keys),
            system_images=find_system_images(done, wanted.share_keys),
            answers=self.answers.get(name, {}),
            pool_condition=self.pool_reports.get(name),
        )

    def sync(self, name: str) -> BuildDecision:
        """Decide once, and execute the decision."""
        decision = decide_builds(self.observe(name))
        for action in decision.actions:
            self._count_write(action)
            self.execute(name, action)
            self._count_write(action, after=True)
        return decision

    def settle(self, name: str) -> BuildDecision:
        """Decide until nothing is left to write."""
        for _ in range(MAX_STEPS):
            decision = self.sync(name)
            if self._answer_push_checks():
                continue
            if not [each for each in decision.actions if not isinstance(each, CallRegistry)]:
                return decision
        raise Broken(f"writes without end: {decision.actions}")

    def converge(self) -> None:
        """Let everything succeed until nothing changes."""
        for _ in range(MAX_STEPS):
            before = (dict(self.configs), dict(self.builds), dict(self.jobs))
            delays = [self.settle(name).requeue_after_s for name in list(self.configs)]
            is_busy = bool(self.asked)
            while self.asked:
                self.answer()
            self.collect_garbage()
            for name, job in list(self.jobs.items()):
                if job.is_running:
                    self.finish_job(name)
            due = [each for each in delays if each is not None]
            self.now += min(due) if due else 0.0
            if before == (self.configs, self.builds, self.jobs) and not (due or is_busy):
                return
        raise Broken("does not converge")

    def _count_write(self, action: BuildAction, *, after: bool = False) -> None:
        if self.kill_at is None or isinstance(action, CallRegistry) or after is self.kills_before:
            return
        self.kill_at -= 1
        if self.kill_at < 0:
            self.kill_at = None
            self.answers.clear()
            self.asked.clear()
            raise Killed

    def execute(self, name: str, action: BuildAction) -> None:
        self.log.append(f"{name}: {action}")
        config = self.configs[name]
        match action:
            case CreateBuild(wanted, rebuild_of, _):
                if wanted.name in self.builds:
                    raise Broken(f"build {wanted.name} exists")
                self._number += 1
                self.builds[wanted.name] = BuildFacts(
                    wanted.name, self._make_uid(), name, wanted.config, wanted.push_spec,
                    created=f"{self._number:06}", share_key=wanted.share_key,
                    rebuild_of=rebuild_of, architectures=wanted.architectures,
                    systems={each.name: each.initial for each in wanted.systems},
                )  # fmt: skip
            case DeleteBuild(build, uid, why):
                found = self.builds[build]
                if found.uid != uid:
                    raise Broken("another build")
                if found.state is BuildState.FAILED and not re.search("rebuild|architecture", why):
                    ended = [
                        b for b in self.builds.values()
                        if b.image_config == name and b.has_ended and b.created > found.created
                    ]  # fmt: skip
                    if len(ended) < 3:
                        raise Broken(f"evidence of {build} is lost")
                self.expired.setdefault(name, []).append(found)
                del self.builds[build]
            case SetCurrentBuild(build):
                self.configs[name] = replace(config, current_build=build)
            case AcceptRebuild(uid):
                self.configs[name] = replace(config, rebuild_requested=False, rebuild_of=uid)
            case FinishRebuild():
                self.configs[name] = replace(config, rebuild_of="")
            case SetReport(build, report):
                self.builds[build] = replace(self.builds[build], report=report)
            case SetSystems(build, systems):
                for architecture, system in systems.items():
                    if system.image and system.image not in self.images:
                        raise Broken(f"{system.image} is not verified")
                    if architecture not in ("", *self.platforms.get(system.image, (architecture,))):
                        raise Broken(f"{system.image} is not for {architecture}")
                self.builds[build] = replace(self.builds[build], systems=systems)
            case SetBuildStatus():
                self._set_build_status(action)
            case SetConfigStatus(conditions, pull_spec, build):
                self._check_served(name, pull_spec)
                self.configs[name] = replace(
                    config, conditions=conditions, pull_spec=pull_spec, pull_spec_build=build,
                    observed_generation=config.generation,
                )  # fmt: skip
            case CreateJob(system, build, attempt):
                self._create_job(name, system, build, attempt)
            case AdoptJob(job, build):
                owners = (*self.jobs[job.name].owners, self.builds[build].uid)
                self._set_job(job.name, owners=owners)
            case DeleteJob(job):
                self.jobs.pop(job.name)
            case CallRegistry(question):
                if (name, question) not in self.asked:
                    self.asked.append((name, question))
            case ReportPool(reason, message):
                self.pool_reports[name] = Condition("ImageBuildDegraded", "True", reason, message)

    def _set_build_status(self, action: SetBuildStatus) -> None:
        before = self.builds[action.build]
        if before.has_ended:
            raise Broken(f"{before.name} has ended")
        if (before.state, action.state) == (BuildState.BUILDING, BuildState.PREPARED):
            raise Broken("Building became Prepared")
        if action.state is BuildState.SUCCEEDED and action.digest not in self.images:
            raise Broken(f"{action.digest} does not exist")
        systems = before.systems
        if "" in systems:
            systems = {"": replace(systems[""], job=action.job or before.job)}
        self.builds[action.build] = replace(
            before,
            systems=systems,
            state=action.state,
            reason=action.reason or action.state.value,
            message=action.message,
            digest=action.digest or before.digest,
            job=action.job or before.job,
        )

    def _check_served(self, name: str, pull_spec: str) -> None:
        if pull_spec == self.configs[name].pull_spec:
            return
        inputs = self.inputs[name]
        if self.images[pull_spec] != (inputs.content, inputs.config):
            raise Broken(f"served {self.images[pull_spec]}, wanted {inputs}")
        if not set(inputs.architectures) <= set(self.platforms[pull_spec]):
            raise Broken(f"served {self.platforms[pull_spec]}, wanted {inputs}")

    def _create_job(self, name: str, system: WantedSystem, build: str, attempt: int) -> None:
        for job in self.jobs.values():
            if job.share_key == system.share_key and job.is_running:
                raise Broken(f"two Jobs of {system.share_key}")
        job_name = make_job_name(build, attempt, system.name)
        if job_name in self.jobs:
            raise Broken(f"Job {job_name} exists")
        self.jobs[job_name] = JobFacts(
            job_name, self._make_uid(), share_key=system.share_key, image_config=name, build=build,
            attempt=attempt, architecture=system.name, owners=(self.builds[build].uid,),
        )  # fmt: skip

    def _make_uid(self) -> str:
        self._number += 1
        return f"uid-{self._number}"


__all__ = ["AppendConfig", "Broken", "Killed", "World"]
