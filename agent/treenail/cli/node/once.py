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
from treenail.cli.files import machine_config
from treenail.cli.main import REBOOT_NEEDED, flush
from treenail.cli.node.local_machine import survey_and_runner
from treenail.cli.node.once_state import has_kept, keep
from treenail.config.wanted import Wanted, wanted
from treenail.daemon.configuration.apply import Recovery, recover
from treenail.daemon.configuration.machine import Configuration
from treenail.errors import FileError, IgnitionError, LedgerError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.steps.plan import plan
from treenail.update.steps.steps import Step

if TYPE_CHECKING:
    from treenail.update.impact.disruption import Disruption

Json = dict[str, object]
_FIRST_BOOT = (
    *(("ignition", name) for name in ("security", "proxy", "timeouts")),
    *(("storage", name) for name in ("disks", "filesystems", "raid", "luks")),
    ("passwd", "groups"),
    *(("kernelArguments", name) for name in ("shouldExist", "shouldNotExist")),
)


_OF_USERS = frozenset({"name", "sshAuthorizedKeys", "passwordHash"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done, and what was not; a directory is not disrupted."""

    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    cost: "Disruption | None" = None
    recovered: Recovery | None = None

    @property
    def reboots(self) -> bool:
        return self.cost is not None and self.cost.reboots


def main(arguments: argparse.Namespace) -> int:
    """Apply the config; 3 when it takes effect with a reboot."""
    # A config is many values and no cycles: looking for those would cost a tenth of the time.
    gc.disable()
    try:
        return _main(arguments)
    finally:
        gc.enable()


def _main(arguments: argparse.Namespace) -> int:
    root = Root(arguments.root or "/")
    config = machine_config(arguments.file)
    running = root.prefix == Path("/") and not arguments.no_services
    outcome = once(config, root, running=running)
    try:
        _print(outcome, as_json=arguments.json)
    except OSError:
        if outcome.steps:
            due = "; reboot the machine for it to take effect" if outcome.reboots else ""
            print(f"treenail: the change is done{due}", file=sys.stderr)
        raise
    return REBOOT_NEEDED if outcome.reboots else 0


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_document(outcome), indent=1))
    else:
        for line in _lines(outcome):
            print(line)
    flush()


def once(config: MachineConfig, root: Root, *, running: bool) -> Outcome:
    """Have the config below the root; ``running`` is a machine whose services take notice.

    Raises `ConfigError` before anything is touched, `StepError` when all is as it was.
    """
    wish = wanted(config)
    _refuse_others(config)
    left_out = tuple(_left_out(config, wish))
    with Ledger(root).lock():
        survey, runner = survey_and_runner(root, running=running)
        recovered = recover(runner)
        if runner.held.owner():
            raise LedgerError(
                f"the agent has an update of {root.prefix} under way",
                remedy="let it finish, or call it off: treenail cancel",
            )
        old = survey.managed()
        found = plan(old, wish, survey.see(old, wish), config=config.name)
        steps, cost = _noticed(wish, found.steps) if running else (found.steps, None)
        try:
            Configuration(survey, runner).apply(steps, wish, config.name)
        except KeyboardInterrupt:
            recover(runner)
            raise
        # Without a step what drifts would drift from the same; to write it out again takes long.
        keeping = steps or not has_kept(Files(root))
        notes = (*found.notes, *(_kept(config, root) if keeping else ()))
    return Outcome(steps, notes, left_out, cost, recovered)


def _kept(config: MachineConfig, root: Root) -> Iterator[str]:
    """Have a copy; why there is none is no reason to call the change a failure."""
    try:
        keep(Files(root), config)
    except FileError as error:
        yield f"treenail drift has nothing to compare with: {error}"


def _noticed(wish: Wanted, steps: tuple[Step, ...]) -> "tuple[tuple[Step, ...], Disruption]":
    """The steps, with those by which what runs takes notice, and what they cost."""
    # A directory needs none of this.
    from treenail.api.disruptionpolicy import DEFAULTS
    from treenail.update.impact.disruption import disruption
    from treenail.update.impact.step_impact import as_diff, serving

    cost = disruption(as_diff(wish, steps), DEFAULTS)
    if not cost.reboots:
        steps += serving(steps, [each.action for each in cost.costs])
    return steps, cost


def _left_out(config: MachineConfig, wish: Wanted) -> Iterator[str]:
    """What the config has and files do not do."""
    for name, value in (
        ("osImageURL", _redacted(wish.os.image)),
        ("baseOSExtensionsContainerImage", _redacted(wish.os.extensions_image)),
        ("kernelArguments", " ".join(map(_redacted, wish.os.kernel_arguments))),
        ("kernelType", "" if wish.os.kernel_type == DEFAULT_KERNEL else wish.os.kernel_type),
        ("extensions", ", ".join(sorted(wish.os.extensions))),
        ("fips", "true" if wish.os.fips else ""),
    ):
        if value:
            yield f"{name} ({value}): it is for the operating system, not for its files"
    document = config.config or {}
    for section, name in _FIRST_BOOT:
        part = document.get(section)
        if isinstance(part, dict) and _filled(part.get(name)):
            yield f"{section}.{name}: it is for a machine's first boot"
    for index, user in enumerate(_users(document)):
        others = ", ".join(key for key in user if key not in _OF_USERS and _filled(user[key]))
        if others:
            yield f"passwd.users[{index}] ({others}): only keys and passwords of users are set"


def _users(document: Json) -> list[Json]:
    section = document.get("passwd")
    return (section.get("users") if isinstance(section, dict) else None) or []


def _refuse_others(config: MachineConfig) -> None:
    """Raise `IgnitionError` for a config that consists of others: without them it is not whole."""
    document = config.config or {}
    section = document.get("ignition")
    others = section.get("config") if isinstance(section, dict) else None
    for name, value in others.items() if isinstance(others, dict) else ():
        if _filled(value):
            raise IgnitionError(
                f"spec.config.ignition.config.{name}: other configs are not fetched",
                remedy="put what they hold into this one",
            )


def _filled(value: object) -> bool:
    """Whether a value is there; an object without values is none."""
    if isinstance(value, dict):
        return any(map(_filled, value.values()))
    return value not in (None, "", [])


def _redacted(text: str) -> str:
    # Its patterns take long to compile, and most configs have none of this.
    if not text:
        return ""
    from treenail.config.redact import redacted_line

    return redacted_line(text)


def _lines(outcome: Outcome) -> Iterator[str]:
    if outcome.recovered is Recovery.UNDONE:
        yield "undid an earlier change that was cut short"
    yield from (f"{step}" for step in outcome.steps)
    yield from (f"note: {note}" for note in outcome.notes)
    yield from (f"left out: {text}" for text in outcome.left_out)
    yield f"done: {len(outcome.steps)} steps" if outcome.steps else "nothing to do"
    if outcome.cost is None:
        return
    if outcome.cost.drains and not outcome.reboots:
        yield "note: the node should have been drained for this; nothing here does that"
    if outcome.reboots:
        yield "reboot the machine for it to take effect:"
        yield from (f"  {reason}" for reason in _reasons(outcome.cost))


def _document(outcome: Outcome) -> Json:
    return {
        "changed": bool(outcome.steps),
        "steps": [str(step) for step in outcome.steps],
        "notes": list(outcome.notes),
        "leftOut": list(outcome.left_out),
        "rebootNeeded": outcome.reboots,
        "reasons": [] if outcome.cost is None else _reasons(outcome.cost),
        "recovered": outcome.recovered,
    }


def _reasons(found: "Disruption") -> list[str]:
    return [str(reason) for cost in found.costs for reason in cost.reasons]
