"""Steps of the stage ``bootstrap``: what a step is, how a list of them runs and resumes.

The status of an installation follows them: ``status.json``, the document of ``/status``, and
systemd's line.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from treenail import clocks, errors, memory
from treenail.encoding import codec, json_text
from treenail.installer.directory import install_files, install_state

log = logging.getLogger(__name__)

StepInputs = Mapping[str, str]
"""Digest of each input by a name that users know: it is printed when the digest has changed."""
StepResult = Mapping[str, str]
"""Facts that the state keeps; contains nothing secret."""


class StepOverdueError(errors.TreenailError):
    """A step exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Time limit of one attempt of a step."""

    seconds: float
    flag: str
    """Option that sets it."""


class Step(Protocol):
    """One step. The process may be killed at any point, so that `run` must be repeatable."""

    @property
    def name(self) -> str:
        """Name in the state and in messages, such as ``build:master``."""

    @property
    def title(self) -> str:
        """Title for users, such as ``build the image of pool master``."""

    @property
    def limit(self) -> StepLimit | None:
        """Time limit of one attempt; None for a step of seconds."""

    def compute_inputs(self) -> StepInputs:
        """Compute the digests of the inputs; earlier steps are done. Raises `TreenailError`."""

    def resume(self, result: StepResult) -> bool:
        """Take over the result of an earlier process; return False when the step must run again.

        The inputs are unchanged. Checks that files and images of the result still exist.
        """

    def run(self, context: "StepContext") -> StepResult:
        """Run to the end; raise `TreenailError`. A step that ran before keeps what it can."""


class InstallStepRunner:
    """Runs steps in order, and continues where a killed process stopped."""

    def __init__(
        self, state: install_state.InstallState, observer: "StatusPublisher", clock: clocks.Clock
    ) -> None:
        self._state = state
        self._observer = observer
        self._clock = clock

    def run_step(self, step: Step) -> None:
        """Run one step, or take over its earlier result. Raises `TreenailError`.

        A step whose inputs changed runs again, and so do all after it, which may find their
        results again by content.
        """
        self._observer.begin_step(step)
        try:
            inputs = step.compute_inputs()
            if self._resume_step(step, inputs):
                log.info("kept step %s of an earlier start: its inputs are unchanged", step.name)
            else:
                self._state.begin_step(step.name, inputs)
                log.info("beginning step %s: %s", step.name, step.title)
                result = step.run(StepContext(step, self._observer, self._clock))
                self._state.finish_step(step.name, result)
                log.info("finished step %s", step.name)
        except errors.TreenailError as error:
            self._record_failure(step, error)
            raise

    def _resume_step(self, step: Step, inputs: StepInputs) -> bool:
        record = self._state.find_step(step.name)
        if record is None:
            return False
        if changed := install_state.find_changed_inputs(record.inputs, inputs):
            log.warning("restarting at step %s: %s", step.name, "; ".join(changed))
            return False
        if record.state is not install_state.StepState.DONE:
            log.info("repeating step %s: its state was %s", step.name, record.state)
            return False
        if not step.resume(record.result):
            log.warning("restarting at step %s: its earlier result is gone", step.name)
            return False
        return True

    def _record_failure(self, step: Step, error: errors.TreenailError) -> None:
        """Record the failure; the error of the step stays the one that is raised."""
        log.error("step %s failed: %s", step.name, error)
        self._observer.fail_step(step, error)
        record = self._state.find_step(step.name)
        if record is None or record.state is not install_state.StepState.RUNNING:
            return  # its inputs cannot be read
        try:
            self._state.fail_step(step.name, error)
        except errors.TreenailError as another:
            log.warning("cannot record the failure: %s", another)


class StepContext:
    """The running step's view of the process."""

    def __init__(self, step: Step, observer: "StatusPublisher", clock: clocks.Clock) -> None:
        self._step = step
        self._observer = observer
        self._clock = clock
        self._end = None if step.limit is None else clock.monotonic() + step.limit.seconds

    def report(self, text: str) -> None:
        """Publish in a few words what the step does now; the text contains nothing secret."""
        log.info("%s: %s", self._step.name, text)
        self._observer.report(text)

    def wait(self, seconds: float) -> None:
        """Sleep, at most until the time limit; raise `StepOverdueError` when it has passed."""
        rest = self.remaining_s()
        if rest <= 0 and (limit := self._step.limit) is not None:
            raise StepOverdueError(
                f"cannot {self._step.title}: the time limit of {format_limit(limit.seconds)} has "
                "passed",
                remedy=f"see what it waited for in the log, and allow more time: {limit.flag} TIME",
            )
        self._clock.sleep(min(seconds, rest))

    def remaining_s(self) -> float:
        """Return the seconds until the time limit; at least 0."""
        return float("inf") if self._end is None else max(0.0, self._end - self._clock.monotonic())


