"""Every row of the decision table.

| update      | wish      | deployments        | handshake      | move             |
|-------------|-----------|--------------------|----------------|------------------|
| none        | = current | booted as wanted   |                | Rest             |
| none        | new       | old booted         |                | Stage            |
| none        | new       | new booted already |                | Adopt            |
| staging     | stands    | staged, locked     |                | Drain            |
| draining    | stands    | staged, locked     | acknowledged   | Reboot           |
| rebooting   | any       | new booted         |                | Commit           |
| resuming    | any       |                    | uncordoned     | Close(done)      |
| any before  | moved     |                    |                | Drop, Close      |
"""

from dataclasses import replace

import pytest

from tests.update.build import (
    BOOT_2,
    DIGEST_A,
    DIGEST_B,
    IMAGE_B,
    A,
    B,
    C,
    drained,
    facts,
    staged,
    update,
    wanting,
)
from treenail.api import annotations as key
from treenail.update.decision import desired
from treenail.update.decision.actions import (
    AdoptAction,
    ApplyAction,
    CancelStagedAction,
    Decision,
    DrainAction,
    FinishAction,
    IdleAction,
    PlanAction,
    RebootAction,
    RecoverAction,
    RefuseAction,
    RestoreAction,
    RetryAction,
    StageAction,
    UncordonAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.decide import decide_action, make_drain_token, needs_deployments
from treenail.update.decision.facts import DeploymentState, DrainHandshake, ObservedNode
from treenail.update.impact.disruption import DisruptionLevel
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import OSChange
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, QuarantinedTarget, Target
from treenail.update.status import NodeEvent, make_report

TOKEN = "drain-rendered-worker-b"
UNCORDON = "uncordon-rendered-worker-b"


def in_phase(phase: Phase, *, current: Target = A, **changes: object) -> LedgerRecord:
    return LedgerRecord(current=current, update=update(phase, **changes))


def refusal(decision: Decision) -> str:
    assert isinstance(decision, RefuseAction)
    return str(decision.error)


def test_a_node_at_its_target_rests() -> None:
    at = facts(record=LedgerRecord(current=B), deployments=None)
    assert decide_action(at) == IdleAction(f"at {B}", is_settled=True)


def test_a_new_image_is_weighed_and_then_staged() -> None:
    assert decide_action(facts()) == PlanAction(B)
    assert decide_action(facts(record=in_phase(Phase.STAGING, impact=None))) == PlanAction(B)
    assert decide_action(facts(record=in_phase(Phase.STAGING))) == StageAction(B)


def test_an_image_that_is_booted_already_is_adopted_where_nobody_remembers_another() -> None:
    booted = DeploymentState(booted_digest=DIGEST_B)
    assert decide_action(facts(record=LedgerRecord(), deployments=booted)) == AdoptAction(B)
    assert decide_action(facts(deployments=booted)) == PlanAction(B), (
        "keys and arguments may be others"
    )


def test_a_machine_that_was_rolled_back_by_hand_is_brought_to_its_target_again() -> None:
    at = facts(record=LedgerRecord(current=B), deployments=DeploymentState(booted_digest=DIGEST_A))
    assert decide_action(at) == PlanAction(B)


def test_a_foreign_staged_deployment_is_named_and_left_alone() -> None:
    assert "os-1 is staged" in refusal(decide_action(facts(deployments=staged(C))))
    assert "os-1 is staged" in refusal(decide_action(facts(deployments=staged(B, locked=False))))


def test_a_staged_and_locked_image_asks_for_the_drain() -> None:
    at = facts(record=in_phase(Phase.STAGING), deployments=staged())
    assert decide_action(at) == DrainAction(B, TOKEN)


def test_the_drain_is_awaited_while_the_controller_works() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    at = facts(record=record, deployments=staged(), node=wanting(asked=TOKEN, applied="uncordon-x"))
    assert decide_action(at) == WaitAction("waiting for the drain")


def test_a_drain_that_takes_too_long_is_overdue() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    at = facts(record=record, deployments=staged(), node=wanting(asked=TOKEN), now=4000.0)
    assert decide_action(at) == WaitAction("waiting for the drain", is_overdue=True)
    assert make_report(at, decide_action(at), None).event == NodeEvent(
        "Warning", "FailedToDrain", "waiting for the drain for longer than allowed"
    )


def test_a_drained_node_reboots() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    assert decide_action(
        facts(record=record, deployments=staged(), node=drained(TOKEN))
    ) == RebootAction(B, "os-1")


def test_a_node_somebody_uncordoned_is_drained_anew_with_a_new_token() -> None:
    record = in_phase(Phase.DRAINING, drain_token=TOKEN)
    node = wanting(asked=TOKEN, applied=TOKEN, unschedulable=False)
    assert decide_action(facts(record=record, deployments=staged(), node=node)) == DrainAction(
        B, TOKEN + ".again-1"
    )


def test_drain_tokens_count_their_attempts() -> None:
    first = make_drain_token("rendered-a", "")
    second = make_drain_token("rendered-a", first)
    third = make_drain_token("rendered-a", second)
    assert [first, second, third] == [
        "drain-rendered-a",
        "drain-rendered-a.again-1",
        "drain-rendered-a.again-2",
    ]
    assert make_drain_token("rendered-b", third) == "drain-rendered-b"


def test_a_drain_is_not_asked_for_while_an_uncordon_is_under_way() -> None:
    node = wanting(asked="uncordon-rendered-worker-a", applied=TOKEN)
    at = facts(record=in_phase(Phase.STAGING), deployments=staged(), node=node)
    assert decide_action(at) == WaitAction("waiting for the uncordon that was asked for before")


def test_a_single_replica_node_reboots_without_a_drain() -> None:
    at = facts(record=in_phase(Phase.STAGING), deployments=staged(), should_drain=False)
    assert decide_action(at) == RebootAction(B, "os-1")


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.DRAINING])
def test_a_changed_mind_drops_what_was_staged(phase: Phase) -> None:
    at = facts(record=in_phase(phase, drain_token=TOKEN), deployments=staged(), node=wanting(C))
    assert decide_action(at) == CancelStagedAction("another target is asked for", "os-1")


