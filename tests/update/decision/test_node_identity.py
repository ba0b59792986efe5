"""Which Node a machine is, by what names it."""

import pytest

from treenail.update.decision.node_identity import choose_identity


# Certificate, setting and host name; the name, and its note or what the agent waits for.
@pytest.mark.parametrize(
    ("sources", "name", "sentence"),
    [
        (("n1", "", "n1"), "n1", ""),
        (("n1", "n1", "N1"), "n1", ""),
        (("n1", "", "localhost"), "n1", ""),
        (("n1", "", ""), "n1", ""),
        (("N_1", "n7", "n7"), "n7", ""),
        (
            ("n1", "n7", "h1.a"),
            "n1",
            "by the client certificate, not the setting node_name n7 or the host name h1.a",
        ),
        (("", "n1", "localhost"), "n1", ""),
        (("", "n1", "H1"), "n1", "by the setting node_name, not the host name h1"),
        (("", "", "Worker-1.Example.com"), "worker-1.example.com", ""),
        *(
            (("", "", name), "", f"the host name {name!r} is a placeholder")
            for name in ("", "(none)", "localhost", "localhost.localdomain", "Fedora", "none")
        ),
        (("", "", "worker_1"), "", "the host name 'worker_1' is no name of a Node"),
        (("", "", "a" * 9999), "", "the host name 'aaa"),
    ],
)
def test_node_is_that_of_the_first_certain_source(sources, name, sentence):
    identity = choose_identity(*sources)
    assert identity.name == name
    if name:
        assert identity.note == sentence
    else:
        assert identity.wait.startswith(f"waiting for the name of this Node: {sentence}")
        assert len(identity.wait) < 300


def test_uncertain_host_name_has_a_remedy():
    assert choose_identity("", "", "localhost").remedy == (
        "give the machine its host name, or set node_name in /etc/treenail/agent.toml"
    )
