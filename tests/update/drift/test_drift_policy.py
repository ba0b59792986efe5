"""Reactions to drift, by path and by the number of repairs."""

from dataclasses import replace

from treenail.config.drift_comparison import Drift, DriftAttribute
from treenail.observations import EntryKind
from treenail.update.drift.drift_policy import (
    HOUR_S,
    DriftAssessment,
    DriftPolicy,
    DriftReaction,
    assess_drift,
    format_drift,
    format_drift_remedy,
)

MOTD = Drift("/etc/motd", DriftAttribute.CONTENTS, "sha256:a", "sha256:b")
MODE = Drift("/etc/a/b", DriftAttribute.MODE, "0644", "0600")
EXTRA = Drift(
    "/etc/systemd/system/a.service.d/x.conf", DriftAttribute.KIND, EntryKind.NOTHING, EntryKind.FILE
)
UNIT = Drift("a.service", DriftAttribute.ENABLEMENT, "enabled", "disabled")
ARGUMENT = Drift("kernel command line", DriftAttribute.KERNEL_ARGUMENTS, "quiet", "nothing")
REPAIR_ALL = DriftPolicy(paths=(("*", DriftReaction.REPAIR),))


def test_drift_without_matching_glob_blocks():
    assert assess_drift([MOTD, UNIT], DriftPolicy(), {}, 0.0) == DriftAssessment(
        blocking=(MOTD, UNIT)
    )


def test_dropin_outside_the_config_is_only_reported():
    assert assess_drift([EXTRA], DriftPolicy(), {}, 0.0) == DriftAssessment(reported=(EXTRA,))


def test_first_matching_glob_decides():
    policy = DriftPolicy(
        paths=(("/etc/motd", DriftReaction.REPORT), ("/etc/*", DriftReaction.REPAIR)),
    )

    assert assess_drift([MOTD, MODE], policy, {}, 0.0) == DriftAssessment(
        reported=(MOTD,), to_repair=(MODE,)
    )


def test_unit_matches_by_the_path_of_its_file():
    policy = DriftPolicy(paths=(("/etc/systemd/system/a.service", DriftReaction.REPAIR),))

    assert assess_drift([UNIT], policy, {}, 0.0) == DriftAssessment(to_repair=(UNIT,))


def test_drift_that_needs_a_reboot_is_not_repaired():
    assert assess_drift([ARGUMENT], REPAIR_ALL, {}, 0.0) == DriftAssessment(blocking=(ARGUMENT,))


def test_overridden_argument_is_only_reported():
    later = replace(ARGUMENT, actual="a later quiet=0")
    assert assess_drift([later], DriftPolicy(), {}, 0.0) == DriftAssessment(reported=(later,))
    assert assess_drift([ARGUMENT], DriftPolicy(), {}, 0.0) == DriftAssessment(blocking=(ARGUMENT,))


def test_path_repaired_too_often_blocks_and_is_contested():
    repairs = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert assess_drift([MOTD], REPAIR_ALL, repairs, 40.0) == DriftAssessment(
        blocking=(MOTD,), contested=frozenset({"/etc/motd"})
    )


def test_contested_path_is_repaired_again_after_an_hour():
    repairs = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert assess_drift([MOTD], REPAIR_ALL, repairs, 10.0 + HOUR_S) == DriftAssessment(
        to_repair=(MOTD,)
    )


def test_drift_sentence_names_the_first_and_counts_the_rest():
    text = format_drift([MOTD] * 7, "rendered-a")

    assert text.count("/etc/motd") == 5
    assert text.endswith("; and 2 more")


def test_remedy_depends_on_the_kind_of_drift():
    assert "touch /run/machine-config-daemon-force" in format_drift_remedy([ARGUMENT])
    assert format_drift_remedy([MOTD]).startswith("run: treenail drift --repair PATH")
    assert format_drift_remedy([MOTD], frozenset({"/etc/motd"})).startswith(
        "find the program that writes there, then run: "
    )