def test_a_mind_changed_between_the_record_and_the_reboot_is_obeyed() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(record=record, deployments=staged(locked=False), node=drained(TOKEN, A))
    assert decide_action(at) == CancelStagedAction("another target is asked for", "os-1")


def test_after_dropping_the_drain_is_taken_back_and_the_update_closed() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    asked = facts(record=record, node=drained(TOKEN, C))
    assert decide_action(asked) == UncordonAction(UNCORDON)
    waiting = facts(record=record, node=wanting(C, asked=UNCORDON, applied=TOKEN))
    assert decide_action(waiting) == WaitAction("waiting for the uncordon")
    over = facts(record=record, node=wanting(C, asked=UNCORDON, applied=UNCORDON))
    assert decide_action(over) == FinishAction(is_done=False)


def test_a_drain_that_never_reached_the_node_leaves_a_cordon_of_somebody_else_alone() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert decide_action(facts(record=record, node=wanting(C, unschedulable=True))) == FinishAction(
        is_done=False
    )


def test_what_is_still_staged_after_a_crash_in_the_drop_is_dropped() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    assert isinstance(
        decide_action(facts(record=record, deployments=staged(), node=wanting(C))),
        CancelStagedAction,
    )


def test_the_point_of_no_return_is_passed_without_the_api_server() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    assert decide_action(facts(record=record, deployments=staged(), node=None)) == RebootAction(
        B, "os-1"
    )


def test_without_the_api_server_no_drain_is_invented() -> None:
    at = facts(record=in_phase(Phase.STAGING), deployments=staged(), node=None)
    assert decide_action(at) == WaitAction("waiting for the API server, to ask for the drain")


def test_the_booted_digest_is_what_puts_an_update_on_trial() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(
        record=record,
        boot_id=BOOT_2,
        deployments=DeploymentState(booted_digest=DIGEST_B),
        node=None,
    )
    assert decide_action(at) == VerifyAction(B, "the checks begin")


def test_a_reboot_that_lost_the_staged_deployment_stages_again() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    assert decide_action(facts(record=record, boot_id=BOOT_2, node=drained(TOKEN))) == StageAction(
        B
    )


