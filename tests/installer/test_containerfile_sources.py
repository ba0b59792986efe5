"""Files that a Containerfile copies."""

import pytest

from treenail.image.containerfile import find_source_problems
from treenail.installer.directory.manifest_checks import is_based_on_system


@pytest.mark.parametrize(
    "line",
    [
        "COPY --from=quay.io/x/y:1 /a /b",
        "COPY <<EOF /etc/a\nx\nEOF",
        "ADD https://example.com/a /b",
        "ADD git@example.com:a.git /b",
        "COPY $FILE /b",
        "COPY . /b",
        "COPY ./ /b",
        "COPY a.conf ./a.conf /a.conf a.* /etc/",
        'COPY ["a.conf", "/etc/"]',
        "COPY --chmod=0644 a.conf /etc/",
        "ADD .treenail-config.tar.gz /",
        "COPY /etc/",
        'COPY ["a',
        "COPY 'a",
        "RUN cp missing /etc/",
    ],
)
def test_source_that_the_build_has_is_no_problem(line: str) -> None:
    assert list(find_source_problems(f"FROM configs\n{line}\n", ["a.conf"])) == []


@pytest.mark.parametrize("line", ["COPY b /etc/", "ADD ./dir/b /etc/", 'COPY ["b", "/etc/"]'])
def test_source_that_no_build_has_is_a_problem_with_its_line(line: str) -> None:
    (problem,) = find_source_problems(f"FROM configs\n\n{line}\n", ["a.conf"])
    assert problem.line == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM configs AS final\n", True),
        ("FROM configs AS a\nFROM a\n", True),
        ("FROM quay.io/x/y:1 AS a\nFROM configs\nCOPY --from=a /b /c\n", True),
        ("# nothing\n", True),
        ("FROM configs\nFROM quay.io/x/y:1\n", False),
        ("FROM a AS a\nFROM a\n", False),
    ],
)
def test_base_of_the_last_stage_is_found(text: str, *, expected: bool) -> None:
    assert is_based_on_system(text) == expected
