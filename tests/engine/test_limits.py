import pytest

from engine.protocol import Breakpoint, Sampling
from engine.scheduling.limits import clamp_max_tokens, find_fault
from tests.engine.oracle import ask, small_config

# 32 blocks of 4, at most 12 of them pinned: 80 tokens fit, as does the window.
CONFIG = small_config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"namespace": b""}, "namespace is empty"),
        ({"prompt_token_ids": b""}, "prompt is empty"),
        ({"prompt_token_ids": b"\0" * 6}, "not packed u32: 6 bytes"),
        ({"prompt_token_ids": b"\xe8\x03\0\0"}, "out of vocabulary: 1000"),
        ({"prompt_token_ids": b"\xff\xff\xff\xff"}, "out of vocabulary: 4294967295"),
        ({"max_tokens": -1}, "max_tokens is negative: -1"),
        ({"read_tokens": -1}, "read_tokens outside the prompt: -1"),
        ({"read_tokens": 11}, "read_tokens outside the prompt: 11"),
        ({"breakpoints": (Breakpoint(0, 1, True),)}, "outside the prompt: 0"),
        ({"breakpoints": (Breakpoint(11, 1, True),)}, "outside the prompt: 11"),
        ({"breakpoints": (Breakpoint(5, 1, True), Breakpoint(5, 1, True))}, "out of order"),
        ({"breakpoints": (Breakpoint(5, -1, True),)}, "negative ttl: -1"),
        ({"breakpoints": (Breakpoint(5, 604_800_001, True),)}, "ttl over 604800000 ms: 604800001"),
        ({"breakpoints": (Breakpoint(5, 1, True),) * 257}, "More than 256 breakpoints: 257"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": Sampling(top_p=-0.1)}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
    ],
)
def test_a_malformed_request_is_refused_with_its_fault(fields, message) -> None:
    request = ask("r", range(10))
    changed = {name: fields.get(name, getattr(request, name)) for name in request.__slots__}

    fault = find_fault(type(request)(**changed), CONFIG)

    assert fault is not None
    assert fault.code == "invalid_request"
    assert message in fault.message


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "pin_cap", "code"),
    [
        (80, 0, 12, None),
        (79, 1, 12, None),
        (80, 1, 12, "prompt_too_long"),
        (81, 0, 12, "prompt_too_long"),
        (48, 0, 20, None),
        (48, 1, 20, "pool_too_small"),
        (49, 0, 20, "pool_too_small"),
        (81, 0, 20, "prompt_too_long"),
    ],
)
def test_a_prompt_that_can_never_fit_is_refused(num_prompt, max_tokens, pin_cap, code) -> None:
    request = ask("r", [1] * num_prompt, max_tokens=max_tokens)

    fault = find_fault(request, small_config(pin_cap_blocks=pin_cap))

    assert (fault.code if fault else None) == code


def test_the_output_is_clamped_to_what_fits_beside_the_prompt() -> None:
    assert clamp_max_tokens(ask("r", [1] * 70, max_tokens=100), CONFIG) == 10
    assert clamp_max_tokens(ask("r", [1] * 70, max_tokens=3), CONFIG) == 3
