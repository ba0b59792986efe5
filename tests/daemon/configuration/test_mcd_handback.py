"""The Node's annotations for the Machine Config Daemon and its controllers."""

import pytest

from tests.update.build import A, B, update
from treenail.api import annotations as key
from treenail.daemon.configuration.mcd_handback import check_handback, compute_handback_annotations
from treenail.errors import UsageError
from treenail.update.state.ledger_record import LedgerRecord, Phase, Target

LAYERED = Target("rendered-worker-a", "quay.example/os@sha256:" + "0" * 64)
PLAIN = Target("rendered-worker-a")


def test_handback_without_config_or_during_update_is_refused() -> None:
    with pytest.raises(UsageError, match="its ledger has no current config"):
        check_handback(LedgerRecord())
    with pytest.raises(UsageError, match=r"an update to .* is in progress \(draining\)"):
        check_handback(LedgerRecord(A, update(Phase.DRAINING, target=B)))
    check_handback(LedgerRecord(A))


def test_handback_of_node_with_all_annotations_changes_nothing() -> None:
    found = {
        key.CURRENT_CONFIG: PLAIN.config,
        key.DESIRED_CONFIG: PLAIN.config,
        key.STATE: "Done",
        key.REASON: "",
    }
    assert compute_handback_annotations(found, PLAIN) == {}


def test_handback_moves_the_image_to_the_spelling_of_the_daemon() -> None:
    found = {
        key.CURRENT_CONFIG: LAYERED.config,
        key.CURRENT_OS_IMAGE: LAYERED.image,
        key.DESIRED_OS_IMAGE: LAYERED.image,
        key.STATE: "Done",
        key.REASON: "",
    }
    assert compute_handback_annotations(found, LAYERED) == {
        key.CURRENT_IMAGE: LAYERED.image,
        key.DESIRED_IMAGE: LAYERED.image,
        key.CURRENT_OS_IMAGE: None,
        key.DESIRED_OS_IMAGE: None,
    }


def test_handback_keeps_a_request_in_the_spelling_of_the_daemon() -> None:
    newer = LAYERED.image.replace("0", "1")
    found = {key.DESIRED_IMAGE: newer, key.CURRENT_IMAGE: LAYERED.image}
    assert compute_handback_annotations(found, LAYERED) == {
        key.CURRENT_CONFIG: LAYERED.config,
        key.STATE: "Done",
        key.REASON: "",
    }


def test_handback_without_image_removes_the_image_annotation() -> None:
    assert compute_handback_annotations({key.CURRENT_IMAGE: "x"}, PLAIN)[key.CURRENT_IMAGE] is None
