"""``treenail once``: a machine or a directory brought to a config, all of it or nothing."""

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treenail.api.machineconfig import DEFAULT_KERNEL, MachineConfig
from treenail.cli.files import read_machine_config
from treenail.cli.main import EXIT_REBOOT_NEEDED, flush_output
from treenail.cli.node.local_machine import create_inspector_and_runner
from treenail.cli.node.once_state import has_stored_config, store_config
from treenail.config.wanted import WantedState, read_wanted_state
from treenail.daemon.configuration.apply import RecoveryOutcome, recover_interrupted
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.errors import FileError, IgnitionError, LedgerError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.steps import ConfigStep

if TYPE_CHECKING:
    from treenail.update.impact.disruption import ConfigDisruption

Json = dict[str, object]
_FIRST_BOOT_SECTIONS = (
    *(("ignition", name) for name in ("security", "proxy", "timeouts")),
    *(("storage", name) for name in ("disks", "filesystems", "raid", "luks")),
    ("passwd", "groups"),
    *(("kernelArguments", name) for name in ("shouldExist", "shouldNotExist")),
)


_APPLIED_USER_KEYS = frozenset({"name", "sshAuthorizedKeys", "passwordHash"})


@dataclass(frozen=True, slots=True)
class OnceResult:
    """What was done, and what was not; a directory is not disrupted."""

    steps: tuple[ConfigStep, ...] = ()
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    disruption: "ConfigDisruption | None" = None
    recovery: RecoveryOutcome | None = None

    @property
    def needs_reboot(self) -> bool:
        return self.disruption is not None and self.disruption.needs_reboot


def main(arguments: argparse.Namespace) -> int:
    """Apply the config; 3 when it takes effect with a reboot."""
    # A config is many values and no cycles: looking for those would cost a tenth of the time.
    gc.disable()
    try:
        return _apply_file(arguments)
    finally:
        gc.enable()


def _apply_file(arguments: argparse.Namespace) -> int:
    root = Root(arguments.root or "/")
    config = read_machine_config(arguments.file)
    running = root.prefix == Path("/") and not arguments.no_services
    outcome = apply_once(config, root, is_running=running)
    try:
        _print_result(outcome, is_json=arguments.json)
    except OSError:
        if outcome.steps:
            due = "; reboot the machine for it to take effect" if outcome.needs_reboot else ""
            print(f"treenail: the change is done{due}", file=sys.stderr)
        raise
    return EXIT_REBOOT_NEEDED if outcome.needs_reboot else 0


def _print_result(outcome: OnceResult, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(_build_document(outcome), indent=1))
    else:
        for line in _format_result(outcome):
            print(line)
    flush_output()


def apply_once(config: MachineConfig, root: Root, *, is_running: bool) -> OnceResult:
    """Have the config below the root; ``is_running`` is a machine whose services take notice.

    Raises `ConfigError` before anything is touched, `StepError` when all is as it was.
    """
    wish = read_wanted_state(config)
    _refuse_included_configs(config)
    left_out = tuple(_find_skipped_parts(config, wish))
    with Ledger(root).hold_lock():
        survey, runner = create_inspector_and_runner(root, is_running=is_running)
        recovered = recover_interrupted(runner)
        if runner.pending.find_owner():
            raise LedgerError(
                f"the agent has an update of {root.prefix} under way",
                remedy="let it finish, or call it off: treenail cancel",
            )
        old = survey.read_ownership()
        found = plan_steps(old, wish, survey.inspect_machine(old, wish), config=config.name)
        steps, cost = _add_service_steps(wish, found.steps) if is_running else (found.steps, None)
        try:
            NodeConfiguration(survey, runner).apply_steps(steps, wish, config.name)
        except KeyboardInterrupt:
            recover_interrupted(runner)
            raise
        # Without a step what drifts would drift from the same; to write it out again takes long.
        keeping = steps or not has_stored_config(HostFiles(root))
        notes = (*found.notes, *(_store_config(config, root) if keeping else ()))
    return OnceResult(steps, notes, left_out, cost, recovered)


def _store_config(config: MachineConfig, root: Root) -> Iterator[str]:
    """Have a copy; why there is none is no reason to call the change a failure."""
    try:
        store_config(HostFiles(root), config)
    except FileError as error:
        yield f"treenail drift has nothing to compare with: {error}"


