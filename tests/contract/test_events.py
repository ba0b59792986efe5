"""Events, as components report them."""

from tests.contract.client import STRATEGIC, Json
from tests.contract.space import Space, names


def event(space: Space, name: str, **more: object) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": space.name},
        "involvedObject": {"kind": "ConfigMap", "name": "a", "namespace": space.name},
        "reason": "Tried",
        "message": "it was tried",
        "type": "Normal",
        "count": 1,
        "source": {"component": "contract"},
    } | more


def test_event_is_counted_up(space: Space) -> None:
    space.cluster.post(space.at("events"), event(space, "e.1")).ok()
    changed = space.cluster.patch(space.at("events", "e.1"), {"count": 2}, STRATEGIC).ok()
    assert (changed["count"], changed["message"]) == (2, "it was tried")


def test_events_are_selected_by_involved_object(space: Space) -> None:
    space.cluster.post(space.at("events"), event(space, "e.1")).ok()
    space.cluster.post(space.at("events"), event(space, "e.2", reason="Failed")).ok()
    selector = "involvedObject.kind=ConfigMap,involvedObject.name=a,reason=Tried"
    listed = space.cluster.get(space.at("events"), fieldSelector=selector).ok()
    assert names(listed) == ["e.1"]


def test_event_lives_where_its_object_lives(space: Space) -> None:
    stray = event(space, "e.1", involvedObject={"kind": "ConfigMap", "namespace": "default"})
    answer = space.cluster.post(space.at("events"), stray)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "involvedObject.namespace")}


def test_event_about_a_node_lives_in_the_default_namespace(space: Space) -> None:
    about_node = {"kind": "Node", "name": "n"}
    body = event(space, f"{space.name}.1", involvedObject=about_node)
    body["metadata"]["namespace"] = "default"
    at = "/api/v1/namespaces/default/events"
    made = space.cluster.post(at, body)
    assert made.code == 201
    space.cluster.delete(f"{at}/{body['metadata']['name']}").ok()
