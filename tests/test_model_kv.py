"""KV out of one engine and into another: same process, other process, any cut, and broken bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import engine, greedy, prompt, reference

from pdd.errors import WireError
from pdd.model.engine import Engine, KvSequence
from pdd.model.kv import KvHeader, KvSegment, KvTensor

ALL = ("tiny_qwen3", "tiny_llama", "tiny_deepseek_v4", "windowed")


def through_bytes(segment: KvSegment) -> KvSegment:
    header, payload = segment.to_bytes()
    assert sum(part.nbytes for part in payload) == segment.nbytes
    return KvSegment.from_bytes(header, bytearray(b"".join(payload)))


def stepped(eng: Engine, tokens: int) -> KvSequence:
    seq = eng.new()
    eng.extend(seq, prompt(tokens))
    return seq


def assert_same(eng: Engine, seq: KvSequence, other: KvSequence) -> None:
    """Equal bits in what follows."""
    assert seq.kv_tokens == other.kv_tokens
    for ids in ([7], prompt(150, seed=8), [9]):
        assert torch.equal(eng.extend(seq, ids), eng.extend(other, ids))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tokens", [1, 3, 4, 127, 128, 129, 300])
def test_whole_sequence(name: str, tokens: int) -> None:
    eng = engine(name)
    seq, copy = stepped(eng, tokens), eng.new()
    eng.load(copy, through_bytes(eng.export(seq, 0, tokens)))
    assert_same(eng, seq, copy)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12, deadline=None)
@given(cuts=st.sets(st.integers(1, 299), max_size=5))
def test_pieces_cut_anywhere(name: str, cuts: set[int]) -> None:
    """P ships as chunks finish, and MD lacks a suffix only: any cut, boundary at the end."""
    eng = engine(name)
    seq, copy, edges = stepped(eng, 300), eng.new(), [0, *sorted(cuts), 300]
    for start, end in zip(edges, edges[1:], strict=False):
        eng.load(copy, through_bytes(eng.export(seq, start, end, boundary=end == 300)))
    assert_same(eng, seq, copy)


@pytest.mark.parametrize("name", ALL)
def test_streaming_while_the_prompt_grows(name: str) -> None:
    eng, ids = engine(name), prompt(333)
    seq, copy = eng.new(), eng.new()
    for start, end in [(0, 100), (100, 228), (228, 333)]:
        eng.extend(seq, ids[start:end])
        eng.load(copy, eng.export(seq, start, end))
    assert_same(eng, seq, copy)


def test_v4_prefix_is_cut_at_its_blocks() -> None:
    eng, ids = engine("tiny_deepseek_v4", chunk_tokens=128), prompt(400)
    seq, short, copy = eng.new(), eng.new(), eng.new()
    eng.extend(seq, ids)
    eng.extend(short, ids[:256])
    eng.load(copy, eng.export(seq, 0, 256))
    assert_same(eng, short, copy)
    with pytest.raises(ValueError, match="boundary"):
        eng.export(seq, 0, 250)
    assert not eng.export(seq, 0, 250, boundary=False).boundary


def test_v4_without_its_boundary_does_not_step() -> None:
    eng = engine("tiny_deepseek_v4")
    seq, copy = stepped(eng, 200), eng.new()
    eng.load(copy, eng.export(seq, 0, 100, boundary=False))
    with pytest.raises(ValueError, match="without the state"):
        eng.extend(copy, [1])
    eng.load(copy, eng.export(seq, 100, 200))
    assert_same(eng, seq, copy)


def test_plain_export_is_a_copy_of_any_range() -> None:
    eng = engine("tiny_qwen3")
    seq = stepped(eng, 100)
    segment = eng.export(seq, 0, 60)
    wanted = {name: tensor.clone() for name, tensor in segment.tensors.items()}
    eng.rewind(seq, 0)
    eng.extend(seq, prompt(100, seed=5))
    assert all(torch.equal(segment.tensors[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(ValueError, match="100"):
        eng.export(seq, 50, 101)


CHILD = """
import json, sys
from pathlib import Path
from tiny_models import engine, greedy
from pdd.model.kv import KvSegment
folder, found = Path(sys.argv[1]), {}
for name in sys.argv[2:]:
    eng = engine(name)
    seq = eng.new()
    header, payload = (folder / f"{name}.header").read_bytes(), (folder / f"{name}.kv").read_bytes()
    eng.load(seq, KvSegment.from_bytes(header, payload))
    row = eng.extend(seq, json.loads((folder / f"{name}.ids").read_text()))
    found[name] = greedy(eng, seq, row, 40)
