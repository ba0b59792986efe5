"""Takes one flush, rename or ledger write out of the agent, and looks whether a state shows it."""

from collections.abc import Iterator
from typing import NamedTuple

from tests.crash.recorder import FLUSHES, RENAMES, Site
from tests.crash.states import CrashState, ScenarioRun

RESTS = 40
"""From so many states of each mutation the machine is brought to rest."""
DURABLE_CALLS = (*FLUSHES, *RENAMES, "syncfs")


class Mutation(NamedTuple):
    """A call of the code that does not happen: a site, or the ledger write of this number."""

    site: Site | None = None
    ledger_write: int = -1

    def __str__(self) -> str:
        return str(self.site) if self.site else f"ledger write {self.ledger_write}"


class _NoticedError(BaseException):
    """A state showed the mutation."""


def list_mutations(run: ScenarioRun) -> list[Mutation]:
    """Return a mutation for each site of a flush or rename, and for each ledger write."""
    sites = {_shorten(site) for site in run.outcome.sites if site.call in DURABLE_CALLS}
    return [Mutation(site) for site in sorted(sites)] + [
        Mutation(ledger_write=number) for number in range(run.outcome.ledger_writes)
    ]


def find_notice(run: ScenarioRun, mutation: Mutation, *, limit: int) -> str:
    """Return what shows the mutation; empty if nothing does.

    The states at the calls that follow an omitted one come first: they are the most likely.
    """
    omitted = frozenset(
        site for site in run.outcome.sites if mutation.site and _shorten(site) == mutation.site
    )
    states: list[CrashState] = []
    try:
        run.run(states.append, limit=limit, omitted=omitted, omitted_write=mutation.ledger_write)
    except Exception as error:  # noqa: BLE001 - a mutation may break anything
        return f"{type(error).__name__}: {error}"
    return next(_find_wrong(run, states), "")


def _find_wrong(run: ScenarioRun, states: list[CrashState]) -> Iterator[str]:
    for state in states:
        for wrong in run.check_state(state, until_rest=False):
            yield f"{state.story}: {wrong}"
    for state in states[:: max(len(states) // RESTS, 1)]:
        for wrong in run.check_state(state):
            yield f"{state.story}: {wrong}"


def _shorten(site: Site) -> Site:
    """Return the site with the functions that name the call: the last three of the product."""
    return Site(site.call, site.functions[-3:])
