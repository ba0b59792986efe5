"""``treenail drift``: what is not as the current config says, and putting it right."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from treenail.api.contents import Contents
from treenail.api.machineconfig import MachineConfig
from treenail.cli.main import DEGRADED
from treenail.cli.node.cancel import asked
from treenail.cli.node.local_machine import labelled_disk, survey_and_runner, unit_states
from treenail.cli.node.once_state import kept
from treenail.cli.node.own_node import settings_of
from treenail.cli.terminal import Paint, paint
from treenail.clock import Clock, SystemClock
from treenail.config.drift import Attribute, Drift, expected
from treenail.config.redact import FileDiff, redacted_diff
from treenail.config.wanted import Wanted, WantedOS, wanted
from treenail.daemon.configuration.apply import apply
from treenail.daemon.configuration.config_cache import Configs
from treenail.daemon.configuration.drift import Asked, Booted, DriftCheck
from treenail.daemon.configuration.drift_repair import Sayings
from treenail.errors import FileError, HostError, Unreachable, UsageError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.update.decision.request import Kind, Request
from treenail.update.drift.drift_policy import OF_THE_BOOT, Reaction, remedy
from treenail.update.drift.drift_repair import healing
from treenail.update.state import record as records
from treenail.update.state.record import Target
from treenail.update.steps.plan import plan

Json = dict[str, object]

_WORDS = {
    Reaction.REPORT: "reported",
    Reaction.HEAL: "put right by the agent",
    Reaction.BLOCK: "holds updates up",
}
_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Found:
    """One drift, what it leads to, and from what is expected to what is there."""

    drift: Drift
    reaction: Reaction
    diff: FileDiff = field(default_factory=FileDiff)


def main(arguments: argparse.Namespace) -> int:
    """Print what drifted, or put it right; 4 when something is not as the config says."""
    root, clock = Root(arguments.root or "/"), SystemClock()
    machine = _Machine(root, arguments.config, clock)
    found = machine.look()
    if arguments.heal:
        machine.heal(_chosen(found, arguments.heal))
        found = machine.look()
        left = [each for each in found if each.drift.subject in arguments.heal]
        if left:
            raise HostError(
                f"still not as the config says: {'; '.join(str(each.drift) for each in left)}",
                remedy="see why with: journalctl -u treenail",
            )
    if arguments.json:
        document = {"config": machine.current.config, "drifts": [*map(_document, found)]}
        print(json.dumps(document, indent=1))
    else:
        for line in lines(found, machine.current, paint(sys.stdout, os.environ)):
            print(line)
    return DEGRADED if found else 0


def documents(root: Root, config: str | None, clock: Clock) -> list[Json]:
    """What drifted, for a program."""
    return [*map(_document, _Machine(root, config, clock).look())]


def lines(found: Sequence[Found], current: Target, paint: Paint) -> Iterator[str]:
    """What drifted, for a person."""
    if not found:
        yield f"the machine is as {current.config} says"
    for each in found:
        drift = each.drift
        if drift.attribute is Attribute.CONTENTS:
            told = f"{drift.subject}: other contents"
        else:
            told = str(drift)
        yield f"{paint(told, '~')} ({_WORDS[each.reaction]})"
        for line in each.diff.lines:
            yield f"    {paint(line, line[:1])}"
        if each.diff.note:
            yield f"    ({each.diff.note})"


class Away:
    """In the place of a cluster: what is not kept on this machine is not asked for."""

    def machine_config(self, name: str) -> MachineConfig:
        raise Unreachable(f"{name} is not kept on this machine")


class _Machine:
    """What is looked at, and put right."""

    def __init__(self, root: Root, config: str | None, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._files = Files(root)
        self._running = root.prefix == Path("/")
        self._policy = settings_of(root, config).drift.policy
        self.current = records.from_json(Ledger(root).read()).current
        if self.current.config:
            self._wish, self._says = self._of_node()
        else:
            self._wish, self._says = self._of_once()

    def _of_node(self) -> tuple[Wanted, Asked]:
        sayings = Sayings(self._files, Configs(self._files, Away()))
        wish, says = sayings.wish(self.current), sayings.asked(self.current)
        if wish is None or says is None:
            raise HostError(
                f"there is no copy of {self.current.config} on this machine",
                remedy="the agent keeps one as soon as it reaches the API server",
            )
        return wish, says

    def _of_once(self) -> tuple[Wanted, Asked]:
        """Files and units; what is for the operating system was left out."""
        config = kept(self._files)
        if config is None:
            raise HostError(
                "no config of this machine is recorded: there is nothing to compare with",
                remedy="the agent records one with its first update, treenail once when it is done",
            )
        self.current = Target(config.name or "the config of treenail once")
        wish = replace(wanted(config), os=WantedOS())
        return wish, Asked.of(wish)

    def look(self) -> list[Found]:
        """What drifted, by path."""
        states = unit_states(self._root, running=self._running)
        check = DriftCheck(self._root, states, labelled_disk(self._root))
        found = check.everything(self._says, self._booted())
        return [
            Found(drift, self._policy.reaction(drift), self._diff(drift))
            for subject in sorted(found)
            for drift in found[subject]
        ]

    def heal(self, drifts: Sequence[Drift]) -> None:
        """Have these as the config says: by the agent, or where none runs, in its place."""
        paths = tuple(dict.fromkeys(drift.subject for drift in drifts))
        if asked(self._root, Request(Kind.HEAL, paths=paths), self._clock):
            return
        with Ledger(self._root).lock():
            survey, runner = survey_and_runner(self._root, running=self._running)
            old = survey.managed()
            seen = survey.see(old, self._wish)
            steps = plan(old, self._wish, seen, config=self.current.config).steps
            apply(healing(steps, drifts), runner)

    def _booted(self) -> Booted:
        # Commands that look at a tree of files need no bus.
        from treenail.cli.node.choose_backend import deployments

        try:
            arguments = Kernel(self._root).command_line()
        except FileError:
            if self._running:
                raise
            # A tree of files was booted with none: what is not known has not drifted.
            arguments = self._wish.os.kernel_arguments
        try:
            booted = deployments(self._root, self._clock).booted
        except HostError:
            booted = None
        return Booted(arguments, None if booted is None else frozenset(booted.packages))

    def _diff(self, drift: Drift) -> FileDiff:
        if drift.attribute is not Attribute.CONTENTS:
            return FileDiff()
        entry = expected(self._wish)[drift.subject]
        contents = entry.contents or ""
        old = contents.decode() if isinstance(contents, Contents) else contents.encode()
        new = self._files.read(drift.subject, limit=_LIMIT)
        mode = self._root.path(drift.subject).stat().st_mode & (entry.mode or 0)
        return redacted_diff(old, new, path=drift.subject, mode=mode)


def _chosen(found: Sequence[Found], paths: Sequence[str]) -> list[Drift]:
    known = {each.drift.subject for each in found}
    for path in paths:
        if path not in known:
            raise UsageError(f"{path} has not drifted", remedy="see what has: treenail drift")
    chosen = [each.drift for each in found if each.drift.subject in paths]
    for drift in chosen:
        if drift.attribute in OF_THE_BOOT:
            raise UsageError(
                f"{drift.subject}: what was booted can't be put right while it runs",
                remedy=remedy([drift]),
            )
    return chosen


def _document(found: Found) -> Json:
    drift = found.drift
    return {
        "subject": drift.subject,
        "attribute": drift.attribute,
        "expected": drift.expected,
        "actual": drift.actual,
        "reaction": found.reaction,
        "diff": {"lines": list(found.diff.lines), "note": found.diff.note},
    }