def format_limit(seconds: float) -> str:
    """Format a time limit as users write it: ``45s``, ``60m``."""
    whole = round(seconds)
    return f"{whole // 60}m" if whole >= 60 and whole % 60 == 0 else f"{seconds:g}s"


STATUS_VERSION = 1
_TEXT_LIMIT = 2000
_LIMIT = memory.MIB


class InstallPhase(StrEnum):
    """State of an installation."""

    RUNNING = "running"
    STOPPED = "stopped"
    """A user or systemd stopped the process; the next start continues."""
    FAILED = "failed"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class InstallFailure:
    """Why an installation failed."""

    step: str
    reason: str
    remedy: str
    at: str
    """Time in RFC 3339."""


@dataclass(frozen=True, slots=True)
class InstalledPool:
    """Config and image of a pool, as far as they exist."""

    rendered: str = ""
    image: str = ""
    """Pull spec by digest; empty for the stock image, and before it exists."""


@dataclass(frozen=True, slots=True)
class InstallStatus:
    """The document ``status.json``. It contains nothing secret: every client may read it."""

    id: str
    phase: InstallPhase
    since: str
    """Time at which the step began, in RFC 3339."""
    step: str = ""
    title: str = ""
    """The step in words."""
    activity: str = ""
    """What the step does now."""
    updated: str = ""
    limit_seconds: float | None = None
    """Time limit of the step; None for a step of seconds."""
    is_serving: bool = False
    """True while machines receive their configs."""
    pools: Mapping[str, InstalledPool] | None = None
    failure: InstallFailure | None = None

    def describe_progress(self, now: float) -> str:
        """Describe in one line what happens, since when, and how long it may take."""
        if self.failure is not None:
            return f"the installation failed: {self.failure.reason}"
        if self.phase is InstallPhase.COMPLETE:
            return "the installation is complete"
        if not self.step:
            return "the installation begins"
        since = clocks.parse_rfc3339(self.since)
        waited = f" for {max(0.0, now - since):.0f} s" if since is not None else ""
        limit = f" (limit {self.limit_seconds:.0f} s)" if self.limit_seconds is not None else ""
        activity = f": {self.activity}" if self.activity else ""
        return f"the bootstrap host has tried to {self.title}{waited}{limit}{activity}"