def _add_service_steps(
    wish: WantedState, steps: tuple[ConfigStep, ...]
) -> "tuple[tuple[ConfigStep, ...], ConfigDisruption]":
    """The steps, with those by which what runs takes notice, and what they cost."""
    # A directory needs none of this.
    from treenail.api.disruptionpolicy import DEFAULT_POLICY
    from treenail.update.impact.disruption import compute_disruption
    from treenail.update.impact.step_impact import convert_steps_to_diff, plan_service_steps

    cost = compute_disruption(convert_steps_to_diff(wish, steps), DEFAULT_POLICY)
    if not cost.needs_reboot:
        steps += plan_service_steps(steps, [each.action for each in cost.costs])
    return steps, cost


def _find_skipped_parts(config: MachineConfig, wish: WantedState) -> Iterator[str]:
    """What the config has and files do not do."""
    for name, value in (
        ("osImageURL", _redact_text(wish.os.image)),
        ("baseOSExtensionsContainerImage", _redact_text(wish.os.extensions_image)),
        ("kernelArguments", " ".join(map(_redact_text, wish.os.kernel_arguments))),
        ("kernelType", "" if wish.os.kernel_type == DEFAULT_KERNEL else wish.os.kernel_type),
        ("extensions", ", ".join(sorted(wish.os.extensions))),
        ("fips", "true" if wish.os.fips else ""),
    ):
        if value:
            yield f"{name} ({value}): it is for the operating system, not for its files"
    document = config.config or {}
    for section, name in _FIRST_BOOT_SECTIONS:
        part = document.get(section)
        if isinstance(part, dict) and _has_values(part.get(name)):
            yield f"{section}.{name}: it is for a machine's first boot"
    for index, user in enumerate(_get_users(document)):
        others = ", ".join(
            key for key in user if key not in _APPLIED_USER_KEYS and _has_values(user[key])
        )
        if others:
            yield f"passwd.users[{index}] ({others}): only keys and passwords of users are set"


def _get_users(document: Json) -> list[Json]:
    section = document.get("passwd")
    return (section.get("users") if isinstance(section, dict) else None) or []


def _refuse_included_configs(config: MachineConfig) -> None:
    """Raise `IgnitionError` for a config that consists of others: without them it is not whole."""
    document = config.config or {}
    section = document.get("ignition")
    others = section.get("config") if isinstance(section, dict) else None
    for name, value in others.items() if isinstance(others, dict) else ():
        if _has_values(value):
            raise IgnitionError(
                f"spec.config.ignition.config.{name}: other configs are not fetched",
                remedy="put what they hold into this one",
            )


def _has_values(value: object) -> bool:
    """Whether a value is there; an object without values is none."""
    if isinstance(value, dict):
        return any(map(_has_values, value.values()))
    return value not in (None, "", [])


def _redact_text(text: str) -> str:
    # Its patterns take long to compile, and most configs have none of this.
    if not text:
        return ""
    from treenail.config.redact import redact_line

    return redact_line(text)


def _format_result(outcome: OnceResult) -> Iterator[str]:
    if outcome.recovery is RecoveryOutcome.UNDONE:
        yield "undid an earlier change that was cut short"
    yield from (f"{step}" for step in outcome.steps)
    yield from (f"note: {note}" for note in outcome.notes)
    yield from (f"left out: {text}" for text in outcome.skipped)
    yield f"done: {len(outcome.steps)} steps" if outcome.steps else "nothing to do"
    if outcome.disruption is None:
        return
    if outcome.disruption.needs_drain and not outcome.needs_reboot:
        yield "note: the node should have been drained for this; nothing here does that"
    if outcome.needs_reboot:
        yield "reboot the machine for it to take effect:"
        yield from (f"  {reason}" for reason in _list_reasons(outcome.disruption))


def _build_document(outcome: OnceResult) -> Json:
    return {
        "changed": bool(outcome.steps),
        "steps": [str(step) for step in outcome.steps],
        "notes": list(outcome.notes),
        "leftOut": list(outcome.skipped),
        "rebootNeeded": outcome.needs_reboot,
        "reasons": [] if outcome.disruption is None else _list_reasons(outcome.disruption),
        "recovered": outcome.recovery,
    }


def _list_reasons(found: "ConfigDisruption") -> list[str]:
    return [str(reason) for cost in found.costs for reason in cost.reasons]
