"""Takes one flush, rename or ledger write out of the agent, and looks whether a state shows it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.crash.recorder import FLUSHES, RENAMES, Site
from tests.crash.scenarios import Twist
from tests.crash.states import CrashRun, CrashState

STARTS = 120
"""On so many new states of each mutation the agent is started."""
RESTS = 16
"""From so many of them the machine is brought to rest."""
DURABLE_CALLS = (*FLUSHES, *RENAMES, "syncfs")
_SHOWN_FUNCTIONS = 3
_WRAPPERS = frozenset({"_write_alone.<locals>.locked", "HostFiles.write_file"})
"""Functions that say nothing about a call."""


class Mutation(NamedTuple):
    """A call of the code that does not happen: a site, or the ledger write of this number."""

    site: Site | None = None
    ledger_write: int = -1
    write: str = ""
    """The phase of the update in that write, and the functions that lead to it."""

    def __str__(self) -> str:
        return str(self.site) if self.site else f"ledger write in phase {self.write}"


class Trial(NamedTuple):
    """The result of a mutation."""

    notice: str
    """What shows it; empty if nothing does."""
    states: int
    """The states that it leaves, and an update without it never does."""


def list_mutations(run: CrashRun) -> list[Mutation]:
    """Return a mutation for each site of a flush or rename, and for each ledger write."""
    sites = {_shorten(site) for site in run.outcome.sites if site.call in DURABLE_CALLS}
    return [Mutation(site) for site in sorted(sites)] + [
        Mutation(ledger_write=number, write=write)
        for number, write in enumerate(_number_repeated(run.outcome.ledger_calls))
    ]


def _number_repeated(names: Sequence[str]) -> Iterator[str]:
    """Yield the names, with a number behind each that was there before."""
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})"


def list_known_states(run: CrashRun, limit: int) -> frozenset[object]:
    """Return the identities of the states without a mutation, which are all recovered."""
    return run.run(lambda _: None, limit=limit).states


def try_mutation(
    run: CrashRun, mutation: Mutation, known: frozenset[object], *, limit: int
) -> Trial:
    """Look for a state that shows the mutation.

    States that the update leaves without it, which are ``known``, cannot show it.
    """
    omitted = frozenset(
        site for site in run.outcome.sites if mutation.site and _shorten(site) == mutation.site
    )
    states: list[CrashState] = []
    try:
        run.run(
            states.append,
            limit=limit,
            omitted=omitted,
            omitted_write=mutation.ledger_write,
            known=known,
        )
    except Exception as error:  # noqa: BLE001 - a mutation may break anything
        return Trial(f"without a crash: {type(error).__name__}: {error}", len(states))
    return Trial(next(_find_wrong(run, states), ""), len(states))


def _find_wrong(run: CrashRun, states: list[CrashState]) -> Iterator[str]:
    checks: list[tuple[int, Twist | None]] = [(STARTS, None), (RESTS, None)]
    checks += [(RESTS, twist) for twist in run.twists]
    for count, twist in checks:
        for state in states[:: -(-len(states) // count) or 1]:
            for wrong in run.check_state(state, until_rest=count == RESTS, twist=twist):
                story = f"{state.story}, {twist.name}" if twist else state.story
                yield f"{story}: {wrong}"


def _shorten(site: Site) -> Site:
    """Return the site with the functions that name the call: the last of the product."""
    named = [each for each in site.functions if each not in _WRAPPERS]
    return Site(site.call, tuple(named[-_SHOWN_FUNCTIONS:]))
