"""Steps of the stage ``bootstrap``: what a step is, and how a list of them runs and resumes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treenail.clock import Clock
from treenail.errors import TreenailError
from treenail.installer.steps.install_state import InstallState, StepState, find_changed_inputs

log = logging.getLogger(__name__)

StepInputs = Mapping[str, str]
"""Digest of each input by a name that users know: it is printed when the digest has changed."""
StepResult = Mapping[str, str]
"""Facts that the state keeps; contains nothing secret."""


class StepOverdueError(TreenailError):
    """A step exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Time limit of one attempt of a step."""

    seconds: float
    flag: str
    """Option that sets it."""


class StepContext(Protocol):
    """The running step's view of the process."""

    def report(self, text: str) -> None:
        """Publish in a few words what the step does now; the text contains nothing secret."""

    def wait(self, seconds: float) -> None:
        """Sleep, at most until the time limit; raise `StepOverdueError` when it has passed."""

    def remaining_s(self) -> float:
        """Return the seconds until the time limit; at least 0."""


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

    def run(self, context: StepContext) -> StepResult:
        """Run to the end; raise `TreenailError`. A step that ran before keeps what it can."""


class StepObserver(Protocol):
    """Is informed of steps, to publish what the installation does."""

    def begin_step(self, step: Step) -> None:
        """A step begins, or its earlier result is checked."""

    def report(self, text: str) -> None:
        """The running step does this now."""

    def end_step(self, step: Step) -> None:
        """A step is done, in this process or in an earlier one."""

    def fail_step(self, step: Step, error: TreenailError) -> None:
        """A step failed."""


class InstallStepRunner:
    """Runs steps in order, and continues where a killed process stopped."""

    def __init__(self, state: InstallState, observer: StepObserver, clock: Clock) -> None:
        self._state = state
        self._observer = observer
        self._clock = clock

    def run_steps(self, steps: Sequence[Step]) -> None:
        """Run the steps that are not done with these inputs; raise the error of the first failure.

        A step whose inputs changed runs again, and so do all after it, which may find their
        results again by content.
        """
        for step in steps:
            self.run_step(step)

    def run_step(self, step: Step) -> None:
        """Run one step, or take over its earlier result. Raises `TreenailError`."""
        self._observer.begin_step(step)
        try:
            inputs = step.compute_inputs()
            if self._resume_step(step, inputs):
                log.info("kept step %s of an earlier start: its inputs are unchanged", step.name)
            else:
                self._state.begin_step(step.name, inputs)
                log.info("beginning step %s: %s", step.name, step.title)
                result = step.run(_RunningStep(step, self._observer, self._clock))
                self._state.finish_step(step.name, result)
                log.info("finished step %s", step.name)
        except TreenailError as error:
            self._record_failure(step, error)
            raise
        self._observer.end_step(step)

    def _resume_step(self, step: Step, inputs: StepInputs) -> bool:
        record = self._state.find_step(step.name)
        if record is None:
            return False
        if changed := find_changed_inputs(record.inputs, inputs):
            log.warning("restarting at step %s: %s", step.name, "; ".join(changed))
            return False
        if record.state is not StepState.DONE:
            log.info("repeating step %s: its state was %s", step.name, record.state)
            return False
        if not step.resume(record.result):
            log.warning("restarting at step %s: its earlier result is gone", step.name)
            return False
        return True

    def _record_failure(self, step: Step, error: TreenailError) -> None:
        """Record the failure; the error of the step stays the one that is raised."""
        log.error("step %s failed: %s", step.name, error)
        self._observer.fail_step(step, error)
        record = self._state.find_step(step.name)
        if record is None or record.state is not StepState.RUNNING:
            return  # its inputs cannot be read
        try:
            self._state.fail_step(step.name, error)
        except TreenailError as another:
            log.warning("cannot record the failure: %s", another)


class _RunningStep:
    def __init__(self, step: Step, observer: StepObserver, clock: Clock) -> None:
        self._step = step
        self._observer = observer
        self._clock = clock
        self._end = None if step.limit is None else clock.monotonic() + step.limit.seconds

    def report(self, text: str) -> None:
        log.info("%s: %s", self._step.name, text)
        self._observer.report(text)

    def wait(self, seconds: float) -> None:
        rest = self.remaining_s()
        if rest <= 0 and (limit := self._step.limit) is not None:
            raise StepOverdueError(
                f"cannot {self._step.title}: the time limit of {format_limit(limit.seconds)} has "
                "passed",
                remedy=f"see what it waited for in the log, and allow more time: {limit.flag} TIME",
            )
        self._clock.sleep(min(seconds, rest))

    def remaining_s(self) -> float:
        return float("inf") if self._end is None else max(0.0, self._end - self._clock.monotonic())


def format_limit(seconds: float) -> str:
    """Format a time limit as users write it: ``45s``, ``60m``."""
    whole = round(seconds)
    return f"{whole // 60}m" if whole >= 60 and whole % 60 == 0 else f"{seconds:g}s"
