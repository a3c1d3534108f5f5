import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.errors import ServerSecretError
from gateway.requests.namespace import (
    SECRET_BYTES,
    load_server_secret,
    namespace,
)

CALLER = {
    "organization_id": "org_1",
    "workspace_id": "wrk_1",
    "model_id": "wt",
    "weights_digest": "d",
}


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "server-secret"

    made = load_server_secret(path)

    assert len(made) == SECRET_BYTES
    assert load_server_secret(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["server-secret"]


@pytest.mark.parametrize("left", [0, SECRET_BYTES - 1])
def test_a_secret_that_was_cut_is_none(tmp_path: Path, left: int) -> None:
    path = tmp_path / "server-secret"
    path.write_bytes(load_server_secret(path)[:left])

    with pytest.raises(ServerSecretError, match="server-secret is damaged"):
        load_server_secret(path)


def test_many_first_starts_agree_on_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "server-secret"

    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(load_server_secret, [path] * 64))

    assert len(secrets) == 1


def test_every_part_of_a_caller_changes_the_namespace() -> None:
    made = {namespace(b"s", **CALLER), namespace(b"other secret", **CALLER)}
    for name in CALLER:
        made.add(namespace(b"s", **(CALLER | {name: "x"})))
    made.add(namespace(b"s", **(CALLER | {"organization_id": "org_1w", "workspace_id": "rk_1"})))

    assert len(made) == len(CALLER) + 3
    assert namespace(b"s", **CALLER) == namespace(b"s", **CALLER)