print(json.dumps(found))
"""


def test_another_process_continues_with_the_same_tokens(tmp_path: Path) -> None:
    ids, names = prompt(211, seed=6), ("tiny_qwen3", "tiny_deepseek_v4")
    for name in names:
        eng = engine(name)
        seq = eng.new()
        eng.extend(seq, ids[:-1])
        header, payload = eng.export(seq, 0, 210).to_bytes()
        (tmp_path / f"{name}.header").write_bytes(header)
        (tmp_path / f"{name}.kv").write_bytes(b"".join(payload))
        (tmp_path / f"{name}.ids").write_text(str(ids[-1:]))
    command = [sys.executable, "-c", CHILD, str(tmp_path), *names]
    here = Path(__file__).parent
    environ = os.environ | {"PYTHONPATH": str(here.parent)}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout)
    for name in names:
        assert found[name] == reference(name, ids, 40)
        assert len(set(found[name])) >= 20


# -- broken bytes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wire() -> tuple[bytes, bytes]:
    eng = engine("tiny_qwen3")
    header, payload = eng.export(stepped(eng, 20), 0, 20).to_bytes()
    return header, b"".join(payload)


def test_payload_must_be_whole_and_unchanged(wire: tuple[bytes, bytes]) -> None:
    header, payload = wire
    with pytest.raises(WireError, match="bytes"):
        KvSegment.from_bytes(header, payload[:-1])
    broken = bytearray(payload)
    broken[1000] ^= 1
    with pytest.raises(WireError, match="checksum"):
        KvSegment.from_bytes(header, broken)
    parts = [payload[:100], payload[100:]]
    assert KvSegment.from_bytes(header, parts).nbytes == len(payload)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"start": -1},
        {"start": 20},
        {"tensors": (KvTensor("0.k", "float32", (-1, -20)),)},
        {"tensors": (KvTensor("0.k", "object", (1,)),)},
        {"tensors": (KvTensor("0.k", "float32", (1,)), KvTensor("0.k", "float32", (1,)))},
        {"tensors": (KvTensor("0.k", "float32", (2**40, 2**40)),)},
    ],
)
def test_impossible_headers(wire: tuple[bytes, bytes], change: dict[str, object]) -> None:
    head = msgspec.msgpack.decode(wire[0], type=KvHeader)
    header = msgspec.msgpack.encode(msgspec.structs.replace(head, **change))
    with pytest.raises(WireError):
        KvSegment.from_bytes(header, wire[1])


@settings(max_examples=200, deadline=None)
@given(header=st.binary(max_size=60), payload=st.binary(max_size=20))
def test_garbage_is_a_wire_error(header: bytes, payload: bytes) -> None:
    with pytest.raises(WireError):
        KvSegment.from_bytes(header, payload)


def test_wrong_segments_are_refused_and_change_nothing() -> None:
    eng, other = engine("tiny_qwen3"), engine("tiny_llama")
    seq = stepped(eng, 30)
    segment = eng.export(seq, 0, 30)
    copy = eng.new()
    with pytest.raises(WireError, match="fingerprint"):
        other.load(other.new(), segment)
    with pytest.raises(WireError, match="starts at token 10"):
        eng.load(copy, eng.export(seq, 10, 30))
    tensors = dict(segment.tensors)
    tensors["2.v"] = tensors["2.v"][:, :-1]
    with pytest.raises(WireError, match="2.v"):
        eng.load(copy, KvSegment(segment.fingerprint, 0, 30, True, tensors))
    del tensors["2.v"]
    with pytest.raises(WireError, match="2.v"):
        eng.load(copy, KvSegment(segment.fingerprint, 0, 30, True, tensors))
    eng.load(copy, segment)
    assert greedy(eng, copy, eng.extend(copy, [4]), 10) == greedy(eng, seq, eng.extend(seq, [4]), 10)