def test_a_boot_without_a_package_that_was_asked_for_is_not_done() -> None:
    asked = OSChange(install=("usbguard",))
    record = in_phase(
        Phase.REBOOTING, drain_token=TOKEN, reboot_count=1, impact=replace(IMAGE_B, os=asked)
    )
    for packages, decision in (
        ((), StageAction(B)),
        (("usbguard",), VerifyAction(B, "the checks begin")),
    ):
        deployed = DeploymentState(booted_digest=DIGEST_A, packages=packages)
        at = facts(record=record, boot_id=BOOT_2, deployments=deployed, node=drained(TOKEN))
        assert decide_action(at) == decision


def test_the_third_reboot_that_leads_elsewhere_is_the_last() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=3)
    decision = decide_action(facts(record=record, boot_id=BOOT_2, node=drained(TOKEN)))
    assert isinstance(decision, CancelStagedAction)
    assert decision.quarantine is not None
    assert "3 times" in decision.quarantine.reason


def test_a_refused_target_is_not_tried_again_until_another_was_asked_for() -> None:
    refused = LedgerRecord(current=A, quarantined=QuarantinedTarget(B, "it does not boot"))
    assert refusal(decide_action(facts(record=refused))) == "it does not boot"
    assert decide_action(facts(record=refused, node=wanting(C))) == RetryAction()


def test_an_unlocked_deployment_on_a_node_in_service_is_dropped() -> None:
    for phase in (Phase.STAGING, Phase.DRAINING, Phase.REBOOTING):
        at = facts(record=in_phase(phase, drain_token=TOKEN), deployments=staged(locked=False))
        assert isinstance(decide_action(at), CancelStagedAction), phase


def test_after_the_boot_the_uncordon_is_asked_for_and_awaited() -> None:
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN)
    assert decide_action(
        facts(record=record, deployments=None, node=drained(TOKEN))
    ) == UncordonAction(UNCORDON)
    waiting = wanting(asked=UNCORDON, applied=TOKEN, unschedulable=True)
    assert decide_action(facts(record=record, deployments=None, node=waiting)) == WaitAction(
        "waiting for the uncordon"
    )
    over = wanting(asked=UNCORDON, applied=UNCORDON)
    assert decide_action(facts(record=record, deployments=None, node=over)) == FinishAction(
        is_done=True
    )


def test_an_uncordon_that_takes_too_long_is_overdue_and_the_node_not_done() -> None:
    record = in_phase(Phase.UNCORDONING, current=B, drain_token=TOKEN)
    waiting = wanting(asked=UNCORDON, applied=TOKEN, unschedulable=True)
    at = facts(record=record, deployments=None, node=waiting, now=700.0)
    decision = decide_action(at)
    assert decision == WaitAction("waiting for the uncordon", is_overdue=True)
    told = make_report(at, decision, None)
    sentence = "waiting for the uncordon for longer than allowed"
    assert told.event == NodeEvent("Warning", "FailedToUncordon", sentence)
    assert (told.annotations[key.STATE], told.annotations[key.REASON]) == ("Working", sentence)


def test_a_machine_that_goes_down_is_left_in_peace() -> None:
    assert decide_action(facts(is_shutting_down=True)) == IdleAction("the machine is going down")


def test_a_drain_left_over_from_a_lost_ledger_is_taken_back() -> None:
    at = facts(record=LedgerRecord(current=B), deployments=None, node=drained(TOKEN))
    assert decide_action(at) == UncordonAction(UNCORDON)


def test_a_node_that_is_asked_for_nothing_rests() -> None:
    node = ObservedNode(desired.NoTarget(), DrainHandshake(), Target())
    assert decide_action(facts(node=node)) == IdleAction("no config is asked of this node")


def test_a_node_taken_over_outside_image_mode_rests_at_what_it_claims() -> None:
    at = Target("rendered-a")
    node = wanting(at, claimed=at)
    assert decide_action(facts(record=LedgerRecord(), node=node)) == AdoptAction(at)
    assert decide_action(facts(record=LedgerRecord(current=at), node=node)) == IdleAction(
        f"at {at}", is_settled=True
    )


