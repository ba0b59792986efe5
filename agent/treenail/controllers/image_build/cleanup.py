"""Which Jobs and builds are no longer needed."""

from collections.abc import Iterable, Sequence

from treenail.api.machineosbuild import BuildState
from treenail.controllers.image_build.actions import BuildAction, DeleteBuild, DeleteJob
from treenail.controllers.image_build.facts import (
    BuildFacts,
    BuildSituation,
    ImageConfigFacts,
    JobFacts,
)

KEPT_BUILDS = 3
"""Ended builds that a MachineOSConfig keeps beside the current one, the newest ones."""
_ENDED = "all of its builds have ended"


def find_job_deletions(
    situation: BuildSituation, builds: Sequence[BuildFacts], actions: Iterable[BuildAction]
) -> tuple[DeleteJob, ...]:
    """Find Jobs that no build needs. The last Job of a failed build stays for its logs.

    That of an interrupted build does not stay, even if it ended just before the interruption: the
    Secrets of a Job are copies of logins.

    ``builds`` are the builds of the MachineOSConfig as they are after the ``actions``.
    """
    needed = {each for build in builds if not build.has_ended for each in build.share_keys}
    needed |= situation.needed_keys
    wanted = situation.wanted
    if wanted is not None and all(build.name != wanted.name for build in builds):
        # The build that takes the Job over is not created yet.
        needed |= wanted.share_keys
    deleted = {each.job.name for each in actions if isinstance(each, DeleteJob)}
    reasons = (
        (job, _find_reason(job, situation.config.name, builds, frozenset(needed)))
        for job in situation.jobs
        if not job.is_deleting and job.name not in deleted
    )
    return tuple(DeleteJob(job, why, why == _ENDED) for job, why in reasons if why)


def _find_reason(
    job: JobFacts, image_config: str, builds: Sequence[BuildFacts], needed: frozenset[str]
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
    config: ImageConfigFacts,
    builds: Iterable[BuildFacts],
    current: str,
    actions: Iterable[BuildAction],
) -> tuple[DeleteBuild, ...]:
    """Find the oldest ended builds. Images are not deleted with them."""
    kept = {config.current_build, config.pull_spec_build, current}
    kept |= {each.name for each in actions if isinstance(each, DeleteBuild)}
    ended = [
        build
        for build in builds
        if build.has_ended and not build.is_deleting and build.name not in kept
    ]
    ended.sort(key=lambda build: (build.created, build.name), reverse=True)
    why = f"{KEPT_BUILDS} newer builds have ended"
    # The oldest first: images are marked as expired in this order.
    return tuple(DeleteBuild(build.name, build.uid, why) for build in reversed(ended[KEPT_BUILDS:]))
