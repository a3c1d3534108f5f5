from gateway.requests.namespace import namespace

CALLER = {
    "organization_id": "org_1",
    "workspace_id": "wrk_1",
    "model_id": "wt",
    "weights_digest": "d",
}


def test_every_part_of_a_caller_changes_the_namespace() -> None:
    made = {namespace(b"s", **CALLER), namespace(b"other secret", **CALLER)}
    for name in CALLER:
        made.add(namespace(b"s", **(CALLER | {name: "x"})))
    made.add(namespace(b"s", **(CALLER | {"organization_id": "org_1w", "workspace_id": "rk_1"})))

    assert len(made) == len(CALLER) + 3
    assert namespace(b"s", **CALLER) == namespace(b"s", **CALLER)
