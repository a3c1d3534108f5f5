from hashlib import sha256

from gateway.prompts.prefix_hash import entry_keys, scope
from gateway.prompts.rendered_prompt import RenderedPrompt, pack_token_ids

SCOPE = scope(workspace_id="wrk_1", model_id="wt", weights_digest="d")


def test_a_key_is_the_hash_of_scope_and_prefix() -> None:
    rendered = RenderedPrompt(pack_token_ids([1, 2, 3, 4, 5]), (2, 4))

    assert entry_keys(SCOPE, rendered) == (
        sha256(SCOPE + pack_token_ids([1, 2])).hexdigest(),
        sha256(SCOPE + pack_token_ids([1, 2, 3, 4])).hexdigest(),
    )


def test_what_follows_a_block_does_not_change_its_key() -> None:
    short = entry_keys(SCOPE, RenderedPrompt(pack_token_ids([1, 2, 9]), (2,)))
    longer = entry_keys(SCOPE, RenderedPrompt(pack_token_ids([1, 2, 3, 4]), (2, 3)))

    assert short[0] == longer[0]


def test_no_two_scopes_are_alike() -> None:
    one = scope(workspace_id="ab", model_id="c", weights_digest="d")
    other = scope(workspace_id="a", model_id="bc", weights_digest="d")

    assert one != other
