"""Problems of a user's Containerfile that are found before any build."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz
from treenail.image.containerfile import MAX_PROBLEMS, find_containerfile_problems, is_qualified

FROM = "FROM configs AS final\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n\n",
        FROM,
        "from configs as Final\nrun dnf install -y tree && \\\n# why\n  ostree container commit\n",
        "# escape=`\nFROM configs AS final\nRUN a `\n  b\n",
        FROM + "RUN <<EOF cat > /etc/x\nnot an instruction\nFROM nothing\nEOF\nCOPY <<A /x\n1\nA\n",
        "ARG IMAGE=registry.example.com/tools:1\nFROM ${IMAGE} AS tools\nRUN make\nFROM configs\n",
        "FROM configs AS tools\nFROM configs\nCOPY --from=tools a b\nRUN --mount=from=tools ls\n",
        "FROM scratch\nCOPY --from=registry:5000/a/b c d\n",
        FROM + 'ENV A=1 B="2 3"\nENV C d e\nLABEL x=y\nSHELL ["sh", "-c"]\nCMD ["x"]\n',
        FROM + "ONBUILD RUN x\nARG TAG=1\nCOPY --from=localhost/a:${TAG} b c\n",
        FROM + "#" * 4000,
    ],
)
def test_text_that_builders_accept_has_no_problem(text: str) -> None:
    assert find_containerfile_problems(text) == ()


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("RUN true\n", 0, "there is no FROM"),
        ("ARG A\n", 0, "there is no FROM"),
        ("RUN true\n" + FROM, 1, "RUN stands before the first FROM"),
        (FROM + "RNU true\n", 2, "unknown instruction 'RNU'"),
        (FROM + "RUN a\n  && b\n", 3, "unknown instruction '&&'"),
        (FROM + "RUN\n", 2, "RUN has no argument"),
        (FROM + "RUN --network=none\n", 2, "RUN has no argument"),
        (FROM + "\nRUN a \\\n", 0, ""),
        ("FROM\n", 1, "FROM has no argument"),
        ("FROM fedora:41\n", 1, "FROM fedora:41 names no earlier stage"),
        ("FROM library/fedora\n", 1, "names no earlier stage"),
        ("FROM later AS a\nFROM configs AS later\n", 1, "FROM later names no earlier stage"),
        ("FROM configs final\n", 1, "expected FROM IMAGE AS NAME"),
        ("FROM configs AS 1st\n", 1, "'1st' is not a name of a stage"),
        ("FROM ${IMAGE}\n", 1, "'${IMAGE}' is empty"),
        (FROM + "COPY --from=0 a b\n", 2, "names stage 0 by its number"),
        (FROM + "COPY --from=tools a b\n", 2, "COPY from tools names no earlier stage"),
        (FROM + "RUN --mount=type=bind,from=tools ls\n", 2, "RUN from tools names no"),
        (FROM + "ARG A\nCOPY --from=$A a b\n", 3, "COPY names no image: no ARG of this stage"),
        (FROM + "COPY --from=a.io/B c d\n", 2, "'a.io/B' is no name of an image"),
        (FROM + "ENV A\n", 2, "ENV: expected NAME=VALUE, found 'A'"),
        (FROM + "ENV A=1 B\n", 2, "ENV: expected NAME=VALUE, found 'B'"),
        (FROM + "SHELL sh\n", 2, "SHELL: expected"),
        (FROM + "COPY a\n", 2, "COPY: expected a source and a destination"),
        (FROM + "RUN <<EOF\ntrue\n", 2, "the here-document EOF has no end"),
        ("# escape=x\n" + FROM, 1, "expected escape=\\ or escape=`, found 'x'"),
        ("# escape=`\n# escape=`\n" + FROM, 2, "the directive escape appears twice"),
        (FROM + "#" * 4075, 0, "expected at most 4096 characters, found 4097"),
        (FROM + "RUN a\0b\n", 2, "it has a NUL character"),
    ],
)
def test_problem_names_its_line_and_a_remedy(text: str, line: int, expected: str) -> None:
    found = find_containerfile_problems(text)
    if not expected:
        assert found == ()
        return
    assert found[0].line == line
    assert expected in found[0].text
    assert found[0].remedy


def test_close_keyword_is_proposed() -> None:
    (found,) = find_containerfile_problems(FROM + "RNU true\n")
    assert found.remedy == "write RUN"
    assert str(found) == "line 2: unknown instruction 'RNU'"


def test_stage_in_other_case_is_proposed() -> None:
    (found,) = find_containerfile_problems("FROM configs AS Tools\nFROM tools\n")
    assert found.remedy == "write Tools: case matters in names of stages"


def test_problems_are_bounded_and_in_order_of_lines() -> None:
    found = find_containerfile_problems(FROM + "XX\n" * 100)
    assert [each.line for each in found] == list(range(2, MAX_PROBLEMS + 2))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("registry.example.com/a", True),
        ("registry:5000/a", True),
        ("localhost/a", True),
        ("fedora", False),
        ("fedora:41", False),
        ("library/fedora", False),
    ],
)
def test_qualified_image_begins_with_a_registry(image: str, expected: bool) -> None:
    assert is_qualified(image) is expected


@fuzz
@given(st.text(st.sampled_from("FROMRUNCPY \n\t#\\`<-'\"$={}EOFas[]ä--from="), max_size=200))
def test_problems_of_any_text_are_short_single_lines(text: str) -> None:
    for found in find_containerfile_problems(text):
        assert len(found.text) < 300
        assert "\n" not in found.text