class StatusPublisher:
    """Publishes the status. Thread-safe.

    A status that cannot be written is logged once: it must not end an installation.
    """

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        install_id: str,
        files: install_files.InstallFiles,
        clock: clocks.Clock,
        notify_status: Callable[[str], None],
    ) -> None:
        """``notify_status`` receives a line for the service manager."""
        self._path = directory.status
        self._files = files
        self._clock = clock
        self._notify_status = notify_status
        self._lock = threading.RLock()
        self._is_failing = False
        self._status = InstallStatus(install_id, InstallPhase.RUNNING, self._read_time())
        self._publish_status(self._status)

    @property
    def status(self) -> InstallStatus:
        """The newest status."""
        with self._lock:
            return self._status

    def describe_progress(self) -> str:
        """Describe in one line what the installation does now."""
        return self.status.describe_progress(self._clock.now())

    def build_document(self) -> codec.Json:
        """Return the answer to ``/status``: the document, and the seconds of the step so far."""
        status = self.status
        since = clocks.parse_rfc3339(status.since)
        waited = 0.0 if since is None else max(0.0, self._clock.now() - since)
        return {**codec.encode(status, version=STATUS_VERSION), "waited_seconds": round(waited, 1)}

    def begin_step(self, step: Step) -> None:
        """Publish that a step begins."""
        self._change_status(
            step=step.name,
            title=step.title,
            activity="",
            since=self._read_time(),
            limit_seconds=None if step.limit is None else step.limit.seconds,
        )

    def report(self, text: str) -> None:
        """Publish what the step does now."""
        self._change_status(activity=text[:_TEXT_LIMIT])

    def fail_step(self, step: Step, error: errors.TreenailError) -> None:
        """Publish the failure."""
        failure = InstallFailure(
            step.name,
            str(error)[:_TEXT_LIMIT],
            error.remedy[:_TEXT_LIMIT],
            self._read_time(),
        )
        self._change_status(phase=InstallPhase.FAILED, is_serving=False, failure=failure)

    def fail(self, error: errors.TreenailError) -> None:
        """Publish a failure outside of a step, unless that of a step is published."""
        if self.status.phase is not InstallPhase.FAILED:
            failure = InstallFailure(
                "start", str(error)[:_TEXT_LIMIT], error.remedy[:_TEXT_LIMIT], self._read_time()
            )
            self._change_status(phase=InstallPhase.FAILED, is_serving=False, failure=failure)

    def set_pools(self, pools: Mapping[str, InstalledPool]) -> None:
        """Publish config and image of each pool."""
        self._change_status(pools=dict(pools))

    def set_serving(self, *, is_serving: bool) -> None:
        """Publish whether machines receive their configs."""
        self._change_status(is_serving=is_serving)

    def complete(self, *, is_serving: bool) -> None:
        """Publish that the installation is complete."""
        self._change_status(
            phase=InstallPhase.COMPLETE,
            is_serving=is_serving,
            since=self._read_time(),
            step="",
            title="",
            activity="",
            limit_seconds=None,
        )

    def stop(self) -> None:
        """Publish that the process ends before the installation is complete."""
        self._change_status(phase=InstallPhase.STOPPED, is_serving=False)

    def _change_status(self, **changes: object) -> None:
        with self._lock:
            # mypy cannot check the types of names that a caller chooses.
            self._publish_status(replace(self._status, **changes))  # type: ignore[arg-type]

    def _publish_status(self, status: InstallStatus) -> None:
        with self._lock:
            self._status = replace(status, updated=self._read_time())
            content = (
                json.dumps(codec.encode(self._status, version=STATUS_VERSION), indent=1) + "\n"
            )
            try:
                # Each user of the host may wait for the installation.
                self._files.write(self._path, content.encode(), mode=0o644)
                self._is_failing = False
            except errors.FileError as error:
                if not self._is_failing:
                    log.warning("cannot publish the status: %s", error)
                self._is_failing = True
            self._notify_status(self._status.describe_progress(self._clock.now()))

    def _read_time(self) -> str:
        return clocks.format_rfc3339(self._clock.now())


def read_install_status(
    directory: install_files.InstallDirectory, files: install_files.InstallFiles
) -> InstallStatus | None:
    """Read ``status.json``; None before the first start. Raises `TreenailError`."""
    content = files.read(directory.status, limit=_LIMIT)
    if content is None:
        return None
    try:
        document = json_text.parse_json(content)
    except ValueError as error:
        raise _make_damaged_error(directory, error) from error
    try:
        return codec.decode(InstallStatus, document, version=STATUS_VERSION)
    except codec.CodecError as error:
        version = document.get("version") if isinstance(document, dict) else None
        if isinstance(version, int) and version != STATUS_VERSION:
            raise install_state.InstallStateError(
                f"cannot read {directory.status}: {error}",
                remedy="run this command with the treenail that installs",
            ) from error
        raise _make_damaged_error(directory, error) from error


def _make_damaged_error(
    directory: install_files.InstallDirectory, error: Exception
) -> install_state.InstallStateError:
    return install_state.InstallStateError(
        f"cannot read {directory.status}: it is damaged: {error}",
        remedy="continue the installation, which writes it again: treenail-controller install "
        f"bootstrap --dir {directory.root}",
    )
