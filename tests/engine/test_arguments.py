from pathlib import Path

import pytest

from engine.arguments import parse_arguments


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "smol"
    folder.mkdir()
    return folder


def test_defaults_are_the_documented_ones(model):
    arguments = parse_arguments(["--model", str(model)], {})

    assert arguments.model_id == "smol"
    assert arguments.data_dir == Path("var")
    assert arguments.listen == "unix:var/run/engine.sock"
    assert (arguments.max_num_seqs, arguments.max_num_batched_tokens) == (64, 2048)
    assert (arguments.block_size, arguments.kv_cache_memory) == (16, None)
    assert (arguments.max_model_len, arguments.num_threads) == (None, None)
    assert arguments.gpu_memory_utilization == 0.85
    assert (arguments.dtype, arguments.device) == ("auto", "cpu")
    assert (arguments.lease_cap_bytes, arguments.lease_quota_bytes) == (None, None)
    assert (arguments.lease_host_bytes, arguments.lease_disk_bytes) == (8 << 30, 8 << 30)
    assert arguments.enable_prefix_caching
    assert arguments.enable_chunked_prefill
    assert arguments.native_kernels
    assert (arguments.scheduling, arguments.kv_layout) == ("continuous", "paged")


def test_a_flag_wins_over_its_variable(model):
    environment = {
        "KVMETER_MODEL": str(model),
        "KVMETER_DTYPE": "bfloat16",
        "KVMETER_MAX_NUM_SEQS": "3",
        "DATA_DIR": "/data",
    }

    arguments = parse_arguments(["--max-num-seqs", "5"], environment)

    assert (arguments.dtype, arguments.max_num_seqs) == ("bfloat16", 5)
    assert arguments.listen == "unix:/data/run/engine.sock"


def test_each_boolean_can_be_switched_off(model):
    off = ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"]

    arguments = parse_arguments(["--model", str(model), *off], {})

    assert not arguments.enable_prefix_caching
    assert not arguments.enable_chunked_prefill


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        (["--no-native-kernels"], {}, False),
        ([], {"KVMETER_NATIVE_KERNELS": "0"}, False),
        ([], {"KVMETER_NATIVE_KERNELS": "1"}, True),
        (["--native-kernels"], {"KVMETER_NATIVE_KERNELS": "0"}, True),
    ],
)
def test_the_kernels_in_c_are_a_choice(model, flags, environment, expected):
    arguments = parse_arguments(["--model", str(model), *flags], environment)

    assert arguments.native_kernels is expected


def test_each_part_can_be_compared_with_what_it_replaces(model):
    compared = ["--scheduling", "static", "--kv-layout", "contiguous"]

    arguments = parse_arguments(["--model", str(model), *compared], {})

    assert (arguments.scheduling, arguments.kv_layout) == ("static", "contiguous")


@pytest.mark.parametrize(
    ("flags", "environment", "sentence"),
    [
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: not a whole number above zero: 0"),
        (["--kv-cache-memory", "1GB"], {}, "not a whole number above zero: 1GB"),
        (["--max-model-len", "0"], {}, "--max-model-len: not a whole number above zero: 0"),
        (["--num-threads", "0"], {}, "--num-threads: not a whole number above zero: 0"),
        (["--gpu-memory-utilization", "90"], {}, "not a number above 0 and at most 1: 90"),
        ([], {"KVMETER_GPU_MEMORY_UTILIZATION": "x"}, "not a number above 0 and at most 1: x"),
        (["--dtype", "int4"], {}, "--dtype: not one of auto, float32, bfloat16: int4"),
        ([], {"KVMETER_DTYPE": "int4"}, "--dtype: not one of auto, float32, bfloat16: int4"),
        (["--device", "tpu"], {}, "--device: not one of cpu, cuda: tpu"),
        (["--scheduling", "padded"], {}, "--scheduling: not one of continuous, static: padded"),
        (["--kv-layout", "ring"], {}, "--kv-layout: not one of paged, contiguous: ring"),
        ([], {"KVMETER_NATIVE_KERNELS": "yes"}, "KVMETER_NATIVE_KERNELS: not 0 or 1: yes"),
        (["--listen", "http://h:1"], {}, "--listen: Not an engine address"),
        (["--tensor-parallel-size", "2"], {}, "--tensor-parallel-size: this engine runs"),
        (["--model", "/nowhere"], {}, "--model: no such folder: /nowhere"),
        (["--max-num-seq", "1"], {}, "unrecognized arguments: --max-num-seq 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(model, capsys, flags, environment, sentence):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(["--model", str(model), *flags], environment)

    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_a_model_must_be_named(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments([], {})

    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_has_a_sentence_for_every_flag(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(["--help"], {})

    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--tensor-parallel-size" in text
    assert "until-stdin" not in text
