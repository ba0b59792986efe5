"""System parts of earlier builds that a build can use again."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.image_build.facts import BuildFacts, SystemFacts
from treenail.controllers.image_build.planning import BuildPlan
from treenail.controllers.image_build.pushed_images import read_pushed_images


def find_system_images(
    builds: Iterable[BuildFacts],
    share_keys: frozenset[str],
    pushed: Iterable[SystemFacts] = (),
) -> dict[str, tuple[str, ...]]:
    """Return the system parts with these share keys, newest first.

    ``pushed`` are those of deleted builds, which come last: the registry may not have them.
    """
    found: dict[str, dict[str, None]] = {each: {} for each in share_keys if each}
    ordered = sorted(builds, key=lambda each: each.created, reverse=True)
    for system in chain(*(each.systems.values() for each in ordered), pushed):
        if system.image and system.share_key in found:
            found[system.share_key].setdefault(system.image)
    return {share_key: tuple(images) for share_key, images in found.items()}


def find_pushed_systems(config: MachineOSConfig, plan: BuildPlan | None) -> Iterator[SystemFacts]:
    """Yield the system parts of deleted builds that the wanted build could use again.

    Pruning spares them, because the wanted build may use their tag.
    """
    pushed = read_pushed_images(config)[::-1]
    for system in () if plan is None else (each.wanted for each in plan.systems):
        repository, _, tag = system.push_spec.rpartition(":")
        for each in pushed:
            if each.tag == tag and each.image.startswith(f"{repository}@"):
                yield replace(system.initial, image=each.image)
