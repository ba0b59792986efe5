"""The files, units and users of this machine, as an update plans and changes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from treenail.config.wanted import Wanted
from treenail.daemon.configuration.apply import apply, put_back, recover
from treenail.daemon.configuration.inspect import Survey
from treenail.daemon.configuration.step_runner import Runner
from treenail.errors import FileError
from treenail.update.impact.step_impact import serving
from treenail.update.steps.ownership import Managed, managed
from treenail.update.steps.plan import Plan, plan
from treenail.update.steps.steps import Enabling, Remember, Step

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an earlier process, or an earlier move, has left."""

    cut_short: bool = False
    """Something is to be put back, or cleaned up, before anything else is done."""
    held: bool = False
    """What the owner has changed, and can put back."""


class Configuration:
    """Plans and changes. Raises `HostError`, and `ConfigError` for a damaged record."""

    def __init__(self, survey: Survey, runner: Runner) -> None:
        self._survey = survey
        self._runner = runner

    def unfinished(self, owner: str) -> Unfinished:
        """What is left of changes; whatever is held for another than ``owner`` is cut short."""
        held = self._runner.held.owner()
        return Unfinished(
            cut_short=self._runner.undo.left() is not None
            or self._runner.held.unclean
            or held not in {"", owner},
            held=bool(held) and held == owner,
        )

    def recover(self, owner: str) -> None:
        """Have nothing cut short; what is held for another than ``owner`` stays as it is now."""
        recover(self._runner)
        if self._runner.held.owner() not in {"", owner}:
            self._runner.held.confirm()

    def plan(self, new: Wanted, config: str) -> Plan:
        """What there is to do until the machine has the config of this name."""
        old = self._survey.managed()
        return plan(old, new, self._survey.see(old, new), config=config)

    def check(self, steps: Sequence[Step]) -> None:
        """Raise `FileError` for what the steps ask for and the machine can't have."""
        self._runner.check(steps)
        self._runner.check_kinds(steps)

    def apply(self, steps: Sequence[Step], new: Wanted, config: str, *, owner: str = "") -> None:
        """Do the steps, all or none, and verify that nothing is left to do.

        With an ``owner`` they are held: `confirm` or `put_back` says what becomes of them.
        """

        def verify() -> None:
            left = self.plan(new, config).steps
            if left:
                shown = "; ".join(str(step) for step in left[:_SHOWN])
                more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
                raise FileError(f"this is still, or again, to be done: {shown}{more}")

        apply(steps, self._runner, verify=verify, owner=owner)

    def adopt(self, new: Wanted, config: str) -> None:
        """Have it written down that the config's belong to it, unless somebody wrote down what."""
        if self._survey.managed() == Managed():
            apply((Remember(managed(config, new)),), self._runner)

    def complete(self, steps: Sequence[Step], new: Wanted, config: str) -> None:
        """Do, after a boot, the steps that are still left, and have started what they enable."""
        self.apply((*steps, *serving(steps, ())), new, config)
        if any(isinstance(step, Enabling) for step in steps):
            self._runner.start_enabled()

    def put_right(self, steps: Sequence[Step]) -> None:
        """Do the steps, all or none; others may be left to do."""
        apply(steps, self._runner)

    def complete_first(self, steps: Sequence[Step]) -> None:
        """Do some of them, before it is known whether the boot is any good."""
        apply((*steps, *serving(steps, ())), self._runner)
        if any(isinstance(step, Enabling) for step in steps):
            self._runner.start_enabled()

    def confirm(self) -> None:
        """Have for good what is held."""
        self._runner.held.confirm()

    def put_back(self, *, booted: bool = False) -> None:
        """Undo what is held; ``booted``: the machine was booted with it."""
        put_back(self._runner, booted=booted)