def test_deployments_are_not_asked_for_at_rest() -> None:
    at_rest = facts(record=LedgerRecord(current=B), deployments=None)
    assert not needs_deployments(at_rest, is_first=False)
    assert needs_deployments(at_rest, is_first=True)
    assert needs_deployments(facts(), is_first=False)
    assert not needs_deployments(facts(node=None), is_first=True)


def _annotations(*pairs: tuple[str, str]) -> dict[str, str]:
    return {key.DESIRED_CONFIG: B.config, **dict(pairs)}


@pytest.mark.parametrize("spelling", list(key.IMAGE_SPELLINGS))
def test_each_spelling_of_the_image_is_obeyed(spelling: str) -> None:
    assert desired.read_desired_target(_annotations((spelling, B.image))) == desired.DesiredTarget(
        B, (spelling,)
    )


def test_two_spellings_that_agree_are_one_wish() -> None:
    asked = _annotations((key.DESIRED_IMAGE, B.image), (key.DESIRED_OS_IMAGE, B.image))
    assert desired.read_desired_target(asked) == desired.DesiredTarget(
        B, (key.DESIRED_OS_IMAGE, key.DESIRED_IMAGE)
    )


def test_two_spellings_that_disagree_are_an_error_naming_both() -> None:
    asked = desired.read_desired_target(
        _annotations((key.DESIRED_IMAGE, A.image), (key.DESIRED_OS_IMAGE, B.image))
    )
    assert isinstance(asked, desired.InvalidTarget)
    for part in (key.DESIRED_IMAGE, key.DESIRED_OS_IMAGE, A.image, B.image):
        assert part in str(asked.error)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("registry.example.com/os/node:latest", "it names a tag"),
        ("registry.example.com/os/node", "it has no digest"),
        (f"registry.example.com/os/node:1@{DIGEST_B}", "a tag beside the digest"),
        (f"docker://registry.example.com/os/node@{DIGEST_B}", "starts with a transport"),
        (f"ostree-unverified-registry:r.example.com/n@{DIGEST_B}", "starts with a transport"),
        ("registry.example.com/os/node@sha256:abc", "not sha256: and 64 hex digits"),
        (f"registry.example.com/os/node@sha512:{'b' * 128}", "not sha256: and 64 hex digits"),
        (f"node@{DIGEST_B}", "does not start with a registry host"),
        (f"registry.example.com/OS@{DIGEST_B}", "lower-case path components"),
        (f"registry.example.com/os/../node@{DIGEST_B}", "lower-case path components"),
        (f"user:secret@registry.example.com/os@{DIGEST_B}", ""),
        ("", "it has no digest"),
        ("rm -rf /", "it has no digest"),
    ],
)
def test_anything_but_a_digest_is_refused_with_what_to_write(text: str, why: str) -> None:
    asked = desired.read_desired_target(_annotations((key.DESIRED_OS_IMAGE, text)))
    assert isinstance(asked, desired.InvalidTarget)
    assert why in str(asked.error)
    assert "@sha256:" in asked.error.remedy
    assert isinstance(
        decide_action(facts(node=ObservedNode(asked, DrainHandshake(), A))), RefuseAction
    ), "nothing is touched"


MISBAKED = "was built from rendered-worker-x, and the node is asked for rendered-worker-b"


def test_an_image_that_was_built_from_another_config_is_refused_before_the_drain() -> None:
    deployed = replace(staged(), staged_config="rendered-worker-x")
    decision = decide_action(facts(record=in_phase(Phase.STAGING), deployments=deployed))
    assert isinstance(decision, CancelStagedAction)
    assert decision.staged_id == "os-1"
    assert decision.quarantine is not None
    assert MISBAKED in decision.quarantine.reason
    booted = DeploymentState(booted_digest=DIGEST_B, booted_config="rendered-worker-x")
    assert MISBAKED in refusal(decide_action(facts(deployments=booted)))


def test_an_image_that_bakes_the_config_or_says_nothing_or_need_not_is_taken() -> None:
    record = in_phase(Phase.STAGING)
    for baked in ("", B.config):
        deployed = replace(staged(), staged_config=baked)
        assert decide_action(facts(record=record, deployments=deployed)) == DrainAction(B, TOKEN)
    deployed = replace(staged(), staged_config="rendered-worker-x")
    assert decide_action(
        facts(record=record, deployments=deployed, has_files_in_image=False)
    ) == DrainAction(B, TOKEN)


