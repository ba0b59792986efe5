"""The lines of the demo of an installation."""

from treenail_lab.install.install_run import format_activity

DIGEST = "sha256:" + "ab" * 32


def test_step_is_shown_once_and_its_activity_below_it() -> None:
    assert format_activity("render the pools", "", is_new=True) == ["  render the pools"]
    text = f"copying {DIGEST} to registry.example"
    assert format_activity("hand the images over", text, is_new=False) == [
        "    copying sha256:abababab… to registry.example"
    ]
