"""The files, units and users of this machine, as an update plans and changes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from treenail.config.wanted import WantedState
from treenail.daemon.configuration.apply import apply_steps, recover_interrupted, restore_pending
from treenail.daemon.configuration.inspect import MachineInspector
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import FileError
from treenail.update.impact.step_impact import plan_service_steps
from treenail.update.steps.ownership import Ownership, compute_ownership
from treenail.update.steps.plan import StepPlan, plan_steps
from treenail.update.steps.steps import ConfigStep, EnablementStep, RecordOwnership

_MAX_SHOWN_STEPS = 3


@dataclass(frozen=True, slots=True)
class UnfinishedChanges:
    """What an earlier process, or an earlier move, has left."""

    is_interrupted: bool = False
    """Something is to be put back, or cleaned up, before anything else is done."""
    has_undo: bool = False
    """What the owner has changed, and can put back."""


class NodeConfiguration:
    """Plans and changes. Raises `HostError`, and `ConfigError` for a damaged record."""

    def __init__(self, inspector: MachineInspector, runner: StepRunner) -> None:
        self._inspector = inspector
        self._runner = runner

    def find_unfinished(self, owner: str) -> UnfinishedChanges:
        """What is left of changes; whatever is held for another than ``owner`` is cut short."""
        held = self._runner.pending.find_owner()
        return UnfinishedChanges(
            is_interrupted=self._runner.undo.find_interrupted() is not None
            or self._runner.pending.needs_cleanup
            or held not in {"", owner},
            has_undo=bool(held) and held == owner,
        )

    def recover_interrupted(self, owner: str) -> None:
        """Have nothing cut short; what is held for another than ``owner`` stays as it is now."""
        recover_interrupted(self._runner)
        if self._runner.pending.find_owner() not in {"", owner}:
            self._runner.pending.confirm_change()

    def plan_steps(self, new: WantedState, config: str) -> StepPlan:
        """What there is to do until the machine has the config of this name."""
        old = self._inspector.read_ownership()
        return plan_steps(old, new, self._inspector.inspect_machine(old, new), config=config)

    def check_steps(self, steps: Sequence[ConfigStep]) -> None:
        """Raise `FileError` for what the steps ask for and the machine can't have."""
        self._runner.check_owners(steps)
        self._runner.check_path_kinds(steps)

    def apply_steps(
        self, steps: Sequence[ConfigStep], new: WantedState, config: str, *, owner: str = ""
    ) -> None:
        """Do the steps, all or none, and verify that nothing is left to do.

        With an ``owner`` they are held: `confirm_pending` or `restore_pending` says what becomes of them.
        """

        def verify() -> None:
            left = self.plan_steps(new, config).steps
            if left:
                shown = "; ".join(str(step) for step in left[:_MAX_SHOWN_STEPS])
                more = (
                    f" and {len(left) - _MAX_SHOWN_STEPS} more"
                    if len(left) > _MAX_SHOWN_STEPS
                    else ""
                )
                raise FileError(f"this is still, or again, to be done: {shown}{more}")

        apply_steps(steps, self._runner, verify=verify, owner=owner)

    def record_ownership(self, new: WantedState, config: str) -> None:
        """Have it written down that the config's belong to it, unless somebody wrote down what."""
        if self._inspector.read_ownership() == Ownership():
            apply_steps((RecordOwnership(compute_ownership(config, new)),), self._runner)

    def complete_steps(self, steps: Sequence[ConfigStep], new: WantedState, config: str) -> None:
        """Do, after a boot, the steps that are still left, and have started what they enable."""
        self.apply_steps((*steps, *plan_service_steps(steps, ())), new, config)
        if any(isinstance(step, EnablementStep) for step in steps):
            self._runner.start_default_target()

    def apply_repair(self, steps: Sequence[ConfigStep]) -> None:
        """Do the steps, all or none; others may be left to do."""
        apply_steps(steps, self._runner)

    def complete_early_steps(self, steps: Sequence[ConfigStep]) -> None:
        """Do some of them, before it is known whether the boot is any good."""
        apply_steps((*steps, *plan_service_steps(steps, ())), self._runner)
        if any(isinstance(step, EnablementStep) for step in steps):
            self._runner.start_default_target()

    def confirm_pending(self) -> None:
        """Have for good what is held."""
        self._runner.pending.confirm_change()

    def restore_pending(self, *, is_booted: bool = False) -> None:
        """Undo what is held; ``is_booted``: the machine was booted with it."""
        restore_pending(self._runner, is_booted=is_booted)