CONFIG_ONLY = Target("rendered-worker-b")


def config_only(phase: Phase, level: DisruptionLevel, **changes: object) -> LedgerRecord:
    work = UpdateImpact(needs_write=True, level=level)
    return in_phase(phase, target=CONFIG_ONLY, impact=work, **changes)


def test_a_config_that_disturbs_nothing_is_applied_in_service() -> None:
    at = facts(record=config_only(Phase.STAGING, DisruptionLevel.RELOAD), node=wanting(CONFIG_ONLY))
    assert not needs_deployments(at, is_first=False)
    assert decide_action(replace(at, deployments=None)) == ApplyAction(CONFIG_ONLY)


def test_a_config_that_drains_is_applied_out_of_service_and_without_a_reboot() -> None:
    record = config_only(Phase.STAGING, DisruptionLevel.DRAIN)
    at = facts(record=record, node=wanting(CONFIG_ONLY), deployments=None)
    assert decide_action(at) == DrainAction(CONFIG_ONLY, TOKEN)
    record = config_only(Phase.DRAINING, DisruptionLevel.DRAIN, drain_token=TOKEN)
    at = facts(record=record, node=drained(TOKEN, CONFIG_ONLY), deployments=None)
    assert decide_action(at) == ApplyAction(CONFIG_ONLY)


def test_a_config_that_reboots_is_applied_and_held_first() -> None:
    record = config_only(Phase.APPLYING, DisruptionLevel.REBOOT, drain_token=TOKEN)
    at = facts(record=record, node=drained(TOKEN, CONFIG_ONLY))
    assert decide_action(at) == ApplyAction(CONFIG_ONLY)
    assert decide_action(replace(at, has_undo=True)) == RebootAction(CONFIG_ONLY)
    booted = replace(at, has_undo=True, boot_id=BOOT_2)
    assert decide_action(booted) == VerifyAction(CONFIG_ONLY, "the checks begin")


def test_files_are_put_back_first_when_another_deployment_is_booted() -> None:
    record = in_phase(Phase.REBOOTING, drain_token=TOKEN, reboot_count=1)
    at = facts(record=record, boot_id=BOOT_2, node=drained(TOKEN), has_undo=True)
    assert decide_action(at) == RestoreAction()
    assert decide_action(replace(at, has_undo=False)) == StageAction(B)


@pytest.mark.parametrize("phase", [Phase.REBOOTING, Phase.VERIFYING, Phase.ROLLING_BACK])
def test_files_are_put_back_before_anything_is_said_of_a_former_system(phase: Phase) -> None:
    staged_id = "os-1"
    record = in_phase(phase, drain_token=TOKEN, reboot_count=3, staged_id=staged_id)
    record = replace(record, quarantined=QuarantinedTarget(B, "bad"))
    former = DeploymentState(booted_digest=DIGEST_A, other_ids=(staged_id,))
    at = facts(record=record, boot_id=BOOT_2, node=None, deployments=former, has_undo=True)
    assert decide_action(at) == RestoreAction()
    assert isinstance(decide_action(replace(at, has_undo=False)), CancelStagedAction)


def test_a_changed_mind_puts_files_back_once_nothing_is_staged_and_before_the_uncordon() -> None:
    record = in_phase(Phase.CANCELLING, drain_token=TOKEN)
    at = facts(record=record, node=drained(TOKEN, C), deployments=staged(), has_undo=True)
    assert decide_action(at) == CancelStagedAction("called off", "os-1")
    dropped = replace(at, deployments=DeploymentState(booted_digest=DIGEST_A))
    assert decide_action(dropped) == RestoreAction()
    assert decide_action(replace(dropped, has_undo=False)) == UncordonAction(UNCORDON)


def test_what_was_cut_short_is_put_in_order_before_anything_else() -> None:
    assert decide_action(facts(node=None, has_interrupted_change=True)) == RecoverAction()


def test_a_name_that_is_none_of_a_machine_config_is_refused() -> None:
    asked = desired.read_desired_target({key.DESIRED_CONFIG: "../../etc/shadow"})
    assert isinstance(asked, desired.InvalidTarget)
