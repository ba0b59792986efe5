"""Texts and documents of ``treenail-controller install plan``."""

from collections.abc import Iterator, Sequence

from treenail.cli.terminal import format_duration
from treenail.installer.prepare.install_plan import InstallImageSource, PoolInstallPlan
from treenail.installer.prepare.prepare import CheckedDirectory

_SOURCES = {
    InstallImageSource.NONE: "none: the pool boots the stock image",
    InstallImageSource.PREBUILT: "pre-built, nothing is built",
    InstallImageSource.LAYER: "the base image with one layer of files",
    InstallImageSource.BUILD: "built from instructions",
}


def format_plan(
    checked: CheckedDirectory, plans: Sequence[PoolInstallPlan], host: Sequence[str]
) -> Iterator[str]:
    """Format the plan for people; ``host`` are problems of this host."""
    for plan in plans:
        yield from _format_pool(plan)
        yield ""
    for note in checked.notes:
        yield f"note: {note}"
    if not checked.is_prepared:
        command = f"treenail-controller install prepare --dir {checked.root}"
        yield f"note: this is the plan after: {command}"
    reasons = [
        *map(str, checked.problems),
        *(f"pool {plan.name}: {each}" for plan in plans for each in plan.problems),
        *(f"this host: {each}" for each in host),
    ]
    if not reasons:
        yield "no reason found why the installation would fail"
        return
    yield f"the installation would fail, {len(reasons)} reason{'' if len(reasons) == 1 else 's'}:"
    for each in reasons:
        yield f"  {each}"


def convert_to_json(
    checked: CheckedDirectory, plans: Sequence[PoolInstallPlan], host: Sequence[str]
) -> dict[str, object]:
    """Convert the plan to a document."""
    return {
        "pools": [_convert_pool(each) for each in plans],
        "problems": [
            {"file": each.file, "line": each.line or None, "text": each.text, "remedy": each.remedy}
            for each in checked.problems
        ],
        "hostProblems": list(host),
        "notes": list(checked.notes),
        "isPrepared": checked.is_prepared,
    }


def _convert_pool(plan: PoolInstallPlan) -> dict[str, object]:
    return {
        "name": plan.name,
        "machineConfig": plan.rendered or None,
        "source": plan.source.value,
        "image": plan.image or None,
        "baseImage": plan.base_image or None,
        "contentKey": plan.content_key or None,
        "host": plan.host or None,
        "expectedSeconds": plan.estimate.seconds if plan.estimate else None,
        "firstBoot": list(plan.first_boot),
        "reboots": plan.reboots,
        "problems": list(plan.problems),
        "notes": list(plan.notes),
    }


def _format_pool(plan: PoolInstallPlan) -> Iterator[str]:
    yield f"pool {plan.name}"
    yield f"  config:     {plan.rendered or 'unknown'}"
    where = f", on {plan.host}" if plan.host else ""
    yield f"  image:      {_SOURCES[plan.source]}{where}"
    if plan.image:
        yield f"  name:       {plan.image}"
    if plan.base_image:
        yield f"  base image: {plan.base_image}"
    if plan.content_key:
        yield f"  content:    {plan.content_key}"
    if plan.estimate:
        duration = format_duration(plan.estimate.seconds)
        yield f"  expected:   {duration} ({plan.estimate.why})"
    for number, each in enumerate(plan.first_boot, 1):
        yield f"  {'first boot: ' if number == 1 else '            '}{number}. {each}"
    if plan.source is not InstallImageSource.NONE:
        yield f"  reboots:    {plan.reboots}"
    for each in plan.notes:
        yield f"  note:       {each}"
