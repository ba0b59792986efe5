"""Texts about failed builds: line, last output and remedy."""

from treenail.controllers.image_build.status import MESSAGE_LIMIT, format_failure
from treenail.image.build_result import AttemptFailure, BuildReason

LOG = (
    "STEP 1/2: FROM configs\n[2/2] STEP 2/2: RUN cat /x\n"
    "cat: /x: missing\nsubprocess exited with status 1"
)


def test_failed_instruction_has_line_last_output_and_remedy() -> None:
    failure = AttemptFailure(BuildReason.INSTRUCTION_FAILED, "RUN cat /x: exit status 1", 2, LOG)
    text = format_failure(failure, 1)
    assert text.startswith("line 2: RUN cat /x: exit status 1; last output: cat: /x: missing; corr")
    assert "rebuild" not in text


def test_long_message_keeps_output_and_remedy() -> None:
    failure = AttemptFailure(BuildReason.INSTRUCTION_FAILED, "RUN " + "x" * 9000, 2, LOG)
    text = format_failure(failure, 1)
    assert len(text) <= MESSAGE_LIMIT
    assert "last output: cat: /x: missing" in text
    assert "treenail-controller build -f DIR --local" in text


def test_cause_outside_of_the_inputs_names_the_command_for_another_build() -> None:
    failure = AttemptFailure(BuildReason.PUSH_DENIED, "no", log="a remedy")
    text = format_failure(failure, 1, config="infra")
    assert text.endswith(
        "kubectl annotate machineosconfig infra machineconfiguration.openshift.io/rebuild="
    )
    assert "last output" not in text
