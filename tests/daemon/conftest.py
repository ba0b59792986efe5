"""Nodes of both back ends."""

from collections.abc import Iterator

import pytest

from tests.daemon.nodes import BACK_ENDS, Node, NodeOf, directories


@pytest.fixture(params=BACK_ENDS)
def node_of(request: pytest.FixtureRequest) -> Iterator[NodeOf]:
    """Makes the node of a world, by each of the two back ends."""
    with directories() as directory_of:
        bootc = directory_of(request.param)
        yield lambda world: Node(world, bootc=bootc)
