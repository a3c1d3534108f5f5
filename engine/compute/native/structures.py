"""The structures shared with the C kernels, field by field as in structures.h.

The library exports its own layout (layout.h); `layout` is what it must be.
"""

import ctypes

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class LinearStruct(ctypes.Structure):
    """`struct linear`."""

    _fields_ = (
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("num_inputs", _COUNT),
        ("num_panels", _COUNT),
    )


class LayerStruct(ctypes.Structure):
    """`struct layer`."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm")),
    )


class ModelStruct(ctypes.Structure):
    """`struct model`."""

    _fields_ = (
        *((name, _COUNT) for name in ("hidden_size", "hidden_width", "mlp_width")),
        *((name, _COUNT) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")),
        ("vocab_width", _COUNT),
        ("eps", ctypes.c_float),
        *((name, _POINTER) for name in ("layers", "embedding", "final_norm")),
        ("lm_head", LinearStruct),
        *((name, _POINTER) for name in ("cos", "sin")),
    )


class BatchStruct(ctypes.Structure):
    """`struct batch`."""

    _fields_ = (
        *((name, _COUNT) for name in ("num_rows", "num_tokens", "num_sampled")),
        *((name, _POINTER) for name in ("token_ids", "first_token", "start", "first_block")),
        *((name, _POINTER) for name in ("blocks", "sampled", "cache")),
        ("block_size", _COUNT),
        ("logits", _POINTER),
    )


class FieldStruct(ctypes.Structure):
    """`struct field`: one line of the layout that a library exports."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", _COUNT), ("size", _COUNT))


_SHARED = {"linear": LinearStruct, "layer": LayerStruct, "model": ModelStruct, "batch": BatchStruct}


def layout() -> dict[str, tuple[int, int]]:
    """Return offset and size of every shared structure and of its fields, by `structure.field`."""
    found = {}
    for name, structure in _SHARED.items():
        found[name] = (0, ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            described = getattr(structure, field)
            found[f"{name}.{field}"] = (described.offset, described.size)
    return found
