"""Which Node a machine is, by what names it."""

import pytest

from treenail.update.decision.node_identity import IdentitySources, choose_identity

MISSING = "cannot read kubeconfig /k: No such file or directory"


# Sources, and the name with its note or what the agent waits for.
@pytest.mark.parametrize(
    ("sources", "name", "sentence"),
    [
        (IdentitySources(certificate="n1", host_name="n1"), "n1", ""),
        (IdentitySources(certificate="n1", host_name="localhost"), "n1", ""),
        (IdentitySources(certificate="n1"), "n1", ""),
        (
            IdentitySources(certificate="n1", setting="n7", host_name="h1.a"),
            "n1",
            "by the client certificate, not the setting node_name n7 or the host name h1.a",
        ),
        (IdentitySources(setting="n1", host_name="localhost"), "n1", ""),
        (
            IdentitySources(setting="n1", host_name="H1"),
            "n1",
            "by the setting node_name, not the host name h1",
        ),
        (IdentitySources(host_name="Worker-1.Example.com"), "worker-1.example.com", ""),
        # A certificate that comes may name another Node than these.
        (IdentitySources(setting="n1", host_name="n1", problem=MISSING), "", MISSING),
        *(
            (IdentitySources(host_name=name), "", f"the host name {name!r} is a placeholder")
            for name in ("", "(none)", "localhost", "localhost.localdomain", "Fedora", "none")
        ),
        (IdentitySources(host_name="worker_1"), "", "the host name 'worker_1' is no name of a"),
        (IdentitySources(host_name="a" * 9999), "", "the host name 'aaa"),
    ],
)
def test_node_is_that_of_the_first_certain_source(sources, name, sentence):
    identity = choose_identity(sources)
    assert identity.name == name
    if name:
        assert identity.note == sentence
    else:
        assert identity.problem.startswith(sentence)
        assert len(identity.problem) < 250


def test_uncertain_host_name_has_a_remedy():
    assert choose_identity(IdentitySources(host_name="localhost")).remedy == (
        "give the machine its host name, or set node_name in /etc/treenail/agent.toml"
    )
