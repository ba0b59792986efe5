"""`BuildOutput`: the last lines and the current instruction."""

from treenail.builder.buildah.program import TAIL_LINES, BuildOutput

LINES = {(1, 1): 1, (1, 2): 3, (2, 1): 7, (2, 2): 9}


def make_output() -> tuple[BuildOutput, list[str]]:
    shown: list[str] = []
    return BuildOutput(LINES, shown.append), shown


def test_output_with_many_lines_keeps_the_last_forty() -> None:
    output, shown = make_output()
    for number in range(100):
        output.add_line(f"line {number}")
    assert output.tail == tuple(f"line {number}" for number in range(60, 100))
    assert len(output.tail) == TAIL_LINES
    assert len(shown) == 100


def test_output_with_credentials_shows_none() -> None:
    output, shown = make_output()
    output.add_line("GET https://user:hunter2@registry.example.com/v2/")
    output.add_line("Authorization: Bearer hunter3")
    output.add_line("https://cdn.example.com/blob?X-Signature=hunter4 failed")
    assert "hunter" not in "".join([*shown, *output.tail])


def test_output_with_control_characters_is_escaped() -> None:
    output, shown = make_output()
    output.add_line("\x1b]0;title\x07done")
    assert shown == ["\\u001b]0;title\\u0007done"]


def test_step_lines_advance_the_current_line() -> None:
    output, _ = make_output()
    assert output.line == 0
    output.add_line("[1/2] STEP 1/2: FROM localhost/base AS configs")
    output.add_line("[1/2] STEP 2/2: RUN true")
    assert output.line == 3
    output.add_line("[2/2] STEP 1/2: FROM 0123 AS final")
    assert output.line == 7


def test_step_line_of_a_program_does_not_move_back_or_outside() -> None:
    output, _ = make_output()
    output.add_line("STEP 2/2: RUN make")
    output.add_line("STEP 1/2: FROM fake")
    output.add_line("STEP 77/99: RUN fake")
    assert output.line == 3
