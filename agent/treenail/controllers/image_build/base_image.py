"""Decide which image the tag in ``treenail.io/base-image`` stands for.

A tag is resolved once. With ``treenail.io/rebuild-schedule`` it is resolved again while a window is
open, and a new digest is followed. The record in an annotation of the MachineOSConfig is what
builds use, so that neither a restart nor the registry changes the base of a build.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from treenail.api import annotations as key
from treenail.api import decode, machineosconfig
from treenail.controllers.pools import image_tags, maintenance_windows, rollout_policy
from treenail.errors import ConfigError
from treenail.image.inputs import checks

_MAX_WINDOWS = 20
_TEXTS = image_tags.TagTexts(
    condition=machineosconfig.ImageConfigCondition.BASE_RESOLVED,
    subject="The base image",
    users="builds",
    missing_remedy=f"push the tag, or name another image in the annotation {key.BASE_IMAGE}",
    moved_back_remedy=(
        f"to follow the tag, set the annotation {key.REBUILD} of the MachineOSConfig"
    ),
)
_SCHEDULE_FORMAT = (
    'a list such as [{"days": ["Sun"], "start": "02:00", "duration": "4h", "timeZone": "UTC"}]'
)


def make_base_facts(config: machineosconfig.MachineOSConfig) -> image_tags.TagFacts:
    """Extract the facts; raise `ConfigError` for an invalid schedule."""
    image = config.base_image
    tag = image if image_tags.is_tag(image) else ""
    schedule = config.metadata.annotations.get(key.REBUILD_SCHEDULE)
    if schedule is not None and not tag:
        raise ConfigError(
            f"annotation {key.REBUILD_SCHEDULE}: expected a tag in the annotation "
            f"{key.BASE_IMAGE}, found {image[:100] or 'no annotation'!r}; name the base by tag, or "
            "remove the schedule"
        )
    record = image_tags.decode_base_record(config.metadata.annotations.get(key.RESOLVED_BASE, ""))
    windows = () if schedule is None else parse_schedule(schedule)
    return image_tags.TagFacts(
        tag,
        record,
        is_watched=bool(windows),
        windows=windows,
        rebuild_requested=config.needs_rebuild,
        is_stored=record is not None,
        has_condition=any(
            condition.type == machineosconfig.ImageConfigCondition.BASE_RESOLVED
            for condition in config.conditions
        ),
    )


def parse_schedule(text: str) -> tuple[maintenance_windows.MaintenanceWindow, ...]:
    """Parse the windows of the annotation; raise `ConfigError`."""
    where = f"annotation {key.REBUILD_SCHEDULE}"
    try:
        fields = decode.Fields.from_json({"windows": decode.load_json(text, where=where)}, "")
        _check_count(len(fields.get_list("windows")))
        return fields.map_objects(
            "windows",
            lambda window: maintenance_windows.parse_window(
                window, rollout_policy.parse_duration_s(window, "duration")
            ),
        )
    except ConfigError as error:
        # An annotation has one value, and its finding one form.
        finding = checks.InputFinding(
            checks.InputReason.ANNOTATION_INVALID,
            where,
            _SCHEDULE_FORMAT,
            f"{text[:100]!r} ({error})",
            "correct it, or remove the annotation",
        )
        raise ConfigError(str(finding)) from error


def _check_count(count: int) -> None:
    # Without windows, a schedule would always be open.
    if not 1 <= count <= _MAX_WINDOWS:
        raise ConfigError(f"expected 1 to {_MAX_WINDOWS} windows, found {count}")


def decide_base(
    facts: image_tags.TagFacts,
    answers: Mapping[image_tags.TagQuestion, image_tags.ImageAnswer],
    now: float,
    *,
    login: str = "",
) -> image_tags.TagDecision:
    """Decide whether to resolve the tag, and whether to follow the answer."""
    find_answer = partial(image_tags.find_tag_answer, answers)
    decision = image_tags.decide_tag(facts, find_answer, now, _TEXTS, login=login)
    if decision.problem is None:
        return decision
    problem = replace(decision.problem, reason=checks.InputReason.BASE_IMAGE_UNRESOLVED)
    return replace(decision, problem=problem)
