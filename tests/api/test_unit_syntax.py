"""Units are accepted exactly when Ignition's parser accepts them."""

import pytest

from treenail.api.ignition.checks import check_unit_syntax
from treenail.errors import IgnitionError


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no section",
        "junk before [Unit]\nA=1",
        "[Unit]",
        "[Unit] \nA=\n\n",
        "[Unit]\nA = 1 \\\n  continued\nB=2",
        "[Unit]\nA=1\\\n\nB=2",
        "# [comment \\\n still one\n[Unit]\n;A\n  #B\n\tC=1\n",
        "[Unit\nName]\nA=[x]\r\n",
        "[Unit]\n#\\",
    ],
)
def test_unit_that_ignition_parses_is_accepted(text: str) -> None:
    check_unit_syntax(text, "contents")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[Unit", "contents, line 1: expected ']' after the section name"),
        ("\n[Unit] x\n", "contents, line 2: expected nothing after the section name"),
        ("[Unit]\nA=1\nnothing\n", "contents, line 3: expected an option and '='"),
        ("[Unit]\nnothing", "contents, line 2: expected an option and '='"),
        ("[Unit]\nA\r=1", "contents, line 2: expected an option and '='"),
    ],
)
def test_unit_that_ignition_rejects_raises_error_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(IgnitionError) as raised:
        check_unit_syntax(text, "contents")
    assert str(raised.value) == sentence
