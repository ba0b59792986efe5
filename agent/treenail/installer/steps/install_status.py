"""Status of an installation: ``status.json``, the document of ``/status``, and systemd's line."""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail.clock import Clock, format_rfc3339, parse_rfc3339
from treenail.codec import CodecError, Json, decode, encode, parse_json
from treenail.errors import FileError, TreenailError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.steps.install_state import InstallStateError
from treenail.installer.steps.steps import Step

log = logging.getLogger(__name__)

STATUS_VERSION = 1
_TEXT_LIMIT = 2000
_LIMIT = 1024 * 1024


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
        since = parse_rfc3339(self.since)
        waited = f" for {max(0.0, now - since):.0f} s" if since is not None else ""
        limit = f" (limit {self.limit_seconds:.0f} s)" if self.limit_seconds is not None else ""
        activity = f": {self.activity}" if self.activity else ""
        return f"the bootstrap host has tried to {self.title}{waited}{limit}{activity}"


class StatusPublisher:
    """Publishes the status; a `StepObserver`. Thread-safe.

    A status that cannot be written is logged once: it must not end an installation.
    """

    def __init__(
        self,
        directory: InstallDirectory,
        install_id: str,
        files: InstallFiles,
        clock: Clock,
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
        self._publish(self._status)

    @property
    def status(self) -> InstallStatus:
        """The newest status."""
        with self._lock:
            return self._status

    def describe_progress(self) -> str:
        """Describe in one line what the installation does now."""
        return self.status.describe_progress(self._clock.now())

    def build_document(self) -> Json:
        """Return the answer to ``/status``: the document, and the seconds of the step so far."""
        status = self.status
        since = parse_rfc3339(status.since)
        waited = 0.0 if since is None else max(0.0, self._clock.now() - since)
        return {**encode(status, version=STATUS_VERSION), "waited_seconds": round(waited, 1)}

    def begin_step(self, step: Step) -> None:
        """Publish that a step begins."""
        self._change(
            step=step.name,
            title=step.title,
            activity="",
            since=self._read_time(),
            limit_seconds=None if step.limit is None else step.limit.seconds,
        )

    def report(self, text: str) -> None:
        """Publish what the step does now."""
        self._change(activity=text[:_TEXT_LIMIT])

    def end_step(self, step: Step) -> None:
        """Do nothing: the next step follows at once."""

    def fail_step(self, step: Step, error: TreenailError) -> None:
        """Publish the failure."""
        failure = InstallFailure(
            step.name,
            str(error)[:_TEXT_LIMIT],
            error.remedy[:_TEXT_LIMIT],
            self._read_time(),
        )
        self._change(phase=InstallPhase.FAILED, is_serving=False, failure=failure)

    def fail(self, error: TreenailError) -> None:
        """Publish a failure outside of a step, unless that of a step is published."""
        if self.status.phase is not InstallPhase.FAILED:
            failure = InstallFailure(
                "start", str(error)[:_TEXT_LIMIT], error.remedy[:_TEXT_LIMIT], self._read_time()
            )
            self._change(phase=InstallPhase.FAILED, is_serving=False, failure=failure)

    def set_pools(self, pools: Mapping[str, InstalledPool]) -> None:
        """Publish config and image of each pool."""
        self._change(pools=dict(pools))

    def set_serving(self, *, is_serving: bool) -> None:
        """Publish whether machines receive their configs."""
        self._change(is_serving=is_serving)

    def complete(self, *, is_serving: bool) -> None:
        """Publish that the installation is complete."""
        self._change(
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
        self._change(phase=InstallPhase.STOPPED, is_serving=False)

    def _change(self, **changes: object) -> None:
        with self._lock:
            # mypy cannot check the types of names that a caller chooses.
            self._publish(replace(self._status, **changes))  # type: ignore[arg-type]

    def _publish(self, status: InstallStatus) -> None:
        with self._lock:
            self._status = replace(status, updated=self._read_time())
            content = json.dumps(encode(self._status, version=STATUS_VERSION), indent=1) + "\n"
            try:
                # Each user of the host may wait for the installation.
                self._files.write(self._path, content.encode(), mode=0o644)
                self._is_failing = False
            except FileError as error:
                if not self._is_failing:
                    log.warning("cannot publish the status: %s", error)
                self._is_failing = True
            self._notify_status(self._status.describe_progress(self._clock.now()))

    def _read_time(self) -> str:
        return format_rfc3339(self._clock.now())


def read_install_status(directory: InstallDirectory, files: InstallFiles) -> InstallStatus | None:
    """Read ``status.json``; None before the first start. Raises `TreenailError`."""
    content = files.read(directory.status, limit=_LIMIT)
    if content is None:
        return None
    try:
        document = parse_json(content)
    except ValueError as error:
        raise _make_damaged_error(directory, error) from error
    try:
        return decode(InstallStatus, document, version=STATUS_VERSION)
    except CodecError as error:
        version = document.get("version") if isinstance(document, dict) else None
        if isinstance(version, int) and version != STATUS_VERSION:
            raise InstallStateError(
                f"cannot read {directory.status}: {error}",
                remedy="run this command with the treenail that installs",
            ) from error
        raise _make_damaged_error(directory, error) from error


def _make_damaged_error(directory: InstallDirectory, error: Exception) -> InstallStateError:
    return InstallStateError(
        f"cannot read {directory.status}: it is damaged: {error}",
        remedy="continue the installation, which writes it again: treenail-controller install "
        f"bootstrap --dir {directory.root}",
    )
